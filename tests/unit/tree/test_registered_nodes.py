"""Nodes of registered classes: made again from what is stored, and never by trusting it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.tree_util import GetAttrKey, register_dataclass
from msgspec.structs import replace

from ckpt._format.manifest import Node
from ckpt._tree.leaf_specs import classify
from ckpt._tree.static_values import Classes, UnknownNode, class_name, find_class, known_classes
from ckpt._tree.structure import describe, unflatten
from ckpt.errors import CheckpointError, InvalidArgumentError, UnsupportedLeafError
from ckpt.testing.compare import differences

HERE = __name__
CALLS: list[tuple[Any, ...]] = []


class Color(enum.Enum):
    RED = 1


@functools.partial(register_dataclass, data_fields=["w", "b"], meta_fields=["name", "sizes"])
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    name: str = "layer"
    sizes: Any = ()

    def __post_init__(self) -> None:
        CALLS.append(("Layer", self.w))


class Keyed:
    """Has auxiliary data and a constructor that nothing but its own functions may call."""

    def __init__(self, *arguments: Any) -> None:
        CALLS.append(("Keyed", *arguments))
        raise AssertionError("called")

    @classmethod
    def of(cls, left: Any, right: Any, beside: Any) -> Keyed:
        made = object.__new__(cls)
        made.left, made.right, made.beside = left, right, beside
        return made

    left: Any
    right: Any
    beside: Any


jax.tree_util.register_pytree_with_keys(
    Keyed,
    lambda tree: (
        ((GetAttrKey("left"), tree.left), (GetAttrKey("right"), tree.right)),
        tree.beside,
    ),
    lambda beside, children: Keyed.of(*children, beside),  # type: ignore[call-arg]
)


@dataclasses.dataclass
class Unregistered:
    x: Any


def round_trip(tree: Any, classes: Classes | None = None) -> Any:
    found, unbuilt = again(describe(tree), classes)
    assert not unbuilt
    return found


def again(structure: Any, classes: Classes | None = None) -> tuple[Any, dict[str, str]]:
    nodes = msgspec.json.decode(msgspec.json.encode(structure.nodes), type=list[Node])
    return unflatten(nodes, structure.leaves, classes or {})


def changed(tree: Any, **update: Any) -> tuple[Any, dict[str, str]]:
    """What comes back of a tree of which the first node's record was changed."""
    structure = describe(tree)
    first, *others = structure.nodes
    return unflatten([replace(first, **update), *others], structure.leaves)


STATIC: list[Any] = [
    *(None, "text", 5, 2**70, 1.5, -0.0, True, b"\0", 1j, ..., (), (1, ("a",)), frozenset("a")),
    *(Color.RED, np.float32, jnp.bfloat16, np.dtype("int4"), jax.P("x", None), {"a": (1,)}, [1]),
]


@pytest.mark.parametrize("static", STATIC, ids=repr)
def test_static_data_come_back(static: Any) -> None:
    layer = round_trip(Layer(1, [2, 3], sizes=static))
    assert (type(layer), layer.w, layer.b, layer.name) == (Layer, 1, [2, 3], "layer")
    keyed = round_trip(Keyed.of(1, {"a": 2}, static))
    assert (type(keyed), keyed.left, keyed.right) == (Keyed, 1, {"a": 2})
    for found in (layer.sizes, keyed.beside):
        assert type(found) is type(static)
        assert found == static


@pytest.mark.parametrize("static", [object(), print, np.zeros(3), [object()], lambda: 0])
def test_static_data_that_cannot_be_stored_make_a_record_that_says_so(static: Any) -> None:
    for tree, what in ((Layer(1, 2, sizes=static), "sizes|aux"), (Keyed.of(1, 2, static), "aux")):
        found, unbuilt = again(describe(tree))
        assert type(found) is UnknownNode
        assert list(found.fields.values()) == [1, 2]
        ((name, reason),) = unbuilt.items()
        assert name == class_name(type(tree))
        assert any(each in reason for each in what.split("|"))
        assert "like=" in reason


