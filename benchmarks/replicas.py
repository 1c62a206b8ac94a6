"""Restores of a state that all processes of a job hold, each for itself and with shared reads.

`python -m benchmarks.replicas` starts SeaweedFS behind one line for all processes, and jobs of 2
and 4 of them on loopback. `--page docs/how-to/multi-process.md` writes the table into a page.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import table, write_between
from benchmarks.object_stores import BANDWIDTH, LATENCY_S, MIB, kind_of, line
from tests.stores import servers

if TYPE_CHECKING:
    from benchmarks.object_stores import Line

START, END = "<!-- replicas:start -->", "<!-- replicas:end -->"
NBYTES = 128 * MIB
KINDS = {"each for itself": None, "broadcast_bytes=256 MiB": 256 * MIB}
# The first of each kind compiles, and touches its memory for the first time; it is left out.
ROUNDS = 4


def compared(where: Line, processes: int, name: str) -> list[tuple[str, ...]]:
    """Rows: seconds, requests and bytes of restores of both kinds, in turns."""
    from tests.support.real_jobs import started

    kinds = list(KINDS) * ROUNDS
    passed: list[tuple[int, int]] = []
    with started(
        processes,
        Path(__file__).with_name("replica.py"),
        where.open(name).endpoint,
        where.open(name).url,
        *(KINDS[kind] or 0 for kind in kinds),
        devices_per_process=1,
        timeout=900,
    ) as job:
        for number in range(len(kinds) + 1):
            for child in job.children:
                child.reached(f"round {number}", 300)
            seen = [each for each in where.requests() if kind_of(each) == "GET"]
            passed.append((len(seen), sum(each["down"] for each in seen)))
            for child in job.children:
                child.go_on()
        seconds = [max(each) for each in zip(*(r.value for r in job.results()), strict=True)]
    rows: list[tuple[str, ...]] = []
    for first, kind in enumerate(KINDS):
        later = range(first + len(KINDS), len(kinds), len(KINDS))
        # What has passed is known when the next round begins.
        gets = statistics.median(passed[number + 1][0] for number in later)
        nbytes = statistics.median(passed[number + 1][1] for number in later)
        took = statistics.median(seconds[number] for number in later)
        rows.append(
            (
                f"{processes} processes, {kind}",
                f"{took:.2f} s",
                f"{gets:.0f}",
                f"{nbytes / MIB:.0f} MiB",
            )
        )
    return rows


def saved(where: Line) -> str:
    """Save the state; return where."""
    import numpy as np

    import ckpt.sync

    random = np.random.default_rng(0)
    name = uuid.uuid4().hex
    arrays: dict[str, Any] = {
        f"layer{n}": random.random((4096, 1024), np.float32) for n in range(NBYTES // 16 // MIB)
    }
    with ckpt.sync.CheckpointManager(where.open(name)) as mgr:
        mgr.save(1, arrays)
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="the page whose table is made anew")
    chosen = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]
    os.environ.update(servers.environment())
    rows = []
    with line("s3", LATENCY_S, BANDWIDTH) as where:
        name = saved(where)
        for processes in (2, 4):
            rows += compared(where, processes, name)
    text = (
        f"A state of {NBYTES // MIB} MiB that every process holds, {LATENCY_S * 1e3:.0f} ms before "
        f"every request and {BANDWIDTH / 1e6:.0f} MB/s for all of them together, median of "
        f"{ROUNDS - 1}:\n\n"
    ) + table(("", "took", "GETs", "from the store"), rows)
    sys.stdout.write(text + "\n")
    if chosen.page:
        write_between(chosen.page, START, END, text)


if __name__ == "__main__":
    main()
