"""Orbax and plain TensorStore read what this library writes.

What is written here is read back without `ckpt`: by both APIs of Orbax, from one-shot directories
and from the root of a manager, and by TensorStore alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp0
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

import ckpt
from tests.support.manifests import document_of, leaf_rows
from tests.support.trees import P, abstract, mesh, sharded, structure

Moments = namedtuple("Moments", ["mean", "variance"])

# The dtypes that both numpy (or ml_dtypes) and zarr, as TensorStore speaks it, have a name for.
DTYPES = [
    "bool",
    "int2",
    "int4",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
UNNAMED_DTYPES = ["float8_e4m3", "uint2", "uint4"]
WIDE_DTYPES = {"int64", "uint64", "float64", "complex128"}
STEPS = [3, 12]
# Little enough that a megabyte has several chunks, and an item several data files.
STAGING = ckpt.Staging(budget_bytes=1 << 20)
METRICS = {3: {"loss": 1.5}, 12: {"loss": 0.25, "accuracy": 0.5}}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def make_state() -> dict[str, Any]:
    return {
        "params": {
            "kernel": sharded(np.arange(128.0, dtype=np.float32).reshape(8, 16), "data", "model"),
            "bias": sharded(np.arange(16).astype(ml_dtypes.bfloat16), ("data", "model")),
            # Not packed, and larger than a batch: several chunks, several data files.
            "table": sharded(np.arange(2**20, dtype=np.float32).reshape(1024, 1024), "data"),
            # Shards of prime length: a chunk that lies in two of them, and a ragged one.
            "odd": sharded(np.arange(2 * 1009 * 200, dtype=np.int32).reshape(2018, 200), "data"),
            "odder": sharded(
                (np.arange(2 * 4 * 300_007) % 251).astype(np.uint8).reshape(2, -1), "data", "model"
            ),
        },
        "count": sharded(np.arange(5, dtype=np.int32)),
        "scale": jnp.float32(0.5),
        "moments": Moments(jnp.ones((2, 3)), np.arange(6, dtype=np.int16)),
        "layers": [jnp.zeros(3), (np.full(2, 7), jnp.arange(4))],
        "host": np.arange(12, dtype=np.int64).reshape(3, 4),
        "ragged": np.arange(200_003, dtype=np.float32),
        "epoch": 7,
        "rate": 0.125,
        "nothing": None,
        "empty": {},
    }


def expected_by_orbax(state: dict[str, Any]) -> dict[str, Any]:
    """What Orbax makes of the state where it is given no target: lists and dicts only."""
    layers = state["layers"]
    return state | {
        "moments": state["moments"]._asdict(),
        "layers": [layers[0], list(layers[1])],
    }


def assert_same(found: Any, expected: Any) -> None:
    """Compare two trees: structure, dtypes, shapes, values, and the places of jax arrays."""
    assert structure(found) == structure(expected)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        other = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        where = jax.tree_util.keystr(path)
        if isinstance(leaf, str | int | float):
            assert type(other) is type(leaf), where
            assert other == leaf, where
            continue
        assert isinstance(other, jax.Array) == isinstance(leaf, jax.Array), where
        assert other.dtype == leaf.dtype, where
        assert other.shape == leaf.shape, where
        assert np.asarray(other).tobytes() == np.asarray(leaf).tobytes(), where
        if isinstance(leaf, jax.Array):
            assert other.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), where


def split_last_axis(array: jax.Array) -> NamedSharding:
    """A sharding other than any that was saved, over another mesh."""
    other = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("a", "b"))
    fits = array.ndim > 0 and array.shape[-1] % 4 == 0
    spec = [None] * (array.ndim - 1) + ["b"] if fits else []
    return NamedSharding(other, P(*spec))


def moved(state: dict[str, Any]) -> dict[str, Any]:
    """The state on those shardings."""
    return jax.tree.map(
        lambda leaf: (
            jax.device_put(leaf, split_last_axis(leaf)) if isinstance(leaf, jax.Array) else leaf
        ),
        state,
    )


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return make_state()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> Path:
    """The root of a manager with two steps."""
    root = tmp_path_factory.mktemp("orbax") / "run"
    with ckpt.sync.CheckpointManager(root, staging=STAGING) as mgr:
        for step in STEPS:
            mgr.save(
                step, state, metrics=METRICS[step], custom_metadata={"git": "abc", "step": step}
            )
    return root


@pytest.fixture(scope="module")
def final(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> Path:
    """A one-shot checkpoint."""
    path = tmp_path_factory.mktemp("orbax") / "final"
    ckpt.sync.save(path, state, custom_metadata={"git": "abc"}, staging=STAGING)
    return path


@pytest.fixture(params=["one-shot", "step"])
def checkpoint(request: pytest.FixtureRequest, run: Path, final: Path) -> Path:
    return final if request.param == "one-shot" else run / str(STEPS[-1])


def manifest(path: Path) -> dict[str, Any]:
    return document_of(path)


def test_the_state_exercises_what_a_writer_can_do(checkpoint: Path, state: dict[str, Any]) -> None:
    """Several data files, packed leaves, chunks that cross shards and chunks that are ragged."""
    item = manifest(checkpoint)["items"]["default"]
    leaves = {leaf["name"]: leaf for leaf in leaf_rows(item) if "dtype" in leaf}
    assert leaves["params.kernel"]["packed"]
    assert not leaves["params.table"].get("packed", False)
    assert len(set(leaves["params.table"]["files"])) > 2
    data_files = {path.name for path in (checkpoint / "default" / "d").iterdir()}
    # And one file for the index over them.
    assert len({Path(path).name for path in item["data_files"]} ^ data_files) == 1
    crossing, ragged = set(), set()
    for name in (name for name, leaf in leaves.items() if not leaf.get("packed", False)):
        array = state["params"].get(name.removeprefix("params."), state.get(name))
        shard = array.shape
        if isinstance(array, jax.Array):
            shard = array.sharding.shard_shape(array.shape)
        for chunk, length, part in zip(leaves[name]["chunks"], array.shape, shard, strict=True):
            if length % chunk:
                ragged.add(name)
            if part < length and part % chunk:
                crossing.add(name)
    assert crossing == {"params.odd", "params.odder"}
    assert ragged == {"params.odd", "params.odder", "ragged"}


# Orbax, API v1.


def test_v1_takes_it_for_a_checkpoint(checkpoint: Path) -> None:
    assert ocp.is_orbax_checkpoint(checkpoint)


def test_v1_loads_it_as_it_was_saved(checkpoint: Path, state: dict[str, Any]) -> None:
    assert_same(ocp.load(checkpoint), expected_by_orbax(state))


def test_v1_loads_it_onto_a_target(checkpoint: Path, state: dict[str, Any]) -> None:
    assert_same(ocp.load(checkpoint, abstract(state)), state)


def test_v1_loads_it_onto_other_shardings(checkpoint: Path, state: dict[str, Any]) -> None:
    found = ocp.load(checkpoint, abstract(moved(state)))
    assert_same(found, moved(state))
    assert found["params"]["table"].sharding == split_last_axis(state["params"]["table"])


def test_v1_loads_it_on_a_single_device_without_this_library(
    run: Path, final: Path, state: dict[str, Any]
) -> None:
    program = """
