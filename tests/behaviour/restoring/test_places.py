"""Arrays come back where they were, or where today's program puts them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.jax_utils import replicate
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync

SHAPE = (16, 8)


def mesh_of(kind: AxisType, *sizes: int) -> Mesh:
    names = ("data", "model")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


AUTO, EXPLICIT = mesh_of(AxisType.Auto, 4, 2), mesh_of(AxisType.Explicit, 4, 2)
BACKWARDS = Mesh(
    np.array(jax.devices())[::-1].reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
)
SPEC = P("data", "model")


def put(mesh: Mesh) -> Callable[[], Any]:
    def init() -> Any:
        w = jax.device_put(jnp.ones(SHAPE), NamedSharding(mesh, SPEC))
        return {"w": w, "b": jnp.zeros(8), "step": jnp.int32(0)}

    return init


def constrained() -> Any:
    place = NamedSharding(AUTO, SPEC)
    return {"w": jax.lax.with_sharding_constraint(jnp.ones(SHAPE), place), "step": jnp.int32(0)}


def split() -> Any:
    return nnx.split(
        nnx.Linear(
            8,
            16,
            kernel_init=nnx.with_partitioning(nnx.initializers.ones, (None, "data")),
            rngs=nnx.Rngs(0),
        ),
    )[1]


def on_device() -> Any:
    return {"w": jax.device_put(jnp.ones(4), jax.devices()[5])}


FUNCTIONS: dict[str, Any] = {
    "put": put(AUTO),
    "put on explicit axes": put(EXPLICIT),
    "put on devices backwards": put(BACKWARDS),
    "constrained": constrained,
    "jitted": jax.jit(constrained),
    "jitted on explicit axes": jax.jit(put(EXPLICIT)),
    "jitted with shardings": jax.jit(constrained, out_shardings=NamedSharding(AUTO, P())),
    "replicated": lambda: replicate({"w": jnp.ones(SHAPE)}),
    "one device": on_device,
}


def places(tree: Any) -> list[Any]:
    return [(leaf.sharding, leaf.committed) for leaf in jax.tree.leaves(tree)]


def equal_places(one: Any, other: Any) -> bool:
    """Tell whether arrays lie alike: explicit axes write the same spec in several ways."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(
        a.committed == b.committed and a.sharding.is_equivalent_to(b.sharding, a.ndim)
        for a, b in pairs
    )


