"""A campaign of `kill -9` on agents that join the parts of steps in a root."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from tests.reliability.kills import KILLED, attempts
from tests.reliability.tally import Tally
from tests.support.forked_programs import Forked, program
from tests.support.joined_roots import assert_joined, assert_whole, made_parts
from tests.support.paths import PROGRAMS

__all__ = ["at_random"]

AGENT = PROGRAMS / "join_until_killed.py"
COUNT, STEPS = 3, (1, 2)
# How many agents are killed before all of them may come to their end.
ROUNDS = 4
LONGEST_S = 0.8


def at_random(directory: Path, count: int, seed: int = 0) -> Tally:
    """Kill agents at `count` random moments, several times over on each root."""
    saved = directory / "saved"
    parts = made_parts(saved, COUNT, *STEPS)
    tally = Tally()
    for index in range(-(-count // ROUNDS)):
        choice = random.Random(f"{seed} {index}")
        far = directory / f"far-{index}"
        try:
            tally += _killed(parts, far, min(ROUNDS, count - index * ROUNDS), choice)
        except Exception as error:
            tally.lose(f"root {index}", error)
        shutil.rmtree(far, ignore_errors=True)
    return tally


def _killed(parts: list[Path], far: Path, count: int, choice: random.Random) -> Tally:
    agents = [_agent(parts, far, process) for process in range(COUNT)]
    tally = Tally()
    try:
        for _ in range(count):
            time.sleep(choice.uniform(0, LONGEST_S))
            process = choice.randrange(COUNT)
            agents[process].kill()
            said = agents[process].stdout.read()
            with agents[process] as child:
                child.wait()
            assert child.returncode in (0, KILLED), said
            met = far.exists() and bool(attempts(far))
            tally += Tally(1, child.returncode == KILLED and met)
            if far.exists():
                assert_whole(far, parts)
            agents[process] = _agent(parts, far, process)
        for child in agents:
            said = child.stdout.read()
            assert child.wait() == 0, said
            ended = dict(line.split()[1:] for line in said.splitlines() if "ended" in line)
            assert ended.keys() == {str(step) for step in STEPS}, said
            assert set(ended.values()) <= {"copied", "there"}, said
    finally:
        for child in agents:
            child.kill()
            with child:
                pass
    assert_joined(far, parts, *STEPS)
    # The next leader removes what these have left.
    with _agent(parts, far, 0) as child:
        child.stdout.read()
    assert child.returncode == 0
    assert attempts(far) == [], "what dead agents left is there still"
    return tally


def _agent(parts: list[Path], far: Path, process: int) -> Forked:
    child = program(AGENT, parts[process], far, process, COUNT)
    assert child.stdout.readline() == "begun\n"
    return child