def test_static_data_that_are_very_large_are_not_stored() -> None:
    found, unbuilt = again(describe(Keyed.of(1, 2, "x" * 100_000)))
    assert type(found) is UnknownNode
    assert unbuilt


def test_a_dataclass_is_made_without_its_constructor() -> None:
    structure = describe([Layer(1, 2), Keyed.of(3, 4, None)])
    CALLS.clear()
    layer, keyed = again(structure)[0]
    assert (layer.w, layer.b, keyed.left, keyed.right) == (1, 2, 3, 4)
    # jax itself makes a dataclass by calling it with its fields.
    assert set(CALLS) <= {("Layer", 1)}


# -- classes that changed since the save ----------------------------------------------------------


def evolving(fields: list[tuple[Any, ...]], meta: list[str]) -> Any:
    """The class `Evolving` of a process: a local one, as another version of a module has it."""
    made = dataclasses.make_dataclass("Evolving", fields)
    made.__module__, made.__qualname__ = "a_module", "Evolving"
    names = [each[0] for each in fields]
    register_dataclass(made, [name for name in names if name not in meta], meta)
    return made


OLD = evolving([("w", Any), ("size", int)], ["size"])
STORED = describe(OLD(7, 8))


def now(fields: list[tuple[Any, ...]], meta: list[str]) -> tuple[Any, dict[str, str], Any]:
    kind = evolving(fields, meta)
    return (*again(STORED, known_classes([kind])), kind)


def test_a_new_static_field_takes_its_default() -> None:
    dtype = ("dtype", Any, dataclasses.field(default="f4"))
    found, unbuilt, kind = now([("w", Any), ("size", int), dtype], ["size", "dtype"])
    assert (type(found), found.w, found.size, found.dtype) == (kind, 7, 8, "f4")
    assert not unbuilt
    names: tuple[str, Any, Any] = ("names", Any, dataclasses.field(default_factory=tuple))
    found, _, kind = now([("w", Any), ("size", int), names], ["size", "names"])
    assert (type(found), found.names) == (kind, ())


@pytest.mark.parametrize(
    ("fields", "meta"),
    [
        ([("w", Any), ("size", int), ("dtype", Any)], ["size", "dtype"]),
        ([("w", Any)], []),
        ([("size", int)], ["size"]),
        ([("w", Any), ("size", int), ("b", Any)], ["size"]),
        ([("w", Any), ("size", int), ("b", Any, dataclasses.field(default=0))], ["size"]),
        ([("v", Any), ("size", int)], ["size"]),
        ([("w", Any), ("size", int)], []),
        ([("w", Any), ("size", int)], ["w"]),
        ([("w", Any), ("size", int)], ["w", "size"]),
    ],
)
def test_a_class_with_other_fields_gives_a_record(fields: Any, meta: Any) -> None:
    found, unbuilt, _ = now(fields, meta)
    assert type(found) is UnknownNode
    assert dict(found.fields) == {"w": 7}
    assert "like=" in unbuilt["a_module:Evolving"]
    # Nothing is lost: the class as it was makes the object again.
    old = again(describe(found), known_classes([OLD]))[0]
    assert (type(old), old.w, old.size) == (OLD, 7, 8)


def test_a_member_of_an_enumeration_that_is_gone_makes_a_record() -> None:
    for stored in (["a_module_that_is_gone:Color", "RED"], [f"{HERE}:Color", "GREEN"]):
        enum_value: Any = {"enum": stored}
        found, unbuilt = changed(Keyed.of(1, 2, Color.RED), static={"aux": enum_value})
        assert type(found) is UnknownNode
        assert "classes=" in unbuilt[f"{HERE}:Keyed"]


def test_an_enumeration_is_found_under_the_name_it_had() -> None:
    structure = describe(Keyed.of(1, 2, Color.RED))
    stored: Any = {"aux": {"enum": ["old:Color", "RED"]}}
    node = replace(structure.nodes[0], static=stored)
    found, unbuilt = unflatten([node], [1, 2], known_classes({"old:Color": Color}))
    assert found.beside is Color.RED
    assert not unbuilt


class Turned:
    """Puts its children together in another order than it takes them apart."""

    def __init__(self, *children: Any) -> None:
        self.children = children


