"""The rehearsal of a save: what is tried, where, when, and what is said and raised."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import StorageError
from ckpt.extensions import Rehearsal
from ckpt.storage._local.storage import LocalStorage
from ckpt.tiers import Tier
from tests.support.simulated_job import closed, managers, saved, together

STATE = {"w": np.arange(60_000.0), "step": 3}
FOLDER = ".ckpt-rehearsal"


def manager(root: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, extensions=[Rehearsal()], **options)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


class Tried:
    """Notes the acts on notes of the rehearsal, and makes one of them fail or wait."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.acts: list[tuple[str, str]] = []
        self.failing = self.waiting = ""
        self.go = threading.Event()
        self.at: set[str] = set()
        for name in ("put_note", "read", "notes", "drop_note"):
            patch.setattr(LocalStorage, name, self._noting(name, getattr(LocalStorage, name)))

    def _noting(self, act: str, real: Any) -> Any:
        async def call(storage: LocalStorage, *args: Any, **how: Any) -> Any:
            if not any(str(each).startswith(FOLDER) for each in args):
                return await real(storage, *args, **how)
            self.acts.append((os.path.basename(storage.location), act))
            while act == self.waiting and not self.go.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if act == self.failing:
                raise StorageError("no permission", errno=errno.EACCES)
            return await real(storage, *args, **how)

        return call


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tried]:
    found = Tried(monkeypatch)
    yield found
    found.go.set()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(1, STATE)
    return tmp_path / "run"


def left(monkeypatch: pytest.MonkeyPatch, **changed: int) -> None:
    """Let a disk have some bytes or files left."""
    real = os.statvfs

    def found(path: Any) -> Any:
        state = real(path)
        names = [each for each in dir(state) if each.startswith("f_")]
        values = {name: getattr(state, name) for name in names} | {"f_frsize": 1} | changed
        return type("State", (), values)()

    monkeypatch.setattr(os, "statvfs", found)


def test_a_small_file_is_written_read_listed_and_deleted(
    tmp_path: Path, tried: Tried, caplog: pytest.LogCaptureFixture
) -> None:
    with manager(tmp_path / "run") as mgr:
        mgr.save(1, STATE).result()
    assert [act for _, act in tried.acts] == ["put_note", "read", "notes", "drop_note"]
    assert not (tmp_path / "run" / FOLDER).exists()
    assert errors_in(caplog) == []


def test_it_is_for_roots_that_are_there_too(root: Path, tried: Tried) -> None:
    with manager(root, mode="r+") as mgr:
        assert mgr.resume(STATE)[0] == 2
    assert len(tried.acts) == 4
    assert not (root / FOLDER).exists()


def test_readers_write_nothing(root: Path, tried: Tried) -> None:
    before = sorted(root.iterdir())
    with manager(root, mode="r") as mgr:
        mgr.restore()
    assert (tried.acts, sorted(root.iterdir())) == ([], before)


def test_nothing_is_tried_among_other_things(tmp_path: Path, tried: Tried) -> None:
    (tmp_path / "pictures").mkdir()
    with manager(tmp_path) as mgr:
        mgr.save(1, STATE).result()
    assert tried.acts == []
    with manager(tmp_path):
        # Now it has a step.
        pass
    assert len(tried.acts) == 4


ACTS = {"put_note": "written", "read": "read", "notes": "listed", "drop_note": "deleted"}


@pytest.mark.parametrize("failing", ACTS)
def test_what_does_not_work_is_said_at_once_and_raised_by_the_first_save(
    root: Path, tried: Tried, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    tried.failing = failing
    with manager(root) as mgr:
        end = time.monotonic() + 30
        while not errors_in(caplog) and time.monotonic() < end:
            time.sleep(0.01)
        [text] = errors_in(caplog)
        assert text == (
            f"{root}: the rehearsal failed: a small file in {FOLDER} could not be "
            f"{ACTS[failing]}: no permission. Saves of this run would fail, too"
        )
        assert mgr.resume(STATE)[0] == 2
        with pytest.raises(StorageError, match=f"could not be {ACTS[failing]}") as caught:
            mgr.save(2, STATE)
        assert caught.value.errno == errno.EACCES
        # Said once: the program may have put it right.
        mgr.save(2, STATE).result()
    if failing != "drop_note":
        assert not (root / FOLDER).exists()


@pytest.mark.parametrize(("act", "answer"), [("read", b"another"), ("notes", {})])
def test_a_store_that_tells_something_else_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch, act: str, answer: Any
) -> None:
    real = getattr(LocalStorage, act)

    async def other(storage: LocalStorage, *args: Any) -> Any:
        return answer if FOLDER in str(args) else await real(storage, *args)

    monkeypatch.setattr(LocalStorage, act, other)
    with manager(root) as mgr:
        with pytest.raises(StorageError, match=f"could not be {ACTS[act]}: (it|the list) does"):
            mgr.save(2, STATE)
        mgr.wait_until_finished()
    assert not (root / FOLDER).exists()


