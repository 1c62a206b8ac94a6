"""Equinox: modules with static fields, functions among the leaves, and states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

eqx = pytest.importorskip("equinox")

import ckpt  # noqa: E402
import ckpt.sync  # noqa: E402
from ckpt.testing.compare import differences  # noqa: E402
from tests.interop.frameworks.exact import (  # noqa: E402
    abstract,
    comes_back,
    comes_back_with_a_target,
    told_at_load,
)
from tests.support.trees import mesh, sharded  # noqa: E402

KEY = jax.random.key(0)


class Strict(eqx.Module):  # type: ignore[name-defined]
    """Converts, checks, and keeps things beside its leaves."""

    weight: jax.Array = eqx.field(converter=jnp.asarray)
    size: int = eqx.field(static=True)
    options: Any = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        if self.size < 0:
            raise ValueError("a negative size")

    def method(self, x: Any) -> Any:
        return x * self.weight


class Lazy(eqx.Module):  # type: ignore[name-defined]
    """Has a field that its own constructor fills."""

    weight: jax.Array
    scale: jax.Array

    def __init__(self, weight: Any) -> None:
        self.weight, self.scale = weight, jnp.sum(weight)


class Outer(eqx.Module):  # type: ignore[name-defined]
    inner: Any
    name: str = eqx.field(static=True, default="outer")


MODULES: dict[str, Callable[[], Any]] = {
    "linear": lambda: eqx.nn.Linear(3, 4, key=KEY),
    "no bias": lambda: eqx.nn.Linear(3, "scalar", use_bias=False, key=KEY),
    "attention": lambda: eqx.nn.MultiheadAttention(2, 4, key=KEY),
    "cell": lambda: eqx.nn.GRUCell(2, 4, key=KEY),
    "convolution": lambda: eqx.nn.Conv2d(2, 4, 3, key=KEY),
    "dropout": lambda: eqx.nn.Dropout(0.3),
    "embedding": lambda: eqx.nn.Embedding(5, 3, key=KEY),
    "sequence": lambda: eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=KEY), eqx.nn.LayerNorm(2)]),
    "norm": lambda: batch_norm()[0],
    "norm state": lambda: batch_norm()[1],
    "filtered": lambda: eqx.filter(eqx.nn.MLP(2, 2, 4, 2, key=KEY), eqx.is_array),
    "partition": lambda: eqx.partition(eqx.nn.Linear(3, 4, key=KEY), eqx.is_inexact_array)[0],
    "strict": lambda: Strict(np.arange(3.0), 3),
    "lazy": lambda: Lazy(jnp.arange(3.0)),
}


def batch_norm() -> Any:
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="ema")


@pytest.mark.parametrize("name", MODULES)
def test_a_module_without_functions_comes_back(tmp_path: Path, name: str) -> None:
    comes_back(tmp_path / "x", MODULES[name]())


def test_modules_of_one_class_keep_each_its_own_static_fields(tmp_path: Path) -> None:
    options = [None, (1, "a", {"k": (2.5, None)}), jnp.bfloat16, "same", [1, 2]]
    tree = [Strict(np.arange(3.0), number, each) for number, each in enumerate(options)]
    found = comes_back(tmp_path / "x", tree)
    assert [(each.size, each.options) for each in found] == list(enumerate(options))


def test_nested_modules_on_a_mesh(tmp_path: Path) -> None:
    rows = sharded(np.arange(64.0, dtype=np.float32).reshape(8, 8), "data", "model")
    inner = eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(8, 8, key=KEY), rows)
    tree = Outer([Outer(inner, name="first"), Outer({"a": inner, "b": None}, name="second")])
    with jax.set_mesh(mesh()):
        found = comes_back(tmp_path / "x", tree)
    assert found.inner[0].name == "first"
    # One array at two places is one again.
    assert found.inner[0].inner.weight is found.inner[1].inner["a"].weight


def test_functions_among_the_leaves_are_those_of_the_target(tmp_path: Path) -> None:
    model = eqx.nn.MLP(2, 2, 4, 2, activation=jax.nn.gelu, key=KEY)
    tree = [model, eqx.nn.Sequential([model, eqx.nn.Lambda(jnp.tanh)])]
    ckpt.sync.save(tmp_path / "x", tree)
    comes_back_with_a_target(tmp_path / "x", tree)
    shapes = eqx.filter_eval_shape(lambda: tree)
    found = ckpt.sync.load(tmp_path / "x", like=shapes)
    assert found[0].activation is model.activation
    assert differences(tree, found) == []
    with pytest.raises(ckpt.errors.TargetMismatchError) as caught:
        ckpt.sync.load(tmp_path / "x")
    assert "1.layers.1.fn: stored the function" in str(caught.value)
    assert "like= has to have the function in its place" in str(caught.value)


def test_a_bound_method_is_a_module_whose_function_has_to_be_brought_along(tmp_path: Path) -> None:
    tree = {"method": Strict(jnp.arange(3.0), 3).method}
    ckpt.sync.save(tmp_path / "x", tree)
    comes_back_with_a_target(tmp_path / "x", tree)
    found, messages = told_at_load(tmp_path / "x")
    assert type(found["method"]) is ckpt.types.UnknownNode
    assert differences(tree["method"].__self__, found["method"]["__self__"]) == []  # type: ignore[attr-defined]
    assert len(messages) == 1
    assert "BoundMethod (its aux could not be stored: pass like=)" in messages[0]


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static:UserWarning")
def test_an_array_in_a_static_field_is_named_and_taken_from_a_target(tmp_path: Path) -> None:
    model = Strict(jnp.ones(2), 2, options=np.arange(4))
    ckpt.sync.save(tmp_path / "x", {"model": model})
    found = ckpt.sync.load(tmp_path / "x", like=abstract({"model": model}))
    assert found["model"].options is model.options
    assert differences(model.weight, found["model"].weight) == []
    found, messages = told_at_load(tmp_path / "x")
    assert type(found["model"]) is ckpt.types.UnknownNode
    assert found["model"].unstored == ("options",)
    assert "Strict (its options could not be stored: pass like=)" in messages[0]


@pytest.mark.filterwarnings("ignore:Using `field.init=False.`:UserWarning")
def test_fields_that_a_constructor_does_not_take(tmp_path: Path) -> None:
    class Late(eqx.Module):  # type: ignore[name-defined]
        weight: jax.Array
        late: Any = dataclasses.field(init=False)
        fixed: Any = eqx.field(init=False, static=True)

        def __post_init__(self) -> None:
            self.late, self.fixed = jnp.zeros(2), "fixed"

    # As training changes it: the constructor would have made zeros.
    tree = eqx.tree_at(lambda m: m.late, Late(jnp.ones(2)), jnp.full(2, 7.0))
    ckpt.sync.save(tmp_path / "x", tree)
    comes_back_with_a_target(tmp_path / "x", tree)
    found, messages = told_at_load(tmp_path / "x")
    assert type(found) is ckpt.types.UnknownNode
    assert "<locals>.Late (not imported here" in messages[0]
    found, messages = told_at_load(
        tmp_path / "x", handlers=[ckpt.handlers.PyTreeHandler(classes=[Late])]
    )
    assert messages == []
    assert differences(tree, found) == []


def test_a_number_among_the_leaves_is_the_one_that_was_saved_unless_it_is_filtered_out(
    tmp_path: Path,
) -> None:
    def model(rate: float) -> Any:
        return eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=KEY), eqx.nn.Dropout(rate)])

    ckpt.sync.save(tmp_path / "whole", model(0.1))
    assert ckpt.sync.load(tmp_path / "whole", like=model(0.5)).layers[1].p == 0.1
    ckpt.sync.save(tmp_path / "arrays", eqx.filter(model(0.1), eqx.is_array))
    _, rest = eqx.partition(model(0.5), eqx.is_array)
    found = eqx.combine(ckpt.sync.load(tmp_path / "arrays"), rest)
    assert found.layers[1].p == 0.5
    assert differences(model(0.5), found) == []
