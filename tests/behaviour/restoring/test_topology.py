"""Saved on any devices, restored on any others: bit by bit, reading no more than is needed."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

import ckpt
import ckpt.sync
from ckpt.testing.compare import differences
from tests.support.counted_reads import Reads
from tests.support.forked_programs import run
from tests.support.paths import PROGRAMS
from tests.support.trees import P, bits

# Divide by every number of devices that is used; chunks and shards of others do not line up. A leaf
# of a few kilobytes is stored and placed as a whole, a larger one part by part.
SHAPE = (24, 48)
LARGE = (384, 768)
# Sources for the large ones: every kind of place, in few bytes.
SOURCES = ("numpy", "3 by columns", "8 transposed", "8 backwards", "8 partly replicated")
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "int4": ml_dtypes.int4,
    "bool": np.bool_,
}
MIB = 1 << 20


def values(dtype: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray[Any, Any]:
    """Values that are all over the dtype's range, NaNs with payloads among the floats."""
    kind = np.dtype(DTYPES[dtype])
    count = int(np.prod(shape))
    random = np.random.default_rng(count)
    if dtype in ("int4", "bool"):
        low, high = (-8, 8) if dtype == "int4" else (0, 2)
        return random.integers(low, high, count).astype(np.int8).astype(kind).reshape(shape)
    return np.frombuffer(random.bytes(count * kind.itemsize), kind).reshape(shape)


def on(devices: Any, axes: tuple[int, ...], *spec: Any, **options: Any) -> NamedSharding:
    names = ("x", "y", "z")[: len(axes)]
    return NamedSharding(Mesh(np.array(devices).reshape(axes), names), P(*spec), **options)


@functools.cache
def layouts() -> dict[str, Any]:
    """Shardings by name; None is a numpy array, "free" one that jax may move."""
    all8 = jax.devices()
    kinds = {memory.kind for memory in all8[0].addressable_memories()}
    found: dict[str, Any] = {
        "numpy": None,
        "free": "free",
        "device 0": SingleDeviceSharding(all8[0]),
        "device 5": SingleDeviceSharding(all8[5]),
        "a mesh of 1": on(all8[:1], (1,), "x"),
        "2 by rows": on(all8[:2], (2,), "x"),
        "2 others by columns": on(all8[6:], (2,), None, "x"),
        "3 by rows": on(all8[:3], (3,), "x"),
        "3 by columns": on(all8[2:5], (3,), None, "x"),
        "4 as tiles": on(all8[:4], (2, 2), "x", "y"),
        "4 replicated": on(all8[:4], (4,)),
        "6 as tiles": on(all8[:6], (3, 2), "x", "y"),
        "8 by rows": on(all8, (8,), "x"),
        "8 as tiles": on(all8, (2, 4), "x", "y"),
        "8 transposed": on(np.array(all8).reshape(2, 4).T, (4, 2), "x", "y"),
        "8 backwards": on(all8[::-1], (8,), None, "x"),
        "8 over one axis": on(all8, (2, 4), ("y", "x")),
        "8 partly replicated": on(all8, (4, 2), None, "y"),
        "8 replicated": on(all8, (2, 2, 2)),
    }
    for kind in ("pinned_host", "unpinned_host"):
        if kind in kinds:
            found[kind] = on(all8, (2, 4), "y", "x", memory_kind=kind)
            found[f"{kind} of one"] = SingleDeviceSharding(all8[3], memory_kind=kind)
    return found


def put(array: Any, layout: Any) -> Any:
    if layout is None:
        return array
    return jnp.asarray(array) if isinstance(layout, str) else jax.device_put(array, layout)


def target(array: Any, layout: Any) -> Any:
    if layout is None:
        return np.empty(array.shape, array.dtype)
    sharding = None if isinstance(layout, str) else layout
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def lies_as(array: Any, layout: Any, source: Any) -> bool:
    if layout is None:
        return type(array) is np.ndarray
    if isinstance(layout, str):
        # It goes where it was.
        was_bound = isinstance(source, jax.sharding.Sharding)
        return bool(array.sharding == source) if was_bound else not array.committed
    # One that was free to move stays so where jax would have put it anyway.
    free = isinstance(source, str) and layout == array.sharding == layouts()["device 0"]
    return bool(array.sharding == layout and array.committed is not free)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPE, LARGE], ids=["packed", "in chunks"])
