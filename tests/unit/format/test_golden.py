"""The golden checkpoints of every way of writing stay readable, bit for bit."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
import xxhash
from jax.sharding import NamedSharding, PartitionSpec
from make_golden import (
    GOLDEN,
    METADATA,
    METRICS,
    SETS,
    STEP,
    Forgotten,
    Settings,
    final_state,
    mesh,
    pattern,
    sharded_state,
    step_items,
)

import ckpt
from tests.support.manifests import leaf_rows
from tests.support.trees import abstract

(DATA_FILES,) = (GOLDEN / name for name in SETS)
SHARDS = DATA_FILES / "shards"
CHECKPOINTS = [DATA_FILES / "final", DATA_FILES / "run" / str(STEP), SHARDS]
TRAILER = b',"checksum":"xxh3_128:'

each_checkpoint = pytest.mark.parametrize(
    "checkpoint", CHECKPOINTS, ids=lambda path: path.relative_to(GOLDEN).as_posix()
)


@pytest.fixture(params=SETS)
def golden(request: pytest.FixtureRequest) -> Path:
    """A set of golden checkpoints; all hold the same trees."""
    return GOLDEN / request.param


def assert_same(found: Any, expected: Any, where: str = "tree") -> None:
    """Compare two trees: types of containers and leaves, order of keys, dtypes, places, bits."""
    assert type(found) is type(expected) or isinstance(expected, jax.Array), where
    if isinstance(expected, ckpt.types.UnknownNode):
        assert found.class_name == expected.class_name, where
        assert_same(dict(found.fields), dict(expected.fields), where)
    elif isinstance(expected, dict):
        assert [*map(repr, found)] == [*map(repr, expected)], where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, child in enumerate(expected):
            assert_same(found[number], child, f"{where}[{number}]")
    elif isinstance(expected, Settings):
        assert_same(vars(found), vars(expected), where)
    elif isinstance(expected, jax.Array | np.ndarray | np.generic):
        assert isinstance(found, jax.Array) == isinstance(expected, jax.Array), where
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes(), where
        if isinstance(expected, jax.Array):
            assert found.sharding == expected.sharding, where
            assert found.committed == expected.committed, where
    else:
        assert repr(found) == repr(expected), where


def without_classes(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as a process finds it that lacks one of its classes."""
    containers = state["containers"]
    forgotten = ckpt.types.UnknownNode("a_module_that_is_gone:Forgotten", {"value": 11})
    return state | {"containers": containers | {"forgotten": forgotten}}


def reordered(tree: Any) -> Any:
    """Return the tree with the keys of its dicts in the order of jax, as targets have them."""
    return jax.tree.map(lambda leaf: leaf, tree)


def replicated(tree: Any) -> Any:
    everywhere = NamedSharding(mesh(), PartitionSpec())
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, everywhere) if isinstance(leaf, jax.Array) else leaf, tree
    )


def files_below(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "ckpt.json").read_bytes())


def leaves_of(manifest: dict[str, Any], item: str) -> list[dict[str, Any]]:
    return leaf_rows(manifest["items"][item])


