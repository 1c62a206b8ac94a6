"""Flax Linen: variables, boxes with the names of axes, train states, and `flax.struct`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.trees import structure

flax = pytest.importorskip("flax")

from flax import linen as nn  # noqa: E402
from flax import struct  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

import ckpt  # noqa: E402
import ckpt.sync  # noqa: E402
from ckpt.testing.compare import differences  # noqa: E402
from tests.interop.frameworks.exact import (  # noqa: E402
    abstract,
    by_jax,
    comes_back,
    comes_back_with_a_target,
    told_at_load,
)
from tests.support.trees import mesh  # noqa: E402


class Model(nn.Module):
    """A model with parameters, named axes and batch statistics."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
        x = nn.Dense(8, kernel_init=init)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(8)(nn.relu(x))


@functools.cache
def variables() -> Any:
    return jax.jit(Model().init)(jax.random.key(0), jnp.ones((1, 8)))


def train_state() -> TrainState:
    state = TrainState.create(
        apply_fn=Model().apply, params=nn.unbox(variables())["params"], tx=optax.adam(1e-3)
    )
    # The step counter is a Python int until a compiled step has made an array of it.
    return jax.jit(lambda state: state.apply_gradients(grads=state.params))(state)


def test_variables_come_back_with_their_boxes(tmp_path: Path) -> None:
    found = comes_back(tmp_path / "x", variables())
    kernel = found["params"]["Dense_0"]["kernel"]
    assert type(kernel) is nn.Partitioned
    assert kernel.names == ("data", "model")


def test_variables_come_back_without_boxes_and_frozen(tmp_path: Path) -> None:
    plain = nn.unbox(variables())
    comes_back(tmp_path / "x", plain)
    assert type(comes_back(tmp_path / "y", flax.core.freeze(plain))) is flax.core.FrozenDict
    # A frozen dict is a dict to a target, and the other way round.
    found = ckpt.sync.load(tmp_path / "y", like=plain)
    assert differences(by_jax(plain), found) == []


@pytest.mark.parametrize("boxed", [True, False])
def test_boxes_may_come_and_go(tmp_path: Path, boxed: bool) -> None:
    one, other = variables(), nn.unbox(variables())
    if not boxed:
        one, other = other, one
    ckpt.sync.save(tmp_path / "x", one)
    for like in (other, abstract(other)):
        assert differences(by_jax(other), ckpt.sync.load(tmp_path / "x", like=like)) == []


def test_boxes_on_a_mesh_with_logical_names_and_in_one_another(tmp_path: Path) -> None:
    kernel = jnp.ones((8, 8))
    with jax.set_mesh(mesh()):
        specs = nn.get_sharding(variables()["params"], mesh())
        placed = jax.device_put(variables()["params"], specs)
    tree = {
        "placed": placed,
        "logical": nn.LogicallyPartitioned(kernel, names=("embed", None)),
        "twice": nn.Partitioned(nn.LogicallyPartitioned(kernel, ("a",)), ("b",)),
        "abroad": nn.Partitioned({"w": kernel, "b": None}, ("b",)),
    }
    found = comes_back(tmp_path / "x", tree)
    assert found["twice"].value.names == ("a",)
    without = {**tree, "twice": kernel, "logical": kernel}
    assert differences(by_jax(without), ckpt.sync.load(tmp_path / "x", like=without)) == []


def test_a_train_state_needs_a_target_for_its_functions_and_says_so(tmp_path: Path) -> None:
    state = train_state()
    ckpt.sync.save(tmp_path / "x", state)
    comes_back_with_a_target(tmp_path / "x", state)
    found, messages = told_at_load(tmp_path / "x")
    assert type(found) is ckpt.types.UnknownNode
    assert found.class_name == "flax.training.train_state:TrainState"
    (message,) = messages
    assert message == (
        "restored as read-only ckpt.types.UnknownNode: flax.training.train_state:TrainState "
        "(its apply_fn, tx could not be stored: pass like=)"
    )
    # All else is there, exactly.
    for name in ("step", "params", "opt_state"):
        assert differences(getattr(state, name), found[name]) == [], name
    # So it can be put together by hand, and the state that was never made is target enough.
    assert differences(by_jax(state), state.replace(**found.fields)) == []
    shapes = jax.eval_shape(train_state)
    shapes = shapes.replace(apply_fn=state.apply_fn, tx=state.tx)
    assert differences(by_jax(state), ckpt.sync.load(tmp_path / "x", like=shapes)) == []


