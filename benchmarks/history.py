"""The published runs over time: one line of JSON for each, and a table of how they compare.

Ratios are shown and not times, since machines differ: `times as fast as Orbax` in the same run.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks.figures import table, times
from benchmarks.labels import label
from benchmarks.summary import SHORT_ROWS
from benchmarks.tables import BASELINE
from benchmarks.targets import OURS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.results import Results

NAME = "history.jsonl"
START, END = "<!-- bench:history:start -->", "<!-- bench:history:end -->"
_SHOWN = 8
_LIBRARIES = ("ckpt-jax", "jax", "tensorstore", "orbax-checkpoint")


def record(run: Results) -> dict[str, Any]:
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


def append(run: Results, file: Path) -> None:
    """Adds a run to the file; one of the same date takes the place of the earlier one."""
    kept = [each for each in read(file) if each["date"] != run.date]
    lines = [json.dumps(each, separators=(",", ":")) for each in (*kept, record(run))]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the recorded runs, oldest first."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda each: str(each["date"]))


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """Returns the table: a row for each figure that readers want first, a column for each run."""
    shown = records[-_SHOWN:]
    rows = []
    for scenario, measure, text in SHORT_ROWS:
        ratios = [_ratio(each["medians"].get(scenario, {}), measure) for each in shown]
        if any(ratio is not None for ratio in ratios):
            name = f"{text.partition(', ')[0].removesuffix(' of the same')} ({scenario})"
            cells = ("-" if ratio is None else times(ratio) for ratio in ratios)
            rows.append((name, *cells))
    versions = [each["versions"]["orbax-checkpoint"] or "-" for each in shown]
    rows.append((f"{label(BASELINE)}", *versions))
    head = (f"times as fast as {label(BASELINE)}", *(each["date"] for each in shown))
    return f"{table(head, rows)}\n"


def _ratio(medians: dict[str, dict[str, float]], measure: str) -> float | None:
    ours, theirs = (medians.get(row, {}).get(measure) for row in (OURS, BASELINE))
    return None if not ours or theirs is None else theirs / ours
