"""Promise 6: what was saved is what comes back, with and without a target, on any local mesh."""

from __future__ import annotations

import asyncio
import collections
import copy
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from jax.sharding import NamedSharding, SingleDeviceSharding

import ckpt
import ckpt.sync
from ckpt._format.array_format import DTYPES
from ckpt.testing.compare import differences
from ckpt.testing.strategies import states
from tests.support.manifests import document_of, rewrite
from tests.support.trees import P, abstract, assert_same, bits, mesh, sharded

JAX_DTYPES = sorted(
    name for name in DTYPES if jax.dtypes.canonicalize_dtype(DTYPES[name]) == DTYPES[name]
)


class Pair(NamedTuple):
    first: Any
    second: Any


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Values with every bit pattern the dtype has, NaNs of all kinds included."""
    count = int(np.prod(shape))
    kind = DTYPES[dtype]
    if dtype == "bool" or dtype.endswith(("int2", "int4", "float4_e2m1fn")):
        # Not every byte is a value of these.
        return (np.arange(count) % 2).astype(np.int8).astype(kind).reshape(shape)
    raw = np.random.default_rng(0).integers(0, 256, count * kind.itemsize, np.uint8)
    return raw.view(kind).reshape(shape)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_numpy_arrays_of_every_dtype(tmp_path: Path, dtype: str) -> None:
    tree = {
        "vector": values(dtype, (7,)),
        "scalar": values(dtype, ()),
        "empty": values(dtype, (0, 3)),
        "large": values(dtype, (300, 1000)),
        "numpy scalar": values(dtype, (3,))[1],
    }
    ckpt.sync.save(tmp_path / "x", tree, staging=ckpt.Staging(budget_bytes=1 << 20))
    assert_same(ckpt.sync.load(tmp_path / "x"), tree)
    assert_same(ckpt.sync.load(tmp_path / "x", like=tree), tree)


@pytest.mark.parametrize("dtype", JAX_DTYPES)
def test_jax_arrays_of_every_dtype(tmp_path: Path, dtype: str) -> None:
    tree = {
        "vector": sharded(values(dtype, (8,)), "data"),
        "scalar": jnp.asarray(values(dtype, ())),
        "empty": jnp.asarray(values(dtype, (0, 3))),
        "large": sharded(values(dtype, (1024, 1024)), "model", "data"),
    }
    ckpt.sync.save(tmp_path / "x", tree)
    assert_same(ckpt.sync.load(tmp_path / "x"), tree)
    assert_same(ckpt.sync.load(tmp_path / "x", like=abstract(tree)), tree)


def test_bools_that_are_neither_0_nor_1_in_memory(tmp_path: Path) -> None:
    odd = np.arange(300_000, dtype=np.uint8).view(np.bool_)
    ckpt.sync.save(tmp_path / "x", {"large": odd, "small": odd[:10]})
    found = ckpt.sync.load(tmp_path / "x")
    for name, wanted in (("large", odd), ("small", odd[:10])):
        np.testing.assert_array_equal(found[name], wanted)
        assert set(found[name].view(np.uint8)) <= {0, 1}
    # jax takes an aligned buffer over as it is, and one-shot saves copy no jax array.
    raw = np.full((1 << 20) + 64, 255, np.uint8)
    start = -raw.ctypes.data % 64
    aliased = jax.device_put(raw[start : start + (1 << 20)].view(np.bool_))
    ckpt.sync.save(tmp_path / "y", {"a": aliased})
    assert bool(ckpt.sync.load(tmp_path / "y")["a"].all())


def test_the_structure_comes_back_without_a_target(tmp_path: Path) -> None:
    tree = {
        "zeta": [jnp.ones(2), (np.zeros(1), None), []],
        "alpha": collections.OrderedDict([("b", 1), ("a", 2)]),
        "pair": Pair(1, {"deep": Pair(2.5, "text")}),
        "default": collections.defaultdict(list, {"x": [1]}),
        "empties": ({}, [], (), None),
        "adam": optax.adam(1e-3).init({"w": jnp.ones((3, 3))}),
        "scalars": [True, 3, -(2**100), 2.5, float("nan"), float("-inf"), -0.0, 1 - 2j, "", b"\0"],
        "dots": {"a.b": np.zeros(2), "a": {"b": np.ones(2)}, "a/b": np.full(2, 2), "": 1},
        "unicode ü 漢": np.int8(4),
    }
    numbers = {2: np.ones(2), 10: np.zeros(2), -1: "int keys"}
    tuples = {(1, "a"): np.ones(1), (0, "b"): np.zeros(1)}
    for number, each in enumerate((tree, numbers, tuples, [], {}, (), jnp.ones(3), 5, np.ones(2))):
        path = tmp_path / str(number)
        ckpt.sync.save(path, each)
        found = ckpt.sync.load(path)
        assert_same(found, each)
        assert type(found) is type(each) or isinstance(each, jax.Array)
        assert_same(ckpt.sync.load(path, like=each), each)
    found = ckpt.sync.load(tmp_path / "0")
    assert list(found) == list(tree)
    assert type(found["default"]) is collections.defaultdict
    assert found["default"].default_factory is list
    assert type(found["adam"][0]) is type(tree["adam"][0])


def test_none_is_not_a_checkpoint_but_may_be_in_one(tmp_path: Path) -> None:
    with pytest.raises(ckpt.errors.InvalidArgumentError, match="nothing to save"):
        ckpt.sync.save(tmp_path / "x", None)
    ckpt.sync.save(tmp_path / "x", items={"nothing": None})
    assert ckpt.sync.load(tmp_path / "x") == {"nothing": None}


MESHES = {
    "1": (1, 1),
    "2": (2, 1),
    "2 across": (1, 2),
    "3": (3, 1),
    "4": (2, 2),
    "8": (2, 4),
    "8 tall": (8, 1),
}
SPECS = [P(), P("data"), P("model", "data"), P(None, ("data", "model"))]


@pytest.mark.parametrize("target", MESHES)
def test_any_mesh_to_any_mesh(tmp_path: Path, target: str) -> None:
    base = np.arange(48 * 48 * 64, dtype=np.float32).reshape(48, 48, 64)
    cases = itertools.product(("1", "3", "4", "8"), SPECS)
    tree = {
        f"{name} {spec}": jax.device_put(base, NamedSharding(mesh(*MESHES[name]), spec))
        for name, spec in cases
    }
    staging = ckpt.Staging(budget_bytes=1 << 20)
    ckpt.sync.save(tmp_path / "x", tree, staging=staging)
    for spec in SPECS:
        sharding = NamedSharding(mesh(*MESHES[target]), spec)
        like = jax.tree.map(
            lambda x, s=sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree
        )
        found = ckpt.sync.load(tmp_path / "x", like=like)
        for name, array in found.items():
            assert array.sharding == sharding
            assert bits(array) == base.tobytes(), name


def test_shardings_come_back_without_a_target(tmp_path: Path) -> None:
    explicit = jax.make_mesh((4, 2), ("x", "y"))
    tree = {
        "explicit": jax.device_put(jnp.ones((8, 8)), NamedSharding(explicit, P("x", "y"))),
        "joint": sharded(np.ones((16, 2)), ("data", "model")),
        "third device": jax.device_put(jnp.ones(3), jax.devices()[3]),
        "free": jnp.ones(3),
        "host": jax.device_put(
            jnp.ones(4), SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host")
        ),
    }
    ckpt.sync.save(tmp_path / "x", tree)
    found = ckpt.sync.load(tmp_path / "x")
    for name, array in tree.items():
        assert found[name].sharding == array.sharding, name
        assert found[name].committed == array.committed, name


def test_free_arrays_stay_free_so_that_they_combine_with_any_others(tmp_path: Path) -> None:
    state = {"count": jnp.zeros((), jnp.int32), "w": sharded(np.ones(8), "data")}
    ckpt.sync.save(tmp_path / "x", state)
    for like in (None, abstract(state)):
        found = ckpt.sync.load(tmp_path / "x", like=like)
        assert float(jax.jit(lambda s: jnp.sum(s["w"]) + s["count"])(found)) == 8.0


def test_the_target_decides_kind_dtype_and_place(tmp_path: Path) -> None:
    ckpt.sync.save(
        tmp_path / "x", {"a": sharded(np.ones((8, 8)), "data"), "b": np.arange(3), "c": 1}
    )
    like = {
        "a": np.empty((8, 8), np.float64),
        "b": jax.ShapeDtypeStruct((3,), jnp.int32),
        "c": int,
    }
    found = ckpt.sync.load(tmp_path / "x", like=like)
    assert type(found["a"]) is np.ndarray
    assert found["a"].dtype == np.float64
    assert found["a"].flags.writeable
    assert isinstance(found["b"], jax.Array)
    assert found["b"].tolist() == [0, 1, 2]
    assert found["c"] == 1
    skipped: Any = ckpt.sync.load(tmp_path / "x", like={"a": ..., "b": np.empty(3, int), "c": ...})
    assert skipped["a"] is ...
    assert skipped["b"].tolist() == [0, 1, 2]


def test_results_do_not_share_memory_with_each_other_or_the_library(tmp_path: Path) -> None:
    tree = {"small": np.arange(10), "large": np.arange(1 << 17)}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, tree)
        mgr.wait_until_finished()
        first = mgr.restore(0)
        for array in first.values():
            array[...] = -1
        assert_same(mgr.restore(0), tree)


def test_metadata_tells_everything_but_the_values(tmp_path: Path) -> None:
    tree = {"w": sharded(np.ones((8, 4), jnp.bfloat16), "data", None), "n": 3, "v": np.ones(2)}
    info = ckpt.sync.save(
        tmp_path / "x", tree, metrics={"loss": float("nan")}, custom_metadata={"run": ["a", 1]}
    )
    found = asyncio.run(ckpt.metadata(tmp_path / "x"))
    assert found.info.metrics is not None
    assert info.metrics is not None
    assert found.info == info or np.isnan(found.info.metrics["loss"])
    assert np.isnan(info.metrics["loss"])
    assert info.custom_metadata == {"run": ["a", 1]}
    assert info.nbytes == 8 * 4 * 2 + 16
    leaf = found.tree["w"]
    assert (leaf.shape, leaf.dtype, leaf.kind) == ((8, 4), jnp.bfloat16, "jax")
    assert leaf.saved_sharding.spec == ["data", None]
    assert found.tree["n"] == 3
    # The metadata is a target too.
    assert_same(ckpt.sync.load(tmp_path / "x", like=found.tree), tree, placed=False)


def test_a_sharding_of_absent_devices_is_made_of_those_that_are_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {
        "w": sharded(np.arange(8.0, dtype=np.float32), "data"),
        "v": sharded(np.ones(8), "data"),
    }
    ckpt.sync.save(tmp_path / "x", tree)
    document = document_of(tmp_path / "x")
    for sharding in document["items"]["default"]["shardings"]:
        sharding["device_ids"][0] = 9000
    rewrite(tmp_path / "x", document)
    found = ckpt.sync.load(tmp_path / "x")
    assert_same(found, tree)
    assert [r for r in caplog.records if r.levelname == "WARNING"] == []


def test_async_and_plain_calls_are_the_same(tmp_path: Path) -> None:
    tree = {"x": jnp.arange(4), "y": [1, "two"]}

    async def main() -> Any:
        await ckpt.save(tmp_path / "a", tree)
        async with ckpt.CheckpointManager(tmp_path / "root") as mgr:
            commit = await mgr.save(7, tree, metrics={"loss": jnp.float32(0.5)})
            info = await commit
            assert info is not None
            assert (info.step, info.metrics) == (7, {"loss": 0.5})
            assert await mgr.metrics(7) == {"loss": 0.5}
            assert await mgr.latest_step() == 7
            assert (await mgr.metadata()).info == info
        assert_same(await ckpt.load(tmp_path / "root" / "7"), tree)
        return await ckpt.load(tmp_path / "a")

    assert_same(asyncio.run(main()), tree)
    assert_same(ckpt.sync.load(tmp_path / "a"), tree)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(states())
def test_any_state_comes_back_exactly(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    if state is None:
        return
    path = tmp_path_factory.mktemp("any") / "x"
    ckpt.sync.save(path, items={"state": state})
    (found,) = ckpt.sync.load(path).values()
    assert differences(state, found, shared=True) == []
    (found,) = ckpt.sync.load(path, like={"state": abstract_state(state)}).values()
    assert differences(unshared(state), unshared(found)) == []


def abstract_state(state: Any) -> Any:
    """The tree as a target that has none of its values."""

    def leaf(each: Any) -> Any:
        if isinstance(each, jax.Array):
            weak = getattr(each, "weak_type", False)
            return jax.ShapeDtypeStruct(
                each.shape, each.dtype, sharding=each.sharding, weak_type=weak
            )
        if isinstance(each, np.ndarray):
            return np.zeros_like(each)
        return each

    return jax.tree.map(leaf, state)


def unshared(state: Any) -> Any:
    """The tree with every array an object of its own, keys of dicts in the order of jax."""
    return jax.tree.map(copy.copy, state)
