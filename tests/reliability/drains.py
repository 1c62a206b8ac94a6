"""A campaign of `kill -9` on a program that saves steps and drains them to another disk."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import ckpt.sync
from tests.reliability.kills import KILLED, attempts
from tests.reliability.tally import Tally
from tests.support.forked_programs import program
from tests.support.numbered_states import state_of
from tests.support.paths import PROGRAMS
from tests.support.trees import assert_same

__all__ = ["at_random"]

DRAINER = PROGRAMS / "drain_until_killed.py"
# Of a step; the program has the same number.
LARGE = 1 << 18
ROUNDS = 5


@dataclass
class _Disks:
    """Two disks, and what the programs have said of them.

    Attributes:
        near: Where steps are saved.
        far: Where they are drained to.
        saved: The steps whose durability was acknowledged.
        drained: Those of which it was said that the far disk has them.
    """

    near: Path
    far: Path
    saved: set[int] = field(default_factory=set)
    drained: set[int] = field(default_factory=set)

    def hear(self, lines: Iterable[str]) -> None:
        for line in lines:
            match line.split() if line.endswith("\n") else ():
                case ["saved", step]:
                    self.saved.add(int(step))
                case ["drained", step, "copied" | "there"]:
                    self.drained.add(int(step))
                case ["drained", *what]:
                    raise AssertionError(f"not drained: {what}")

    def check(self) -> None:
        """Every step that can be seen is whole, and none is lost."""
        near, far = _whole_steps(self.near), _whole_steps(self.far)
        lost = self.saved - near - far
        assert not lost, f"lost {sorted(lost)}"
        assert self.drained <= far, f"not there: {sorted(self.drained - far)}"

    def check_end(self) -> None:
        """All was drained, and nothing else is left."""
        self.check()
        far = _whole_steps(self.far)
        assert self.saved <= far, f"not drained: {sorted(self.saved - far)}"
        assert attempts(self.far) == [], "what dead drains left is there still"


def _whole_steps(root: Path) -> set[int]:
    """The steps that can be seen, each of which is read and compared."""
    if not root.exists():
        return set()
    visible = sorted(int(name) for name in os.listdir(root) if name.isdigit())
    with ckpt.sync.CheckpointManager(root, mode="r") as reader:
        assert reader.all_steps() == visible, "a half-visible step"
        for step in visible:
            report = reader.verify(step)
            assert report.ok, str(report)
        for step in visible[-2:]:
            assert_same(reader.restore(step), state_of(step, large=LARGE))
    return set(visible)


def at_random(directory: Path, count: int, seed: int = 0) -> Tally:
    """Kill a program at `count` random moments, several times over on each pair of disks."""

    def work(index: int) -> Tally:
        choice = random.Random(f"{seed} {index}")
        disks = _Disks(directory / str(index) / "near", directory / str(index) / "far")
        tally = Tally()
        try:
            for _ in range(min(ROUNDS, count - index * ROUNDS)):
                _kill_after_a_while(disks, choice)
                tally += Tally(1, disks.far.exists() and bool(attempts(disks.far)))
                disks.check()
            with program(DRAINER, disks.near, disks.far, "finish") as child:
                disks.hear(child.stdout)
            assert child.returncode == 0, f"ended with {child.returncode}"
            disks.check_end()
        except Exception as error:
            tally.lose(f"disks {index}", error)
        shutil.rmtree(directory / str(index))
        return tally

    with ThreadPoolExecutor(2) as two:
        return sum(two.map(work, range(-(-count // ROUNDS))), Tally())


def _kill_after_a_while(disks: _Disks, choice: random.Random) -> None:
    """Kill the program at a random moment after a random number of lines."""
    with program(DRAINER, disks.near, disks.far, "save") as child:
        said = [child.stdout.readline() for _ in range(choice.randint(1, 4))]
        time.sleep(choice.uniform(0, 0.05))
        child.kill()
        said += child.stdout
    disks.hear(said)
    assert child.returncode == KILLED, f"the program ended by itself: {said}"
