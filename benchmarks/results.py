"""The record of a run: raw samples and the facts needed to read them, as plain JSON.

The history has one line of JSON for each published run, with its medians. The facts tell what a
figure needs to be read; they have no host names and no paths.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCHEMA = 2

SECONDS, BYTES, PER_SECOND, SHARE = "s", "B", "1/s", "1"
# The peers that are compared.
OURS, BASELINE = "ckpt", "orbax"
HISTORY = "history.jsonl"
_LIBRARIES = ("ckpt-jax", "jax", "tensorstore", "orbax-checkpoint")


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


def medians_of(run: Results) -> dict[str, Any]:
    """Returns what is kept of a run: its date, versions, and the median of each measure."""
    return {
        "date": run.date,
        "machine": f"{run.machine['cores_usable']} cores, {run.machine['file_system']}",
        "versions": {name: run.machine["versions"].get(name) for name in _LIBRARIES},
        "medians": {
            each.name: {
                row: {name: sample.median for name, sample in measures.items()}
                for row, measures in each.measures.items()
                if row in (OURS, BASELINE)
            }
            for each in run.scenarios
        },
    }


def append_history(run: Results, file: Path) -> None:
    """Adds a run to the file; one of the same date takes the place of the earlier one."""
    kept = [each for each in read_history(file) if each["date"] != run.date]
    lines = [json.dumps(each, separators=(",", ":")) for each in (*kept, medians_of(run))]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_history(file: Path) -> list[dict[str, Any]]:
    """Returns the recorded runs, oldest first."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda each: str(each["date"]))


# uvloop is here because Orbax runs on it where it is installed.
_DISTRIBUTIONS = (
    "ckpt-jax",
    "jax",
    "jaxlib",
    "numpy",
    "tensorstore",
    "orbax-checkpoint",
    "safetensors",
    "torch",
    "uvloop",
)


def machine_facts(directory: Path) -> dict[str, Any]:
    """Returns cores, memory, devices, versions, and the file system that `directory` is on."""
    devices = jax.devices()
    return {
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "file_system": file_system(directory),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _DISTRIBUTIONS},
    }


def file_system(directory: Path) -> str:
    """Returns the type of the file system of a directory, such as ext4 or tmpfs."""
    command = ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(directory)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    # The last of mounts on one place is the one that is seen.
    return found[-1] if found else "unknown"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
