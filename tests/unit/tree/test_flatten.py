"""PyTree to nodes and leaves, and back: exactly, and without trusting what is stored."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt._format.manifest import ItemEntry, Manifest, Node, decode, encode
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.static_values import UnknownNode
from ckpt._tree.structure import describe, unflatten
from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError
from ckpt.testing.compare import differences
from ckpt.testing.strategies import Empty, Pair, keys, python_scalars, trees

HERE = __name__


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    """A custom node that names its children, in an order that is not the alphabet's."""

    def __init__(self, weight: Any, bias: Any) -> None:
        self.weight, self.bias = weight, bias

    def tree_flatten_with_keys(self) -> Any:
        key = jax.tree_util.GetAttrKey
        return ((key("weight"), self.weight), (key("bias"), self.bias)), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Keyed:
        return cls(*children)


@jax.tree_util.register_pytree_node_class
class Unkeyed:
    """A custom node whose children have numbers only."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> Any:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Unkeyed:
        return cls(*children)


@jax.tree_util.register_pytree_with_keys_class
class Boxed:
    """A class around one value, as frameworks have them."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten_with_keys(self) -> Any:
        return ((jax.tree_util.GetAttrKey("value"), self.value),), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Boxed:
        return cls(*children)


def custom_nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(Keyed, children, children),
        st.lists(children, max_size=3).map(lambda made: Unkeyed(*made)),
    )


SCALAR_TREES = trees(python_scalars())
CUSTOM_TREES = st.recursive(
    trees(python_scalars(), max_leaves=3),
    lambda children: st.one_of(
        custom_nodes(children),
        st.lists(children, max_size=3),
        st.dictionaries(st.text("ba", max_size=2), children, max_size=3),
        st.builds(Point, children, children),
    ),
    max_leaves=8,
)


def stored_and_read(nodes: tuple[Node, ...]) -> list[Node]:
    """The nodes after they were in a manifest."""
    manifest = Manifest(
        format="ckpt",
        version=1,
        step=0,
        attempt="",
        unnamed=True,
        items={"state": ItemEntry(handler="pytree", nodes=list(nodes))},
        created_ns=0,
        committed_ns=0,
        writer={},
        process_count=1,
        files={},
    )
    return decode(encode(manifest), where="here").items["state"].nodes


def round_trip(tree: Any) -> Any:
    structure = describe(tree)
    found, unknown = unflatten(stored_and_read(structure.nodes), structure.leaves)
    assert not unknown
    return found


# -- out ------------------------------------------------------------------------------------------


@given(st.one_of(trees(), CUSTOM_TREES))
def test_leaves_are_those_of_jax_in_the_order_of_jax(tree: Any) -> None:
    leaves = jax.tree.leaves(tree)
    structure = describe(tree)
    assert len(structure.leaves) == len(structure.names) == len(leaves)
    assert all(found is leaf for found, leaf in zip(structure.leaves, leaves, strict=True))


@given(st.one_of(trees(), CUSTOM_TREES))
def test_names_are_all_different(tree: Any) -> None:
    names = describe(tree).names
    assert len(set(names)) == len(names)


def test_names_are_the_keys_joined_with_dots() -> None:
    tree = {"b": [1, (2,)], "a": Point(3, {"/": 4}), "c": Keyed(5, 6), "d": Unkeyed(7)}
    found = dict(zip(describe(tree).names, describe(tree).leaves, strict=True))
    assert found == {
        "b.0": 1,
        "b.1.0": 2,
        "a.x": 3,
        "a.y.%2F": 4,
        "c.weight": 5,
        "c.bias": 6,
        "d.0": 7,
    }
    assert describe(7).names == ("%root",)


@given(st.one_of(trees(), CUSTOM_TREES))
def test_equal_trees_have_equal_structures(tree: Any) -> None:
    copied = copy.deepcopy(tree)
    assert describe(copied).nodes == describe(tree).nodes
    assert describe(copied).names == describe(tree).names