import json, sys
import jax, numpy as np
from orbax.checkpoint import v1 as ocp
device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
target = {
    "params": {
        "kernel": jax.ShapeDtypeStruct((8, 16), "float32", sharding=device),
        "bias": jax.ShapeDtypeStruct((16,), "bfloat16", sharding=device),
        "table": jax.ShapeDtypeStruct((1024, 1024), "float32", sharding=device),
        "odd": jax.ShapeDtypeStruct((2018, 200), "int32", sharding=device),
        "odder": jax.ShapeDtypeStruct((2, 4 * 300007), "uint8", sharding=device),
    },
}
for path in sys.argv[1:]:
    with ocp.Context(pytree_options=ocp.options.PyTreeOptions(
        loading=ocp.options.PyTreeOptions.Loading(partial_load=True))):
        found = ocp.load(path, target)
    print(json.dumps(jax.tree.map(lambda x: float(np.asarray(x, np.float64).sum()), found)))
assert jax.device_count() == 1 and "ckpt" not in sys.modules
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(final), str(run / str(STEPS[-1]))],
        env=env | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sums = jax.tree.map(lambda x: float(np.asarray(x, np.float64).sum()), state["params"])
    assert [json.loads(line)["params"] for line in done.stdout.splitlines()] == [sums, sums]


