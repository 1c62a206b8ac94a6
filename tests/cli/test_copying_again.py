"""`ckpt cp` over what is there already: what is the same, what is replaced, what goes on."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

import ckpt
from ckpt._conversion.copies.step_location import is_copy
from ckpt.errors import StorageError
from ckpt.manifest import LeafTable, decode
from ckpt.storage._local.storage import LocalStorage
from tests.cli.test_copying import files_of
from tests.cli.test_verifying import data_file, flip
from tests.support.command import Ran, in_this_process


@pytest.fixture
def cp(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Ran:
        return in_this_process(capsys, "cp", *arguments)

    return call


@pytest.fixture
def root(run_root: Path, tmp_path: Path) -> Path:
    """A copy of the root, to be changed."""
    return Path(shutil.copytree(run_root, tmp_path / "runs"))


@pytest.fixture
def virtual(tmp_path: Path) -> Path:
    """A root of two virtual steps."""
    for step in (0, 1):
        model = tmp_path / f"m{step}.safetensors"
        save_file({"a": np.arange(1000, dtype="f4") + step, "b": np.ones(3, "f4")}, model)
        ckpt.sync.adopt(model, tmp_path / "virtual", step=step)
    return tmp_path / "virtual"


def outcomes(ran: Ran) -> list[str]:
    return [each["outcome"] for each in ran.json["steps"]]


def test_a_whole_copy_is_begun_again(virtual: Path, tmp_path: Path, cp: Any) -> None:
    target = tmp_path / "b"
    assert outcomes(cp(virtual, target, "--whole", "--json")) == ["copied", "copied"]
    before = files_of(target)
    assert outcomes(cp(virtual, target, "--whole", "--json")) == ["there", "there"]
    # All of it is there, so nothing is replaced by less.
    ran = cp(virtual, target, "--json")
    assert outcomes(ran) == ["there", "there"]
    assert not any(each["is_virtual"] for each in ran.json["steps"])
    assert files_of(target) == before
    next((target / "1" / "default" / "d").iterdir()).unlink()
    assert outcomes(cp(virtual, target, "--whole", "--json")) == ["there", "copied"]
    shutil.rmtree(target / "0")
    assert outcomes(cp(virtual, target, "--whole", "--json")) == ["copied", "there"]
    for step in (0, 1):
        found = ckpt.sync.load(target / str(step))
        assert np.array_equal(found["a"], np.arange(1000.0) + step)


def test_a_virtual_copy_becomes_a_whole_one(virtual: Path, tmp_path: Path, cp: Any) -> None:
    assert cp(virtual, tmp_path / "b").status == 0
    assert outcomes(cp(virtual, tmp_path / "b", "--whole", "--json")) == ["copied", "copied"]
    for step in (0, 1):
        (tmp_path / f"m{step}.safetensors").unlink()
        assert ckpt.sync.verify(tmp_path / "b" / str(step)).ok


def test_another_step_is_not_taken_for_a_whole_copy(virtual: Path, tmp_path: Path, cp: Any) -> None:
    assert cp(virtual, tmp_path / "b", "--whole").status == 0
    shutil.rmtree(virtual / "1")
    # The same names and shapes, saved another time.
    save_file({"a": np.zeros(1000, "f4"), "b": np.ones(3, "f4")}, tmp_path / "m1.safetensors")
    ckpt.sync.adopt(tmp_path / "m1.safetensors", virtual, step=1)
    ran = cp(virtual, tmp_path / "b", "--whole")
    assert ran.status == 2
    assert "has other steps 1 already; nothing was copied" in ran.err


def test_a_source_of_a_virtual_step_that_is_gone(virtual: Path, tmp_path: Path, cp: Any) -> None:
    (tmp_path / "m0.safetensors").unlink()
    ran = cp(virtual, tmp_path / "b", "--whole", "--json")
    assert ran.status == 1
    assert outcomes(ran) == ["damaged", "copied"]


def test_other_content_of_the_same_size_is_another_step(
    run_root: Path, tmp_path: Path, cp: Any
) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "a") as mgr:
        mgr.save(1, {"w": jnp.zeros(100)})
    with ckpt.sync.CheckpointManager(tmp_path / "b") as mgr:
        mgr.save(1, {"w": jnp.ones(100)})
    ran = cp(tmp_path / "a", tmp_path / "b")
    assert ran.status == 2
    assert "has other steps 1 already" in ran.err
    assert np.array_equal(ckpt.sync.load(tmp_path / "b" / "1")["w"], np.ones(100))


def test_a_manifest_with_other_digests_is_not_that_of_a_copy(run_root: Path) -> None:
    manifest = decode((run_root / "20" / "ckpt.json").read_bytes(), where="x")
    item = manifest.items["default"]
    leaves = list(item.leaves)
    number = next(each for each, leaf in enumerate(leaves) if leaf.digests)
    digests = [f"{int(leaves[number].digests[0], 16) ^ 1:032x}", *leaves[number].digests[1:]]
    leaves[number] = replace(leaves[number], digests=digests)
    other = replace(item, leaves=LeafTable.of(leaves))
    assert is_copy(manifest, manifest)
    assert not is_copy(manifest, replace(manifest, items={"default": other}))
    # Where the files are does not matter.
    assert is_copy(manifest, replace(manifest, attempt="0" * 32, folder="0" * 32))


def test_bytes_are_read_again_where_that_is_asked_for(
    run_root: Path, tmp_path: Path, cp: Any
) -> None:
    target = tmp_path / "b"
    assert cp(run_root, target).status == 0
    flip(*data_file(target / "20"))
    assert outcomes(cp(run_root, target, "--json")) == ["there", "there", "there"]
    assert outcomes(cp(run_root, target, "--verify", "--json")) == ["there", "copied", "there"]
    assert files_of(target) == files_of(run_root)


def test_a_damaged_manifest_of_a_copy(run_root: Path, tmp_path: Path, cp: Any) -> None:
    target = tmp_path / "b"
    assert cp(run_root, target).status == 0
    flip(target / "20" / "ckpt.json", 900)
    flip(target / "30" / "ckpt.json", 5)
    assert outcomes(cp(run_root, target, "--json")) == ["there", "copied", "copied"]
    assert files_of(target) == files_of(run_root)


def test_a_damaged_checkpoint_by_itself(items_path: Path, tmp_path: Path, cp: Any) -> None:
    assert cp(items_path, tmp_path / "b").status == 0
    flip(tmp_path / "b" / "ckpt.json", 900)
    assert cp(items_path, tmp_path / "b").status == 0
    assert files_of(tmp_path / "b") == files_of(items_path)


def test_what_is_damaged_and_was_another_step_is_kept(
    run_root: Path, tmp_path: Path, cp: Any
) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "b") as mgr:
        mgr.save(20, {"other": jnp.zeros(300)})
    flip(tmp_path / "b" / "20" / "ckpt.json", 900)
    assert outcomes(cp(run_root, tmp_path / "b", "--json")) == ["copied"] * 3
    assert (tmp_path / "b" / "damaged" / "20").is_dir()


@pytest.mark.parametrize("damage", ["head", "rest", "gone", "cut", "short", "flipped"])
def test_the_other_steps_of_a_root_with_a_damaged_one(
    damage: str, root: Path, tmp_path: Path, cp: Any
) -> None:
    manifest = root / "20" / "ckpt.json"
    file, offset = data_file(root / "20")
    if damage == "head":
        flip(manifest, 5)
    elif damage == "rest":
        flip(manifest, 900)
    elif damage == "gone":
        manifest.unlink()
    elif damage == "cut":
        manifest.write_bytes(manifest.read_bytes()[:100])
    elif damage == "short":
        file.write_bytes(b"")
    else:
        flip(file, offset)
    ran = cp(root, tmp_path / "b")
    assert ran.status == 1, ran
    assert "20: not copied: " in ran.out
    assert "2 steps copied" in ran.out
    assert ckpt.sync.verify(tmp_path / "b" / "30").ok
    assert not (tmp_path / "b" / "20").exists()


def test_a_file_that_a_disk_cannot_read(
    root: Path, tmp_path: Path, cp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = data_file(root / "20")
    read_block = LocalStorage.read_block

    async def read(self: Any, step_dir: str, path: str, *rest: Any, **options: Any) -> None:
        if step_dir == "20" and path.endswith(file.name):
            raise StorageError(f"cannot read {file}: Input/output error", errno=errno.EIO)
        await read_block(self, step_dir, path, *rest, **options)

    monkeypatch.setattr(LocalStorage, "read_block", read)
    ran = cp(root, tmp_path / "b")
    assert ran.status == 1
    assert "20: not copied: cannot read " in ran.out
    assert "2 steps copied" in ran.out


def test_a_copied_step_is_held_for_a_minute_only(
    root: Path, tmp_path: Path, cp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    read_block = LocalStorage.read_block

    async def read(self: Any, *rest: Any, **options: Any) -> None:
        seen.update(each.name for each in (root / ".ckpt-pins").glob("*lease*"))
        await read_block(self, *rest, **options)

    monkeypatch.setattr(LocalStorage, "read_block", read)
    assert cp(root, tmp_path / "b").status == 0
    assert len(seen) == 3
    assert all(".lease-60.000-" in each for each in seen)
    assert not list((root / ".ckpt-pins").glob("*lease*"))
