"""What plain jax makes a tree of: dataclasses, registered classes, namedtuples, partials, keys."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import DictKey, GetAttrKey, Partial

import ckpt
import ckpt.sync
from ckpt.testing.compare import differences
from tests.interop.frameworks.exact import comes_back, comes_back_with_a_target, told_at_load


class Chain(NamedTuple):
    """As samplers keep their state."""

    i: Any
    z: Any
    accept: Any
    rng_key: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["kind", "to"])
@dataclasses.dataclass(frozen=True)
class Tagged:
    w: Any
    kind: str
    to: Any = None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=[], drop_fields=["cache"]
)
@dataclasses.dataclass
class Cached:
    """Has a field that jax drops."""

    w: Any
    cache: Any = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["n"])
@dataclasses.dataclass
class Derived:
    """Works a field out that its constructor does not take."""

    w: Any
    n: int
    double: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.double = 2 * self.n


@jax.tree_util.register_pytree_node_class
class Layer:
    """Children without names, and a name beside them."""

    def __init__(self, *children: Any, name: Any = None) -> None:
        self.children, self.name = children, name

    def tree_flatten(self) -> Any:
        return self.children, self.name

    @classmethod
    def tree_unflatten(cls, name: Any, children: Any) -> Layer:
        return cls(*children, name=name)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass
class Moody:
    """A dataclass that tells jax more than its fields."""

    w: Any

    def tree_flatten_with_keys(self) -> Any:
        return ((GetAttrKey("w"), self.w),), getattr(self, "mood", "calm")

    @classmethod
    def tree_unflatten(cls, mood: str, children: Any) -> Moody:
        made = cls(*children)
        made.mood = mood  # type: ignore[attr-defined]
        return made


class Keyed:
    """Children under whatever keys."""

    def __init__(self, *pairs: tuple[Any, Any]) -> None:
        self.pairs = pairs


jax.tree_util.register_pytree_with_keys(  # type: ignore[type-var]
    Keyed,
    lambda tree: (
        tuple((DictKey(key), child) for key, child in tree.pairs),
        None if any(type(key) is object for key, _ in tree.pairs) else [k for k, _ in tree.pairs],
    ),
    lambda keys, children: Keyed(*zip(keys or [object() for _ in children], children, strict=True)),
)


class Own(enum.Enum):
    FIRST = 1


class Counted(NamedTuple):
    """A namedtuple that is something else to jax: its number is no leaf."""

    w: Any
    number: int


jax.tree_util.register_pytree_node(
    Counted, lambda tree: ((tree.w,), tree.number), lambda number, kids: Counted(kids[0], number)
)


@jax.tree_util.register_static
class Mode(enum.StrEnum):
    """A text that is no leaf."""

    TRAIN = "train"


@jax.tree_util.register_static
class Level(enum.IntEnum):
    """A number that is no leaf."""

    HIGH = 3


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration without leaves."""

    width: int
    names: tuple[str, ...]


class Upper(dict[str, Any]):
    """A dict of a class of its own."""


jax.tree_util.register_pytree_with_keys(
    Upper,
    lambda tree: (tuple((DictKey(key), child) for key, child in tree.items()), tuple(tree)),  # type: ignore[arg-type, return-value]
    lambda keys, children: Upper(zip(keys, children, strict=True)),
)