def test_a_train_step_does_not_change_the_names_of_a_state() -> None:
    state = {"b": 1, "a": defaultdict(None, {2: 3, 1: Point(4, {"d": 5, "c": 6})})}
    # jax sorts the keys of the dicts that it makes.
    stepped = jax.tree.map(lambda leaf: leaf + 1, state)
    assert list(stepped) != list(state)
    assert describe(stepped).names == describe(state).names


@pytest.mark.parametrize(
    ("tree", "leaf"),
    [
        ({"x": {1: 0, "a": 1}}, "x"),
        ({"x": {object(): 0}}, "x"),
        ({"x": [OrderedDict({range(3): 0})]}, "x.0"),
        ({"x": {(1, print): 0}}, "x"),
    ],
)
def test_keys_that_cannot_be_stored_are_refused_by_leaf_path(tree: Any, leaf: str) -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        describe(tree)
    assert caught.value.leaf == leaf


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append({"again": tree})
    with pytest.raises(UnsupportedLeafError, match="contains itself"):
        describe(tree)


# -- and back -------------------------------------------------------------------------------------


@given(trees())
def test_a_tree_comes_back_exactly(tree: Any) -> None:
    assert differences(tree, round_trip(tree)) == []


@pytest.mark.parametrize(
    "tree",
    [
        {"b": 1, "a": 2, "": 3, ".": 4},
        OrderedDict([("b", 1), (2, 3), ("2", 4), (True, 5), (b"2", 6), (("2", (1.5,)), 7)]),
        defaultdict(list, {"b": [1], "a": []}),
        defaultdict(None, {2**70: 1, -1: 2, True: 3}),
        {0.5: 1, float("inf"): 2, -3: 3, False: 4},
        [(), [], {}, None, Empty(), OrderedDict(), Pair(None, Point(1, ()))],
        None,
        5,
    ],
)
def test_containers_keys_and_their_order_come_back(tree: Any) -> None:
    assert differences(tree, round_trip(tree)) == []


@pytest.mark.parametrize("depth", [100, 450, 600, 800, 900])
def test_a_tree_that_can_be_described_can_be_rebuilt_however_deep(depth: int) -> None:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    try:
        structure = describe(tree)
    except UnsupportedLeafError:
        return
    found, _ = unflatten(structure.nodes, structure.leaves)
    for _ in range(depth):
        (found,) = found
    assert found == 1


@pytest.mark.parametrize("depth", [10, 60, 90, 100, 110, 130, 200, 2000])
def test_a_key_that_can_be_described_can_be_stored_however_deep(depth: int) -> None:
    key: tuple[Any, ...] = ()
    for _ in range(depth):
        key = (key,)
    try:
        nodes = describe({key: 1}).nodes
    except UnsupportedLeafError:
        return
    assert list(unflatten(stored_and_read(nodes), [1])[0]) == [key]


@pytest.mark.parametrize("key", ["\ud800", ("\udcff", 1), "ok"])
def test_a_key_that_can_be_described_can_be_stored_whatever_its_text(key: Any) -> None:
    try:
        nodes = describe({key: 1}).nodes
    except UnsupportedLeafError:
        return
    assert unflatten(stored_and_read(nodes), [1])[0] == {key: 1}


def test_a_key_of_thousands_of_digits_is_refused_or_comes_back() -> None:
    for digits in (4000, 4300, 4301, 10_000):
        key = 16**digits
        try:
            nodes = describe({key: 1}).nodes
        except UnsupportedLeafError:
            continue
        assert unflatten(stored_and_read(nodes), [1])[0] == {key: 1}


# -- classes --------------------------------------------------------------------------------------


def test_a_namedtuple_class_this_process_has_is_used() -> None:
    found = round_trip(Point(1, [2]))
    assert type(found) is Point
    assert found == Point(1, [2])


class Outer:
    class Inner(NamedTuple):
        x: Any


def test_a_nested_namedtuple_class_is_found() -> None:
    assert type(round_trip(Outer.Inner(1))) is Outer.Inner


