"""What a run with snapshots in memory loses, by the way it ends; and how soon it goes on.

    python -m benchmarks.lost_steps                                     # prints the table
    python -m benchmarks.lost_steps --page docs/how-to/surviving.md     # writes it into the page

Each run saves a step to its root, takes snapshots in memory, and is ended. Then a new process asks
for the step to go on from: on the same host, at once; and on another host, when all that was still
being written is there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import table, value, write_between

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.snapshots import Trainer

__all__ = ["WAYS", "Way", "lost"]

START, END = "<!-- lost:start -->", "<!-- lost:end -->"
SNAPSHOTS = 3


@dataclass(frozen=True, slots=True)
class Way:
    """A way to end.

    Attributes:
        then: What the program does after its snapshots; see `take_snapshots.py`.
        end: Ends it, or waits until it has begun to end; returns what it has read of the output.
        loses_memory: Whether the memory of the host goes at the same time.
    """

    then: str
    end: Callable[[Trainer], list[str]]
    loses_memory: bool = False


def _alone(run: Trainer) -> list[str]:
    return []


def _kill(run: Trainer) -> list[str]:
    said = run.lines(until=f"ack {SNAPSHOTS}")
    run.kill()
    return said


def _terminate(run: Trainer) -> list[str]:
    said = run.lines(until="held")
    run.process.send_signal(signal.SIGTERM)
    return said


def _kill_agent(run: Trainer) -> None:
    from tests.support.snapshots import children_of

    for agent in children_of(run.process.pid):
        os.kill(agent, signal.SIGKILL)


def _kill_agent_first(run: Trainer) -> list[str]:
    """Kill the agent; the trainer some snapshots later, which have started another agent."""
    said = run.lines(until=f"ack {SNAPSHOTS}")
    _kill_agent(run)
    said += run.lines(until=f"ack {2 * SNAPSHOTS}")
    run.kill()
    return said


def _kill_both(run: Trainer) -> list[str]:
    said = run.lines(until=f"ack {SNAPSHOTS}")
    _kill_agent(run)
    run.kill()
    return said


WAYS = {
    "`kill -9`": Way("wait", _kill),
    "an exception": Way("raise", _alone),
    "SIGTERM in a compile": Way("compile", _terminate),
    "`kill -9` of the agent, and later of the trainer": Way("go on", _kill_agent_first),
    "`kill -9` of both at once": Way("wait", _kill_both),
    "the host is lost, with its memory": Way("wait", _kill_both, loses_memory=True),
}


def lost(way: Way, root: Path, *, same_host: bool) -> tuple[int, float]:
    """Returns how many steps of a run are lost, and the seconds until a new process goes on."""
    import ckpt.sync
    from tests.support.numbered_states import state_of
    from tests.support.snapshots import shared_memory, trainer

    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(0, state_of(0)).result()
    count = [-1, SNAPSHOTS] if way.then != "go on" else []
    with shared_memory() as memory, shared_memory() as other:
        with trainer(root, memory, way.then, *count) as run:
            said = way.end(run)
            if way.loses_memory:
                shutil.rmtree(memory, ignore_errors=True)
            if not same_host or way.then == "raise":
                said += run.end()[0]
            run.process.wait()
            began = time.perf_counter()
            with trainer(root, memory if same_host else other, "wait", -1, 1) as following:
                assert following.process.stdout is not None
                start = following.process.stdout.readline()
                seconds = time.perf_counter() - began
                if same_host and way.then != "raise":
                    said += run.end()[0]
        newest = max(int(line.split()[1]) for line in said if line.startswith("ack "))
        return newest - (int(start.split()[1]) - 1), seconds


def rows(place: Path, rounds: int) -> list[tuple[str, ...]]:
    """Returns a row for every way to end: the most that was lost, and the median of the times."""
    found: dict[tuple[str, bool], list[tuple[int, float]]] = {}
    for number in range(rounds):
        for name, way in WAYS.items():
            for same_host in (True, False):
                root = place / f"{number}-{len(found)}-{same_host}"
                found.setdefault((name, same_host), []).append(lost(way, root, same_host=same_host))
                shutil.rmtree(root)

    def row(name: str) -> tuple[str, ...]:
        same, other = found[name, True], found[name, False]
        seconds = statistics.median(each for _, each in same)
        return name, str(max(n for n, _ in same)), str(max(n for n, _ in other)), value(seconds)

    return [row(name) for name in WAYS]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page", type=Path, help="the page whose table is made anew")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        found = rows(Path(place), chosen.rounds)
    head = ("how it ends", "steps lost, same host", "steps lost, another host", "goes on after")
    text = (
        f"Runs of {SNAPSHOTS} snapshots or more of 7.5 MiB after a save to the root; the most of "
        f"{chosen.rounds} runs, and the median of the times on the same host, with the start of "
        f"Python and the import of jax.\n\n{table(head, found)}\n"
    )
    sys.stdout.write(text)
    if chosen.page:
        write_between(chosen.page, START, END, text)


if __name__ == "__main__":
    main()
