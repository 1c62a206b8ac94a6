"""A step that is saved anew at the nearest place replaces the old one in the root, nothing else."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._tiers.agent.messages import TransferResult
from ckpt.tiers import Tier
from tests.support.drained_roots import saved_at
from tests.support.snapshots import PATIENCE_S


def manager(base: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(base / "root", tiers=[Tier(base / "disk")], **options)


def state(value: float) -> dict[str, Any]:
    return {"w": np.full(1000, value)}


def run_a(base: Path) -> None:
    with manager(base) as mgr:
        for step in range(5):
            mgr.save(step, state(step))


def in_root(base: Path, step: int) -> float:
    return float(ckpt.sync.load(base / "root" / str(step))["w"][0])


def arrived(commit: Any) -> None:
    commit.in_root.result(PATIENCE_S)


@pytest.mark.parametrize("is_lost", [False, True])
def test_steps_of_a_run_that_went_back_replace_those_before(tmp_path: Path, is_lost: bool) -> None:
    run_a(tmp_path)
    if is_lost:
        # Another host has no disk of the first run.
        shutil.rmtree(tmp_path / "disk")
    with manager(tmp_path) as mgr:
        assert mgr.restore(2)["w"][0] == 2
        for step in (3, 4):
            arrived(mgr.save(step, state(step + 0.5), if_exists="replace"))
    assert [in_root(tmp_path, step) for step in range(5)] == [0, 1, 2, 3.5, 4.5]


def test_a_step_that_is_replaced_twice_arrives_as_it_is_last(tmp_path: Path) -> None:
    run_a(tmp_path)
    with manager(tmp_path) as mgr:
        for value in (4.25, 4.5, 4.75):
            last = mgr.save(4, state(value), if_exists="replace")
        arrived(last)
    assert in_root(tmp_path, 4) == 4.75


def test_the_outcome_of_a_replaced_save_is_not_that_of_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy of the old save may end, or fail, after the new one is committed."""
    with manager(tmp_path) as mgr:
        service = mgr._service
        mgr.save(4, state(4)).in_root.result(PATIENCE_S)
        agent = service._agent._process.pid  # type: ignore[attr-defined]
        os.kill(agent, signal.SIGSTOP)
        try:
            saves, commits = [], []
            for value in (4.25, 4.5):
                commits.append(mgr.save(4, state(value), if_exists="replace"))
                commits[-1].result(PATIENCE_S)
                saves.append(saved_at(tmp_path / "disk" / "4"))
            gone = TransferResult(4, "deleted", reason="it is gone", save=saves[0])
            service.drains.heard(gone)  # type: ignore[attr-defined]
            assert not any(each.in_root.done() for each in commits)
            arrived_late = TransferResult(4, "copied", save=saves[0])
            service.drains.heard(arrived_late)  # type: ignore[attr-defined]
            assert [each.in_root.done() for each in commits] == [True, False]
        finally:
            os.kill(agent, signal.SIGCONT)
        arrived(commits[-1])
    assert in_root(tmp_path, 4) == 4.5
    assert "NOT" not in caplog.text


def test_what_another_run_has_saved_meanwhile_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_a(tmp_path)
    with manager(tmp_path) as mgr:
        agent = mgr._service._agent._process.pid  # type: ignore[attr-defined]
        os.kill(agent, signal.SIGSTOP)
        try:
            commit = mgr.save(4, state(4.5), if_exists="replace")
            commit.result(PATIENCE_S)
            with ckpt.sync.CheckpointManager(tmp_path / "root") as other:
                other.save(4, state(40), if_exists="replace").result()
        finally:
            os.kill(agent, signal.SIGCONT)
        with pytest.raises(ckpt.CheckpointError):
            arrived(commit)
    assert in_root(tmp_path, 4) == 40
    assert any("step 4" in each.message for each in caplog.records if each.levelno == logging.ERROR)


def test_a_pinned_step_stays(tmp_path: Path) -> None:
    run_a(tmp_path)
    with ckpt.sync.CheckpointManager(tmp_path / "root") as mgr:
        mgr.pin(4, "paper")
    with manager(tmp_path) as mgr, pytest.raises(ckpt.CheckpointError, match="paper"):
        arrived(mgr.save(4, state(4.5), if_exists="replace"))
    assert in_root(tmp_path, 4) == 4


def test_unhealthy_steps_are_moved_aside_in_the_root(tmp_path: Path) -> None:
    with manager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        for step, value in enumerate([0, 1, np.nan, np.nan]):
            mgr.save(step, state(value))
    with manager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        start, _ = mgr.resume(state(0), healthy=True)
        assert start == 2
        for step in (2, 3):
            arrived(mgr.save(step, state(step)))
    assert [in_root(tmp_path, step) for step in range(4)] == [0, 1, 2, 3]
    aside = [each.name for each in (tmp_path / "root" / "unhealthy").iterdir()]
    assert sorted(name.partition(".")[0] for name in aside if name[0].isdigit()) == ["2", "3"]