def test_an_unknown_namedtuple_class_becomes_a_record_and_is_reported() -> None:
    Gone = namedtuple("Gone", ["x", "y"])
    nodes = describe([Gone(1, Point(2, 3)), 4]).nodes
    found, unknown = unflatten(nodes, [1, 2, 3, 4])
    assert set(unknown) == {f"{HERE}:Gone"}
    assert "classes=[...]" in unknown[f"{HERE}:Gone"]
    assert found == [UnknownNode(f"{HERE}:Gone", {"x": 1, "y": Point(2, 3)}, "namedtuple"), 4]
    with pytest.raises(TypeError):
        found[0].fields["x"] = 5


@pytest.mark.parametrize(
    ("class_name", "fields"),
    [
        (f"{HERE}:Point", ["x", "z"]),
        (f"{HERE}:Point", ["x"]),
        (f"{HERE}:Keyed", ["x", "y"]),
        (f"{HERE}:describe", ["x", "y"]),
        ("subprocess:Popen", ["args"]),
        ("os:system", ["command"]),
        ("builtins:tuple", []),
        (":", []),
        ("", []),
        (HERE, ["x", "y"]),
        (f"{HERE}:Point.__class__", ["x", "y"]),
        (None, ["x", "y"]),
    ],
)
def test_a_class_that_is_not_that_namedtuple_is_never_called(
    class_name: str | None, fields: list[str]
) -> None:
    children = list(range(len(fields)))
    node = Node(kind="namedtuple", keys=[*fields], class_name=class_name, children=children)
    found, unknown = unflatten([node], children)
    assert type(found) is UnknownNode
    assert dict(found.fields) == dict(zip(fields, children, strict=True))
    assert set(unknown) == {found.class_name}


class Total(namedtuple("Total", ["parts", "total"])):
    """A namedtuple class that is not called with its fields."""

    __slots__ = ()

    def __new__(cls, parts: Any) -> Total:
        return super().__new__(cls, parts, len(parts))


def test_a_namedtuple_class_with_its_own_constructor_raises_nothing_foreign() -> None:
    structure = describe(Total("abc"))
    try:
        found, _ = unflatten(structure.nodes, structure.leaves)
    except CheckpointError:
        return
    fields = found.fields if isinstance(found, UnknownNode) else found._asdict()
    assert dict(fields) == {"parts": "abc", "total": 3}


def test_a_custom_node_of_a_class_that_is_here_comes_back() -> None:
    found, unknown = unflatten(describe(Keyed(1, [2])).nodes, [1, 2])
    assert type(found) is Keyed
    assert (found.weight, found.bias) == (1, [2])
    assert not unknown


def test_a_custom_node_of_a_class_that_is_gone_is_a_record_that_says_what_it_was() -> None:
    (node, *others) = describe(Keyed(1, [2])).nodes
    gone = replace(node, class_name="a_module_that_is_gone:Keyed")
    found, unknown = unflatten([gone, *others], [1, 2])
    assert type(found) is UnknownNode
    assert found.class_name == "a_module_that_is_gone:Keyed"
    assert dict(found.fields) == {"weight": 1, "bias": [2]}
    assert set(unknown) == {"a_module_that_is_gone:Keyed"}


def test_a_record_comes_back_as_the_record_it_was() -> None:
    record = UnknownNode("elsewhere:Gone", {"b": 1, "a": UnknownNode("elsewhere:Other", {})})
    structure = describe(record)
    found, _ = unflatten(structure.nodes, structure.leaves)
    assert differences(record, found) == []


@pytest.mark.parametrize("kind", ["namedtuple", "custom"])
def test_no_module_is_imported_by_a_stored_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "hostile_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    name = "hostile_module:P"
    key: Any = {"enum": [name, "x"]}
    with pytest.raises(CorruptCheckpointError, match="hostile_module"):
        unflatten([Node(kind="dict", keys=[key], children=[0])], [1])
    found, _ = unflatten([Node(kind="default_dict", class_name=name)], [])
    assert found.default_factory is None
    node = Node(kind=kind, keys=["x"], class_name=name, children=[0])
    before = set(sys.modules)
    found, _ = unflatten([node], [1])
    assert found == UnknownNode("hostile_module:P", {"x": 1}, kind)
    assert set(sys.modules) == before