def test_a_record_that_is_saved_again_is_still_what_it_stands_for(tmp_path: Path) -> None:
    state = train_state()
    ckpt.sync.save(tmp_path / "x", state)
    record, _ = told_at_load(tmp_path / "x")
    ckpt.sync.save(tmp_path / "y", record)
    comes_back_with_a_target(tmp_path / "y", state)
    again, messages = told_at_load(tmp_path / "y")
    assert len(messages) == 1
    assert structure(again) == structure(record)


@struct.dataclass
class Plain:
    leaf: Any
    name: str = struct.field(pytree_node=False)
    sizes: Any = struct.field(pytree_node=False, default=())


@functools.partial(struct.dataclass, kw_only=True)
class Careful:
    """Refuses anything but what it is made for, and works something out."""

    leaf: Any
    scale: float = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        if self.leaf is None:
            raise TypeError("no leaf")
        object.__setattr__(self, "halved", self.scale / 2)


class Node(struct.PyTreeNode):
    leaf: Any
    kept: Any = struct.field(pytree_node=False, default=None)


def test_struct_dataclasses_come_back_each_with_its_own_static_fields(tmp_path: Path) -> None:
    static = ("text", 1, 2.5, float("inf"), -(2**70), True, None, b"\0", ..., (1, ["a", {"k": 1}]))
    tree = [
        Plain(jnp.ones(2), "one"),
        Plain(jnp.ones(2), "two", sizes=static),
        Plain(None, "three", sizes={"z": 1, "a": frozenset({1, 2})}),
        Careful(leaf=jnp.ones(1), scale=3.0),  # type: ignore[call-arg]
        Careful(leaf=Careful(leaf={"deep": 1}, scale=1.0), scale=4.0),  # type: ignore[call-arg]
        Node(jnp.zeros(2), kept=(jnp.bfloat16, np.dtype("int8"), jax.P("data", None), np.int8(3))),
        Node(jnp.zeros(2)),
    ]
    found = comes_back(tmp_path / "x", tree)
    assert [each.name for each in found[:3]] == ["one", "two", "three"]
    assert found[1].sizes == static
    assert list(map(type, found[1].sizes)) == list(map(type, static))
    assert found[3].halved == 1.5


@pytest.mark.parametrize("kept", [np.arange(3), jnp.sin, object()], ids=["array", "code", "object"])
def test_a_static_field_that_cannot_be_stored_is_named_and_taken_from_a_target(
    tmp_path: Path, kept: Any
) -> None:
    tree = {"a": Node(jnp.ones(2), kept=kept), "b": Node(jnp.ones(2), kept=5)}
    ckpt.sync.save(tmp_path / "x", tree)
    found = ckpt.sync.load(tmp_path / "x", like=tree)
    assert found["a"].kept is kept
    assert found["b"].kept == 5
    found, messages = told_at_load(tmp_path / "x")
    assert type(found["a"]) is ckpt.types.UnknownNode
    assert differences(tree["b"], found["b"]) == []
    (message,) = messages
    assert message == (
        "restored as read-only ckpt.types.UnknownNode: test_flax_linen:Node "
        "(its kept could not be stored: pass like=)"
    )


def test_fields_of_dataclasses_are_all_looked_at() -> None:
    """If flax gives its dataclasses fields of another kind, these tests have to know of them."""
    assert {each.name for each in dataclasses.fields(Plain)} == {"leaf", "name", "sizes"}
