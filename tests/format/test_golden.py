"""The golden checkpoints of every released format version stay readable, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import xxhash
from jax.sharding import NamedSharding, PartitionSpec
from make_golden import (
    GOLDEN,
    METADATA,
    METRICS,
    STEP,
    Forgotten,
    Settings,
    final_state,
    mesh,
    step_items,
)
from trees import abstract

import ckpt

FINAL = GOLDEN / "v1" / "final"
RUN = GOLDEN / "v1" / "run"
CHECKPOINTS = [FINAL, RUN / str(STEP)]
TRAILER = b',"checksum":"xxh3_128:'


def assert_same(found: Any, expected: Any, where: str = "tree") -> None:
    """Compare two trees: types of containers and leaves, order of keys, dtypes, places, bits."""
    assert type(found) is type(expected) or isinstance(expected, jax.Array), where
    if isinstance(expected, ckpt.Record):
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
    """Return the state as a process finds it that lacks some of its classes."""
    containers = state["containers"]
    settings = containers["settings"]
    records = {
        "forgotten": ckpt.Record("a_module_that_is_gone:Forgotten", {"value": 11}),
        "settings": ckpt.Record(
            "make_golden:Settings", {"width": settings.width, "mask": settings.mask}
        ),
    }
    return state | {"containers": containers | records}


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


def damaged_files(checkpoint: Path) -> set[str]:
    """Return the files of a checkpoint that its manifest does not vouch for."""
    manifest = json.loads((checkpoint / "ckpt.json").read_bytes())
    found = {}
    for path in files_below(checkpoint):
        data = path.read_bytes()
        entry = {"size": len(data), "digest": xxhash.xxh3_128_hexdigest(data)}
        found[path.relative_to(checkpoint).as_posix()] = entry
    del found["ckpt.json"]
    names = set(found) | set(manifest["files"])
    return {name for name in names if found.get(name) != manifest["files"].get(name)}


def test_a_tree_comes_back_as_it_was_saved() -> None:
    assert_same(ckpt.sync.load(FINAL), without_classes(final_state()))


def test_a_tree_comes_back_onto_a_target() -> None:
    expected = final_state()
    found = ckpt.sync.load(FINAL, like=abstract(expected))
    assert isinstance(found["containers"]["forgotten"], Forgotten)
    assert_same(found, reordered(expected))


def test_a_tree_comes_back_onto_other_shardings() -> None:
    expected = replicated(final_state())
    assert_same(ckpt.sync.load(FINAL, like=abstract(expected)), expected)


def test_a_step_comes_back() -> None:
    expected = step_items()
    with ckpt.sync.CheckpointManager(RUN, read_only=True) as mgr:
        assert mgr.all_steps() == [STEP]
        assert_same(mgr.restore(), expected)
        assert_same(mgr.restore(STEP, like=abstract(expected)), reordered(expected))
        assert_same(mgr.restore(items=["seed"]), {"seed": 42})
        assert mgr.metrics(STEP) == {name: float(value) for name, value in METRICS.items()}
        assert mgr.metadata().info.metadata == METADATA


def test_metadata_tells_everything_but_the_array_bytes() -> None:
    found = ckpt.sync.metadata(FINAL)
    manifest = json.loads((FINAL / "ckpt.json").read_bytes())
    expected = final_state()
    arrays = [leaf for leaf in jax.tree.leaves(expected) if hasattr(leaf, "shape")]
    assert found.unnamed
    assert found.info.step is None
    assert found.info.metadata == METADATA
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


def test_large_leaves_have_several_chunks_in_several_lanes() -> None:
    leaves = json.loads((FINAL / "ckpt.json").read_bytes())["items"]["state"]["leaves"]
    large = {leaf["name"]: leaf for leaf in leaves if not leaf.get("packed", False)}
    assert len(large["device.large"]["digests"]) == 8
    ragged = large["host.ragged"]
    assert ragged["shape"][0] % ragged["chunks"][0]
    assert len(list((FINAL / "state").glob("lane_0_*"))) > 1


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda path: path.name)
def test_the_manifest_carries_its_own_checksum(checkpoint: Path) -> None:
    data = (checkpoint / "ckpt.json").read_bytes()
    body, found = data.split(TRAILER)
    assert found == xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda path: path.name)
def test_every_file_has_the_size_and_digest_of_the_manifest(checkpoint: Path) -> None:
    assert damaged_files(checkpoint) == set()


def test_a_changed_or_missing_file_would_be_noticed(tmp_path: Path) -> None:
    copy = shutil.copytree(RUN / str(STEP), tmp_path / "copy")
    names = {path.relative_to(copy).as_posix() for path in files_below(copy)} - {"ckpt.json"}
    for number, name in enumerate(sorted(names)):
        data = (copy / name).read_bytes()
        if number % 2 and data:
            (copy / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        else:
            (copy / name).unlink()
    assert damaged_files(copy) == names


def test_the_same_trees_are_described_in_the_same_way(tmp_path: Path) -> None:
    """What is told of a tree is part of the format; how large arrays are cut into chunks is not."""
    ckpt.sync.save(tmp_path / "final", final_state())
    ckpt.sync.save(tmp_path / "step", items=step_items())
    for golden, fresh in ((FINAL, "final"), (RUN / str(STEP), "step")):
        expected = json.loads((golden / "ckpt.json").read_bytes())["items"]
        found = json.loads((tmp_path / fresh / "ckpt.json").read_bytes())["items"]
        for item in [*expected.values(), *found.values()]:
            for leaf in item["leaves"]:
                if not leaf.get("packed", False):
                    for field in ("chunks", "digests", "packed"):
                        leaf.pop(field, None)
        assert found == expected