def test_a_module_whose_loading_was_put_off_is_not_loaded_by_a_stored_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lazy_module.py"
    path.write_text("raise SystemExit('loaded')")
    spec = importlib.util.spec_from_file_location("lazy_module", path)
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    loader.exec_module(module)
    node = Node(kind="namedtuple", keys=["x"], class_name="lazy_module:P", children=[0])
    assert unflatten([node], [1])[0] == UnknownNode("lazy_module:P", {"x": 1}, "namedtuple")


def test_no_code_of_a_module_runs_by_a_stored_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noisy(type(sys)):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            raise SystemExit(f"asked for {name}")

    monkeypatch.setitem(sys.modules, "noisy_module", Noisy("noisy_module"))
    node = Node(kind="namedtuple", keys=["x"], class_name="noisy_module:P.Q", children=[0])
    assert unflatten([node], [1])[0] == UnknownNode("noisy_module:P.Q", {"x": 1}, "namedtuple")


# -- what may be in a file ------------------------------------------------------------------------

KINDS = ["dict", "ordered_dict", "default_dict", "list", "tuple", "namedtuple", "none", "custom"]
STORED_KEYS = st.one_of(  # type: ignore[var-annotated]
    st.sampled_from(["a", "b", "x", "y", 0, 1, None, 1.5, True, [], {}]),
    st.sampled_from(["float", "bytes", "bool", "tuple", "int"]).flatmap(
        lambda kind: st.fixed_dictionaries(
            {
                kind: st.sampled_from(
                    ["", "x", "1.5", "nan", "YQ==", "YQ", "é", True, 1, None, [], ["a"], [{}]]
                )
            }
        )
    ),
)
NODES = st.builds(
    Node,
    kind=st.sampled_from([*KINDS, "", "set"]),
    keys=st.lists(STORED_KEYS, max_size=3),
    children=st.lists(st.integers(-4, 4), max_size=3),
    class_name=st.sampled_from(
        [None, "list", "dict", "os:stat_result", "builtins:dict", "types:NoneType", "", ":"]
        + [f"{HERE}:{name}" for name in ("Point", "Keyed", "Unkeyed", "Boxed", "UnknownNode")]
    ),
    static=st.sampled_from([None, [], {}, {"aux": None}, {"aux": {"tuple": []}}, {"fields": {}}]),
)


MISTAKES = st.one_of(
    st.fixed_dictionaries({"kind": st.sampled_from([*KINDS, "other"])}),
    st.fixed_dictionaries({"keys": st.lists(STORED_KEYS, max_size=4)}),
    st.fixed_dictionaries({"children": st.lists(st.integers(-9, 9), max_size=4)}),
    st.fixed_dictionaries({"class_name": st.sampled_from([None, "x:y", f"{HERE}:Point"])}),
)


def rebuilds_wholly_or_raises(nodes: list[Node], leaves: list[Any]) -> None:
    try:
        tree, _ = unflatten(nodes, leaves)
    except CheckpointError:
        return
    found = jax.tree.leaves(tree)
    assert len(found) == len(leaves), f"{len(leaves)} leaves are stored, {tree!r} came back"
    assert all(one is other for one, other in zip(found, leaves, strict=True))


@given(st.lists(NODES, max_size=4), st.integers(0, 4))
def test_malformed_nodes_raise_only_checkpoint_errors(nodes: list[Node], count: int) -> None:
    rebuilds_wholly_or_raises(nodes, [object() for _ in range(count)])


@given(st.data())
def test_nodes_with_one_mistake_raise_only_checkpoint_errors(data: st.DataObject) -> None:
    structure = describe(data.draw(SCALAR_TREES))
    nodes, leaves = list(structure.nodes), [object() for _ in structure.leaves]
    if not nodes:
        return
    number = data.draw(st.integers(0, len(nodes) - 1))
    change = data.draw(MISTAKES)
    nodes[number] = replace(nodes[number], **change)
    rebuilds_wholly_or_raises(nodes, leaves)