def test_v1_shows_its_metadata(checkpoint: Path, state: dict[str, Any]) -> None:
    found = ocp.metadata(checkpoint)
    tree = found.metadata
    assert tree["params"]["kernel"].shape == (8, 16)
    assert tree["params"]["kernel"].dtype == np.float32
    assert tree["params"]["kernel"].sharding_metadata.partition_spec == ("data", "model")
    assert tree["params"]["bias"].dtype == ml_dtypes.bfloat16
    assert tree["host"].shape == (3, 4)
    assert tree["moments"]["variance"].dtype == np.int16
    assert (tree["nothing"], tree["empty"]) == (None, {})
    assert found.custom_metadata["git"] == "abc"
    own = manifest(checkpoint)
    assert found.init_timestamp_nsecs == own["created_ns"]
    assert found.commit_timestamp_nsecs == own["committed_ns"]


def test_v1_loads_named_items(tmp_path: Path) -> None:
    items: dict[str, Any] = {"params": {"w": sharded(np.arange(16.0), "data")}, "opt": {"count": 3}}
    ckpt.sync.save(tmp_path / "both", items=items)
    assert_same(ocp.load_checkpointables(tmp_path / "both"), items)
    assert_same(ocp.load(tmp_path / "both", checkpointable_name="params"), items["params"])
    names = ocp.checkpointables_metadata(tmp_path / "both").metadata
    assert set(names) == {"params", "opt"}
    target = {"params": abstract(moved(items["params"]))}
    loaded = ocp.load_checkpointables(tmp_path / "both", target)
    assert loaded["params"]["w"].sharding == split_last_axis(items["params"]["w"])


def test_v1_checkpointer_lists_and_loads_the_steps(run: Path, state: dict[str, Any]) -> None:
    with ocp.training.Checkpointer(run) as checkpointer:
        assert [found.step for found in checkpointer.checkpoints] == STEPS
        assert checkpointer.latest.step == STEPS[-1]
        # As with the steps of Orbax's own v0 manager, whose one item has this name as well.
        name = "default"
        assert_same(checkpointer.load(STEPS[0], checkpointable_name=name), expected_by_orbax(state))
        assert_same(checkpointer.load(None, abstract(state), checkpointable_name=name), state)
        for step in STEPS:
            assert_same(ocp.load(run / str(step)), expected_by_orbax(state))
        metadata = checkpointer.metadata(STEPS[0])
        assert metadata.custom_metadata == {"git": "abc", "step": STEPS[0]}


def test_v1_checkpointer_shows_the_metrics(run: Path) -> None:
    with ocp.training.Checkpointer(run) as checkpointer:
        found = {each.step: each.metrics for each in checkpointer.checkpoints}
    assert found == METRICS


# Orbax, API v0.


def test_v0_manager_lists_the_same_steps(run: Path) -> None:
    ours = ckpt.sync.CheckpointManager(run, mode="r")
    with ours, ocp0.CheckpointManager(run) as theirs:
        assert list(theirs.all_steps()) == ours.all_steps() == STEPS
        assert theirs.latest_step() == ours.latest_step() == STEPS[-1]


def test_v0_manager_restores_onto_a_target(run: Path, state: dict[str, Any]) -> None:
    target = abstract(moved(state))
    with ocp0.CheckpointManager(run) as manager:
        found = manager.restore(STEPS[0], args=ocp0.args.StandardRestore(target))
    assert_same(found, moved(state))


def test_v0_manager_restores_without_a_target(run: Path, state: dict[str, Any]) -> None:
    with ocp0.CheckpointManager(run) as manager:
        found = manager.restore(STEPS[0], args=ocp0.args.StandardRestore())
    assert_same(found, expected_by_orbax(state))


def test_v0_manager_restores_without_arguments(run: Path, state: dict[str, Any]) -> None:
    with ocp0.CheckpointManager(run) as manager:
        assert_same(manager.restore(STEPS[0]), expected_by_orbax(state))


def test_v0_manager_shows_metadata(run: Path) -> None:
    handler = ocp0.StandardCheckpointHandler()
    with ocp0.CheckpointManager(run, item_handlers=handler) as manager:
        found = manager.metadata(STEPS[1])
        item = manager.item_metadata(STEPS[1])
    assert found.custom_metadata == {"git": "abc", "step": STEPS[1]}
    own = manifest(run / str(STEPS[1]))
    assert found.init_timestamp_nsecs == own["created_ns"]
    assert found.commit_timestamp_nsecs == own["committed_ns"]
    assert found.metrics == METRICS[STEPS[1]]
    assert item["params"]["table"].shape == (1024, 1024)


