"""Promise: a file that is known to be damaged is never shared again, and the saver is told."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import ckpt
import ckpt.sync
from ckpt.errors import CorruptCheckpointError, NotInRootError
from ckpt.storage._local import attempts
from ckpt.testing.compare import differences
from ckpt.tiers import Tier
from tests.support.simulated_job import FAR, closed, managers, saved, steps, together
from tests.support.snapshots import PATIENCE_S
from tests.support.trees import assert_same

SIZES = {"large": 300_000, "other": 280_000, "small": 50, "tiny": 7}
NAMES = st.sampled_from(sorted(SIZES))
DAMAGES = st.sampled_from(["flip", "cut", "lose"])


@functools.cache
def numbers(name: str, version: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    random = np.random.default_rng([SIZES[name], version])
    return random.standard_normal(SIZES[name]).astype(np.float32)


def made(name: str, version: int) -> Any:
    return jnp.array(numbers(name, version))


def state(version: int = 0) -> dict[str, Any]:
    return {name: made(name, version) for name in SIZES}


def data_files(step: Path) -> dict[str, Path]:
    """The data files of a step by their names, which are random; a shared one keeps its name."""
    return {each.name: each for each in sorted(step.glob("*/d/*"))}


def flip(path: Path, at: float = 0.5) -> None:
    """Change a byte of a file in place, so that every step that has it is hit."""
    with path.open("r+b") as file:
        place = int(at * (path.stat().st_size - 1))
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def largest(step: Path) -> Path:
    return max(data_files(step).values(), key=lambda each: each.stat().st_size)


def warnings_in(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if part in each.getMessage()]


class Damaged(RuleBasedStateMachine):
    """A run on a bad disk: files are hit at any time, and some of that is seen."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.versions = dict.fromkeys(SIZES, 0)
        self.state = state()
        self.kept: dict[int, dict[str, Any]] = {}
        # Names of files: those that are damaged, and those of a step that was seen to be damaged.
        self.hit: set[str] = set()
        self.seen: set[str] = set()
        self.open()

    def open(self) -> None:
        # Small, so that a state has several files.
        staging = ckpt.Staging(budget_bytes=1 << 20)
        self.mgr = ckpt.sync.CheckpointManager(self.root, staging=staging)

    @rule(names=st.sets(NAMES, max_size=3))
    def save(self, names: set[str]) -> None:
        for name in names:
            self.versions[name] += 1
            self.state[name] = made(name, self.versions[name])
        step = len(self.kept)
        self.mgr.save(step, self.state).result(PATIENCE_S)
        self.kept[step] = dict(self.state)
        files = data_files(self.root / str(step)).keys()
        assert not files & self.seen
        if not files & self.hit:
            assert ckpt.sync.verify(self.root / str(step)).ok

    @precondition(lambda self: self.kept)
    @rule(how=DAMAGES, at=st.floats(0, 1), data=st.data())
    def damage(self, how: str, at: float, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.kept)))
        files = data_files(self.root / str(step))
        if not files:
            return
        name = data.draw(st.sampled_from(sorted(files)))
        if name in self.hit:
            return
        self.hit.add(name)
        if how == "flip":
            flip(files[name], at)
        elif how == "cut":
            os.truncate(files[name], int(at * (files[name].stat().st_size - 1)))
        else:
            files[name].unlink()

    def note(self, step: int) -> None:
        self.seen |= data_files(self.root / str(step)).keys() & self.hit

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.kept)))
        try:
            found = self.mgr.restore(step)
        except CorruptCheckpointError:
            self.note(step)
        else:
            assert_same(found, self.kept[step])

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.kept)))
        if not self.mgr.verify(step).ok:
            self.note(step)

    @rule()
    def reopen(self) -> None:
        self.mgr.close()
        self.open()
        # Another program does not know what the one before has seen.
        self.seen.clear()

    def teardown(self) -> None:
        self.mgr.close()
        shutil.rmtree(self.root)


