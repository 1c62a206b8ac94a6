"""Deleting one item of a step: the rest takes its place in one act."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace
from orbax.checkpoint import v1 as ocp

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._engine.save.republication import delete_items
from ckpt._format.manifest import Manifest, decode
from ckpt._format.manifest_head import FILE_NAME, FileEntry
from ckpt._interop.orbax.sidecars import OrbaxSidecars
from ckpt.storage import open_root
from tests.reliability.scenarios import age, leftovers
from tests.support.faults import (
    Crash,
    Fail,
    FaultyFiles,
    FileOperation,
    Plan,
    Wait,
    at,
    named,
    refused_by,
)
from tests.support.trees import assert_same

PATIENCE_S = 120
ITEMS: dict[str, Any] = {
    "params": {"w": jnp.arange(12.0).reshape(3, 4), "big": np.arange(1 << 19, dtype=np.int32)},
    "optimizer": {"mu": np.zeros((64, 4096), np.float32), "count": 3},
    "note": "text",
    "rng": np.random.default_rng(3),
}
LEFT = tuple(name for name in ITEMS if name != "optimizer")
FORMATS = {"mu": ckpt.ArrayFormat(compression="zstd")}


def plain(root: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, **options)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with one step of four items."""
    root = tmp_path / "run"
    with FaultyFiles(tmp_path, sync=False), plain(root, formats=FORMATS) as mgr:
        mgr.save(1, items=ITEMS, metrics={"loss": 0.5}, custom_metadata={"git": "abc"})
    return root


def manifest(root: Path) -> Manifest:
    return decode((root / "1" / FILE_NAME).read_bytes(), where="")


def files(root: Path) -> dict[str, int]:
    """Every file of the step, and its identity."""
    found = (path for path in (root / "1").rglob("*") if not path.is_dir())
    return {path.relative_to(root / "1").as_posix(): path.lstat().st_ino for path in found}


def check_kept(root: Path, mgr: ckpt.sync.CheckpointManager) -> None:
    """Tell that all items but the one are there, and nothing of that one is."""
    assert mgr.metadata(1).info.items == LEFT
    found = mgr.restore(1)
    assert tuple(found) == LEFT
    assert_same(found["params"], ITEMS["params"])
    assert found["note"] == "text"
    assert found["rng"].random() == np.random.default_rng(3).random()
    report = mgr.verify(1)
    assert report, report
    assert not (root / "1" / "optimizer").exists()


def test_the_rest_of_the_step_stays_what_it_was(root: Path) -> None:
    old, before = manifest(root), files(root)
    with plain(root) as mgr:
        info = mgr.metadata(1).info
        mgr.delete(1, item="optimizer")
        check_kept(root, mgr)
        found = mgr.metadata(1).info
        with pytest.raises(errors.CheckpointError):
            mgr.restore(1, items=["optimizer"])
    assert (found.metrics, found.custom_metadata) == ({"loss": 0.5}, {"git": "abc"})
    assert (found.created, found.committed) == (info.created, info.committed)
    assert found.statistics == info.statistics
    new = manifest(root)
    assert new.attempt != old.attempt
    assert new.items == {name: old.items[name] for name in LEFT}
    # Nothing that needs to be understood is left in it.
    assert (old.requires, new.requires) == (["compression"], [])
    assert leftovers(root) == []
    after = files(root)
    assert after.keys() == {path for path in before if not path.startswith("optimizer/")}
    anew = {FILE_NAME, "_CHECKPOINT_METADATA", "commit_success.txt", "orbax.checkpoint"}
    copied = {path for path in after if after[path] != before[path]}
    assert copied == {*anew, "metrics/metrics"}
    for path in after.keys() - copied:
        known = old.files[path]
        assert new.files[path] == known
        assert (root / "1" / path).stat().st_nlink == 1


def test_orbax_reads_what_is_left(root: Path) -> None:
    with plain(root) as mgr:
        mgr.delete(1, item="optimizer")
    assert set(ocp.checkpointables_metadata(root / "1").metadata) == set(LEFT)
    found = ocp.load(root / "1", checkpointable_name="params")
    assert_same(found, ITEMS["params"], placed=False)