@jax.tree_util.register_pytree_with_keys_class
class Box:
    """A single value in a box, as in Flax."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten_with_keys(self) -> Any:
        return ((GetAttrKey("value"), self.value),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Box:
        return cls(*children)


W = np.arange(6, dtype=np.float32).reshape(2, 3)
# Ready at import, so that jax has its devices.
TREES: dict[str, Any] = {
    "a sampler with a typed key": lambda: Chain(jnp.int32(3), {"x": W}, 0.5, jax.random.key(3)),
    "a sampler with a raw key": lambda: Chain(3, {"x": None}, (), jax.random.PRNGKey(3)),
    "keys": lambda: [
        *(jax.random.key(1, impl=impl) for impl in ("threefry2x32", "rbg", "unsafe_rbg")),
        jax.random.split(jax.random.key(0), (2, 3)),
    ],
    "dataclasses in dicts": lambda: {"b": [Point(W, Point(1, None))], "a": {2: Point(None)}},
    "static fields": lambda: [
        Tagged(jnp.ones(1), "one"),
        Tagged(jnp.ones(1), "two", to=("x", 1.5, None, jnp.bfloat16)),
        Tagged(None, "", to={"k": [b"", 1j]}),
    ],
    "a field that is dropped": lambda: Cached(jnp.ones(2)),
    "a field that is worked out": lambda: Derived(jnp.ones(2), 4),
    "classes": lambda: [Layer(W, 2, name="a"), Layer(name=["b", {"c": 1}]), Layer(None, name=3)],
    "children that are None": lambda: [Layer(None), Point(None, {"x": None}), Box(None), Keyed()],
    "more than the fields": lambda: Moody(jnp.ones(2)),
    "keys that are no texts": lambda: Keyed((1, W), ((2, "x"), 1), (2.5, 2), (Own.FIRST, 3)),
    "keys that are twice there": lambda: Keyed(("same", W), ("same", 2), ("other", 3)),
    "texts and numbers as keys": lambda: Keyed((1, W), ("1", 2), (True, 3)),
    "classes derived from built-ins": lambda: [Upper(b=1, a=W), Mode.TRAIN, {"x": Level.HIGH}],
    "nothing but static": lambda: {"c": Config(3, ("a", "b")), "d": Config(4, ())},
    "boxes in boxes": lambda: {"a": Box(Box(W)), "b": Box({"value": Box(1), "x": [Box(2)]})},
    "a box alone": lambda: Box(jnp.ones(1)),
    "a key of an enumeration": lambda: {Own.FIRST: jnp.ones(1)},
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back(tmp_path: Path, name: str) -> None:
    comes_back(tmp_path / "x", TREES[name]())


def test_static_data_of_nodes_of_one_class_are_not_mixed_up(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "x": [Tagged(1, kind) for kind in "abc"],
        "y": [Layer(1, name=name) for name in "abc"],
        "z": [Moody(1), Moody(1)],
    }
    tree["z"][1].mood = "wild"
    found = comes_back(tmp_path / "x", tree)
    assert [each.kind for each in found["x"]] == ["a", "b", "c"]
    assert [each.name for each in found["y"]] == ["a", "b", "c"]
    assert [each.mood for each in found["z"]] == ["calm", "wild"]


def test_a_field_that_jax_drops_is_no_reason_for_a_record(tmp_path: Path) -> None:
    found = comes_back(tmp_path / "x", [Cached(jnp.ones(2), cache=lambda: 1), Cached(1, cache=5)])
    assert found[0].cache is None


def test_keys_that_cannot_be_stored_give_way_to_numbers(tmp_path: Path) -> None:
    tree = Keyed((object(), W), (object(), 2))
    ckpt.sync.save(tmp_path / "x", tree)
    found, messages = told_at_load(tmp_path / "x")
    assert messages == []
    assert type(found) is Keyed
    assert differences(jax.tree.leaves(tree), jax.tree.leaves(found)) == []
    assert jax.tree.leaves(ckpt.sync.load(tmp_path / "x", like=tree))[1] == 2


def test_a_namedtuple_that_is_registered_has_the_leaves_that_jax_sees(tmp_path: Path) -> None:
    tree = {"a": Counted(jnp.ones(2), 5), "b": Counted(None, 6)}
    ckpt.sync.save(tmp_path / "x", tree)
    comes_back_with_a_target(tmp_path / "x", tree)
    assert ckpt.sync.load(tmp_path / "x", like=tree)["a"].number == 5
    assert len(jax.tree.leaves(told_at_load(tmp_path / "x")[0])) == 1


def test_a_partial_has_its_arguments_stored_and_its_function_from_a_target(tmp_path: Path) -> None:
    tree = {
        "one": Partial(jnp.add, jnp.ones(2), y=jnp.zeros(3)),
        "two": Partial(Partial(operator.mul, 2), z={"deep": 3}),
        "three": Partial(jax.nn.relu),
    }
    ckpt.sync.save(tmp_path / "x", tree)
    comes_back_with_a_target(tmp_path / "x", tree)
    found, messages = told_at_load(tmp_path / "x")
    assert type(found["one"]) is ckpt.types.UnknownNode
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True)
    assert all(differences(one, other) == [] for one, other in leaves)
    assert len(messages) == 1
    assert "jax.tree_util:Partial (its aux could not be stored: pass like=)" in messages[0]


def test_children_that_changed_places_since_the_save_are_not_mixed_up(tmp_path: Path) -> None:
    class Pair:
        order = ("first", "second")

        def __init__(self, first: Any, second: Any) -> None:
            self.first, self.second = first, second

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Pair)

        __hash__ = None  # type: ignore[assignment]

    def unflatten(order: Any, children: Any) -> Pair:
        return Pair(**dict(zip(Pair.order, children, strict=True)))

    jax.tree_util.register_pytree_with_keys(
        Pair,
        lambda tree: ([(GetAttrKey(name), getattr(tree, name)) for name in Pair.order], None),
        unflatten,
    )
    handlers = [ckpt.handlers.PyTreeHandler(classes=[Pair])]
    ckpt.sync.save(tmp_path / "x", Pair(1, 2))
    found = ckpt.sync.load(tmp_path / "x", handlers=handlers)
    assert (found.first, found.second) == (1, 2)
    # As an edit of the class would do it.
    Pair.order = ("second", "first")
    found, messages = told_at_load(tmp_path / "x", handlers=handlers)
    assert type(found) is ckpt.types.UnknownNode
    assert (found["first"], found["second"]) == (1, 2)
    assert "it has other fields today: pass like=" in messages[0]
    found = ckpt.sync.load(tmp_path / "x", like=Pair(0, 0))
    assert (found.first, found.second) == (1, 2)


@pytest.mark.parametrize(
    "leaf", [Own.FIRST, {1}, object(), slice(1), memoryview(b"x"), np.ma.masked_array([1])]
)
def test_what_is_no_node_and_no_leaf_is_refused_by_its_path(tmp_path: Path, leaf: Any) -> None:
    with pytest.raises(ckpt.errors.UnsupportedLeafError) as caught:
        ckpt.sync.save(tmp_path / "x", {"a": [Layer(leaf)]})
    assert caught.value.leaf == "a.0.0"
    assert not (tmp_path / "x").exists()


def test_the_shape_of_a_mesh_without_devices_is_made_of_those_that_are_here(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"w": jnp.ones((8, 8))})
    nowhere = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    sharding = jax.sharding.NamedSharding(nowhere, jax.P("data"))
    like = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=nowhere.axis_types)
    found = ckpt.sync.load(tmp_path / "x", like)
    assert found["w"].sharding == jax.sharding.NamedSharding(mesh, jax.P("data"))


def test_a_number_wanted_as_an_array_twice_comes_back_twice(tmp_path: Path) -> None:
    shared = jnp.float32(2.5)
    ckpt.sync.save(tmp_path / "x", {"a": shared, "b": [shared, shared]})
    like = {"a": jnp.float32(0), "b": [jax.ShapeDtypeStruct((), jnp.float32), np.float64(0)]}
    found = ckpt.sync.load(tmp_path / "x", like=like)
    assert differences({"a": shared, "b": [shared, np.float64(2.5)]}, found) == []
