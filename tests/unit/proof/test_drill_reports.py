"""What a drill says of programs that are fast, or at their end, when it kills them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt._proof import drill
from ckpt._proof.state_marks import MARK, StateLayout, StateMark
from ckpt.errors import CheckpointError

LAYOUT = StateLayout(("w",), ("float32[2]",))


def marks(steps: Iterable[int]) -> dict[int, StateMark]:
    found = {}
    for step in steps:
        leaves = np.zeros(1, MARK)
        leaves["fingerprint"] = step
        found[step] = StateMark(step, LAYOUT, leaves)
    return found


class Runs:
    """A program that makes the given steps in each of its runs: whole, killed, resumed."""

    def __init__(self, last: int, *runs: range, was_killed: bool = True) -> None:
        self.last, self.scratch, self.was_killed = last, Path("scratch"), was_killed
        self._runs = [marks(each) for each in runs]
        self._killed: list[dict[int, StateMark]] = []

    def run(self, name: str, *_: Any) -> list[dict[int, StateMark]]:
        if name == "whole":
            return self._runs[:1]
        self._killed.append(self._runs[len(self._killed) + 1])
        return list(self._killed)


def drilled(monkeypatch: pytest.MonkeyPatch, runs: Any) -> drill.DrillReport:
    monkeypatch.setattr(drill, "_committed", lambda _: [2])
    return drill._drilled(runs, [0], random.Random(0), lambda _: None)


def test_a_kill_behind_the_last_step_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = drilled(monkeypatch, Runs(10, range(11), range(14), range(8, 12)))
    assert found.ok
    assert found.steps == (8, 10)
    assert found.kills == [(13, 8)]


def test_a_resume_behind_the_last_step_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = drilled(monkeypatch, Runs(10, range(11), range(14), range(12, 14)))
    assert not found.ok
    assert str(found).endswith("the program went on at step 12, after the last: drill more steps")


def test_a_program_that_has_ended_was_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="ended before it could be killed, after step 9"):
        drilled(monkeypatch, Runs(10, range(10), range(10), range(8, 10), was_killed=False))


def test_a_kill_at_the_last_step_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drilled(monkeypatch, Runs(10, range(11), range(11), range(8, 12))).ok


@pytest.mark.parametrize(("command", "is_killed"), [(["sleep", "60"], True), (["true"], False)])
def test_a_run_tells_a_kill_from_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], is_killed: bool
) -> None:
    none_yet: Iterator[list[dict[int, StateMark]]] = iter([[]])
    monkeypatch.setattr(drill, "_marks_in", lambda _: next(none_yet, [marks(range(3))]))
    run = drill._Drill(command, tmp_path, 10, 60.0)
    run.run("killed", lambda *_: is_killed)
    assert run.was_killed == is_killed
