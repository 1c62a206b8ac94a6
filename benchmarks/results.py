"""The record of a run: raw samples and the facts needed to read them, as plain JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One measure in seconds: the first round, which pays for warm-up, and the others."""

    first: float
    rounds: list[float]

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
    def of(cls, values: list[float]) -> Sample:
        """Returns the sample of all rounds in order, the first one apart."""
        return cls(values[0], values[1:])


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one workload gave: `measures[peer][measure]`, every restore compared to its source."""

    name: str
    kind: str  # "throughput" or "overlap": which table shows it
    summary: str
    leaves: int
    size_bytes: int
    measures: dict[str, dict[str, Sample]]


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


def read(path: Path) -> Results:
    """Returns the run written in a file.

    Raises:
        ValueError: The file was written by another version of these modules.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {data['schema']}, not {SCHEMA}; run again")
    scenarios = [
        Scenario(
            **{
                **scenario,
                "measures": {
                    peer: {name: Sample(**sample) for name, sample in measures.items()}
                    for peer, measures in scenario["measures"].items()
                },
            }
        )
        for scenario in data["scenarios"]
    ]
    return Results(**{**data, "scenarios": scenarios})