def resumed(root: Path, init: Any, like: Any = None) -> Any:
    with ckpt.sync.CheckpointManager(root) as mgr:
        step, state = mgr.resume(init, like=like)
        if step < 2:
            mgr.save(step, jax.tree.map(lambda leaf: leaf, state))
        return state


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("form", ["function", "abstract", "eval_shape"])
def test_a_second_start_has_the_places_of_the_first(
    name: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    init = FUNCTIONS[name]
    first = resumed(tmp_path, init)
    targets: dict[str, Any] = {"abstract": ckpt.abstract, "eval_shape": jax.eval_shape}
    second = resumed(tmp_path, init, targets[form](init) if form in targets else None)
    assert equal_places(first, second), (places(first), places(second))
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_a_module_of_nnx_has_its_places_again(mesh: Mesh, tmp_path: Path) -> None:
    with jax.set_mesh(mesh):
        init = jax.jit(split)
        first = resumed(tmp_path, init)
        assert equal_places(first, resumed(tmp_path, init))
        assert equal_places(first, resumed(tmp_path, init, nnx.eval_shape(split)))
        assert equal_places(first, resumed(tmp_path, split))


def test_uncommitted_arrays_can_be_mixed_with_a_batch_on_a_mesh(tmp_path: Path) -> None:
    batch = jax.device_put(jnp.ones((8, 16)), NamedSharding(AUTO, P("data")))

    def init() -> Any:
        return {"w": jnp.ones(SHAPE), "step": jnp.int32(0), "key": jax.random.key(0)}

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        w = state["w"] + (batch @ state["w"]).sum()
        return {**state, "w": w, "step": state["step"] + 1}

    state = init()
    for start in range(3):
        with ckpt.sync.CheckpointManager(tmp_path) as mgr:
            found, state = mgr.resume(init())
            assert found == start
            state = step(state, batch)
            mgr.save(start, state)
    assert int(ckpt.sync.load(tmp_path / "2", init())["step"]) == 3


@pytest.mark.parametrize("target", ["arrays", "shapes"])
def test_an_array_that_was_uncommitted_stays_so(
    target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {"w": jnp.ones(4), "key": jax.random.key(0)}
    one = jax.device_put(jnp.ones(3), jax.devices()[3])
    ckpt.sync.save(tmp_path / "x", {**tree, "one": one})
    like = {**tree, "one": jnp.ones(3)}
    if target == "shapes":
        like = jax.eval_shape(lambda: like)
    for context in (None, EXPLICIT):
        with jax.set_mesh(context):
            found = ckpt.sync.load(tmp_path / "x", like)
        assert not found["w"].committed
        assert not found["key"].committed
    if target == "arrays":
        # Nothing binds the run of today to that device.
        assert not found["one"].committed
    else:
        found = ckpt.sync.load(tmp_path / "x", like)
        assert found["one"].sharding == one.sharding
        assert found["one"].committed
    assert not caplog.records


def test_the_mesh_that_is_set_comes_first_for_a_leaf_without_a_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = NamedSharding(mesh_of(AxisType.Auto, 8), P("data"))
    tree = {
        "fits": jax.device_put(jnp.ones((16, 3)), wide),
        "odd": jax.device_put(jnp.ones((8, 3)), wide),
        "numpy": np.ones(3, np.float32),
        "number": 3,
    }
    ckpt.sync.save(tmp_path / "x", tree)
    like = jax.eval_shape(lambda: {**tree, "numpy": jnp.ones(3), "number": jnp.int32(0)})
    mesh = jax.make_mesh((2, 4), ("other", "data"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        found = ckpt.sync.load(tmp_path / "x", like)
        as_saved = ckpt.sync.load(tmp_path / "x")
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    for name, place in {"fits": rows, "odd": rows, "numpy": whole, "number": whole}.items():
        assert found[name].sharding.is_equivalent_to(place, found[name].ndim), name
        assert found[name].sharding.mesh == mesh
    # Without a target, everything is where it was.
    assert as_saved["fits"].sharding == wide
    assert not caplog.records


def test_what_a_mesh_cannot_have_is_replicated_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = NamedSharding(AUTO, SPEC)
    tree = jax.device_put({"a": jnp.ones(SHAPE), "b": jnp.ones((4, 8))}, place)
    ckpt.sync.save(tmp_path / "x", tree)
    mesh = mesh_of(AxisType.Auto, 8)
    with jax.set_mesh(mesh):
        found = ckpt.sync.load(tmp_path / "x", jax.eval_shape(lambda: tree))
    assert found["a"].sharding == NamedSharding(mesh, P("data", None))
    assert found["b"].sharding.is_fully_replicated
    assert found["b"].sharding.mesh == mesh
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "1 (a): it has no 'model' there" in record.getMessage()
    assert "1 (b): it has no 'data', 'model' there" in record.getMessage()
    assert "like= with shardings" in record.getMessage()


def test_a_sharding_over_an_abstract_mesh_is_made_real(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"w": jnp.ones(SHAPE)})
    abstract = NamedSharding(EXPLICIT.abstract_mesh, P(None, "data"))
    like = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=abstract)}
    found = ckpt.sync.load(tmp_path / "x", like)["w"]
    assert found.sharding == NamedSharding(EXPLICIT, P(None, "data"))
    with jax.set_mesh(BACKWARDS):
        found = ckpt.sync.load(tmp_path / "x", like)["w"]
    assert found.sharding == NamedSharding(BACKWARDS, P(None, "data"))
    with jax.sharding.use_abstract_mesh(EXPLICIT.abstract_mesh):
        bare = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
        ckpt.sync.save(tmp_path / "y", {"w": np.ones(SHAPE, np.float32)})
        found = ckpt.sync.load(tmp_path / "y", {"w": bare})["w"]
    assert found.sharding == NamedSharding(EXPLICIT, P())


def test_the_default_device_of_the_caller_is_that_of_new_arrays(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"w": jnp.ones(4)})
    with jax.default_device(jax.devices()[6]):
        found = ckpt.sync.load(tmp_path / "x", {"w": jnp.ones(4)})["w"]
        assert found.sharding == SingleDeviceSharding(jax.devices()[6])
        assert not found.committed


WEAK_SHAPES = [(), (8,), (8, 4), (0, 8), (1, 8, 2)]


def weak(value: Any, shape: tuple[int, ...], place: Any) -> jax.Array:
    made = jnp.broadcast_to(jnp.asarray(value), shape) if shape else jnp.asarray(value)
    array = jax.device_put(made, place)
    assert array.weak_type
    return array


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("value", [3, 2.5, 1j])
def test_weakly_typed_arrays_come_back_everywhere(mesh: Mesh, value: Any, tmp_path: Path) -> None:
    places: list[Any] = [None, jax.devices()[3], NamedSharding(mesh, P())]
    places.append(NamedSharding(mesh, P(), memory_kind="pinned_host"))
    tree = {
        f"{shape} {number}": weak(value, shape, place)
        for shape in WEAK_SHAPES
        for number, place in enumerate(places)
    }
    tree |= {
        f"{shape} cut": weak(value, shape, NamedSharding(mesh, P(*axes)))
        for shape, axes in [
            ((8,), ["data"]),
            ((8, 4), [*SPEC]),
            ((0, 8), [None, "data"]),
            ((1, 8, 2), [None, *SPEC]),
        ]
    }
    ckpt.sync.save(tmp_path / "x", tree)
    assert ckpt.sync.verify(tmp_path / "x").ok
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        compiled.append(event)

    for like in (None, tree, jax.eval_shape(lambda: tree)):
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            found = ckpt.sync.load(tmp_path / "x", like)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        for name, array in tree.items():
            back = found[name]
            assert back.weak_type, name
            assert equal_places(back, array), name
            assert np.asarray(back).tobytes() == np.asarray(array).tobytes()
        # What came back can be donated.
        jax.jit(lambda each: each + 1, donate_argnums=0)(found["(8,) 0"])
        assert found["(8,) 0"].is_deleted()
    assert not [event for event in compiled if "backend_compile" in event]
