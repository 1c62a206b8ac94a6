"""What `ckpt.testing` offers: a comparison that misses nothing, strategies that reach all."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from ckpt._format.array_format import DTYPES
from ckpt.testing import strategies
from ckpt.testing.compare import differences
from ckpt.testing.strategies import (
    Empty,
    Module,
    Pair,
    arrays,
    jax_arrays,
    keys,
    leaves,
    numpy_scalars,
    states,
    trees,
)
from ckpt.types import UnknownNode

MANY = settings(derandomize=True, database=None, suppress_health_check=list(HealthCheck))


class Twin(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_pytree_node_class
class Box:
    """A node of a registered class, with something beside its child."""

    def __init__(self, child: Any, beside: Any) -> None:
        self.child, self.beside = child, beside

    def tree_flatten(self) -> Any:
        return (self.child,), self.beside

    @classmethod
    def tree_unflatten(cls, beside: Any, children: Any) -> Box:
        return cls(children[0], beside)


def test_nodes_keys_and_functions_do_not_differ_from_themselves() -> None:
    tree = [Box({"a": 1}, "x"), Box(None, np.zeros(2)), jax.random.key(0), jax.nn.relu, print]
    assert differences(tree, jax.tree.map(lambda leaf: leaf, tree)) == []
    assert differences(jax.random.key(0), jax.random.key(0)) == []


@given(trees())
def test_a_tree_does_not_differ_from_its_copy(tree: Any) -> None:
    assert differences(tree, tree) == []
    assert differences(tree, copy.deepcopy(tree)) == []


def placed(device: int) -> jax.Array:
    return jax.device_put(np.zeros(2, np.float32), jax.devices()[device])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        ({1: 0}, {True: 0}),
        ({(1,): 0}, {(1.0,): 0}),
        ({0.0: 0}, {-0.0: 0}),
        (defaultdict(list), defaultdict(dict)),
        (defaultdict(list), {}),
        ([1], (1,)),
        ([1], [1, 2]),
        ([], None),
        (Pair(1, 2), (1, 2)),
        (Pair(1, 2), Twin(1, 2)),
        (Empty(), ()),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (complex(0.0, 1.0), complex(-0.0, 1.0)),
        (float("nan"), 0.0),
        ("a", b"a"),
        (np.float32(1), 1.0),
        (np.float64(1), 1.0),
        (np.float32(1), np.asarray(1, np.float32)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.zeros((2, 1))),
        (np.array([0.0]), np.array([-0.0])),
        (np.zeros(2, ml_dtypes.int4), np.zeros(2, ml_dtypes.uint4)),
        (jnp.zeros(2), np.zeros(2, np.float32)),
        (jnp.zeros(2), jnp.ones(2)),
        (jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32)),
        (jnp.zeros(2), placed(0)),
        (placed(0), placed(1)),
        (UnknownNode("a:B", {"x": 1}), UnknownNode("a:C", {"x": 1})),
        (UnknownNode("a:B", {"x": 1}), UnknownNode("a:B", {"x": 2})),
        (UnknownNode("a:B", {"x": 1}), {"x": 1}),
        (UnknownNode("a:B", {"x": 1}), UnknownNode("a:B", {"x": 1}, static={"aux": 1})),
        (Box(1, "a"), Box(2, "a")),
        (Box(1, "a"), Box(1, "b")),
        (Box(1, np.zeros(2)), Box(1, np.ones(2))),
        (Box(None, "a"), Box(0, "a")),
        (jax.random.key(0), jax.random.key(1)),
        (jax.random.key(0), jax.random.key(0, impl="rbg")),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
        (jax.random.split(jax.random.key(0), 2), jax.random.split(jax.random.key(0), 3)),
        tuple(jax.device_put(jax.random.key(0), device) for device in jax.devices()[:2]),
    ],
)
def test_whatever_differs_is_told(one: Any, other: Any) -> None:
    for expected, found in ((one, other), (other, one)):
        assert len(differences(expected, found)) == 1
        (line,) = differences([0, {"k": expected}], [0, {"k": found}])
        assert line.startswith("tree[1]['k']")


def test_arrays_that_are_one_have_to_be_one_in_both() -> None:
    one, other = jnp.zeros(2), np.zeros(2)
    shared = {"a": one, "b": [one, other], "c": other}
    assert differences(shared, copy.copy(shared), shared=True) == []
    apart = {"a": one, "b": [jnp.zeros(2), other], "c": other}
    (line,) = differences(shared, apart, shared=True)
    assert line.startswith("tree['b'][0]: expected the array at tree['a']")
    (line,) = differences(apart, shared, shared=True)
    assert line.startswith("tree['b'][0]: expected an array of its own")


def test_all_differences_are_told() -> None:
    assert len(differences([1, [2], 3], [0, [0], 3])) == 2


def reached(strategy: SearchStrategy[Any], count: int = 1000) -> list[Any]:
    found: list[Any] = []

    @settings(MANY, max_examples=count)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


@pytest.mark.parametrize("strategy", [arrays(), numpy_scalars(), leaves()], ids=range(3))
def test_arrays_and_scalars_of_every_dtype_are_reached(strategy: SearchStrategy[Any]) -> None:
    assert {leaf.dtype for leaf in reached(strategy) if hasattr(leaf, "dtype")} == {
        *DTYPES.values()
    }


@pytest.mark.slow
def test_containers_of_every_kind_are_reached() -> None:
    found = reached(trees(), 2000)
    kinds = {dict, OrderedDict, defaultdict, list, tuple}
    assert {type(tree) for tree in found} >= kinds | {Pair, Empty, type(None), int, np.ndarray}
    assert {type(tree) for tree in found if type(tree) in kinds and not tree} == kinds
    assert {type(tree) for tree in found if type(tree) in kinds and len(tree) > 1} == kinds


def test_odd_keys_are_reached() -> None:
    found = {(type(key), key) for key in reached(keys(), 2000)}
    wanted = ["", ".", "/", "%", "%root", 0, -1, 2**63, True, b""]
    assert {(type(key), key) for key in wanted} <= found
    assert any(kind is tuple for kind, _ in found)


def test_arrays_of_every_layout_are_reached() -> None:
    found = reached(arrays())
    for flag in ("c_contiguous", "f_contiguous", "writeable"):
        assert {getattr(array.flags, flag) for array in found if array.size > 1} == {True, False}
    assert any(array.ndim == 0 for array in found)
    assert any(array.size == 0 for array in found)
    assert any(stride < 0 for array in found for stride in array.strides)


@pytest.mark.slow
def test_states_have_arrays_on_devices_keys_modules_boxes_and_shared_arrays() -> None:
    found = reached(states(), 300)
    leaves_found = [leaf for tree in found for leaf in jax.tree.leaves(tree)]
    placed_arrays = [leaf for leaf in leaves_found if isinstance(leaf, jax.Array)]
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in placed_arrays]
    impls = {
        jax.random.key_impl(leaf) for leaf, key in zip(placed_arrays, is_key, strict=True) if key
    }
    assert impls == {"threefry2x32", "rbg", "unsafe_rbg"}
    assert {leaf.committed for leaf in placed_arrays} == {True, False}
    assert {getattr(leaf, "weak_type", False) for leaf in placed_arrays} == {True, False}
    # How many devices a few states have hangs on the constants that Hypothesis finds in what is
    # imported; arrays are made faster than states.
    placed = [*placed_arrays, *reached(jax_arrays(), 500)]
    assert {len(leaf.sharding.device_set) for leaf in placed} >= {1, 2, 3, 4, 8}
    assert any(not leaf.sharding.is_fully_replicated for leaf in placed_arrays)
    numbers = [len(jax.tree.leaves(tree)) for tree in found]
    # How large the largest one is hangs on the constants that Hypothesis finds in what is imported.
    assert max(numbers) > 3

    def nodes(tree: Any, kind: type) -> list[Any]:
        leaves_of = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
        return [leaf for leaf in leaves_of if isinstance(leaf, kind)]

    for kind in (Module, strategies.Box, Pair):
        assert any(nodes(tree, kind) for tree in found)

    def is_shared(tree: Any) -> bool:
        ids = [id(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
        return len(set(ids)) < len(ids)

    assert any(map(is_shared, found))


@pytest.mark.parametrize("module", ["ckpt.testing", "ckpt.testing.compare"])
def test_hypothesis_is_needed_for_the_strategies_only(module: str) -> None:
    script = f"import sys, {module}; sys.exit('hypothesis' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