jax.tree_util.register_pytree_node(
    Turned, lambda tree: (tree.children, None), lambda _, children: Turned(*tuple(children)[::-1])
)


def test_an_object_that_has_its_children_elsewhere_is_a_record() -> None:
    found, unbuilt = again(describe(Turned(1, 2)))
    assert type(found) is UnknownNode
    assert list(found.fields.values()) == [1, 2]
    assert "other fields" in unbuilt[f"{HERE}:Turned"]


# -- classes that have to be handed over ----------------------------------------------------------


def local_class() -> type:
    @jax.tree_util.register_pytree_with_keys_class
    class Local:
        def __init__(self, x: Any, scale: float = 1.0) -> None:
            self.x, self.scale = x, scale

        def tree_flatten_with_keys(self) -> Any:
            return ((GetAttrKey("x"), self.x),), self.scale

        @classmethod
        def tree_unflatten(cls, scale: float, children: Any) -> Any:
            return cls(children[0], scale)

    return Local


def test_a_class_made_in_a_function_has_to_be_handed_over() -> None:
    kind = local_class()
    structure = describe({"a": kind(5, 0.5)})
    found, unbuilt = again(structure)
    assert type(found["a"]) is UnknownNode
    assert "classes=[...]" in unbuilt[class_name(kind)]
    found, unbuilt = again(structure, known_classes([kind]))
    assert (type(found["a"]), found["a"].x, found["a"].scale) == (kind, 5, 0.5)
    assert not unbuilt


def test_a_renamed_class_is_found_by_a_mapping() -> None:
    structure = describe(local_class()(5, 0.5))
    node = replace(structure.nodes[0], class_name="before:Name")
    kind = local_class()
    found, _ = unflatten([node], [5], known_classes({"before:Name": kind}))
    assert (type(found), found.x, found.scale) == (kind, 5, 0.5)


def test_a_record_that_is_saved_again_comes_back_as_the_object_where_the_class_is() -> None:
    class Gone(NamedTuple):
        x: Any

    kind = local_class()
    tree = [kind(Gone({"a": 1}), 0.5), Layer(1, 2, "n")]
    first, _ = again(describe(tree))
    assert type(first[0]) is type(first[0]["x"]) is UnknownNode
    # As a train step leaves it, and after a second life in a process that does not know it.
    second, _ = again(describe(jax.tree.map(lambda leaf: leaf + 10, first)))
    found, unbuilt = again(describe(second), known_classes([kind, Gone]))
    assert not unbuilt
    assert (type(found[0]), type(found[0].x), found[0].scale) == (kind, Gone, 0.5)
    assert found[0].x.x == {"a": 11}


@pytest.mark.parametrize(
    "wrong", [[5], ["Layer"], [Layer, Layer], {"a:b": 5}, {"b": Layer}, {"a:b:c": Layer}, [None]]
)
def test_what_is_no_class_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        known_classes(wrong)


@pytest.mark.parametrize(
    "name",
    [
        *("", ":", "x", ":Layer", "sys:path", "a_module_that_is_gone:X", HERE, f"{HERE}:"),
        *(f"{HERE}:{name}" for name in ("CALLS", "HERE", "Layer.w", "again", "Keyed.of.x")),
    ],
)
def test_what_is_no_class_is_not_found(name: str) -> None:
    assert find_class(name, {}) is None


# -- what may be in a file ------------------------------------------------------------------------

NAMES = st.sampled_from(
    [f"{HERE}:{kind}" for kind in ("Layer", "Keyed", "Unregistered", "Color", "Node", "CALLS")]
    + ["builtins:dict", "builtins:list", "builtins:type", "types:NoneType", "collections:deque"]
    + ["collections:OrderedDict", "collections:defaultdict", "subprocess:Popen", "pathlib:Path"]
    + ["ckpt.testing.strategies:Pair", "ckpt._tree.static_values:UnknownNode", "builtins:object"]
)
PLAIN_JSON: Any = st.one_of(
    st.none(),
    st.integers(-1, 3),
    st.sampled_from(["", "a", "w", "name"]),
    st.sampled_from([{"tuple": []}, {"list": ["a"]}, {"tuple": ["a", 5]}, {"dict": []}, {"x": 1}]),
    st.just({"tuple": [{"list": ["a"]}, 1, 2, {"tuple": []}]}),
)
STATICS = st.one_of(
    PLAIN_JSON,
    PLAIN_JSON.map(lambda aux: {"aux": aux}),
    st.dictionaries(st.sampled_from(["w", "b", "name", "sizes", "x", "__class__"]), PLAIN_JSON).map(
        lambda fields: {"fields": fields}
    ),
    PLAIN_JSON.map(lambda fields: {"fields": fields}),
)
FIELDS = st.lists(st.sampled_from(["w", "b", "left", "right", "a", 0, 1]), unique=True, max_size=3)


