"""Promise 7, first form: a changed or missing byte that a restore needs is reported by leaf."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._format.manifest import decode
from ckpt._format.manifest_head import digest
from tests.support.trees import assert_same, sharded

TREE = {
    "large": sharded(np.random.default_rng(0).standard_normal((512, 512), np.float32), "data"),
    "small": np.arange(1000.0),
    "tiny": np.arange(3),
    "n": 5,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "x"
    ckpt.sync.save(path, TREE)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "x"))


def data_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.parent.name == "d")


def outcome(path: Path) -> str:
    """What a default restore says: "same", or the error's class; anything else is a failure."""
    try:
        found = ckpt.sync.load(path)
    except ckpt.CheckpointError as error:
        return type(error).__name__
    assert_same(found, TREE)
    return "same"


def test_a_copy_made_with_any_tool_stays_valid(copy: Path) -> None:
    assert outcome(copy) == "same"


def test_no_flipped_bit_changes_a_value_silently(copy: Path) -> None:
    random = np.random.default_rng(1)
    counts = {"same": 0, "CorruptCheckpointError": 0}
    for file in [*data_files(copy), *copy.rglob("manifest.ocdbt"), copy / "ckpt.json"]:
        whole = file.read_bytes()
        for bit in random.integers(0, len(whole) * 8, 12):
            broken = bytearray(whole)
            broken[bit // 8] ^= 1 << (bit % 8)
            file.write_bytes(broken)
            found = outcome(copy)
            assert found in counts
            # Those are for Orbax alone.
            counts[found] += file.name != "manifest.ocdbt"
        file.write_bytes(whole)
    # Nodes of trees are not read; nearly everything else is.
    assert counts["CorruptCheckpointError"] > counts["same"]


def test_damage_in_an_array_names_the_leaf(copy: Path) -> None:
    needle = np.asarray(TREE["large"])[100, :16].tobytes()
    file = next(file for file in data_files(copy) if needle in file.read_bytes())
    whole = file.read_bytes()
    file.write_bytes(whole.replace(needle, needle[::-1]))
    with pytest.raises(ckpt.errors.CorruptCheckpointError, match="digest") as caught:
        ckpt.sync.load(copy)
    assert caught.value.leaf == "large"
    # What is not damaged can still be had.
    like = {"large": ..., "small": np.empty(1000), "tiny": np.empty(3, int), "n": int}
    assert_same(ckpt.sync.load(copy, like=like)["small"], TREE["small"])


@pytest.mark.parametrize("how", ["delete", "empty", "cut", "zeros"])
def test_a_lost_data_file_is_noticed(copy: Path, how: str) -> None:
    for file in data_files(copy):
        whole = file.read_bytes()
        if how == "delete":
            file.unlink()
        else:
            new = {"empty": b"", "cut": whole[:-1], "zeros": bytes(len(whole))}[how]
            file.write_bytes(new)
        assert outcome(copy) in ("CorruptCheckpointError", "same")
        file.write_bytes(whole)
    for file in data_files(copy):
        file.unlink()
    assert outcome(copy) == "CorruptCheckpointError"


def test_data_of_another_step_in_its_place_is_noticed(whole: Path, tmp_path: Path) -> None:
    other = {**TREE, "small": np.arange(1000.0)[::-1].copy()}
    ckpt.sync.save(tmp_path / "y", other)
    shutil.rmtree(tmp_path / "y" / "default")
    shutil.copytree(whole / "default", tmp_path / "y" / "default")
    with pytest.raises(ckpt.errors.CorruptCheckpointError) as caught:
        ckpt.sync.load(tmp_path / "y")
    errors: list[Any] = [caught.value, *caught.value.others]
    assert "small" in {error.leaf for error in errors}


def test_every_file_is_listed_with_its_size_and_digest(whole: Path) -> None:
    manifest = decode((whole / "ckpt.json").read_bytes(), where="x")
    found = {
        str(file.relative_to(whole)): (file.stat().st_size, digest(file.read_bytes()))
        for file in whole.rglob("*")
        if file.is_file() and file.name != "ckpt.json"
    }
    assert found == {name: (entry.size, entry.digest) for name, entry in manifest.files.items()}


def test_every_damaged_leaf_is_told_at_once(tmp_path: Path) -> None:
    """Packed leaves, and leaves of several chunks; not only the first that is met."""
    tree = {f"leaf{n}": np.random.default_rng(n).integers(0, 255, 1000 * 4**n) for n in range(5)}
    ckpt.sync.save(tmp_path / "x", tree)
    for name in ("leaf1", "leaf2", "leaf4"):
        needle = tree[name][-16:].tobytes()
        [file] = [file for file in data_files(tmp_path / "x") if needle in file.read_bytes()]
        file.write_bytes(file.read_bytes().replace(needle, needle[::-1]))
    with pytest.raises(ckpt.errors.CorruptCheckpointError) as caught:
        ckpt.sync.load(tmp_path / "x")
    errors: list[Any] = [caught.value, *caught.value.others]
    assert {error.leaf for error in errors} == {"leaf1", "leaf2", "leaf4"}
    assert all(error.item == "default" for error in errors)
    told = [str(caught.value), *caught.value.__notes__]
    assert all(any(name in line for line in told) for name in ("leaf1", "leaf2", "leaf4"))