def test_opening_does_not_wait_and_the_first_save_does(root: Path, tried: Tried) -> None:
    tried.waiting = "read"
    with manager(root) as mgr:
        assert mgr.restore()["step"] == 3
        done: list[int] = []
        saving = threading.Thread(target=lambda: done.append(mgr.save(2, STATE).result().step or 0))
        saving.start()
        saving.join(0.3)
        assert (done, mgr.all_steps()) == ([], [1])
        tried.go.set()
        saving.join(60)
        assert done == [2]


def test_a_manager_that_saves_nothing_leaves_nothing(root: Path, tried: Tried) -> None:
    tried.waiting = "notes"
    threading.Timer(0.3, tried.go.set).start()
    with manager(root):
        pass
    assert [act for _, act in tried.acts][-1] == "drop_note"
    assert not (root / FOLDER).exists()


def test_a_store_without_an_answer_is_given_up(
    root: Path, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt._proof.rehearsal._PATIENCE_SECONDS", 0.2)
    tried.waiting = "read"
    with manager(root) as mgr, pytest.raises(StorageError, match=r"no answer in 0\.2 seconds"):
        mgr.save(2, STATE)
    assert not (root / FOLDER).exists()


def test_too_little_space_for_the_next_step_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left(monkeypatch, f_bavail=300_000)
    with manager(root) as mgr:
        with pytest.raises(StorageError, match=r"293 KiB are left, and a step like step 1 needs"):
            mgr.save(2, STATE)
        assert len(errors_in(caplog)) == 1
        mgr.save(2, STATE).result()
    left(monkeypatch, f_bavail=600_000)
    with manager(root) as mgr:
        mgr.save(3, STATE).result()


def test_it_is_the_space_of_all_steps_that_will_be_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(monkeypatch, f_bavail=1_200_000)
    broken = pytest.raises(StorageError, match=r"and 3 steps, as many as will come, like step 1")
    with manager(root, keep=3) as mgr, broken:
        mgr.save(2, STATE)
    with manager(root, keep=2) as mgr:
        mgr.save(2, STATE).result()
    with manager(root, keep=2) as mgr:
        # Two are there: one more, then one goes.
        mgr.save(3, STATE).result()


def test_shared_files_take_no_space(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": np.arange(300_000.0), "step": 3}
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(2, state).result()
        mgr.save(3, {**state, "step": 4}).result()
        assert mgr.metadata(3).info.statistics.shared_bytes
    left(monkeypatch, f_bavail=100_000)
    with manager(root) as mgr:
        mgr.save(4, {**state, "step": 5}).result()


def test_too_few_files_are_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(monkeypatch, f_files=1000, f_favail=2)
    with manager(root) as mgr, pytest.raises(StorageError, match="2 more files can be made"):
        mgr.save(2, STATE)
    left(monkeypatch, f_files=0, f_favail=0)
    with manager(root) as mgr:
        mgr.save(2, STATE).result()


def test_too_few_descriptors_are_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 30, used + 30))
    with manager(root) as mgr:
        with pytest.raises(StorageError, match=r"a save may need 64 more") as caught:
            mgr.save(2, STATE)
        assert caught.value.errno == errno.EMFILE
        mgr.wait_until_finished()


def test_the_first_step_of_a_root_tells_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left(monkeypatch, f_bavail=300_000)
    with manager(tmp_path / "run") as mgr:
        mgr.save(1, STATE).result()
        assert errors_in(caplog) == []
        with pytest.raises(StorageError, match="293 KiB are left"):
            mgr.save(2, STATE)
        assert len(errors_in(caplog)) == 1
        mgr.save(2, STATE).result()


def test_all_that_is_wrong_is_in_one_error(
    root: Path, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(monkeypatch, f_bavail=0, f_files=10, f_favail=0)
    with manager(root) as mgr, pytest.raises(StorageError, match="0 B are left") as caught:
        mgr.save(2, STATE)
    [other] = caught.value.others
    assert "0 more files can be made" in str(other)
    assert any("0 more files" in each for each in caught.value.__notes__)


def test_each_place_is_tried(tmp_path: Path, tried: Tried) -> None:
    with manager(tmp_path / "root", tiers=[Tier(tmp_path / "disk")]) as mgr:
        mgr.save(1, STATE).in_root.result(60)
    assert {place for place, _ in tried.acts} == {"root", "disk"}
    assert len(tried.acts) == 8


@pytest.mark.parametrize("own_disks", [False, True])
def test_each_process_of_a_job_tries(tmp_path: Path, tried: Tried, own_disks: bool) -> None:
    each = [{"extensions": [Rehearsal()]}] * 2
    mgrs = managers(tmp_path, each=each, own_disks=own_disks)
    together(*(mgr.__enter__ for mgr in mgrs))
    saved(mgrs, 1, {"a": np.arange(4)})
    closed(mgrs)
    assert [act for _, act in tried.acts].count("drop_note") == 2
    assert not list(tmp_path.rglob(FOLDER))


def test_with_asyncio_too(root: Path, tried: Tried) -> None:
    tried.failing = "put_note"

    async def run() -> None:
        async with ckpt.CheckpointManager(root, extensions=[Rehearsal()]) as mgr:
            with pytest.raises(StorageError, match="could not be written"):
                await mgr.save(2, STATE)

    asyncio.run(run())
