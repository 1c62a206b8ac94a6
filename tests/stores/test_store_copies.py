"""Copies of steps into a bucket and out of it."""

from __future__ import annotations

import threading
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import ckpt
from ckpt import errors
from ckpt._conversion.copies import step_copy
from ckpt._conversion.copies.step_location import StepLocation
from ckpt._conversion.copies.steps import (
    CopiedStep,
    CopyRules,
    StepsToCopy,
    committed_steps,
    copy_checkpoint,
    copy_steps,
)
from ckpt._events import Event
from ckpt._format.manifest import Manifest
from ckpt._runtime.loop import call_once
from ckpt._steps.index import StepIndex
from ckpt.storage._base import Attempt
from ckpt.storage._local.storage import LocalStorage
from ckpt.storage._manifests import read_manifest
from ckpt.storage._object.storage import ObjectStorage
from ckpt.storage._resolve import open_root, open_step_dir
from tests.stores.places import Place


class Counted:
    """Counts the bytes of copies."""

    def __init__(self) -> None:
        self.expected = self.moved = 0

    def expect(self, nbytes: int) -> None:
        self.expected += nbytes

    def move(self, nbytes: int) -> None:
        self.moved += nbytes

    def __call__(self, event: Event) -> None:
        pass


def copied(
    source: Any, target: Any, *, overwrite: bool = False, select: tuple[str, ...] = ()
) -> list[CopiedStep]:
    """Copy a root."""
    counted = Counted()

    async def copy() -> list[CopiedStep]:
        storage = open_root(source)
        steps, _ = await committed_steps(StepIndex(storage))
        return await copy_steps(
            StepsToCopy(storage, steps, open_root(target)),
            CopyRules(overwrite, select=select),
            counted,
            lambda _: None,
        )

    done = call_once(copy)
    assert counted.moved <= counted.expected
    return done


def make_run(root: Path) -> None:
    with ckpt.sync.CheckpointManager(root, custom_metadata={"model": "tiny"}) as mgr:
        for step in (1, 2):
            mgr.save(step, {"w": np.arange(300_000) + step}, metrics={"loss": step})
        mgr.wait_until_finished()
        mgr.pin(2, "paper")


def outcomes(done: list[CopiedStep]) -> list[str]:
    return [each.outcome for each in done]


