"""Turns the recorded campaigns into the table of docs/explanation/reliability.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["PAGE", "RESULTS", "Record", "read", "table", "updated", "write"]

START, END = "<!-- campaigns:start -->", "<!-- campaigns:end -->"
PAGE = Path("docs/explanation/reliability.md")
RESULTS = Path("docs/explanation/reliability/results.json")


@dataclass(frozen=True)
class Record:
    """One campaign as it was run.

    Attributes:
        name: What was done, as the table says it.
        campaign: Its function, `module.name` below `tests/reliability`.
        runs: Runs of it; see `Tally`.
        faults: How many of them met what was done to them.
        losses: How many were not as promised.
        seconds: How long it took.
        on: Versions of Python and jax, and the date.
    """

    name: str
    campaign: str
    runs: int
    faults: int
    losses: int
    seconds: float
    on: str


def read(path: Path = RESULTS) -> list[Record]:
    return [Record(**each) for each in json.loads(path.read_text())] if path.exists() else []


def write(records: Sequence[Record], path: Path = RESULTS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(record) for record in records], indent=1) + "\n")


def table(records: Sequence[Record]) -> str:
    """Return the records as a Markdown table."""
    lines = [
        "| attack | runs | met the fault | lost or wrong | minutes | run on |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for each in records:
        minutes = f"{each.seconds / 60:.1f}"
        # Of some nothing is wrong with the world; that much work is the attack.
        met = f"{each.faults:,}" if each.faults else "-"
        lines.append(
            f"| {each.name} (`{each.campaign}`) | {each.runs:,} | {met} | "
            f"{'none' if not each.losses else f'**{each.losses}**'} | {minutes} | {each.on} |"
        )
    return "\n".join(lines)


def updated(page: str, records: Sequence[Record]) -> str:
    """Return the page with the table of these records between its markers."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page needs one {START} and after it one {END}")
    return f"{before}{START}\n\n{table(records)}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(), read()))
    sys.stdout.write(f"{PAGE} is up to date\n")