def test_every_layout_to_every_layout(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = values(dtype, shape)
    wanted = bits(array)
    sources = [*layouts()] if shape == SHAPE else [*SOURCES, "pinned_host"]
    tree = {name: put(array, layouts()[name]) for name in sources}
    ckpt.sync.save(tmp_path / "x", tree)
    found = ckpt.sync.load(tmp_path / "x")
    assert differences(tree, found) == []
    for goal, layout in layouts().items():
        like = dict.fromkeys(tree, target(array, layout))
        for source, restored in ckpt.sync.load(tmp_path / "x", like=like).items():
            assert bits(restored) == wanted, f"{source} -> {goal}"
            assert lies_as(restored, layout, layouts()[source]), (
                f"{source} -> {goal}: {restored.sharding}"
            )
            assert restored.dtype == array.dtype


UNEVEN = [
    (),
    (1,),
    (7, 5),
    (3, 9, 2),
    (0, 4),
    (8, 1),
    (5, 1, 0, 3),
    (16, 3, 7),
    (7, 40000),
    (3, 9, 10000),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_that_fit_a_mesh_only_along_some_axes(tmp_path: Path, dtype: str) -> None:
    devices = jax.devices()
    tree, goals = {}, {}
    for shape in UNEVEN:
        for count in (1, 2, 3, 5, 7, 8):
            for axis, length in enumerate(shape):
                if length % count == 0:
                    spec = [None] * axis + ["x"]
                    name = f"{shape} along {axis} over {count}"
                    tree[name] = put(values(dtype, shape), on(devices[:count], (count,), *spec))
        name = f"{shape} on all"
        tree[name] = put(values(dtype, shape), on(devices, (8,)))
    ckpt.sync.save(tmp_path / "x", tree)
    assert differences(tree, ckpt.sync.load(tmp_path / "x")) == []
    # And each to where the next one of its shape was.
    by_shape: dict[tuple[int, ...], list[Any]] = {}
    for name, array in tree.items():
        by_shape.setdefault(array.shape, []).append((name, array.sharding))
    for same in by_shape.values():
        for (name, _), (_, sharding) in zip(same, same[1:] + same[:1], strict=True):
            goals[name] = target(tree[name], sharding)
    found = ckpt.sync.load(tmp_path / "x", like=goals)
    for name, array in found.items():
        assert array.sharding == goals[name].sharding, name
        assert bits(array) == bits(tree[name]), name


def test_keys_and_weak_types_on_a_mesh(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    for name in ("free", "device 5", "3 by columns", "8 transposed", "8 backwards", "pinned_host"):
        layout = layouts()[name]
        for shape in (SHAPE, (192, 192)):
            tree[f"key {shape}, {name}"] = put(jax.random.split(jax.random.key(1), shape), layout)
        for shape in (SHAPE, LARGE):
            tree[f"weak {shape}, {name}"] = put(jnp.full(shape, 2.0), layout)
            tree[f"strong {shape}, {name}"] = put(jnp.full(shape, 2.0, jnp.float32), layout)
        tree[f"rbg, {name}"] = jax.random.key(2, impl="rbg")
    assert tree[f"weak {LARGE}, 8 backwards"].weak_type
    ckpt.sync.save(tmp_path / "x", tree)
    assert differences(tree, ckpt.sync.load(tmp_path / "x")) == []
    for goal in ("device 5", "3 by columns", "8 transposed", "pinned_host"):
        layout = layouts()[goal]
        like = {
            name: jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=layout if leaf.ndim else leaf.sharding,
                weak_type=bool(getattr(leaf, "weak_type", False)),
            )
            for name, leaf in tree.items()
        }
        found: Any = ckpt.sync.load(tmp_path / "x", like=like)
        for name, leaf in found.items():
            if leaf.ndim:
                assert leaf.sharding.is_equivalent_to(layout, leaf.ndim), name
                assert leaf.sharding.memory_kind == layout.memory_kind, name
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                assert leaf.dtype == tree[name].dtype
                data = jax.random.key_data(leaf)
                assert bits(data) == bits(jax.random.key_data(tree[name])), name
            else:
                assert bits(leaf) == bits(tree[name]), name
                assert leaf.weak_type == tree[name].weak_type, name


# -- what is read -----------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def large(shape: tuple[int, ...] = (96, 24576)) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    "goal", ["8 as tiles", "8 backwards", "3 by rows", "8 replicated", "numpy"]
)
def test_an_array_beyond_the_budget_is_read_once_whatever_wants_it(
    tmp_path: Path, reads: Reads, goal: str
) -> None:
    base = large()
    sources = ("8 transposed", "3 by columns", "8 by rows")
    tree = {name: put(base, layouts()[name]) for name in sources}
    staging = ckpt.Staging(budget_bytes=MIB)
    events: list[ckpt.types.Event] = []
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging, observers=[events.append]) as mgr:
        mgr.save(0, tree)
        mgr.wait_until_finished()
        stored = mgr.metadata(0).info.nbytes
        found = mgr.restore(0, like=dict.fromkeys(tree, target(base, layouts()[goal])))
        assert all(bits(array) == base.tobytes() for array in found.values())
        assert reads.take() == stored == 3 * base.nbytes
        told = sum(event.nbytes for event in events if event.phase == "read")
        assert told == stored
        # An array that is wanted twice, in two places, is still read once.
        twice = {**dict.fromkeys(tree, ...), sources[0]: target(base, layouts()[goal])}
        mgr.restore(0, like=twice)
        assert reads.take() == base.nbytes


