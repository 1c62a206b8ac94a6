"""The processes of a job hear of a failed save in the same call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt
import ckpt.sync
from tests.support.conditions import until
from tests.support.odd_items import Odd, OddHandler
from tests.support.simulated_job import FAR, STATE, closed, kinds, managers, steps, together

both = pytest.mark.parametrize("own_disks", [False, True], ids=["shared", "own disks"])
Manager = ckpt.sync.CheckpointManager


@contextlib.contextmanager
def job(root: Path, *, own_disks: bool, **options: Any) -> Iterator[list[Manager]]:
    mgrs = managers(root, own_disks=own_disks, seconds=FAR, handlers=[OddHandler()], **options)
    try:
        yield mgrs
    finally:
        closed(mgrs)


def saves(mgrs: list[Manager], step: int, *states: Any) -> list[Any]:
    """Have all call save() at once; return the commits, or what the calls raised."""
    pairs = zip(mgrs, states or [STATE] * len(mgrs), strict=True)
    return together(*(lambda m=m, s=s: m.save(step, s) for m, s in pairs))


def failed(mgrs: list[Manager], step: int) -> list[ckpt.Commit]:
    """Have process 0 fail with a step, and wait until it has in all, without looking."""
    gate = threading.Event()
    error = ckpt.CheckpointError("no space left")
    commits = saves(mgrs, step, Odd(STATE, gate=gate, error=error), Odd(STATE))
    gate.set()
    until(lambda: all(commit.done() for commit in commits))
    return commits


def assert_heard(found: list[Any], step: int) -> None:
    assert kinds(found) == [ckpt.CheckpointError] * 2
    assert all("no space left" in str(each) and each.step == step for each in found)
    assert all("the same call again" in str(each) for each in found)
    assert "process 0" in str(found[1])


@both
def test_all_raise_it_in_the_same_call_and_then_save(tmp_path: Path, own_disks: bool) -> None:
    with job(tmp_path, own_disks=own_disks) as mgrs:
        failed(mgrs, 0)
        assert_heard(saves(mgrs, 1), 0)
        assert steps([commit.result(FAR) for commit in saves(mgrs, 1)]) == [1, 1]
        assert together(*(mgr.close for mgr in mgrs)) == [None, None]


@both
def test_one_raises_it_whose_own_save_has_not_ended_yet(tmp_path: Path, own_disks: bool) -> None:
    begin, gate = threading.Event(), threading.Event()
    with job(tmp_path, own_disks=own_disks) as mgrs:
        error = ckpt.CheckpointError("no space left")
        commits = saves(mgrs, 0, Odd(STATE, gate=begin, error=error), Odd(STATE, gate=gate))
        begin.set()
        until(commits[0].done)
        assert_heard(saves(mgrs, 1), 0)
        assert not commits[1].done()
        gate.set()
        assert steps([commit.result(FAR) for commit in saves(mgrs, 1)]) == [1, 1]
        # It was told once.
        assert together(*(mgr.close for mgr in mgrs)) == [None, None]


@both
def test_all_raise_it_if_only_the_others_have_looked(tmp_path: Path, own_disks: bool) -> None:
    with job(tmp_path, own_disks=own_disks) as mgrs:
        commits = failed(mgrs, 0)
        assert commits[1].exception() is not None
        assert_heard(saves(mgrs, 1), 0)
        assert steps([commit.result(FAR) for commit in saves(mgrs, 1)]) == [1, 1]


@both
def test_what_process_0_has_looked_at_stops_nobody(tmp_path: Path, own_disks: bool) -> None:
    with job(tmp_path, own_disks=own_disks) as mgrs:
        commits = failed(mgrs, 0)
        assert commits[0].exception() is not None
        assert steps([commit.result(FAR) for commit in saves(mgrs, 1)]) == [1, 1]
        # It is not lost where nobody has looked.
        found = together(*(mgr.close for mgr in mgrs))
        assert kinds(found) == [type(None), ckpt.CheckpointError]


@both
def test_all_raise_it_where_a_policy_turns_the_step_down(tmp_path: Path, own_disks: bool) -> None:
    with job(tmp_path, own_disks=own_disks, save_when=ckpt.save_when.EverySteps(10)) as mgrs:
        failed(mgrs, 0)
        assert_heard(saves(mgrs, 1), 0)
        assert not any(saves(mgrs, 1))


@both
def test_back_to_back_saves_that_go_well_raise_nothing(tmp_path: Path, own_disks: bool) -> None:
    with job(tmp_path, own_disks=own_disks) as mgrs:
        commits = [saves(mgrs, step) for step in range(5)]
        assert [steps([each.result(FAR) for each in pair]) for pair in commits] == [
            [step, step] for step in range(5)
        ]