def test_all_items_but_one_can_be_deleted(root: Path) -> None:
    with plain(root) as mgr:
        for name in ("note", "rng", "params"):
            mgr.delete(1, item=name)
            assert mgr.verify(1)
        with pytest.raises(errors.InvalidArgumentError) as caught:
            mgr.delete(1, item="optimizer")
        assert "'optimizer' is the only item of the step; delete the step" in str(caught.value)
        with pytest.raises(errors.InvalidArgumentError) as caught:
            mgr.delete(1, item="note")
        assert "has no such item, only optimizer" in str(caught.value)
        assert caught.value.step == 1
        assert_same(mgr.restore(1), {"optimizer": ITEMS["optimizer"]})


def test_wrong_requests_change_nothing(root: Path) -> None:
    before = files(root)
    with plain(root) as mgr:
        with pytest.raises(errors.InvalidArgumentError) as caught:
            mgr.delete(1, item="optimiser")
        assert "only params, optimizer, note, rng" in str(caught.value)
        with pytest.raises(errors.StepNotFoundError):
            mgr.delete(2, item="note")
        mgr.pin(1, "paper")
        with pytest.raises(errors.StepPinnedError):
            mgr.delete(1, item="note")
        mgr.unpin(1, "paper")
    with plain(root, mode="r") as reader, pytest.raises(errors.ReadOnlyError):
        reader.delete(1, item="note")
    assert files(root) == before


def test_in_asynchronous_code(root: Path) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(root) as mgr:
            await mgr.delete(1, item="optimizer")
            assert (await mgr.metadata(1)).info.items == LEFT

    anyio.run(main)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP])
def test_where_files_cannot_have_two_names_they_are_copied(root: Path, code: int) -> None:
    before = files(root)

    def plan(operation: FileOperation) -> Fail | None:
        return Fail(code) if named("link")(operation) and "/d/" in operation.path else None

    with plain(root) as mgr:
        with FaultyFiles(root, plan, sync=False) as watched:
            mgr.delete(1, item="optimizer")
        assert watched.met
        check_kept(root, mgr)
    after = files(root)
    assert all(after[path] != before[path] for path in after if path.startswith("params/d/"))


# --- What goes wrong ------------------------------------------------------------------------------


def delete_by(root: Path, manifest: Manifest, item: str) -> None:
    """Delete an item of a step that looks as `manifest` says."""
    anyio.run(delete_items, open_root(root), "1", manifest, {item: None}, 0, OrbaxSidecars())


def test_damage_of_other_items_is_told_and_the_step_stays(root: Path) -> None:
    with plain(root) as mgr:
        victim = next(path for path in files(root) if path.startswith("params/d/"))
        aside = root.parent / "aside"
        os.rename(root / "1" / victim, aside)
        before = files(root)
        with pytest.raises(errors.CorruptCheckpointError, match="it does not exist"):
            mgr.delete(1, item="optimizer")
        # Nothing is followed out of the step, and no link becomes part of the new one.
        os.symlink(aside, root / "1" / victim)
        with pytest.raises(errors.CorruptCheckpointError, match="symbolic link"):
            mgr.delete(1, item="optimizer")
        os.unlink(root / "1" / victim)
        assert files(root) == before
        assert leftovers(root) == []
        # What is broken itself can be deleted.
        mgr.delete(1, item="params")
        assert mgr.verify(1)
        assert_same(mgr.restore(1, items=["optimizer"])["optimizer"], ITEMS["optimizer"])


@pytest.mark.parametrize("path", ["../../secret", "/etc/hostname", "params/../../../secret", "a\0"])
def test_no_path_of_a_manifest_leads_out_of_the_step(root: Path, path: str) -> None:
    (root.parent / "secret").write_text("secret")
    before = files(root)
    found = manifest(root)
    listed = found.files | {path: FileEntry(size=6, digest="0" * 32)}
    with pytest.raises(errors.CorruptCheckpointError):
        delete_by(root, replace(found, files=listed), "note")
    assert files(root) == before
    assert leftovers(root) == []
    assert sorted(os.listdir(root.parent)) == ["run", "secret"]