@pytest.mark.timeout(300)
def test_no_step_is_born_damaged_after_the_damage_was_seen() -> None:
    count = settings().max_examples
    run_state_machine_as_test(
        Damaged,
        settings=settings(
            max_examples=max(count // 2, 15),
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("seen", ["verify", "restore", "resume", "fallback"])
def test_the_saver_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seen: str
) -> None:
    frozen = state()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in range(4):
            mgr.save(step, {"base": frozen, "step": step}).result()
        hit = largest(tmp_path / "0")
        assert hit.samefile(largest(tmp_path / "3"))
        flip(hit)
        looks: dict[str, Callable[[], object]] = {
            "verify": lambda: mgr.verify(3),
            "restore": lambda: mgr.restore(3),
            "resume": lambda: mgr.resume({"base": frozen, "step": 0}),
            "fallback": lambda: mgr.restore(fallback=True),
        }
        for _ in range(2):
            with pytest.raises(CorruptCheckpointError) if seen != "verify" else nullcontext():
                looks[seen]()
        (said,) = warnings_in(caplog, "would have shared")
        assert hit.name in said
        assert "step 3" in said
        for step in (4, 5):
            mgr.save(step, {"base": frozen, "step": step}).result()
            assert ckpt.sync.verify(tmp_path / str(step)).ok
            # What was written anew is shared from then on.
            assert hit.name not in data_files(tmp_path / str(step))
        assert largest(tmp_path / "4").samefile(largest(tmp_path / "5"))


def test_a_restore_of_other_items_does_not_bring_the_file_back(tmp_path: Path) -> None:
    frozen = state()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, items={"base": frozen, "rest": {"n": jnp.arange(9)}}).result()
    flip(largest(tmp_path / "0"))
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert not mgr.verify(0).ok
        mgr.restore(0, items=["rest"])
        mgr.save(1, items={"base": frozen, "rest": {"n": jnp.arange(9)}}).result()
    assert ckpt.sync.verify(tmp_path / "1").ok


def test_a_save_that_has_taken_the_file_over_already_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = state()
    mgr = ckpt.sync.CheckpointManager(tmp_path)
    mgr.save(0, frozen).result()
    flip(largest(tmp_path / "0"))
    shared = attempts.share

    def verified_after(*args: Any) -> list[str]:
        found = shared(*args)
        # It ends while the save goes on: on the loop of the manager, and in a thread of the save.
        reports.append(mgr.verify(0))
        return found

    reports: list[ckpt.VerifyReport] = []
    monkeypatch.setattr(attempts, "share", verified_after)
    commit = mgr.save(1, frozen)
    with pytest.raises(CorruptCheckpointError, match="found damaged while it was saved"):
        commit.result(PATIENCE_S)
    monkeypatch.undo()
    assert [each.ok for each in reports] == [False]
    assert mgr.all_steps() == [0]
    mgr.save(1, frozen).result()
    assert ckpt.sync.verify(tmp_path / "1").ok
    mgr.close()


def test_a_drain_that_is_refused_ends_the_sharing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = state()
    with ckpt.sync.CheckpointManager(tmp_path / "root", tiers=[Tier(tmp_path / "disk")]) as mgr:
        mgr.save(0, frozen).in_root.result(PATIENCE_S)
        hit = largest(tmp_path / "disk/0")
        flip(hit)
        with pytest.raises(NotInRootError):
            mgr.save(1, frozen).in_root.result(PATIENCE_S)
        (said,) = warnings_in(caplog, "would have shared")
        assert "step 1" in said
        for step in (2, 3):
            mgr.save(step, frozen).in_root.result(PATIENCE_S)
    assert ckpt.sync.verify(tmp_path / "root/3").ok
    assert ckpt.sync.verify(tmp_path / "disk/3").ok


def test_all_processes_of_a_job_know_what_a_restore_of_one_has_found(tmp_path: Path) -> None:
    frozen = {name: np.asarray(made(name, 0)) for name in ("large", "other")}
    mgrs = managers(tmp_path, seconds=FAR, staging=ckpt.Staging(budget_bytes=1 << 20))
    for step in range(3):
        steps(saved(mgrs, step, frozen))
    hit = {each.name for each in data_files(tmp_path / "2").values()}
    assert hit & data_files(tmp_path / "1").keys()
    for path in data_files(tmp_path / "2").values():
        flip(path)
    # One of them reads nothing that is damaged.
    found = together(
        lambda: mgrs[0].restore(2, {"large": ..., "other": ...}), lambda: mgrs[1].restore(2)
    )
    assert [type(each) for each in found] == [CorruptCheckpointError] * 2
    steps(saved(mgrs, 3, frozen))
    closed(mgrs)
    assert not hit & data_files(tmp_path / "3").keys()
    assert ckpt.sync.verify(tmp_path / "3").ok


def test_what_was_read_from_another_place_is_not_shared_either(tmp_path: Path) -> None:
    frozen = state()
    tiers = [Tier(tmp_path / "disk")]
    with ckpt.sync.CheckpointManager(
        tmp_path / "root", tiers=tiers, keep=ckpt.keep.Latest(3)
    ) as mgr:
        mgr.save(0, frozen).in_root.result(PATIENCE_S)
        flip(largest(tmp_path / "disk/0"))
        assert differences(frozen, mgr.restore(0)) == []
        mgr.save(1, frozen).in_root.result(PATIENCE_S)
    assert ckpt.sync.verify(tmp_path / "disk/1").ok
