"""Where the time of a save went: told by the commit, and later by the step."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._commit import SaveStatistics

LATE = {"merged", "published"}


def of(info: ckpt.StepInfo | None) -> SaveStatistics:
    assert info is not None
    return info.statistics


def test_a_step_tells_where_the_time_of_its_save_went(tmp_path: Path) -> None:
    state = {"w": np.ones((2048, 2048)), "b": np.ones(7)}
    with ckpt.sync.CheckpointManager(tmp_path, keep=ckpt.keep.Latest(1)) as mgr:
        for step in range(3):
            told = of(mgr.save(step, state).result())
        later = of(mgr.metadata(2).info)
    known = {name: value for name, value in asdict(told).items() if name != "shared_bytes"}
    assert all(isinstance(value, float) and value >= 0 for value in known.values()), known
    # The manifest is written before the rest is known, and nothing is kept beside the steps.
    assert asdict(later) == asdict(told) | dict.fromkeys(LATE)
    assert told.shared_bytes > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ckpt-run", "2"]
    # As they are defined.
    assert told.blocked is not None
    assert told.written is not None
    assert told.staged is not None
    assert told.blocked <= told.written
    assert told.staged <= told.written
    # Another process is told the same, and one that knows nothing of the root.
    assert of(ckpt.sync.metadata(tmp_path / "2").info) == later


def test_a_one_shot_save_tells_as_much(tmp_path: Path) -> None:
    told = asdict(of(ckpt.sync.save(tmp_path / "one", {"n": 1})))
    others = ("waited", "shared_bytes")
    assert all(isinstance(value, float) for name, value in told.items() if name not in others), told


def test_a_copy_of_a_step_tells_what_was_known_when_it_was_written(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "a") as mgr:
        told = of(mgr.save(1, {"n": 1}).result())
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "1").rename(tmp_path / "b" / "1")
    found = of(ckpt.sync.metadata(tmp_path / "b" / "1").info)
    assert found.blocked == told.blocked
    assert found.published is None


def test_a_save_that_waited_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            commits = [await mgr.save(step, {"w": np.ones((1024, 1024))}) for step in range(4)]
            waits = [of(await commit).waited for commit in commits]
            assert waits[0] is not None
            assert max(each or 0.0 for each in waits[1:]) > 0

    asyncio.run(main())


def test_a_clock_that_goes_back_costs_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.perf_counter
    backwards = itertools.count(step=-1000)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + next(backwards))
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        told = of(mgr.save(0, {"w": np.ones(3)}).result())
        later = of(mgr.metadata(0).info)
    assert {each for each in asdict(told).values() if each is not None} == {0.0}
    assert later.blocked == 0.0
