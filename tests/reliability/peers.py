"""A campaign against jobs whose snapshots have copies on peers: they are killed, and lose hosts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.reliability.kills import ATTEMPT
from tests.reliability.tally import Tally
from tests.support.peer_jobs import DEVICES, PROGRAM, Hosts, agent_of, settings
from tests.support.real_jobs import Job, started
from tests.support.snapshots import shared_memory

__all__ = ["at_random"]

PROCESSES = 3
# On each root and its memory; so most jobs find what a killed one has left.
ROUNDS = 5
# About one snapshot with its copies.
SNAPSHOT_S = 0.1
PATIENCE_S = 120.0


def at_random(directory: Path, count: int, seed: int = 0) -> Tally:
    """Kill jobs that take snapshots without pause, each at a random moment, and lose a host.

    The next one goes on from memory: from no earlier step than the last one of which all processes
    had heard that it is on their peers. Half of the jobs are killed with their agents. The number
    of faults is that of the jobs of which a snapshot, or a copy, was torn.
    """
    tally = Tally()
    for index in range(-(-count // ROUNDS)):
        choice = random.Random(f"{seed} {index}")
        place = directory / str(index)
        place.mkdir()
        with shared_memory() as memory:
            hosts, confirmed, said = Hosts(memory, PROCESSES), -1, ""
            try:
                for _ in range(min(ROUNDS, count - index * ROUNDS)):
                    last, said = _killed(place / "root", hosts, confirmed, choice)
                    confirmed = max(confirmed, last)
                    tally += Tally(1, _is_torn(memory))
                    hosts.lose(choice.randrange(PROCESSES))
                _ended(place / "root", hosts, confirmed)
            except (Exception, pytest.fail.Exception) as error:
                tally.lose(f"hosts {index}", error, said)
    return tally


def _killed(root: Path, hosts: Hosts, confirmed: int, choice: random.Random) -> tuple[int, str]:
    """Kill a job after a while.

    Returns:
        The last step of which all know that it is on peers, and what the job has logged.
    """
    told = settings(hosts, "wait", 100_000)
    with started(
        PROCESSES, PROGRAM, root, told, devices_per_process=DEVICES[PROCESSES], timeout=PATIENCE_S
    ) as job:
        _check_start(job, confirmed)
        agents = [agent_of(child) for child in job.children]
        least = choice.randint(0, 4)
        job[0].wait_for(lambda lines: len(_held(lines)) >= least, "no snapshot", PATIENCE_S)
        time.sleep(choice.uniform(0, 2 * SNAPSHOT_S))
        victims = [child.pid for child in job.children]
        if choice.random() < 0.5:
            victims += agents
        choice.shuffle(victims)
        for pid in victims:
            _kill(pid)
        for child in job.children:
            child.kill()
        # That of a host that is lost goes with it.
        for pid in agents:
            _kill(pid)
        results = job.results()
    said = "\n".join(f"process {each.index}: {each.errors[-2000:]}" for each in results)
    return min(_last(each.output.splitlines()) for each in results), said


def _ended(root: Path, hosts: Hosts, confirmed: int) -> None:
    """A job goes on from there and ends well: then nothing is left of those before."""
    told = settings(hosts, "end", 1)
    with started(
        PROCESSES, PROGRAM, root, told, devices_per_process=DEVICES[PROCESSES], timeout=PATIENCE_S
    ) as job:
        _check_start(job, confirmed)
        for each in job.results():
            assert each.code == 0, f"ended with {each.code}: {each.errors[-2000:]}"
    left = [each for folder in hosts.folders for each in folder.iterdir()]
    assert left == [], f"memory was not given back: {left}"


def _check_start(job: Job, confirmed: int) -> None:
    """All begin at the same step, with its state, and no earlier than they should."""
    found = []
    for child in job.children:
        child.wait_for(lambda lines: _line("agent", lines) != [], "no start", PATIENCE_S)
        _, start, right = _line("start", child.lines)
        found.append((int(start), right))
    assert len(set(found)) == 1, f"they begin at {found}"
    [(begin, is_right)] = set(found)
    assert is_right == "True", f"the state of step {begin} is another"
    assert begin > confirmed, f"starts at {begin} after {confirmed}"


def _line(name: str, lines: Sequence[str]) -> list[str]:
    return next((each.split() for each in lines if each.startswith(f"{name} ")), [])


def _held(lines: Sequence[str]) -> list[int]:
    return [int(each.split()[1]) for each in lines if each.startswith("held ")]


def _last(lines: Sequence[str]) -> int:
    return max(_held(lines), default=-1)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_torn(memory: Path) -> bool:
    """Tell whether a snapshot, or a copy, was being written when a job was killed."""
    places = [*memory.glob("*/ckpt-*/*/steps/*"), *memory.glob("*/ckpt-*/*/held/*/*")]
    return any(ATTEMPT in each.name for each in places)
