"""The record of a run: raw samples and the facts needed to read them, as plain JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

SCHEMA = 2

SECONDS, BYTES, PER_SECOND, SHARE = "s", "B", "1/s", "1"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measure: the first round, which pays for warm-up, and the others.

    Attributes:
        first: The first round; None where no round is kept apart.
        rounds: The measured rounds, at least one.
        unit: One of the units above.
    """

    first: float | None
    rounds: list[float]
    unit: str = SECONDS

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def low(self) -> float:
        return min(self.rounds)

    @property
    def high(self) -> float:
        return max(self.rounds)

    @classmethod
    def of(cls, values: Sequence[float], unit: str = SECONDS) -> Sample:
        """Returns the sample of all rounds in order, the first one apart."""
        return cls(values[0], list(values[1:]), unit)

    @classmethod
    def whole(cls, values: Iterable[float], unit: str = SECONDS) -> Sample:
        """Returns a sample of which no round is kept apart."""
        return cls(None, list(values), unit)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one scenario gave.

    Attributes:
        name: The name on the command line.
        kind: Which table shows it; see `benchmarks.tables`.
        summary: What was saved, in a few words.
        leaves: Leaves of the state.
        size_bytes: Bytes of the state.
        measures: `measures[row][measure]`; a row is a peer or a floor, which is what the machine
            gives without any library.
        facts: Numbers that are not measured, such as a memory budget.
    """

    name: str
    kind: str
    summary: str
    leaves: int
    size_bytes: int
    measures: dict[str, dict[str, Sample]]
    facts: dict[str, float] = field(default_factory=dict)

    def sample(self, row: str, measure: str) -> Sample | None:
        """Returns one sample, or None where it was not taken."""
        return self.measures.get(row, {}).get(measure)


@dataclass(frozen=True, slots=True)
class Results:
    """A whole run."""

    smoke: bool
    date: str
    machine: dict[str, Any]
    scenarios: list[Scenario]
    schema: int = SCHEMA

    def write(self, path: Path) -> None:
        """Writes the run as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def scenario(self, name: str) -> Scenario | None:
        """Returns one scenario, or None where it was not run."""
        return next((each for each in self.scenarios if each.name == name), None)


def read(path: Path) -> Results:
    """Returns the run written in a file.

    Raises:
        ValueError: The file was written by another version of these modules.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {data['schema']}, not {SCHEMA}; run again")
    scenarios = [Scenario(**{**each, "measures": _samples(each)}) for each in data["scenarios"]]
    return Results(**{**data, "scenarios": scenarios})


def _samples(scenario: Mapping[str, Any]) -> dict[str, dict[str, Sample]]:
    return {
        row: {name: Sample(**sample) for name, sample in measures.items()}
        for row, measures in scenario["measures"].items()
    }


def merged(runs: Sequence[Results]) -> Results:
    """Returns one run of the scenarios of several; of a scenario in two of them, the later.

    Raises:
        ValueError: They come from different machines or versions: side by side they would mislead.
    """
    first = runs[0]
    if any((each.machine, each.smoke) != (first.machine, first.smoke) for each in runs):
        raise ValueError("the runs come from different machines, versions or sizes; run again")
    scenarios = {each.name: each for run in runs for each in run.scenarios}
    return replace(first, date=max(each.date for each in runs), scenarios=list(scenarios.values()))