@pytest.mark.parametrize(
    "key",
    [{"float": "x"}, {"bytes": "x"}, {"bytes": "é"}, {"tuple": [{"float": ""}]}, {}, True, 1.5, []],
)
@pytest.mark.parametrize("kind", ["dict", "ordered_dict", "default_dict"])
def test_a_key_of_no_known_kind_is_corruption(kind: str, key: Any) -> None:
    with pytest.raises(CorruptCheckpointError):
        unflatten([Node(kind=kind, keys=[key], children=[0])], [1])


@pytest.mark.parametrize("kind", ["dict", "ordered_dict", "default_dict", "custom"])
def test_two_children_under_one_key_are_corruption(kind: str) -> None:
    with pytest.raises(CorruptCheckpointError):
        unflatten([Node(kind=kind, keys=["a", "a"], children=[0, 1])], [1, 2])


def test_a_none_with_children_is_corruption() -> None:
    with pytest.raises(CorruptCheckpointError):
        unflatten([Node(kind="none", children=[0])], [1])


@pytest.mark.parametrize(
    ("nodes", "leaves"),
    [
        ([], 0),
        ([], 2),
        ([[0]], 0),
        ([[0]], 2),
        ([[0, 0]], 1),
        ([[1, 0]], 2),
        ([[-1]], 0),
        ([[-1], [-1]], 0),
        ([[-1], [-2], [-1]], 0),
        ([[-2]], 0),
        ([[2**70]], 1),
        ([[-(2**70)]], 1),
    ],
)
def test_records_that_are_no_tree_over_these_leaves_are_corruption(
    nodes: list[list[int]], leaves: int
) -> None:
    with pytest.raises(CorruptCheckpointError):
        unflatten([Node(kind="list", children=children) for children in nodes], range(leaves))


def test_a_node_with_two_parents_is_corruption() -> None:
    nodes = [Node(kind="list", children=[-1, -1]), Node(kind="list")]
    with pytest.raises(CorruptCheckpointError):
        unflatten(nodes, [])


def test_a_few_records_cannot_unfold_into_a_million_nodes() -> None:
    # Thirty more lines of this and no machine is large enough.
    nodes = [Node(kind="list", children=[-n, -n]) for n in range(1, 18)]
    with pytest.raises(CorruptCheckpointError):
        unflatten([*nodes, Node(kind="list")], [])


def test_names_without_boxes_do_not_unfold_into_a_million_nodes_either() -> None:
    box = Node(kind="custom", keys=["value"], children=[-1])
    nodes = [box, *(Node(kind="list", children=[-n, -n]) for n in range(2, 40)), Node(kind="list")]
    with pytest.raises(CorruptCheckpointError):
        unboxed_names(nodes, ["a"])
    chain = [Node(kind="custom", keys=["value"], children=[-n]) for n in range(1, 50_000)]
    with pytest.raises(CorruptCheckpointError):
        unboxed_names([*chain, Node(kind="none")], ["a"])


def test_boxes_that_hide_what_tells_two_names_apart_are_corruption() -> None:
    node = Node(kind="custom", keys=["value"], children=[0])
    nodes = [Node(kind="list", children=[-1, 1]), node]
    with pytest.raises(CorruptCheckpointError):
        unboxed_names(nodes, ["a.value", "a"])


@given(CUSTOM_TREES)
def test_names_without_boxes_are_those_of_the_tree_without_boxes(tree: Any) -> None:
    structure = describe(jax.tree.map(Boxed, tree))
    assert list(unboxed_names(structure.nodes, structure.names)) == list(describe(tree).names)
    outside = describe(Boxed(tree))
    assert list(unboxed_names(outside.nodes, outside.names)) == list(describe(tree).names)


def test_a_stored_tree_nested_too_deeply_is_corruption() -> None:
    nodes = [Node(kind="list", children=[-n]) for n in range(1, 100_000)]
    with pytest.raises(CheckpointError):
        unflatten([*nodes, Node(kind="list")], [])


@given(keys())
def test_a_key_comes_back_with_its_type(key: Any) -> None:
    assert differences(OrderedDict({key: 1}), round_trip(OrderedDict({key: 1}))) == []