def test_a_step_that_was_replaced_meanwhile_is_left_alone(root: Path) -> None:
    old = manifest(root)
    with plain(root) as mgr:
        mgr.save(1, items={"params": 1, "optimizer": 2}, if_exists="replace").result()
        with pytest.raises(errors.StepDeletedError):
            delete_by(root, old, "optimizer")
        assert mgr.restore(1) == {"params": 1, "optimizer": 2}
        mgr.delete(1)
        with pytest.raises(errors.StepDeletedError):
            delete_by(root, old, "optimizer")
        assert mgr.all_steps() == []
    assert leftovers(root) == []


def test_a_step_whose_files_are_all_there_may_have_been_replaced_too(root: Path) -> None:
    old = manifest(root)
    with plain(root) as mgr:
        mgr.delete(1, item="optimizer")
    before = files(root)
    with pytest.raises(errors.StepDeletedError, match="replaced"):
        delete_by(root, old, "optimizer")
    assert files(root) == before


def test_a_file_that_is_put_in_the_place_of_another_is_not_taken(root: Path) -> None:
    other = root.parent / "other"
    other.write_text("other")

    def put(operation: FileOperation) -> None:
        if named("link")(operation) and operation.path.endswith("note/text.txt"):
            os.replace(other, root / "1" / "note" / "text.txt")

    with plain(root) as mgr, FaultyFiles(root, put, sync=False):
        with pytest.raises(errors.CorruptCheckpointError, match="another file took its name"):
            mgr.delete(1, item="optimizer")
        assert mgr.metadata(1).info.items == tuple(ITEMS)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_cancelled_deletion_leaves_the_step_as_it_was(root: Path, backend: str) -> None:
    before = files(root)
    begun, held = threading.Event(), threading.Event()

    def slow(operation: FileOperation) -> None:
        if named("link")(operation):
            begun.set()
            held.wait(60)

    async def main() -> None:
        async with ckpt.CheckpointManager(root) as mgr:
            with FaultyFiles(root, slow, sync=False), anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(partial(mgr.delete, 1, item="optimizer"))
                    await anyio.to_thread.run_sync(begun.wait)
                    scope.cancel()
                    held.set()
            assert scope.cancelled_caught
            assert files(root) == before
            assert leftovers(root) == []
            assert await mgr.verify(1)

    anyio.run(main, backend=backend)


# --- Who comes meanwhile --------------------------------------------------------------------------


class Held:
    """A plan that stops the deletion of an item at moments of its publishing.

    They are `sync` (the directories of the attempt are being synced), and `exchange 1`,
    `exchange 2` and so on (it is about to exchange names).
    """

    def __init__(self, *moments: str) -> None:
        self.reached = {moment: threading.Event() for moment in moments}
        self.gates = {moment: threading.Event() for moment in moments}
        self.attempt = ""
        self.exchanges = 0

    def __call__(self, operation: FileOperation) -> Wait | None:
        if operation.name == "link":
            # Nobody else links files.
            self.attempt = (operation.target or "").split("/")[0]
        moment = self._moment(operation)
        if moment not in self.gates or self.reached[moment].is_set():
            return None
        self.reached[moment].set()
        return Wait(self.gates[moment], seconds=PATIENCE_S)

    def _moment(self, operation: FileOperation) -> str:
        if operation.name == "fsync" and operation.path == self.attempt:
            return "sync"
        if operation.name == "renameat2" and self.attempt in (operation.path, operation.target):
            self.exchanges += 1
            return f"exchange {self.exchanges}"
        return ""


def delete_while(
    root: Path, acts: Mapping[str, Callable[[ckpt.sync.CheckpointManager], Any]]
) -> None:
    """Delete an item; at each moment let somebody else act."""
    held = Held(*acts)
    with (
        plain(root) as mgr,
        plain(root) as other,
        ThreadPoolExecutor() as threads,
        FaultyFiles(root, held, sync=False),
    ):
        deletion = threads.submit(mgr.delete, 1, item="optimizer")
        try:
            for moment, act in acts.items():
                assert held.reached[moment].wait(PATIENCE_S), moment
                act(other)
                held.gates[moment].set()
            deletion.result(PATIENCE_S)
        finally:
            for gate in held.gates.values():
                gate.set()