def array_leaves(checkpoint: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every leaf that is an array, with the name of its item."""
    manifest = manifest_of(checkpoint)
    for item in manifest["items"]:
        for leaf in leaves_of(manifest, item):
            if "dtype" in leaf:
                yield item, leaf


def regions(leaf: dict[str, Any]) -> Iterator[tuple[slice, ...]]:
    """Yield the part of the array that every chunk covers, in the order of the digests."""
    shape, chunks = leaf.get("shape", []), leaf.get("chunks", [])
    grid = [-(-n // length) for n, length in zip(shape, chunks, strict=True)]
    for place in np.ndindex(*grid):
        yield tuple(
            slice(p * length, min((p + 1) * length, n))
            for p, length, n in zip(place, chunks, shape, strict=True)
        )


def damaged_files(checkpoint: Path) -> set[str]:
    """Return the files of a checkpoint that its manifest does not vouch for."""
    manifest = manifest_of(checkpoint)
    found = {}
    for path in files_below(checkpoint):
        data = path.read_bytes()
        entry = {"size": len(data), "digest": xxhash.xxh3_128_hexdigest(data)}
        found[path.relative_to(checkpoint).as_posix()] = entry
    del found["ckpt.json"]
    names = set(found) | set(manifest["files"])
    return {name for name in names if found.get(name) != manifest["files"].get(name)}


def test_a_tree_comes_back_as_it_was_saved(golden: Path) -> None:
    assert_same(ckpt.sync.load(golden / "final"), without_classes(final_state()))


def test_a_tree_comes_back_onto_a_target(golden: Path) -> None:
    expected = final_state()
    found = ckpt.sync.load(golden / "final", like=abstract(expected))
    assert isinstance(found["containers"]["forgotten"], Forgotten)
    assert_same(found, reordered(expected))


def test_a_tree_comes_back_onto_other_shardings(golden: Path) -> None:
    expected = replicated(final_state())
    assert_same(ckpt.sync.load(golden / "final", like=abstract(expected)), expected)


def test_a_step_comes_back(golden: Path) -> None:
    expected = step_items()
    with ckpt.sync.CheckpointManager(golden / "run", mode="r") as mgr:
        assert mgr.all_steps() == [STEP]
        assert_same(mgr.restore(), expected)
        assert_same(mgr.restore(STEP, like=abstract(expected)), reordered(expected))
        assert_same(mgr.restore(items=["seed"]), {"seed": 42})
        assert mgr.metrics(STEP) == {name: float(value) for name, value in METRICS.items()}
        assert mgr.metadata().info.custom_metadata == METADATA


def test_metadata_tells_everything_but_the_array_bytes(golden: Path) -> None:
    found = ckpt.sync.metadata(golden / "final")
    manifest = manifest_of(golden / "final")
    expected = final_state()
    arrays = [leaf for leaf in jax.tree.leaves(expected) if hasattr(leaf, "shape")]
    assert found.unnamed
    assert found.info.step is None
    assert found.info.custom_metadata == METADATA
    assert found.info.nbytes == sum(array.nbytes for array in arrays)
    assert found.info.committed.timestamp() == pytest.approx(manifest["committed_ns"] / 1e9)
    assert found.writer == manifest["writer"]
    for name, array in (expected["host"] | expected["device"]).items():
        leaf = found.tree["device" if isinstance(array, jax.Array) else "host"][name]
        assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype), name
        assert leaf.nbytes == array.nbytes, name
    sharding = found.tree["device"]["both axes"].saved_sharding
    assert (sharding.kind, sharding.axis_names) == ("named", ["data", "model"])
    assert (sharding.axis_sizes, sharding.spec) == ([4, 2], ["data", "model"])
    assert_same(found.tree["values"], expected["values"])


def test_large_leaves_have_several_chunks(golden: Path) -> None:
    leaves = leaves_of(manifest_of(golden / "final"), "default")
    large = {leaf["name"]: leaf for leaf in leaves if not leaf.get("packed", False)}
    assert len(large["device.large"]["digests"]) == 8
    ragged = large["host.ragged"]
    assert ragged["shape"][0] % ragged["chunks"][0]


@each_checkpoint
def test_any_zarr_reader_finds_every_chunk_in_the_database(checkpoint: Path) -> None:
    for item, leaf in array_leaves(checkpoint):
        spec = {"driver": "ocdbt", "base": f"{(checkpoint / item).as_uri()}/"}
        array = ts.open(
            {"driver": "zarr3", "kvstore": spec | {"path": f"{leaf['name']}/"}}, read=True
        ).result()
        assert list(array.shape) == leaf.get("shape", [])
        assert list(array.chunk_layout.read_chunk.shape or ()) == leaf.get("chunks", [])
        for region, digest in zip(regions(leaf), leaf.get("digests", []), strict=True):
            data = np.ascontiguousarray(array[region].read().result()).tobytes()
            assert xxhash.xxh3_128_hexdigest(data) == digest, (leaf["name"], region)


@each_checkpoint
def test_the_manifest_carries_its_own_checksums(checkpoint: Path) -> None:
    data = (checkpoint / "ckpt.json").read_bytes()
    body, found = data.split(TRAILER)
    assert found == xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'
    head, rest = data.split(b',"head":"xxh3_128:')
    assert rest[:33] == xxhash.xxh3_128_hexdigest(head).encode() + b'"'
    assert json.loads(data)["rest"] == len(rest) - 33


@each_checkpoint
def test_every_file_has_the_size_and_digest_of_the_manifest(checkpoint: Path) -> None:
    assert damaged_files(checkpoint) == set()


def test_a_changed_or_missing_file_would_be_noticed(golden: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(golden / "run" / str(STEP), tmp_path / "copy")
    names = {path.relative_to(copy).as_posix() for path in files_below(copy)} - {"ckpt.json"}
    for number, name in enumerate(sorted(names)):
        data = (copy / name).read_bytes()
        if number % 2 and data:
            (copy / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        else:
            (copy / name).unlink()
    assert damaged_files(copy) == names


def test_the_same_trees_are_described_in_the_same_way(golden: Path, tmp_path: Path) -> None:
    """What is told of a tree is part of the format; where its bytes lie is not.

    Nor is how large arrays are cut into chunks.
    """
    ckpt.sync.save(tmp_path / "final", final_state())
    ckpt.sync.save(tmp_path / "step", items=step_items())
    for old, fresh in ((golden / "final", "final"), (golden / "run" / str(STEP), "step")):
        expected = manifest_of(old)["items"]
        found = manifest_of(tmp_path / fresh)["items"]
        for item in [*expected.values(), *found.values()]:
            item.pop("data_files", None)
            item["leaves"] = leaf_rows(item)
            for leaf in item["leaves"]:
                places = ["offsets", "files"]
                if not leaf.get("packed", False):
                    places += ["chunks", "count", "digests", "packed"]
                for field in places:
                    leaf.pop(field, None)
        assert found == expected


# -- what is special to a set ---------------------------------------------------------------------


@each_checkpoint
def test_a_chunk_lies_in_a_data_file_at_its_offset(checkpoint: Path) -> None:
    manifest = manifest_of(checkpoint)
    files = {item: manifest["items"][item].get("data_files", []) for item in manifest["items"]}
    used: set[tuple[str, int]] = set()
    for item, leaf in array_leaves(checkpoint):
        dtype = np.dtype(pattern(leaf["dtype"]).dtype)
        digests = leaf.get("digests", [])
        numbers = leaf.get("files", []) or [0] * len(digests)
        chunks = zip(regions(leaf), numbers, leaf.get("offsets", []), digests, strict=True)
        for region, number, offset, digest in chunks:
            used.add((item, number))
            count = math.prod(leaf.get("chunks", []))
            data = (checkpoint / item / files[item][number]).read_bytes()
            stored = np.frombuffer(data, dtype, count, offset).reshape(leaf.get("chunks", []))
            inside = stored[tuple(slice(part.stop - part.start) for part in region)]
            assert xxhash.xxh3_128_hexdigest(inside.tobytes()) == digest, (leaf["name"], region)
    # Every file is of use, but for those that hold only what other readers want.
    scalars = {item for item in files if any("value" in leaf for leaf in leaves_of(manifest, item))}
    for item, paths in files.items():
        assert all(f"{item}/{path}" in manifest["files"] for path in paths)
        unused = {number for number in range(len(paths)) if (item, number) not in used}
        assert len(unused) <= (item in scalars)


def test_the_sharded_state_has_several_data_files_and_chunks_that_cross_shards() -> None:
    item = manifest_of(SHARDS)["items"]["default"]
    leaves = {leaf["name"]: leaf for leaf in leaf_rows(item)}
    assert len(item["data_files"]) > 2
    assert any(len(set(leaf.get("files", []))) > 1 for leaf in leaves.values())
    state = sharded_state()
    for name, crosses in (
        ("crossing rows", True),
        ("crossing columns", True),
        ("crossing and replicated", True),
        ("truth values", True),
        ("less than bytes", True),
        ("not ragged", False),
    ):
        chunks, shape = leaves[name]["chunks"], leaves[name]["shape"]
        shard = state[name].sharding.shard_shape(tuple(shape))
        cut_evenly = [n % chunk == 0 for n, chunk in zip(shard, chunks, strict=True)]
        assert all(cut_evenly) != crosses, name
    assert leaves["ragged columns"]["chunks"] == [1, 601]


def test_chunks_that_cross_shards_come_back() -> None:
    expected = sharded_state()
    assert_same(ckpt.sync.load(SHARDS), expected)
    assert_same(ckpt.sync.load(SHARDS, like=abstract(expected)), reordered(expected))
    everywhere = replicated(expected)
    assert_same(ckpt.sync.load(SHARDS, like=abstract(everywhere)), reordered(everywhere))


def test_sets_that_are_on_the_disks_of_users_are_not_written_again() -> None:
    before = {path: path.stat().st_mtime_ns for path in files_below(GOLDEN)}
    for name in [*SETS[:-1], "v2"]:
        script = [sys.executable, str(GOLDEN.parent / "make_golden.py"), name]
        done = subprocess.run(script, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert f"{name} stays as it is" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in files_below(GOLDEN)} == before