def test_a_root_goes_into_a_bucket_and_comes_back(place: Place, tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    there = place.root("run")
    assert outcomes(copied(tmp_path / "a", there)) == ["copied", "copied"]
    assert outcomes(copied(tmp_path / "a", there)) == ["there", "there"]
    with ckpt.sync.CheckpointManager(place.root("run")) as mgr:
        assert mgr.all_steps() == [1, 2]
        assert mgr.metrics(2) == {"loss": 2}
        assert mgr.root_metadata() == {"model": "tiny"}
        assert [each.name for each in mgr.pins()[2]] == ["paper"]
        assert all(mgr.verify(step).ok for step in (1, 2))
        assert np.array_equal(mgr.restore(1)["w"], np.arange(300_000) + 1)
    assert outcomes(copied(there, place.root("other"))) == ["copied", "copied"]
    assert outcomes(copied(place.root("other"), tmp_path / "back")) == ["copied", "copied"]
    with ckpt.sync.CheckpointManager(tmp_path / "back") as mgr:
        assert mgr.verify(1).ok
        assert np.array_equal(mgr.restore(2)["w"], np.arange(300_000) + 2)
    # What has been in a bucket is an ordinary step again.
    names = {path.relative_to(tmp_path / "a") for path in (tmp_path / "a" / "1").rglob("*")}
    assert names == {
        path.relative_to(tmp_path / "back") for path in (tmp_path / "back/1").rglob("*")
    }


def files_named(root: Any, step: str) -> set[str]:
    """The files that the manifest of a step names, relative to its folder."""

    async def read() -> Manifest:
        return await read_manifest(open_root(root), step)

    return set(call_once(read).files)


def test_a_copy_in_a_store_has_the_marks_of_a_save_there(place: Place, tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    with ckpt.sync.CheckpointManager(place.root("saved")) as mgr:
        mgr.save(1, {"w": np.arange(300_000) + 1}, metrics={"loss": 1})
    copied(tmp_path / "a", place.root("run"))
    found, wanted = files_named(place.root("run"), "1"), files_named(place.root("saved"), "1")
    marks = {path for path in wanted if path.endswith("/commit_success.txt")}
    assert len(marks) == 2
    assert {path for path in found if path.endswith("/commit_success.txt")} == marks


def test_a_part_goes_into_a_bucket(place: Place, tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "a") as mgr:
        for step in (1, 2):
            mgr.save(step, items={"model": {"w": np.ones(9), "b": np.zeros(9)}, "config": {}})
    for select, wanted in ((("model",), ["b", "w"]), (("model:w",), ["w"])):
        root = place.root(f"run-{len(wanted)}")
        assert outcomes(copied(tmp_path / "a", root, select=select)) == ["copied"] * 2
        assert outcomes(copied(tmp_path / "a", root, select=select)) == ["there"] * 2
        with ckpt.sync.CheckpointManager(root) as mgr:
            assert mgr.verify(2).ok
            assert {name: sorted(tree) for name, tree in mgr.restore(2).items()} == {
                "model": wanted
            }
        assert "model/commit_success.txt" in files_named(root, "1")
        back = tmp_path / f"back-{len(wanted)}"
        assert outcomes(copied(root, back)) == ["copied"] * 2
        assert ckpt.sync.verify(back / "1").ok


def test_what_is_damaged_there_is_copied_again(bucket: Place, tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    copied(tmp_path / "a", bucket.root("run"))
    key = next(key for key in bucket.objects() if key.startswith("run/2/") and "/d/" in key)
    bucket.drop(key)
    assert outcomes(copied(tmp_path / "a", bucket.root("run"))) == ["there", "copied"]
    assert ckpt.sync.verify(bucket.root("run/2")).ok


def test_a_damaged_manifest_there(bucket: Place, tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    copied(tmp_path / "a", bucket.root("run"))
    key = "run/1/ckpt.json"
    bucket.put(key, bucket.objects()[key].replace(b'"step":1', b'"step":7'))
    assert outcomes(copied(tmp_path / "a", bucket.root("run"))) == ["copied", "there"]
    assert ckpt.sync.verify(bucket.root("run/1")).ok
    # What may be another step stays, and the others are copied all the same.
    with ckpt.sync.CheckpointManager(bucket.root("other")) as mgr:
        mgr.save(1, {"mine": np.zeros(3)})
    key = "other/1/ckpt.json"
    damaged = bucket.objects()[key].replace(b'"step":1', b'"step":7')
    bucket.put(key, damaged)
    done = copied(tmp_path / "a", bucket.root("other"))
    assert outcomes(done) == ["blocked", "copied"]
    assert "and is damaged" in (done[0].reason or "")
    assert bucket.objects()[key] == damaged
    assert outcomes(copied(tmp_path / "a", bucket.root("other"), overwrite=True))[0] == "copied"


def test_other_steps_in_a_bucket_stay(place: Place, tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    with ckpt.sync.CheckpointManager(place.root("run")) as mgr:
        mgr.save(2, {"other": np.zeros(3)})
    with pytest.raises(errors.StepExistsError, match="other steps 2 already; nothing was copied"):
        copied(tmp_path / "a", place.root("run"))
    with ckpt.sync.CheckpointManager(place.root("run")) as mgr:
        assert mgr.all_steps() == [2]
    assert outcomes(copied(tmp_path / "a", place.root("run"), overwrite=True)) == ["copied"] * 2
    assert ckpt.sync.verify(place.root("run/2")).ok


@pytest.mark.parametrize(("budget", "at_once"), [(100 << 10, 1), (900 << 10, 2)])
def test_large_files_are_within_a_budget(
    budget: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store takes a file as a whole; more of them than fit into memory wait for each other."""
    piece = 64 << 10
    monkeypatch.setattr(step_copy, "_PIECE_BYTES", piece)
    monkeypatch.setattr(step_copy, "_WHOLE_FILES_BYTES", budget)
    arrays = {f"w{number}": np.arange(50_000.0) + number for number in range(4)}
    ckpt.sync.save(tmp_path / "all", items={name: {"w": each} for name, each in arrays.items()})
    sizes = [path.stat().st_size for path in (tmp_path / "all").rglob("*") if path.is_file()]
    assert sum(size >= 400_000 for size in sizes) == 4
    under_way, most = 0, 0
    together = threading.Event()
    write_block, write_part = ObjectStorage.write_block, LocalStorage.write_part

    async def write_whole(self: Any, attempt: Attempt, path: str, data: memoryview) -> None:
        nonlocal under_way, most
        is_large = len(data) > piece
        under_way += is_large
        most = max(most, under_way)
        if is_large and at_once > 1:
            # The first waits for the second, or both would need luck to meet.
            if most == at_once:
                together.set()
            await anyio.to_thread.run_sync(together.wait, 20)
        await write_block(self, attempt, path, data)
        under_way -= is_large

    async def write_one(self: Any, attempt: Attempt, path: str, *rest: Any, **last: Any) -> None:
        assert len(rest[1]) <= piece
        await write_part(self, attempt, path, *rest, **last)

    monkeypatch.setattr(ObjectStorage, "write_block", write_whole)
    monkeypatch.setattr(LocalStorage, "write_part", write_one)

    async def copy(target: Any) -> CopiedStep:
        place = StepLocation(*open_step_dir(target))
        source = StepLocation(*open_step_dir(tmp_path / "all"))
        return await copy_checkpoint(source, place, CopyRules(), Counted())

    url = f"memory://{uuid.uuid4().hex}/all"
    for target in (url, tmp_path / "copy"):
        assert call_once(partial(copy, target)).outcome == "copied"
        found = ckpt.sync.load(target)
        assert all(np.array_equal(found[name]["w"], each) for name, each in arrays.items())
    assert most == at_once