def overwrite(number: int) -> Callable[[ckpt.sync.CheckpointManager], None]:
    def act(mgr: ckpt.sync.CheckpointManager) -> None:
        mgr.save(1, {"number": number}, if_exists="replace").result(PATIENCE_S)

    return act


def remove(mgr: ckpt.sync.CheckpointManager) -> None:
    mgr.delete(1)


@pytest.mark.parametrize("moment", ["sync", "exchange 1"])
def test_a_save_that_overwrites_meanwhile_stays(root: Path, moment: str) -> None:
    with pytest.raises(errors.StepDeletedError, match=r"step 1: .* deleted or replaced"):
        delete_while(root, {moment: overwrite(2)})
    with plain(root) as mgr:
        assert mgr.restore(1) == {"number": 2}
        assert mgr.verify(1)
    assert leftovers(root) == []


@pytest.mark.parametrize("moment", ["sync", "exchange 1"])
def test_a_step_that_is_deleted_meanwhile_does_not_come_back(root: Path, moment: str) -> None:
    with pytest.raises(errors.StepDeletedError):
        delete_while(root, {moment: remove})
    with plain(root) as mgr:
        assert mgr.all_steps() == []
    assert leftovers(root) == []
    assert not (root / "1").exists()


def test_what_comes_before_a_name_is_given_back_counts(root: Path) -> None:
    """The save that overwrote has lost its name for a moment; then somebody else acts on it."""
    with pytest.raises(errors.StepDeletedError):
        delete_while(root, {"exchange 1": overwrite(2), "exchange 2": overwrite(3)})
    with plain(root) as mgr:
        assert mgr.restore(1) == {"number": 3}
        assert mgr.verify(1)
        mgr.save(1, items=ITEMS, if_exists="replace").result()
        with pytest.raises(errors.StepDeletedError):
            delete_while(root, {"exchange 1": overwrite(2), "exchange 2": remove})
        assert mgr.all_steps() == []


def test_only_the_step_it_was_made_of_is_replaced(root: Path) -> None:
    aside = root / "aside"

    def put_file(_: Any) -> None:
        os.rename(root / "1", aside)
        (root / "1").write_text("mine")

    def put_link(_: Any) -> None:
        os.unlink(root / "1")
        os.symlink(aside, root / "1")

    def damage(_: Any) -> None:
        os.unlink(root / "1")
        os.rename(aside, root / "1")
        (root / "1" / FILE_NAME).write_bytes(b"cut")

    before = files(root)
    with pytest.raises(errors.StepDeletedError):
        delete_while(root, {"sync": put_file})
    assert (root / "1").read_text() == "mine"
    os.unlink(root / "1")
    os.rename(aside, root / "1")
    with pytest.raises(errors.StepDeletedError):
        delete_while(root, {"sync": lambda mgr: (put_file(mgr), put_link(mgr))})
    assert (root / "1").readlink() == aside
    os.unlink(root / "1")
    os.rename(aside, root / "1")
    assert files(root) == before
    with pytest.raises(errors.StepDeletedError):
        delete_while(root, {"sync": lambda mgr: (put_file(mgr), damage(mgr))})
    assert (root / "1" / FILE_NAME).read_bytes() == b"cut"
    assert leftovers(root) == []


