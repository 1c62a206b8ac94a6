"""A power cut after something else had gone wrong: a kill and a cleaner, or a sync that failed."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._settings import Timeouts
from ckpt.storage._local import leases as sweeping
from ckpt.storage._local import posix
from ckpt.storage._local.storage import LocalStorage
from tests.support.crash_states import crash_states, read_tree
from tests.support.disk_model import Tree
from tests.support.faults import Effect, Fail, FaultyFiles, FileOperation


def state(number: int) -> dict[str, Any]:
    return {"w": np.full(3, number)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the committed step 5."""
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(5, state(0)).result()
    return tmp_path / "run"


def damaged_steps(
    before: Tree, operations: list[FileOperation], directory: Path
) -> Iterator[tuple[int, Any]]:
    """Yield the steps that are listed and not whole, of every second state after a power cut."""
    found = list(crash_states(before, operations, losses=1))
    assert len(found) > 40, "too few states to prove anything"
    for each in itertools.islice(found, 0, None, 2):
        each.write(directory)
        with ckpt.sync.CheckpointManager(directory, mode="r") as mgr:
            for step in mgr.all_steps():
                if not mgr.verify(step).ok:
                    yield step, each.missing
        shutil.rmtree(directory)


def delete_and_die(root: Path) -> None:
    """A deletion that is killed before its rename is durable."""
    name = sweeping.trash_name(sweeping.attempt_name("5", "0" * 32))
    os.rename(root / "5", root / name)


def overwrite_and_die(root: Path) -> None:
    """An overwrite that is killed before its swap is durable."""
    with ckpt.sync.CheckpointManager(root.parent / "other") as mgr:
        mgr.save(5, state(1)).result()
    source = root.parent / "other" / "5"

    async def main() -> None:
        storage = LocalStorage(root, Timeouts())
        attempt: Any = await storage.begin("5")
        for path in sorted(source.rglob("*")):
            if path.is_file():
                await storage.write(attempt, str(path.relative_to(source)), path.read_bytes())
        posix.fsync_directories(attempt.path)
        posix.exchange(attempt.path, root / "5")
        os.close(attempt.lease)
        os.close(attempt.directory)

    anyio.run(main)


@pytest.mark.slow
@pytest.mark.parametrize("die", [delete_and_die, overwrite_and_die])
def test_a_cleaner_removes_nothing_that_a_power_cut_can_bring_back(
    root: Path, tmp_path: Path, die: Callable[[Path], None]
) -> None:
    before = read_tree(root)
    with FaultyFiles(root, sync=False) as files:
        die(root)
        assert len(sweeping.sweep_root(root)) == 1
    assert list(damaged_steps(before, files.operations, tmp_path / "state")) == []


@pytest.mark.parametrize(("step", "overwrite"), [(6, False), (5, True)])
def test_a_step_that_was_taken_back_is_whole_wherever_it_comes_back(
    root: Path, tmp_path: Path, step: int, overwrite: bool
) -> None:
    """The root could not be synced once; what was published is taken back, and then removed."""
    published = failed = False

    def plan(operation: FileOperation) -> Effect | None:
        nonlocal published, failed
        published = published or operation.name == "renameat2"
        if published and not failed and operation.name == "fsync" and operation.path == ".":
            failed = True
            return Fail(errno.EIO)
        return None

    before = read_tree(root)
    with (
        ckpt.sync.CheckpointManager(root) as mgr,
        FaultyFiles(root, plan, sync=False) as files,
        pytest.raises(ckpt.errors.StorageError),
    ):
        mgr.save(step, state(9), if_exists="replace" if overwrite else "error").result()
    assert failed
    assert list(damaged_steps(before, files.operations, tmp_path / "state")) == []


def test_taking_back_does_not_touch_what_somebody_else_published(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the name and the swap, another writer overwrites the step."""
    sync, exchange = posix.fsync_directory, posix.exchange
    publishing: list[int] = []

    def failing_sync(path: Path, fd: int | None = None) -> None:
        if path == root and publishing == [threading.get_ident()]:
            raise OSError(errno.EIO, "from the device")
        sync(path, fd)

    def meeting(first: Path, second: Path) -> None:
        if not publishing:
            publishing.append(threading.get_ident())
        elif len(publishing) == 1:
            publishing.append(0)
            with ckpt.sync.CheckpointManager(root) as other:
                other.save(5, state(2), if_exists="replace").result()
        exchange(first, second)

    monkeypatch.setattr(posix, "fsync_directory", failing_sync)
    monkeypatch.setattr(posix, "exchange", meeting)
    with ckpt.sync.CheckpointManager(root) as mgr:
        with pytest.raises(ckpt.errors.StorageError):
            mgr.save(5, state(1), if_exists="replace").result()
        assert len(publishing) == 2
        assert mgr.restore(5)["w"].tolist() == [2, 2, 2]
        assert mgr.verify(5).ok
