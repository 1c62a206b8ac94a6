"""Another program removes files of a live attempt: the save fails, and nothing is left of it."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._format.manifest_head import FILE_NAME
from ckpt.errors import StorageError
from tests.support.faults import Effect, FaultyFiles, FileOperation
from tests.support.simulated_job import closed, managers, saved

STATE = {"w": np.arange(100_000.0), "b": np.arange(3)}
PATIENCE_S = 120


def names(root: Path) -> set[str]:
    return set(os.listdir(root))


def attempt_of(root: Path) -> Path:
    [attempt] = [root / name for name in names(root) if "orbax-checkpoint-tmp" in name]
    return attempt


def data_file(top: Path, nbytes: int = 800_000) -> Path:
    [found] = [each for each in (top / "default").rglob("*") if each.stat().st_size == nbytes]
    return found


def empty(top: Path) -> None:
    for each in list(top.iterdir()):
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def removing(remove: Callable[[Path], object], root: Path) -> Any:
    """An observer that removes something once the manifest is written."""

    def observe(event: ckpt.types.Event) -> None:
        if event.operation == "save" and event.phase == "record":
            remove(attempt_of(root))

    return observe


REMOVALS: dict[str, Callable[[Path], object]] = {
    "data": lambda top: data_file(top).unlink(),
    "cut": lambda top: os.truncate(data_file(top), 1),
    "grown": lambda top: os.truncate(data_file(top), 800_001),
    "link": lambda top: (
        (data := data_file(top)).rename(data.with_name("x")) and data.symlink_to("x")
    ),
    "manifest": lambda top: (top / FILE_NAME).unlink(),
    "item": lambda top: shutil.rmtree(top / "default"),
    "all": empty,
}


@pytest.mark.parametrize("how", REMOVALS)
def test_a_save_whose_files_are_removed_fails_and_says_which(how: str, tmp_path: Path) -> None:
    observer = removing(REMOVALS[how], tmp_path)
    with ckpt.sync.CheckpointManager(tmp_path, observers=[observer]) as mgr:
        with pytest.raises(StorageError) as caught:
            mgr.save(0, STATE).result(PATIENCE_S)
        assert mgr.all_steps() == []
    message = str(caught.value)
    assert "files were removed or changed while it was saved: '" in message
    assert (FILE_NAME if how == "manifest" else "default/") in message
    assert "Orbax" in message
    assert names(tmp_path) == set()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, STATE).result(PATIENCE_S)
    assert ckpt.sync.verify(tmp_path / "0").ok


def test_an_overwrite_whose_files_are_removed_leaves_the_old_step(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, {"w": np.zeros(3)}).result(PATIENCE_S)
    observer = removing(REMOVALS["data"], tmp_path)
    with ckpt.sync.CheckpointManager(tmp_path, observers=[observer]) as mgr:
        with pytest.raises(StorageError, match="removed or changed"):
            mgr.save(0, STATE, if_exists="replace").result(PATIENCE_S)
        assert (mgr.restore(0)["w"] == 0).all()
    assert names(tmp_path) == {"0"}


def acting(when: Callable[[FileOperation], bool], act: Callable[[], object]) -> Any:
    """A plan that does something before an operation of a kind, until it returns True."""
    busy = False

    def plan(operation: FileOperation) -> Effect | None:
        nonlocal busy
        # What it does are operations, too.
        if not busy and when(operation):
            busy = True
            busy = bool(act())
        return None

    return plan


def is_publishing(operation: FileOperation) -> bool:
    return operation.name == "renameat2" and operation.target == "0"


def remove_data(root: Path) -> bool:
    data_file(attempt_of(root)).unlink()
    return True


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_removal_that_goes_on_while_the_step_is_published_is_noticed(
    overwrite: bool, tmp_path: Path
) -> None:
    if overwrite:
        ckpt.sync.save(tmp_path / "0", {"w": np.zeros(3)})
    before = names(tmp_path)
    plan = acting(is_publishing, lambda: remove_data(tmp_path))
    with FaultyFiles(tmp_path, plan), pytest.raises(StorageError, match="removed or changed"):
        ckpt.sync.save(tmp_path / "0", STATE, if_exists="replace" if overwrite else "error")
    assert names(tmp_path) == before
    if overwrite:
        assert (ckpt.sync.load(tmp_path / "0")["w"] == 0).all()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_step_that_another_process_deletes_right_after_was_saved(
    replaced: bool, tmp_path: Path
) -> None:
    def is_published(operation: FileOperation) -> bool:
        return operation.name == "fsync" and operation.path == "." and (tmp_path / "0").exists()

    def delete() -> bool:
        shutil.rmtree(tmp_path / "0")
        if replaced:
            (tmp_path / "0").mkdir()
        return True

    with FaultyFiles(tmp_path, acting(is_published, delete)):
        ckpt.sync.save(tmp_path / "0", STATE)
    assert names(tmp_path) == ({"0"} if replaced else set())


def test_files_removed_at_any_moment_never_leave_half_a_step(tmp_path: Path) -> None:
    failed = 0
    for number in itertools.count(1, step=3):
        root = tmp_path / str(number)
        root.mkdir()
        removed: list[Path] = []

        def remove(root: Path = root, removed: list[Path] = removed) -> bool:
            removed += [each for each in root.glob("0.*/**/*") if each.is_file()]
            for each in removed:
                each.unlink()
            return bool(removed)

        def is_late(operation: FileOperation, number: int = number) -> bool:
            return operation.number >= number

        with FaultyFiles(root, acting(is_late, remove)):
            try:
                ckpt.sync.save(root / "0", STATE)
            except StorageError:
                failed += 1
                assert names(root) == set()
            else:
                assert ckpt.sync.verify(root / "0").ok
        if not removed:
            break
    assert failed > 5


def test_an_attempt_that_is_removed_while_it_is_written_is_told(tmp_path: Path) -> None:
    def begun(operation: FileOperation) -> bool:
        return operation.name == "open" and "/default/d/" in operation.path

    def remove() -> bool:
        shutil.rmtree(attempt_of(tmp_path))
        return True

    with (
        FaultyFiles(tmp_path, acting(begun, remove)),
        pytest.raises(StorageError, match=r"was removed while it was written: .*Orbax") as caught,
    ):
        ckpt.sync.save(tmp_path / "0", STATE)
    assert caught.value.errno == errno.ENOENT
    assert names(tmp_path) == set()


def test_orbax_that_cleans_up_beside_a_writer_makes_its_save_fail(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    def clean_up(_: Path) -> None:
        options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
        with ocp.CheckpointManager(tmp_path, options=options) as manager:
            # It cleans up in a thread, and waits for that before its own first save.
            manager._maybe_await_cleanup_tmp_directory()

    observer = removing(clean_up, tmp_path)
    with ckpt.sync.CheckpointManager(tmp_path, observers=[observer]) as mgr:
        with pytest.raises(StorageError):
            mgr.save(0, STATE).result(PATIENCE_S)
        assert mgr.all_steps() == []
    assert "0" not in names(tmp_path)


@pytest.mark.parametrize("nbytes", [64, 800_000])
def test_files_of_every_process_of_a_job_are_missed(nbytes: int, tmp_path: Path) -> None:
    # One of the two is written by the process that does not publish.
    observer = removing(lambda top: data_file(top, nbytes).unlink(), tmp_path)
    mgrs = managers(tmp_path, each=[{"observers": [observer]}, {}], seconds=PATIENCE_S)
    for found in saved(mgrs, 1, STATE):
        assert isinstance(found, StorageError)
        assert "1 of its" in str(found)
    assert mgrs[0].all_steps() == []
    closed(mgrs)


def test_an_item_is_not_deleted_when_files_of_the_new_step_are_removed(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, items={"default": STATE, "other": STATE}).result(PATIENCE_S)
        plan = acting(is_publishing, lambda: remove_data(tmp_path))
        with FaultyFiles(tmp_path, plan), pytest.raises(StorageError, match="removed or changed"):
            mgr.delete(0, item="other")
    assert ckpt.sync.verify(tmp_path / "0").ok
    assert names(tmp_path) == {"0"}