@given(NAMES, FIELDS, STATICS, st.sampled_from(["custom", "namedtuple"]))
def test_any_record_of_a_node_is_an_object_with_these_children_or_corruption(
    name: str, keys: list[Any], static: Any, kind: str
) -> None:
    children = [object() for _ in keys]
    node = Node(
        kind=kind,
        keys=keys,
        children=list(range(len(keys))),
        class_name=name,
        static=static,
    )
    try:
        found, unbuilt = unflatten([node], children)
    except CheckpointError:
        return
    assert (type(found) is UnknownNode) == bool(unbuilt) or name.endswith(":UnknownNode")
    leaves = jax.tree.leaves(found)
    assert all(one is other for one, other in zip(leaves, children, strict=True))
    if type(found) is not UnknownNode:
        assert class_name(type(found)) == name


HOSTILE = """
from test_registered_nodes import HERE
from ckpt.errors import CheckpointError
from ckpt._tree.structure import unflatten
from ckpt.manifest import Node
kinds = ["builtins:dict", "builtins:list", "builtins:tuple", "types:NoneType"]
kinds += ["collections:OrderedDict", "collections:defaultdict"]
kinds += ["ckpt.testing.strategies:Pair", f"{HERE}:Layer", f"{HERE}:Keyed", "builtins:int"]
auxs = [None, 5, "x", {"tuple": []}, {"list": []}, {"list": ["a"]}, {"tuple": ["a", "b"]}]
auxs += [{"tuple": ["a", {"list": ["b"]}]}, {"dict": []}]
for kind in kinds:
    for aux in auxs:
        for count in range(4):
            for names in (range(count), ["w", "b", "c"][:count]):
                node = Node(kind="custom", keys=[*names], children=[*range(count)],
                            class_name=kind, static={"aux": aux})
                try:
                    unflatten([node], list(range(count)))
                except CheckpointError:
                    pass
print("alive")
"""


def test_a_hostile_record_does_not_end_the_process() -> None:
    # jax trusts the data of the nodes it makes itself: of a dict or a dataclass it crashes.
    run = subprocess.run(
        [sys.executable, "-c", HOSTILE],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert run.stdout.strip() == "alive", run.stderr[-2000:]


def test_a_dataclass_that_jax_does_not_know_is_a_leaf_and_refused() -> None:
    structure = describe([Unregistered(1)])
    assert structure.names == ("0",)
    with pytest.raises(UnsupportedLeafError, match=r"jax\.tree_util"):
        classify(structure.leaves[0], "0")


def test_a_stored_name_of_an_unregistered_dataclass_makes_a_record() -> None:
    node = Node(
        kind="custom",
        keys=["x"],
        children=[0],
        class_name=f"{HERE}:Unregistered",
        static={"fields": {}},
    )
    found, unbuilt = unflatten([node], [1])
    assert type(found) is UnknownNode
    assert unbuilt


LAYERS = st.recursive(
    st.integers(),
    lambda children: st.one_of(
        st.builds(Layer, children, children, st.text(max_size=3), st.tuples(st.integers())),
        st.builds(Keyed.of, children, children, st.one_of(st.none(), st.text(max_size=3))),
        st.lists(children, max_size=2),
    ),
    max_leaves=8,
)


@given(LAYERS)
def test_trees_of_registered_classes_come_back_exactly(tree: Any) -> None:
    assert differences(tree, round_trip(tree)) == []