def test_v0_manager_finds_the_best_step_by_its_metrics(run: Path) -> None:
    options = ocp0.CheckpointManagerOptions(best_fn=lambda metrics: -metrics["loss"])
    with ocp0.CheckpointManager(run, options=options) as manager:
        assert {step: manager.metrics(step) for step in STEPS} == METRICS
        assert manager.best_step() == 12


def test_orbax_reads_metrics_that_are_not_finite(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(1, {"w": jnp.ones(2)}, metrics={"loss": float("nan"), "best": float("inf")})
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        found = checkpointer.checkpoints[0].metrics
    assert np.isnan(found["loss"])
    assert found["best"] == float("inf")


# What is not finished, and what is not ours.


def steps_by_orbax(root: Path) -> list[int]:
    with ocp0.CheckpointManager(root) as old, ocp.training.Checkpointer(root) as new:
        listed = [found.step for found in new.checkpoints]
        assert listed == list(old.all_steps())
    return listed


def test_orbax_does_not_list_an_attempt_under_way(tmp_path: Path) -> None:
    root = tmp_path / "run"
    seen: list[tuple[list[int], list[str]]] = []

    def look(event: ckpt.types.Event) -> None:
        if event.phase == "write":
            seen.append((steps_by_orbax(root), os.listdir(root)))

    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(1, {"w": np.ones(3)}).result()
    with ckpt.sync.CheckpointManager(root, observers=[look]) as mgr:
        mgr.save(2, {"w": np.ones(3)}).result()
    listed, names = seen[0]
    assert listed == [1]
    assert [name.startswith("2.orbax-checkpoint-tmp-") for name in names].count(True) == 1
    assert steps_by_orbax(root) == [1, 2]


def test_orbax_does_not_list_what_was_left_behind(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(1, {"w": np.ones(3)})
    token = "0123456789abcdef" * 2
    for name in (
        f"2.orbax-checkpoint-tmp-{token}",
        f"3.orbax-checkpoint-tmp-{token}.trash",
        f".ckpt-clock-{token}",
    ):
        (root / name).mkdir()
        (root / name / "orbax.checkpoint").touch()
    (root / f".ckpt-lease-{token}").touch()
    assert steps_by_orbax(root) == [1]


# Leaves of every kind.


def test_v1_loads_every_dtype(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    for name in DTYPES:
        values = np.arange(12).reshape(3, 4) % 2 if name == "bool" else np.arange(12).reshape(3, 4)
        tree[f"{name}-host"] = values.astype(dtype_of(name))
        if name not in WIDE_DTYPES:
            tree[f"{name}-device"] = jnp.asarray(tree[f"{name}-host"])
    ckpt.sync.save(tmp_path / "dtypes", tree)
    assert_same(ocp.load(tmp_path / "dtypes"), tree)
    assert_same(ocp.load(tmp_path / "dtypes", abstract(tree)), tree)


def test_dtypes_without_a_zarr_name_appear_as_their_bytes(tmp_path: Path) -> None:
    tree = {name: np.arange(4).astype(dtype_of(name)) for name in UNNAMED_DTYPES}
    ckpt.sync.save(tmp_path / "dtypes", tree)
    found = ocp.load(tmp_path / "dtypes")
    assert_same(found, {name: array.view(np.uint8) for name, array in tree.items()})


def test_values_orbax_has_no_kind_for_appear_as_text(tmp_path: Path) -> None:
    tree = {"complex": 1 + 2j, "bytes": b"\x00a", "big": 2**70, "huge": -(10**5000)}
    ckpt.sync.save(tmp_path / "scalars", tree)
    assert ocp.load(tmp_path / "scalars") == {
        "complex": "(1+2j)",
        "bytes": repr(b"\x00a"),
        "big": hex(2**70),
        "huge": hex(-(10**5000)),
    }


def test_v1_loads_python_scalars_and_text(tmp_path: Path) -> None:
    tree = {"small": -3, "least": -(2**63), "half": 0.5, "flag": True, "text": "über\n"}
    ckpt.sync.save(tmp_path / "scalars", tree)
    assert_same(ocp.load(tmp_path / "scalars"), tree)
    assert_same(ocp.load(tmp_path / "scalars", tree), tree)


def test_arrays_without_elements_and_without_dimensions(tmp_path: Path) -> None:
    tree = {
        "none": jnp.zeros((0, 3)),
        "none-host": np.zeros((2, 0), np.int8),
        "one": jnp.float32(2),
        "one-host": np.array(3.0),
    }
    ckpt.sync.save(tmp_path / "shapes", tree)
    assert_same(ocp.load(tmp_path / "shapes"), tree)


def test_keys_are_texts(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "keys", {"a": {"b": jnp.ones(2)}, "ü 1": 5, "p": {2: 6}})
    found = ocp.load(tmp_path / "keys")
    assert_same(found, {"a": {"b": jnp.ones(2)}, "ü 1": 5, "p": {"2": 6}})


def test_containers_without_leaves_stay(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "empties", {"a": {}, "b": [None, ()], "c": []})
    assert ocp.load(tmp_path / "empties") == {"a": {}, "b": [None, ()], "c": []}


def test_v1_loads_arrays_of_a_single_device_and_of_host_memory(tmp_path: Path) -> None:
    last = jax.devices()[-1]
    kinds = {memory.kind for memory in last.addressable_memories()}
    host = next((kind for kind in ("pinned_host", "unpinned_host") if kind in kinds), None)
    tree = {
        "one": jax.device_put(jnp.arange(4.0), SingleDeviceSharding(last)),
        "split": jax.device_put(
            jnp.arange(8.0), NamedSharding(mesh(), P("data"), memory_kind=host)
        ),
    }
    ckpt.sync.save(tmp_path / "places", tree)
    found = ocp.load(tmp_path / "places")
    np.testing.assert_array_equal(found["split"], np.arange(8.0))
    assert found["one"].devices() == {last}
    assert found["split"].sharding.device_set == set(jax.devices())


# TensorStore alone.


def test_tensorstore_reads_every_array(checkpoint: Path, state: dict[str, Any]) -> None:
    arrays = {
        "params.kernel": state["params"]["kernel"],
        "params.bias": state["params"]["bias"],
        "params.table": state["params"]["table"],
        "params.odd": state["params"]["odd"],
        "params.odder": state["params"]["odder"],
        "ragged": state["ragged"],
        "count": state["count"],
        "scale": state["scale"],
        "moments.mean": state["moments"].mean,
        "layers.1.0": state["layers"][1][0],
        "host": state["host"],
        "epoch": np.int64(state["epoch"]),
        "rate": np.float64(state["rate"]),
    }
    for name, expected in arrays.items():
        spec = {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"{(checkpoint / 'default').as_uri()}/",
                "path": f"{name}/",
            },
        }
        found = ts.open(spec, read=True).result().read().result()
        assert found.dtype == expected.dtype, name
        np.testing.assert_array_equal(found, np.asarray(expected), err_msg=name)


# -- what a tree can hold beside plain arrays -----------------------------------------------------


def test_orbax_reads_typed_keys_and_shared_leaves(tmp_path: Path) -> None:
    shared = jnp.arange(70_000, dtype=jnp.float32)
    state: dict[str, Any] = {
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3),
        "tied": {"embed": shared, "head": shared},
    }
    ckpt.sync.save(tmp_path / "x", state)
    for found in (ocp.load(tmp_path / "x"), ocp0_restored(tmp_path / "x" / "default")):
        for name in ("key", "keys"):
            assert found[name].dtype == state[name].dtype
            assert found[name].shape == state[name].shape
            data = [np.asarray(jax.random.key_data(tree[name])) for tree in (found, state)]
            assert np.array_equal(data[0], data[1])
        assert np.array_equal(found["tied"]["embed"], shared)
        assert np.array_equal(found["tied"]["head"], shared)


def ocp0_restored(path: Path) -> Any:
    with ocp0.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def test_orbax_reads_the_arrays_beside_values_it_has_no_kind_for(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "w": jnp.ones(3),
        "f": jax.nn.relu,
        "name": np.str_("x"),
        "raw": np.bytes_(b"y"),
    }
    ckpt.sync.save(tmp_path / "x", state)
    found = ocp.load(tmp_path / "x")
    assert np.array_equal(found["w"], state["w"])
    assert found["name"] == "x"
    assert found["f"].endswith("relu")
