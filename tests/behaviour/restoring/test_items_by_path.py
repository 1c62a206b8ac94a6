"""Promise: whatever path leads into a step of this library, what is read there is compared with its
digests; readers of other formats never get to see it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import CorruptCheckpointError, NotACheckpointError
from ckpt.storage import Memory
from ckpt.storage._object.connection import connect
from tests.reliability.damage import places_of
from tests.support.command import ckpt_command
from tests.support.trees import assert_same

STATE = {"params": {"w": jnp.arange(3000, dtype=jnp.float32)}, "n": jnp.arange(5)}
ITEMS = {"state": STATE, "config": {"lr": 0.1}, "note": "a text"}

READS: dict[str, Callable[[Path], object]] = {
    "load": ckpt.sync.load,
    "a branch": lambda path: ckpt.sync.load(path, at="params"),
    "an array": lambda path: ckpt.sync.open_array(path, "params.w")[...],
    "sources": lambda path: ckpt.sync.load({"here": ckpt.Source(path)}),
    "convert": lambda path: ckpt.sync.convert(path, path.parents[2] / "converted"),
    "merge": lambda path: ckpt.sync.merge({path: 0.5, path.parents[1] / "1/state": 0.5}),
}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        for number in range(2):
            mgr.save(number, items=ITEMS).result()
    return tmp_path / "run/0"


def flip(step: Path) -> None:
    """Change a byte of a large array."""
    place = next(each for each in places_of(step) if each.leaf == "params.w")
    path = step / place.file
    data = bytearray(path.read_bytes())
    data[place.start + 100] ^= 1
    path.write_bytes(data)


def test_the_path_of_an_item_is_that_item(step: Path) -> None:
    assert_same(ckpt.sync.load(step / "state"), STATE)
    assert ckpt.sync.load(step / "config") == ITEMS["config"]
    assert ckpt.sync.load(step / "note") == "a text"
    assert_same(ckpt.sync.load(step / "state", STATE["params"], at="params"), STATE["params"])
    found = ckpt.sync.metadata(step / "state")
    assert found.info.path == str(step / "state")
    assert found.tree["params"]["w"].shape == (3000,)
    for deep in (True, False):
        report = ckpt.sync.verify(step / "state", deep=deep)
        assert report.ok
        assert report.path == str(step / "state")
        assert not report.unlisted
    assert_same(ckpt.sync.load({"params": step / "state"}, at=None)["params"], STATE["params"])
    ckpt.sync.convert(step / "state", step.parent / "alone")
    assert_same(ckpt.sync.load(step.parent / "alone"), STATE)
    (step.parent / "link").symlink_to(step / "state")
    assert_same(ckpt.sync.load(step.parent / "link"), STATE)
    ckpt.sync.save(step.parent / "unnamed", STATE)
    assert_same(ckpt.sync.load(step.parent / "unnamed/default"), STATE)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_flipped_byte_is_found(step: Path, read: Callable[[Path], object]) -> None:
    read(step / "state")
    shutil.rmtree(step.parents[1] / "converted", ignore_errors=True)
    flip(step)
    with pytest.raises(CorruptCheckpointError, match=r"params\.w"):
        read(step / "state")


def test_only_the_item_is_verified(step: Path) -> None:
    flip(step)
    report = ckpt.sync.verify(step / "state")
    assert [(each.item, each.leaf) for each in report.problems] == [("state", "params.w")]
    assert ckpt.sync.verify(step / "config").ok


def test_the_command_reads_items(step: Path) -> None:
    assert ckpt_command("verify", step / "state").status == 0
    shown = ckpt_command("show", step / "state", "--json")
    assert shown.json["path"] == str(step / "state")
    flip(step)
    verified = ckpt_command("verify", step / "state")
    assert verified.status == 1
    assert "params.w" in verified.out
    copied = ckpt_command("cp", step / "state", step.parent / "copy")
    assert copied.status == 2
    assert "'ckpt convert' makes one of it" in copied.err
    assert not (step.parent / "copy").exists()


@pytest.mark.parametrize("how", ["lost", "cut"])
def test_an_item_whose_step_has_no_manifest_is_not_read(step: Path, how: str) -> None:
    manifest = step / "ckpt.json"
    if how == "lost":
        manifest.unlink()
    else:
        manifest.write_bytes(manifest.read_bytes()[:-9])
    kind = NotACheckpointError if how == "lost" else CorruptCheckpointError
    for call in (ckpt.sync.load, ckpt.sync.metadata, ckpt.sync.verify):
        with pytest.raises(kind, match=r"ckpt\.json"):
            call(step / "state")


@pytest.mark.parametrize("inner", ["state/d", "state/array_metadatas", "state/params"])
def test_what_is_below_an_item_is_refused(step: Path, inner: str) -> None:
    (step / inner).mkdir(exist_ok=True)
    for call in (ckpt.sync.load, ckpt.sync.metadata, ckpt.sync.verify):
        with pytest.raises(NotACheckpointError, match="is no item of it"):
            call(step / inner)


def test_what_others_put_into_a_step_is_theirs(step: Path) -> None:
    np.savez(step / "mine.npz", a=np.arange(3))
    assert list(ckpt.sync.load(step / "mine.npz")["a"]) == [0, 1, 2]
    (step / "state" / "file.npz").write_bytes((step / "mine.npz").read_bytes())
    with pytest.raises(NotACheckpointError, match="is no item of it"):
        ckpt.sync.load(step / "state/file.npz")


def test_a_file_of_that_name_above_other_checkpoints_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "ckpt.json").write_text("{}")
    (tmp_path / "models").mkdir()
    np.savez(tmp_path / "models/a.npz", a=np.arange(3))
    assert list(ckpt.sync.load(tmp_path / "models/a.npz")["a"]) == [0, 1, 2]


def test_items_of_steps_in_a_store() -> None:
    root = Memory("memory://items-by-path")
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(0, items=ITEMS).result()
    path = Memory("memory://items-by-path/0/state")
    assert_same(ckpt.sync.load(path), STATE)
    assert ckpt.sync.verify(path).ok

    keys = [key.decode() for key in connect(root).open()[0].list().result()]
    (folder,) = {key.split("/")[1] for key in keys if "/state/" in key}
    for inner in (folder, f"{folder}/state"):
        with pytest.raises(NotACheckpointError):
            ckpt.sync.load(Memory(f"memory://items-by-path/0/{inner}"))
