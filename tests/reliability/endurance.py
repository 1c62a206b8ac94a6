"""A campaign of patience: many saves in a row in one process, which may not grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.reliability.tally import Tally
from tests.support.paths import PROGRAMS

__all__ = ["saves_in_a_row"]

ENDURER = str(PROGRAMS / "save_many_times.py")
MIB = 1 << 20


def saves_in_a_row(directory: Path, count: int, seed: int = 0) -> Tally:
    """Save `count` times in a row; what the process and the root hold must not grow meanwhile.

    Compared are the end and the end of a warm-up, a fifth of all. There is no fault to meet.
    """
    run = subprocess.run(
        [sys.executable, ENDURER, str(directory / "root"), str(count)],
        capture_output=True,
        text=True,
        timeout=60 + count,
    )
    tally = Tally(count)
    if run.returncode:
        tally.losses.append(f"the program ended with {run.returncode}: {run.stderr[-1000:]}")
        return tally
    before, after = (json.loads(line) for line in run.stdout.splitlines())
    tally.losses += grown(before, after, saves=count - count // 5)
    if run.stderr:
        tally.losses.append(f"it said: {run.stderr[:500]}")
    return tally


def grown(before: dict[str, Any], after: dict[str, Any], *, saves: int) -> list[str]:
    """What has grown in so many saves, a line for each."""
    # What the last save still does in the background has a file or a thread now and then.
    spare = {"files": 3, "threads": 4, "tasks": 6}
    losses = [
        f"{what}: {before[what]} became {after[what]}"
        for what, more in spare.items()
        if after[what] > before[what] + more
    ]
    if after["rss"] > before["rss"] * 1.1 + 16 * MIB:
        losses.append(f"memory: {before['rss'] / MIB:.0f} MiB became {after['rss'] / MIB:.0f} MiB")
    for kind, number in after["objects"].items():
        old = before["objects"].get(kind, 0)
        # Also objects; and other libraries fill caches. But not with every save.
        if number > old + saves // (20 if kind.startswith("ckpt.") else 4):
            losses.append(f"{kind}: {old} became {number} objects")
    wanted = sorted(map(str, after["steps"]))
    if len(after["steps"]) != 2 or after["root"] != wanted:
        losses.append(f"in the root: {after['root']}")
    return losses
