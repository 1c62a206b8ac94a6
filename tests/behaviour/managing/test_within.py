"""`keep.Within`: what other policies like best, inside a size."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import ckpt.sync
from ckpt._steps.removal.recorded_policy import read_recorded_policy
from ckpt.errors import InvalidArgumentError, StorageError
from ckpt.keep import (
    All,
    Best,
    EverySteps,
    Healthy,
    Latest,
    SavedStep,
    Within,
    ranking_of,
    steps_kept,
)
from ckpt.keep import Any as AnyOf
from ckpt.keep._by_item import text_of
from ckpt.storage import open_root
from tests.support.command import ckpt_command


def steps(*sizes: int | None, **losses: float) -> list[SavedStep]:
    """Return steps of these sizes; `s3=0.1` is the loss of step 3."""
    return [
        SavedStep(n, float(n), {"loss": losses.get(f"s{n}", 9.0)}, nbytes=size)
        for n, size in enumerate(sizes)
    ]


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == level]


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt")


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("2 TB", 2 * 10**12),
        ("500GiB", 500 * 2**30),
        ("1.5 kB", 1500),
        ("1 MB", 10**6),
        ("3 PiB", 3 * 2**50),
        ("7 B", 7),
        (12, 12),
    ],
)
def test_sizes(size: Any, nbytes: int) -> None:
    assert Within(size).nbytes == nbytes
    assert Within(size) == Within(nbytes) != Within(nbytes + 1)
    assert repr(Within(size, Latest(2))) == f"Within({nbytes}, Latest(n=2))"


@pytest.mark.parametrize("size", ["", "2", "2 XB", "-1 B", "0 B", 0, -3, True, None, 1.5, "1e3 GB"])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Within\(size=.*'2 TB' or '500 GiB'"):
        Within(size)


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="keep policy 3"):
        Within("2 TB", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (Within(35), {5, 6, 7}),
        (Within(35, All()), {5, 6, 7}),
        (Within(35, Latest(2)), {6, 7}),
        (Within(35, Best(2, "loss", "min")), {3, 2, 7}),
        (Within(25, Best(2, "loss", "min")), {3, 7}),
        # In turn: the best, the newest, the next best.
        (Within(45, Best(3, "loss", "min"), Latest(5)), {3, 7, 2, 6}),
        (Within(45, Latest(5), Best(3, "loss", "min")), {7, 3, 6, 2}),
        (Within(35, EverySteps(2)), {6, 4, 7}),
        (Within(35, AnyOf(Best(1, "loss", "min"), EverySteps(2))), {3, 6, 7}),
        (Within(35, lambda step: step < 2), {1, 0, 7}),
        # The greatest one stays in any case.
        (Within(5), {7}),
    ],
)
def test_the_best_liked_are_kept(policy: Within, kept: set[int]) -> None:
    given = steps(*[10] * 8, s3=0.1, s2=0.2, s5=0.3)
    assert steps_kept(policy, given, 0.0) == kept
    # Asked again, it keeps the same.
    again = [each for each in given if each.step in kept]
    assert steps_kept(policy, again, 0.0) == kept


def test_a_step_that_is_too_large_makes_way_for_smaller_ones() -> None:
    assert steps_kept(Within(35), steps(10, 10, 100, 10), 0.0) == {3, 1, 0}


def test_a_step_of_unknown_size_does_not_count() -> None:
    assert steps_kept(Within(25), steps(10, None, 10, 10), 0.0) == {3, 2, 1}
    assert steps_kept(Within(5), steps(10, None, 10, 10), 0.0) == {3, 1}
    assert steps_kept(Within(5, Latest(2)), steps(10, None, 10, 10), 0.0) == {3}
    assert steps_kept(Within(25), [], 0.0) == frozenset()


def test_people_are_told_the_size() -> None:
    assert "30" in text_of(Within(30, Latest(4)))
    assert "Latest(n=4)" in text_of(Within(30, Latest(4)))


def test_its_members_are_known() -> None:
    best = Best(2, "loss", "min")
    assert ranking_of(Within("1 GB", Latest(2), best)) == best


def test_a_line_says_what_is_left_once_for_each_step(caplog: pytest.LogCaptureFixture) -> None:
    policy = Within("1 kB")
    for _ in range(2):
        policy.keep(steps(100, 100, 100), 0.0)
    assert said(caplog, logging.INFO) == ["3 steps are kept, which leaves 700 B of 1 kB"]
    policy.keep(steps(100, 100, 100, 100), 0.0)
    assert said(caplog, logging.INFO)[1:] == ["4 steps are kept, which leaves 600 B of 1 kB"]
    assert said(caplog, logging.WARNING) == []


@pytest.mark.parametrize(("nbytes", "warned"), [(333, False), (334, True), (2000, True)])
def test_a_warning_says_that_two_more_saves_will_not_fit(
    nbytes: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Within("1 kB")
    for sizes in ((10, nbytes), (10, nbytes, nbytes)):
        policy.keep(steps(*sizes), 0.0)
    texts = said(caplog, logging.WARNING)
    assert len(texts) == warned
    assert all(each.startswith("two more saves like step 1, of ") for each in texts)


def test_a_run_stays_inside_the_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep = Within("1 MB", Best(1, "loss", "min"), Latest(10))
    with ckpt.sync.CheckpointManager(tmp_path, keep=keep) as mgr:
        for step in range(6):
            loss = abs(step - 1)
            mgr.save(step, {"w": np.random.rand(30_000)}, metrics={"loss": loss}).result()
        mgr.wait_until_finished()
        # 240 kB each: the best, and the three newest.
        assert mgr.all_steps() == [1, 3, 4, 5]
        assert mgr.best_step() == 1
    assert any("which leaves" in each for each in said(caplog, logging.INFO))
    nbytes = sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file())
    assert nbytes < 1_050_000
    # Another program knows the policy.
    found = ckpt_command("ls", tmp_path, "--json").json["steps"]
    assert [each["step"] for each in found if each["goes_next"]] == [3]
    assert "keeps: best loss, newest 10 within 977 KiB" in ckpt_command("ls", tmp_path).out


@pytest.mark.parametrize(
    "policy",
    [Within("1 GB"), Within(10, Latest(3), Best(2, "loss", "min")), AnyOf(Within(9, Latest(1)))],
)
def test_a_root_records_it(tmp_path: Path, policy: Any) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, keep=policy) as mgr:
        mgr.save(1, {"w": 1})
    noted = anyio.run(read_recorded_policy, open_root(tmp_path))
    assert noted is not None
    assert noted.policy == policy


def test_the_last_healthy_step_stays(tmp_path: Path) -> None:
    signs = [ckpt.extensions.VitalSigns()]
    keep = Within("600 kB", Healthy(1), Latest(10))
    with ckpt.sync.CheckpointManager(tmp_path, keep=keep, extensions=signs) as mgr:
        for step in range(5):
            value = np.random.rand(30_000)
            value[0] = np.nan if step else 0
            mgr.save(step, {"w": value}).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [0, 4]


def test_a_rehearsal_knows_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": np.random.rand(30_000)}).result()
    real = os.statvfs

    def left(path: Any) -> Any:
        state = real(path)
        return type(
            "State",
            (),
            {
                "f_bavail": 600_000,
                "f_frsize": 1,
                "f_files": state.f_files,
                "f_favail": state.f_favail,
            },
        )()

    monkeypatch.setattr(os, "statvfs", left)
    rehearsal = [ckpt.extensions.Rehearsal()]
    broken = pytest.raises(StorageError, match="and 4 steps, as many as will come")
    mgr = ckpt.sync.CheckpointManager(tmp_path, keep=Within("1 MB"), extensions=rehearsal)
    with mgr, broken:
        mgr.save(2, {"w": np.random.rand(30_000)})
    with ckpt.sync.CheckpointManager(tmp_path, keep=Within("500 kB"), extensions=rehearsal) as mgr:
        mgr.save(2, {"w": np.random.rand(30_000)}).result()