def test_only_what_is_wanted_is_read(tmp_path: Path, reads: Reads) -> None:
    base = large((48, 12288))
    small = {f"bias {n}": np.full(10, n, np.float32) for n in range(50)}
    tree = {"a": put(base, layouts()["8 by rows"]), "b": base + 1, "small": small}
    ckpt.sync.save(tmp_path / "x", tree)
    assert differences(tree, ckpt.sync.load(tmp_path / "x")) == []
    everything = reads.take()
    assert everything < 2 * base.nbytes + 50 * 128 + 3 * 4096
    # One of two large arrays.
    nothing = dict.fromkeys(small, ...)
    found: Any = ckpt.sync.load(tmp_path / "x", like={"a": ..., "b": base, "small": nothing})
    assert bits(found["b"]) == bits(tree["b"])
    assert found["a"] is ...
    assert reads.take() == base.nbytes
    # One of many small ones.
    found = ckpt.sync.load(
        tmp_path / "x", like={"a": ..., "b": ..., "small": {**nothing, "bias 7": small["bias 7"]}}
    )
    assert found["small"]["bias 7"].tolist() == [7.0] * 10
    assert reads.take() <= 4096
    # By pattern, and nothing at all.
    found = ckpt.sync.load(tmp_path / "x", adapt=ckpt.Adapt(select="a"))
    assert differences(tree["a"], found["a"]) == []
    assert reads.take() == base.nbytes
    ckpt.sync.load(tmp_path / "x", like={"a": ..., "b": ..., "small": nothing})
    assert reads.take() == 0


def test_one_array_at_many_places_is_read_once(tmp_path: Path, reads: Reads) -> None:
    base = large((48, 12288))
    array = put(base, layouts()["8 by rows"])
    ckpt.sync.save(tmp_path / "x", [array, {"again": array}, array])
    goals = [layouts()[name] for name in ("8 backwards", "3 by columns", "device 5")]
    like = [target(base, goals[0]), {"again": target(base, goals[1])}, target(base, goals[2])]
    first, second, third = jax.tree.leaves(ckpt.sync.load(tmp_path / "x", like=like))
    for array, goal in zip((first, second, third), goals, strict=True):
        assert array.sharding == goal
        assert bits(array) == base.tobytes()
    assert reads.take() == base.nbytes


# -- in other processes -----------------------------------------------------------------------


