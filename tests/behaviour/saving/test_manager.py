"""Decisions of a manager: what it keeps, refuses, deletes and remembers."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import threading
import weakref
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._engine.memory.arena import Arena
from ckpt._format.manifest import decode
from tests.support.conditions import until


def plain(root: Path, **settings: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, **settings)


def test_only_the_latest_n_are_kept(tmp_path: Path) -> None:
    with plain(tmp_path, keep=ckpt.keep.Latest(2)) as mgr:
        for step in range(5):
            mgr.save(step, {"x": step}).result()
    with plain(tmp_path) as mgr:
        assert mgr.all_steps() == [3, 4]
        assert mgr.restore() == {"x": 4}


def test_what_was_acknowledged_just_now_is_never_deleted_by_its_own_save(tmp_path: Path) -> None:
    """A run that went back continues below steps it has abandoned."""
    with plain(tmp_path) as mgr:
        for step in (20, 30):
            mgr.save(step, {"x": step}).result()
    with plain(tmp_path, keep=ckpt.keep.Latest(2)) as mgr:
        mgr.save(11, {"x": 11}).result()
    with plain(tmp_path) as mgr:
        assert mgr.all_steps() == [11, 20, 30]
        assert mgr.restore(11) == {"x": 11}


def test_a_policy_that_says_no_says_why(tmp_path: Path) -> None:
    with plain(tmp_path, save_when=ckpt.save_when.EverySteps(10)) as mgr:
        assert mgr.should_save(20)
        assert not mgr.should_save(21)
        commit = mgr.save(21, {"x": 1})
        assert not commit
        assert commit.done()
        assert isinstance(commit.exception(), errors.SaveSkippedError)
        assert commit.stage == "skipped"
        assert "multiple of 10" in str(commit.skipped)
        assert mgr.all_steps() == []
        assert mgr.save(21, {"x": 1}, force=True)
        assert mgr.save(30, {"x": 1})
    with plain(tmp_path) as mgr:
        assert mgr.all_steps() == [21, 30]


def test_delete_takes_a_step_away_also_a_damaged_one(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        for step in range(3):
            mgr.save(step, {"x": step}).result()
        mgr.delete(1)
        assert mgr.all_steps() == [0, 2]
        (tmp_path / "2" / "ckpt.json").write_text("damaged")
        assert mgr.all_steps() == [0]
        mgr.delete(2)
        assert sorted(os.listdir(tmp_path)) == ["0"]


def test_a_foreign_directory_that_appears_during_a_save_is_not_replaced(tmp_path: Path) -> None:
    def appear(event: ckpt.types.Event) -> None:
        if event.phase == "write":
            (tmp_path / "5").mkdir()
            (tmp_path / "5" / "precious").write_text("mine")

    with plain(tmp_path, observers=[appear]) as mgr:
        commit = mgr.save(5, {"x": np.ones(3)}, if_exists="replace")
        with pytest.raises(errors.StepExistsError, match="not a checkpoint"):
            commit.result()
    assert (tmp_path / "5" / "precious").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["5"]


def test_a_failed_save_does_not_keep_the_state_alive(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        state = {"w": jnp.ones((1000, 1000)), "bad": object()}
        alive = weakref.ref(state["w"])
        with pytest.raises(errors.UnsupportedLeafError):
            mgr.save(0, state)
        del state
        # The call has its error a moment before the save has ended on the engine's thread.
        until(lambda: gc.collect() >= 0 and alive() is None)


def test_leaving_the_block_waits_also_after_a_close_that_was_cancelled(tmp_path: Path) -> None:
    go_on = threading.Event()

    def hold(event: ckpt.types.Event) -> None:
        if event.phase == "write":
            assert go_on.wait(60)

    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path, observers=[hold]) as mgr:
            commit = await mgr.save(0, {"x": np.ones(3)})
            closing = asyncio.ensure_future(mgr.close())
            for _ in range(10):
                await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert not commit.done()
            asyncio.get_running_loop().call_later(0.05, go_on.set)
        assert commit.done()
        assert commit.exception() is None

    asyncio.run(main())


def test_a_directory_that_cannot_be_read_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """os.walk passes over what it cannot list; a save must not."""
    whole = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("/d"):
            raise OSError(24, "Too many open files", str(path))
        return whole(path)

    with plain(tmp_path) as mgr:
        monkeypatch.setattr(os, "scandir", scandir)
        with pytest.raises(errors.StorageError, match="Too many open files"):
            mgr.save(0, {"x": np.ones(100_000)}).result()
        monkeypatch.undo()
        assert mgr.all_steps() == []
        mgr.save(0, {"x": np.ones(100_000)}).result()
    manifest = decode((tmp_path / "0" / "ckpt.json").read_bytes(), where="0")
    listed = {str(tmp_path / "0" / name) for name in manifest.files}
    present = {str(path) for path in (tmp_path / "0").rglob("*") if path.is_file()}
    assert present - listed == {str(tmp_path / "0" / "ckpt.json")}


def test_staging_memory_that_cannot_be_had_is_a_clear_error_every_time() -> None:
    async def main() -> None:
        arena = Arena(1 << 60)
        for _ in range(3):
            with pytest.raises(errors.StorageError, match="budget_bytes"):
                await arena.allocate(1 << 40)
        assert arena.used == 0

    asyncio.run(main())


def test_a_write_error_names_the_item_and_the_leaf_and_leaves_nothing(tmp_path: Path) -> None:
    """A file may not grow beyond a megabyte: the storage refuses array data in the middle."""
    items = {"params": {"w": np.ones(300_000)}}
    with plain(tmp_path) as mgr:
        arena = mgr._service.engine.arena
        mgr.save(2, items=items).result()
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
        try:
            # Other values, which no file of step 2 has.
            error = mgr.save(3, items={"params": {"w": np.zeros(300_000)}}).exception()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert isinstance(error, errors.StorageError)
        assert (error.step, error.item, error.leaf) == (3, "params", "w")
        assert error.errno == errno.EFBIG
        assert sorted(os.listdir(tmp_path)) == ["2"]
        assert arena.used == 0
        mgr.save(3, items=items).result()
        assert mgr.all_steps() == [2, 3]


def test_items_are_a_list_of_names(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        mgr.save(0, items={"state": {"x": 1}}).result()
        with pytest.raises(errors.InvalidArgumentError, match="list of item names"):
            mgr.restore(0, items="state")
        with pytest.raises(errors.InvalidArgumentError, match="no item opt; the step has"):
            mgr.restore(0, items=["opt"])
        mgr.save(1, {"x": 1}).result()
        with pytest.raises(errors.InvalidArgumentError, match=r"no item opt;.*leave out items="):
            mgr.restore(1, items=["opt"])
