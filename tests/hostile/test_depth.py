"""Promise: what is deeper than any tree that can be saved is refused before it is built."""

from __future__ import annotations

import json
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._format.manifest import ItemEntry, Node
from ckpt._interop.runs_of_bytes import nested
from ckpt._plan.leaf_entries import check_leaves
from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from tests.hostile.test_mutations import rewritten, saved

MOST = 200
LEVELS = 20_000
MOST_BYTES = 64 << 20

CALLS: dict[str, Callable[[Path], object]] = {
    "load": ckpt.sync.load,
    "metadata": ckpt.sync.metadata,
    "an array": lambda path: ckpt.sync.open_array(path, "a"),
    "convert": lambda path: ckpt.sync.convert(path, path.parent / "out"),
    "convert the mean": lambda path: ckpt.sync.convert(
        {path: 0.5, path.parent / "whole": 0.5}, path.parent / "out"
    ),
    "merge": lambda path: ckpt.sync.merge({path: 0.5, path.parent / "whole": 0.5}),
}


def safetensors(path: Path, name: str) -> Path:
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0\0\0")
    return path


def npz(path: Path, name: str) -> Path:
    np.savez(path.with_suffix(".npz"), a=np.zeros(1, np.float32))
    with zipfile.ZipFile(path.with_suffix(".npz")) as archive:
        data = archive.read("a.npy")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.npy", data)
    return path


def refused_within_memory(call: Callable[[], object]) -> CheckpointError:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as raised:
            call()
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    return raised.value


@pytest.mark.parametrize("call", [ckpt.sync.load, ckpt.sync.metadata], ids=["load", "metadata"])
@pytest.mark.parametrize("made", [safetensors, npz], ids=lambda made: made.__name__)
@pytest.mark.parametrize("separator", [".", "/"])
def test_a_name_of_many_parts_is_refused(
    tmp_path: Path, call: Callable[[Path], Any], made: Callable[[Path, str], Path], separator: str
) -> None:
    if (made, separator) == (safetensors, "/"):
        pytest.skip("a slash does not part names there")
    name = separator.join("a" * 5000)
    path = made(tmp_path / f"x.{made.__name__}", name)
    error = refused_within_memory(lambda: call(path))
    assert isinstance(error, UnsupportedFormatError)
    assert "5000 parts" in str(error)


def test_names_may_be_as_deep_as_trees(tmp_path: Path) -> None:
    name = ".".join("a" * MOST)
    found = ckpt.sync.load(safetensors(tmp_path / "x.safetensors", name))
    for _ in range(MOST):
        found = found["a"]
    assert found.shape == (1,)
    with pytest.raises(UnsupportedFormatError, match="201 parts"):
        nested({f"{name}.a": 1}, "a file")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_chain_of_nodes_is_refused(tmp_path: Path, call: Callable[[Path], object]) -> None:
    saved(tmp_path / "whole")
    document = saved(tmp_path / "x")
    chain = [{"kind": "list", "children": [-(number + 1)]} for number in range(LEVELS)]
    chain.append({"kind": "list", "children": [0, 1]})
    document["items"]["default"]["nodes"] = chain
    rewritten(tmp_path / "x", document)
    error = refused_within_memory(lambda: call(tmp_path / "x"))
    assert isinstance(error, CorruptCheckpointError)
    assert "deeper than 200 levels" in str(error)
    assert not (tmp_path / "out").exists()


def test_the_deepest_tree_that_can_be_saved_is_loaded(tmp_path: Path) -> None:
    tree: Any = np.ones(2)
    for _ in range(MOST):
        tree = {"a": tree}
    ckpt.sync.save(tmp_path / "x", tree)
    ckpt.sync.convert(tmp_path / "x", tmp_path / "y")
    assert str(ckpt.sync.load(tmp_path / "y")) == str(tree)
    assert ckpt.sync.verify(tmp_path / "y").ok


@pytest.mark.parametrize(("levels", "fits"), [(MOST, True), (MOST + 1, False)])
def test_nodes_are_as_deep_as_they_may_be(levels: int, fits: bool) -> None:
    chain = [Node(kind="list", children=[-(number + 1)]) for number in range(levels)]
    item = ItemEntry("pytree", [*chain, Node(kind="list")])
    if fits:
        check_leaves(item)
    else:
        with pytest.raises(CorruptCheckpointError, match="deeper than 200 levels"):
            check_leaves(item)