def elsewhere(what: str, root: Path, devices: int) -> Any:
    flags = f"--xla_force_host_platform_device_count={devices}"
    ran = run(PROGRAMS / "load_elsewhere.py", what, root, env={**os.environ, "XLA_FLAGS": flags})
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("saved")
    tree = {
        "rows": put(np.ones(SHAPE, np.float32), layouts()["8 by rows"]),
        "tiles": put(values("bfloat16"), layouts()["8 as tiles"]),
        "pair": put(values("int4"), layouts()["2 by rows"]),
        "three": put(values("bool"), layouts()["3 by columns"]),
        "first": put(values("float32"), layouts()["device 0"]),
        "free": jnp.ones(3),
        "key": put(jax.random.split(jax.random.key(1), 8), on(jax.devices(), (8,), "x")),
    }
    ckpt.sync.save(root / "x", tree)
    with ckpt.sync.CheckpointManager(root / "run") as manager:
        manager.save(3, {"rows": tree["rows"], "tiles": tree["tiles"]})
    return root, tree


@pytest.mark.parametrize("devices", [1, 4])
def test_fewer_devices_take_what_they_can_and_one_warning_says_the_rest(
    saved: tuple[Path, dict[str, Any]], devices: int
) -> None:
    root, tree = saved
    found = elsewhere("restore", root, devices)
    arrays = found["arrays"]
    for name, leaf in tree.items():
        data = jax.random.key_data(leaf) if name == "key" else leaf
        assert bytes.fromhex(arrays[name]["bits"]) == bits(data), name
        assert arrays[name]["dtype"] == str(leaf.dtype)
        here = {device.id for device in leaf.sharding.device_set} <= set(range(devices))
        assert arrays[name]["committed"] == leaf.committed, name
        count = len(leaf.sharding.device_set) if here else devices
        assert arrays[name]["devices"] == count, name
        # That of a key is the spec of its data, which has an axis more.
        spec = [part for part in arrays[name]["spec"] if part]
        assert spec == [part for part in getattr(leaf.sharding, "spec", []) if part], name
    lost = sum(
        not {device.id for device in leaf.sharding.device_set} <= set(range(devices))
        for leaf in tree.values()
    )
    (warning,) = found["warnings"]
    assert warning.startswith(f"{lost} arrays are not placed as they were: ")
    assert f"2 (key, ...): its mesh x=8 is x={devices} on the devices here" in warning
    assert "Pass like= with shardings to place them" in warning
    assert found["sum"] == SHAPE[0] * SHAPE[1] + 3


def test_more_devices_are_no_reason_for_a_change(saved: tuple[Path, dict[str, Any]]) -> None:
    root, tree = saved
    found = elsewhere("restore", root, 12)
    assert found["warnings"] == []
    for name, leaf in tree.items():
        line = found["arrays"][name]
        data = jax.random.key_data(leaf) if name == "key" else leaf
        assert bytes.fromhex(line["bits"]) == bits(data), name
        assert line["devices"] == len(leaf.sharding.device_set), name
        spec = list(getattr(leaf.sharding, "spec", []))
        assert line["spec"] == spec, name
        assert line["committed"] == leaf.committed, name


def test_metadata_starts_no_backend(saved: tuple[Path, dict[str, Any]]) -> None:
    root, tree = saved
    found = elsewhere("metadata", root, 1)
    assert not found["initialised"]
    assert found["latest"] == 3
    assert found["specs"] == {"rows": ["x"], "tiles": ["x", "y"]}
    shapes = {name: [*leaf.shape, str(leaf.dtype)] for name, leaf in tree.items()}
    shapes["key"] = found["shapes"]["key"]
    assert found["shapes"] == shapes


def test_memory_stays_near_the_budget_however_large_the_array(tmp_path: Path) -> None:
    found = elsewhere("memory", tmp_path, 8)
    assert found["right"]
    state = 96 * MIB
    # What a save holds beyond the state, and a restore beyond its result.
    assert found["saved"] < 8 * MIB, found
    assert found["restored"] < state + 12 * MIB, found
