"""A campaign against jobs that are killed whole: their agents write the last snapshot."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.reliability.kills import ATTEMPT
from tests.reliability.tally import Tally
from tests.support.parts_of_states import steps_of
from tests.support.real_jobs import started
from tests.support.snapshots import shared_memory

__all__ = ["at_random"]

PROGRAM = "tiers_in_job.py"
PROCESSES = 2
# About one snapshot.
SNAPSHOT_S = 0.05
PATIENCE_S = 120.0


def at_random(directory: Path, count: int, seed: int = 0) -> Tally:
    """Kill all processes of jobs that take snapshots without pause, each job at a random moment.

    When their agents have ended, the root has a snapshot, whole: the last one of which all
    processes had heard that it is there, or a newer one. The number of faults is that of the jobs
    of which a snapshot was torn.
    """
    tally = Tally()
    for index in range(count):
        choice = random.Random(f"{seed} {index}")
        place = directory / str(index)
        place.mkdir()
        try:
            tally += Tally(1, _killed(place / "root", choice))
        except (Exception, pytest.fail.Exception) as error:
            tally += Tally(1)
            tally.lose(f"job {index}", error)
    return tally


def _killed(root: Path, choice: random.Random) -> bool:
    """Kill a job after a while; tell whether a snapshot was torn."""
    with shared_memory() as memory:
        folders = [memory / f"host-{number}" for number in range(PROCESSES)]
        for folder in folders:
            folder.mkdir()
        told = {
            "hosts": list(map(str, folders)),
            "snapshots": 100_000,
            "then": "wait",
            # Agents try to write as long as that; a slow machine needs it.
            "kept": PATIENCE_S,
        }
        with started(
            PROCESSES, PROGRAM, root, json.dumps(told), devices_per_process=2, timeout=PATIENCE_S
        ) as job:
            least = choice.randint(1, 8)
            for child in job.children:
                child.wait_for(lambda lines: len(_taken(lines)) >= least, "no snapshot", PATIENCE_S)
            time.sleep(choice.uniform(0, 2 * SNAPSHOT_S))
            victims = list(job.children)
            choice.shuffle(victims)
            for child in victims:
                child.kill()
            is_torn = any(ATTEMPT in each.name for each in memory.glob("*/ckpt-*/*/steps/*"))
            results = job.results()
            # Agents that need long close the output before they have written.
            end = time.monotonic() + PATIENCE_S
            while not (found := steps_of(root)) and time.monotonic() < end:
                time.sleep(0.1)
    confirmed = min(max(_taken(each.output.splitlines())) for each in results)
    said = " / ".join(each.errors[-1000:] for each in results)
    assert found, f"nothing was written, and all had {confirmed}: {said}"
    assert found[-1] >= confirmed, f"{found} were written, and all had {confirmed}: {said}"
    return is_torn


def _taken(lines: Sequence[str]) -> list[int]:
    return [int(each.split()[1]) for each in lines if each.startswith("snapshot ")]