def test_a_name_that_cannot_be_given_back_at_once_is_told(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held("exchange 1")

    def plan(operation: FileOperation) -> Any:
        found = held(operation)
        back = operation.name == "renameat2" and held.exchanges == 2
        return Fail(errno.EIO) if back else found

    with plain(root) as mgr, plain(root) as other, ThreadPoolExecutor() as threads:
        with FaultyFiles(root, plan, sync=False):
            deletion = threads.submit(mgr.delete, 1, item="optimizer")
            assert held.reached["exchange 1"].wait(PATIENCE_S)
            overwrite(2)(other)
            held.gates["exchange 1"].set()
            with pytest.raises(errors.StepDeletedError):
                deletion.result(PATIENCE_S)
        # The save was acknowledged: whatever happens, it is not removed.
        (kept,) = root.glob("1.replaced-*")
        assert str(kept) in caplog.text
        assert ckpt.sync.load(kept) == {"number": 2}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_deletions_and_saves_beside_it_keep_what_they_promise(tmp_path: Path, backend: str) -> None:
    """Races at moments that nobody chose."""
    item = {"w": np.zeros(3)}
    told: list[BaseException] = []
    acknowledged: list[int] = []

    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path) as mgr:

            async def delete_item(step: int) -> None:
                try:
                    await mgr.delete(step, item="b")
                except errors.StepNotFoundError as error:
                    told.append(error)

            async def overwrite(step: int, delay: float) -> None:
                await anyio.sleep(delay)
                await (await mgr.save(step, items={"z": {"w": np.ones(3)}}, if_exists="replace"))

            async def acknowledge(call: Any, step: int, *arguments: Any) -> None:
                # It may fail where what it was looking at has gone; then it promises nothing.
                with contextlib.suppress(errors.StorageError):
                    await call(step, *arguments)
                    acknowledged.append(step)

            for step in range(50):
                await (await mgr.save(step, items=dict.fromkeys("abcdef", item)))
                await mgr.wait_until_finished()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(delete_item, step)
                    if step % 2:
                        tasks.start_soon(acknowledge, mgr.delete, step)
                    else:
                        tasks.start_soon(acknowledge, overwrite, step, 0.0004 * step / 2)
                if step % 2:
                    left = await mgr.all_steps()
                    assert step not in left or step not in acknowledged, "it came back"
                    continue
                items = (await mgr.metadata(step)).info.items
                assert (items == ("z",)) == (step in acknowledged), "a save was lost"
                assert await mgr.verify(step)

    with FaultyFiles(tmp_path, sync=False):
        anyio.run(main, backend=backend)
    assert told, "nothing met"
    assert len(acknowledged) > 20
    assert leftovers(tmp_path) == []


def small(root: Path) -> None:
    with FaultyFiles(root.parent, sync=False), plain(root) as mgr:
        mgr.save(1, items={"a": {"w": np.arange(5)}, "b": {"w": np.arange(6)}})


def crash(number: int) -> Plan:
    return at(number, Crash())


def error(number: int) -> Plan:
    code = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES][number % 4]
    return at(number, Fail(code), refused_by(code))


@pytest.mark.parametrize("plan_at", [crash, error])
def test_at_every_instant_one_of_the_two_is_there(tmp_path: Path, plan_at: Any) -> None:
    """A fault at every few operations: the old step or the new one, whole, and nothing else."""
    small(tmp_path / "origin" / "run")
    ended = {"old": 0, "new": 0}
    for number in itertools.count(2, 7 if plan_at is crash else 3):
        root = tmp_path / str(number) / "run"
        shutil.copytree(tmp_path / "origin" / "run", root)
        raised = False
        mgr = plain(root)
        mgr.all_steps()
        with mgr, FaultyFiles(root, plan_at(number), sync=False) as watched:
            try:
                mgr.delete(1, item="b")
            except errors.CheckpointError:
                raised = True
            if watched.crashed:
                # The process is dead: what it would still do must not reach the disk.
                mgr.close()
        with FaultyFiles(root, sync=False), plain(root, mode="r") as reader:
            # As a reader sees it while nobody has cleaned up.
            left = reader.metadata(1).info.items
            assert reader.verify(1)
            ended["new" if left == ("a",) else "old"] += 1
            assert left in (("a", "b"), ("a",))
            assert raised or left == ("a",)
        age(root)
        with FaultyFiles(root, sync=False), plain(root) as again:
            again.all_steps()
            if left == ("a", "b"):
                again.delete(1, item="b")
            assert again.restore(1) is not None
        if watched.crashed:
            with plain(root):
                pass
        # A mark of the deletion may stay until it runs out.
        assert set(leftovers(root)) <= {".ckpt-pins"}
        met = bool(watched.met)
        shutil.rmtree(root.parent)
        if not met:
            break
    assert min(ended.values()) >= 1
    assert sum(ended.values()) > 10
