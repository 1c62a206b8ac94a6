"""What a job with copies on peers loses, by what is killed; and how soon it goes on.

    python -m benchmarks.lost_jobs                                      # prints the table
    python -m benchmarks.lost_jobs --page docs/how-to/surviving.md      # writes it into the page

Runs `docs/examples/job_with_peers.py`, in which each process has its memory in a folder of its own,
as if it were a host, and kills what the table says.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from benchmarks.figures import table, value, write_between

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WAYS", "KilledJob", "lost"]

START, END = "<!-- lost-jobs:start -->", "<!-- lost-jobs:end -->"
PROGRAM = Path(__file__).parent.parent / "docs" / "examples" / "job_with_peers.py"
PROCESSES, SAVE_EVERY, KILLED_AT = 4, 200, 299
NEVER = 1_000_000


@dataclass(frozen=True, slots=True)
class KilledJob:
    """What is killed.

    Attributes:
        processes: Which processes get `kill -9`.
        hosts: Whose memory is lost at the same time, or when the agents of that job have written.
        terminates: Whether the whole job gets SIGTERM instead, and `kill -9` five seconds later.
    """

    processes: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    terminates: bool = False


WAYS = {
    "one process": KilledJob((1,)),
    "one process, with the memory of its host": KilledJob((1,), (1,)),
    "all processes": KilledJob((0, 1, 2, 3)),
    "all processes, with the memory of one host": KilledJob((0, 1, 2, 3), (2,)),
    "all processes, with the memory of two hosts that are no peers": KilledJob(
        (0, 1, 2, 3), (0, 2)
    ),
    "all processes, by SIGTERM and five seconds later": KilledJob(terminates=True),
    "all processes, by SIGTERM, and then all hosts with their memory": KilledJob(
        hosts=(0, 1, 2, 3), terminates=True
    ),
    "one process and its peer, with the memory of both hosts": KilledJob((1, 2), (1, 2)),
}


def lost(way: KilledJob, place: Path, memory: Path) -> tuple[int, float]:
    """Returns how many steps of a job are lost, and the seconds until it goes on."""
    with _started(place, memory) as job:
        assert job.stdout is not None
        try:
            processes = [int(each) for each in _read_to(job.stdout, "processes")]
            _read_to(job.stdout, f"step {KILLED_AT}")
            began = time.perf_counter()
            for number in way.processes:
                os.kill(processes[number], signal.SIGKILL)
            if not way.terminates:
                _lose(memory, way.hosts)
                start = int(_read_to(job.stdout, "resumed at step")[-1])
                return KILLED_AT + 1 - start, time.perf_counter() - began
            job.terminate()
            # Until the agents have closed it, too.
            rest = job.stdout.read()
            _lose(memory, way.hosts)
        finally:
            _end(job)
    last = max([KILLED_AT, *(int(each[5:]) for each in rest.split("\n") if each[:5] == "step ")])
    began = time.perf_counter()
    with _started(place, memory) as job:
        assert job.stdout is not None
        try:
            start = int(_read_to(job.stdout, "resumed at step")[-1])
            # It has made steps, and taken snapshots, after the last one that it told.
            return max(last + 1 - start, 0), time.perf_counter() - began
        finally:
            _end(job)


def _lose(memory: Path, hosts: Sequence[int]) -> None:
    for number in hosts:
        shutil.rmtree(memory / f"host-{number}", ignore_errors=True)


def _started(place: Path, memory: Path) -> subprocess.Popen[str]:
    options = ["--root", place, "--hosts", memory, "--processes", PROCESSES, "--steps", NEVER]
    return subprocess.Popen(
        [sys.executable, PROGRAM, *map(str, options), "--save-every", str(SAVE_EVERY)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _end(job: subprocess.Popen[str]) -> None:
    """Ends a job with all its processes; agents have sessions of their own."""
    try:
        os.killpg(job.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read_to(lines: IO[str], start: str) -> list[str]:
    """Returns the words of the next line that begins so, after that."""
    for line in lines:
        if line.startswith(start):
            return line.removeprefix(start).split()
    raise AssertionError(f"the job has ended without {start!r}")


def rows(rounds: int) -> list[tuple[str, ...]]:
    """Returns a row for everything that is killed: the most that was lost, the median of times."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            # Agents may still be writing there when they are removed.
            with (
                tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as place,
                tempfile.TemporaryDirectory(
                    prefix="bench-", dir="/dev/shm", ignore_cleanup_errors=True
                ) as memory,
            ):
                found[name].append(lost(way, Path(place, "run"), Path(memory)))
    return [
        (name, str(max(n for n, _ in each)), value(statistics.median(t for _, t in each)))
        for name, each in found.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page", type=Path, help="the page whose table is made anew")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    text = (
        f"A job of {PROCESSES} processes that takes a snapshot every 20 steps and saves to its "
        f"root every {SAVE_EVERY}, killed after step {KILLED_AT}; the most of {chosen.rounds} "
        "runs, and the median of the times, with the start of all processes and the imports of "
        "jax.\n\n"
        + table(("what is killed", "steps lost", "goes on after"), rows(chosen.rounds))
        + "\n"
    )
    sys.stdout.write(text)
    if chosen.page:
        write_between(chosen.page, START, END, text)


if __name__ == "__main__":
    main()
