"""`ckpt.manifest` tells of a step what was saved."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

import ckpt
import ckpt.manifest
import ckpt.sync

W = np.arange(64, dtype=np.float32).reshape(8, 8)
DAY_NS = 86_400 * 10**9


class Point(NamedTuple):
    x: Any


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])


@pytest.fixture
def step(tmp_path: Path) -> Path:
    state = {
        "key": jax.random.key(7, impl="threefry2x32"),
        "n": 3,
        "point": Point(2.5),
        "rows": jax.device_put(W, NamedSharding(mesh(), PartitionSpec("model", None))),
        "same": (big := np.zeros((256, 256))),
        "tied": big,
        "weak": jnp.asarray(2.0),
    }
    with ckpt.sync.CheckpointManager(
        tmp_path / "run",
        formats=dict.fromkeys(("same", "tied"), ckpt.ArrayFormat(compression=ckpt.Zstd(1))),
        extensions=[ckpt.extensions.VitalSigns()],
    ) as mgr:
        mgr.save(5, state, metrics={"train": {"loss": 0.5}}, custom_metadata={"seen": 9})
    return tmp_path / "run" / "5"


def stored(step: Path) -> dict[str, int]:
    """The sizes of all files of a step but the manifest."""
    found = {str(each.relative_to(step)): each for each in step.rglob("*") if each.is_file()}
    return {name: each.stat().st_size for name, each in found.items() if name != "ckpt.json"}


def test_of_a_step(step: Path) -> None:
    data = (step / "ckpt.json").read_bytes()
    found = ckpt.manifest.decode(data, where="here")
    assert isinstance(found, ckpt.manifest.Manifest)
    assert (found.format, found.version) == ("ckpt", ckpt.manifest.FORMAT_VERSION) == ("ckpt", 1)
    assert (found.step, found.unnamed, list(found.items)) == (5, True, ["default"])
    assert found.requires == [ckpt.manifest.COMPRESSION] == ["compression"]
    assert (found.metrics, found.metadata) == ({"train": {"loss": 0.5}}, {"seen": 9})
    assert abs(time.time_ns() - found.created_ns) < DAY_NS
    assert found.created_ns <= found.committed_ns < found.created_ns + DAY_NS
    assert (found.process_count, found.writer["numpy"]) == (1, np.__version__)
    assert (found.sources, found.replaces, found.left_behind) == ({}, [], [])
    assert (found.folder, found.save, found.parent, found.dropped) == ("", "", None, [])
    assert len(bytes.fromhex(found.attempt)) == 16
    assert found.sizes == stored(step)
    assert {name: each.size for name, each in found.files.items()} == stored(step)
    assert all(len(bytes.fromhex(each.digest)) == 16 for each in found.files.values())
    assert {type(each) for each in found.files.values()} == {ckpt.manifest.FileEntry}
    assert not any(each.shared for each in found.files.values())
    assert found.statistics.keys() == {"blocked", "waited", "staged", "written"}
    assert ckpt.manifest.encode(found) == data


def test_of_its_head(step: Path) -> None:
    data = (step / "ckpt.json").read_bytes()
    whole = ckpt.manifest.decode(data, where="here")
    assert len(data) < ckpt.manifest.HEAD_BYTES < ckpt.manifest.MAX_BYTES
    head = ckpt.manifest.peek(data[: ckpt.manifest.HEAD_BYTES], len(data))
    assert isinstance(head, ckpt.manifest.Summary)
    for name in ("format", "version", "requires", "step", "attempt", "metrics", "folder", "save"):
        assert getattr(head, name) == getattr(whole, name), name
    assert (head.created_ns, head.committed_ns) == (whole.created_ns, whole.committed_ns)
    assert (head.files, head.sizes, head.manifest_bytes) == (whole.files, stored(step), len(data))
    assert (head.tops, head.fileless, head.dropped) == ({"default", "metrics"}, [], [])
    assert head.extensions == {"vital_signs": {"nonfinite_leaves": 0, "unequal_leaves": 0}}
    assert (head.extensions, head.left_behind) == (whole.extensions, [])
    assert 0 < head.rest < len(data)
    assert ckpt.manifest.peek_files(data) == {"ckpt.json", *stored(step)}
    assert ckpt.manifest.flat_metrics(head.metrics) == {"train/loss": 0.5}
    assert ckpt.manifest.peek(data[:-1]) is None


def test_of_its_leaves(step: Path) -> None:
    manifest = ckpt.manifest.decode((step / "ckpt.json").read_bytes(), where="here")
    item = manifest.items["default"]
    assert (item.handler, item.data) == ("pytree", None)
    leaves = {leaf.name: leaf for leaf in item.leaves}
    assert list(leaves) == ["key", "n", "point.x", "rows", "same", "tied", "weak"]
    assert {name: leaf.kind for name, leaf in leaves.items()} == {
        **dict.fromkeys(("rows", "weak"), "jax"),
        **dict.fromkeys(("same", "tied"), "numpy"),
        **{"key": "key", "n": "int", "point.x": "float"},
    }
    key, rows, same = leaves["key"], leaves["rows"], leaves["same"]
    assert (leaves["n"].value, key.impl, tuple(key.shape)) == ("3", "threefry2x32", (2,))
    assert (tuple(rows.shape), rows.dtype, rows.codec) == ((8, 8), "float32", None)
    assert (leaves["weak"].weak_type, rows.weak_type) == (True, False)
    assert (leaves["weak"].committed, rows.committed) == (False, True)
    assert (same.codec, len(same.lengths), same.packed) == ("zstd", len(same.digests), False)
    assert leaves["tied"].same_as == list(leaves).index("same")
    assert item.leaves.extensions.keys() == {"vital_signs"}
    assert item.leaves.replaced(extensions={}) == ckpt.manifest.LeafTable.of(item.leaves)
    blank = item.leaves.replaced(digests=bytes(len(item.leaves.digests)))
    assert len(blank.unchecked()) == len(blank.offsets)
    assert len(item.leaves.unchecked()) == 0
    of_nothing = ckpt.manifest.LeafTable(extensions={"mine": msgspec.Raw(b"3")})
    assert bytes(of_nothing.extensions["mine"]) == b"3"
    form = rows.form
    assert isinstance(form, ckpt.manifest.LeafForm)
    assert (form.kind, form.dtype, form.shape, form.chunks) == ("jax", "float32", (8, 8), (8, 8))
    assert (form.count, form.codec, form.impl, form.packed) == (1, None, None, True)
    assert (form.committed, form.weak_type) == (True, False)
    assert form.sharding is not None
    place = item.shardings[form.sharding]
    assert (place.kind, place.platform, place.memory_kind) == ("named", "cpu", None)
    assert (place.axis_names, place.axis_sizes, place.spec) == (
        *(["data", "model"], [2, 2], ["model", None]),
    )
    assert place.device_ids == [device.id for device in jax.devices()[:4]]
    assert (place.axis_types, place.text) == ([each.name for each in mesh().axis_types], None)


def test_of_its_table_of_leaves(step: Path) -> None:
    manifest = ckpt.manifest.decode((step / "ckpt.json").read_bytes(), where="here")
    table = manifest.items["default"].leaves
    # A leaf that is the same array as an earlier one has the chunks of that one.
    own = [leaf for leaf in table if leaf.same_as is None]
    assert table.firsts[-1] == sum(len(leaf.digests) for leaf in own)
    encoded = [length for leaf in own for length in (leaf.lengths or [0] * len(leaf.digests))]
    assert table.lengths.tolist() == encoded
    number = [leaf.name for leaf in table].index("rows")
    bare = table.bare(number)
    assert (bare.name, bare.kind, len(bare.digests)) == ("rows", "jax", 0)
    assert len(table.unchecked()) == 0


def test_of_its_nodes(step: Path) -> None:
    manifest = ckpt.manifest.decode((step / "ckpt.json").read_bytes(), where="here")
    top, point = manifest.items["default"].nodes
    assert (top.kind, top.keys) == (
        *("dict", ["key", "n", "point", "rows", "same", "tied", "weak"]),
    )
    assert (point.kind, point.keys, point.static, point.unstored) == ("namedtuple", ["x"], None, [])
    assert point.class_name == f"{__name__}:Point"
    assert top.children.index(-1) == top.keys.index("point")


def test_of_what_lies_elsewhere(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": W}, source)
    ckpt.sync.adopt(source, tmp_path / "virtual")
    found = ckpt.manifest.decode((tmp_path / "virtual" / "ckpt.json").read_bytes(), where="here")
    assert found.requires == [ckpt.manifest.VIRTUAL] == ["virtual"]
    assert found.items["default"].leaves.unchecked().tolist() == [0]
    (lies,) = found.sources.values()
    assert (lies.folder, lies.path) == (str(tmp_path), "model.safetensors")
    assert lies.size == source.stat().st_size
    changed = source.stat().st_mtime_ns
    assert lies.fingerprint == f"{lies.size} bytes, {changed}"
    assert ckpt.manifest.FOLDER == "folder"
