"""The structure of a PyTree: flattened into nodes and leaves that can be stored, and made again.

Flattening: a PyTree becomes leaves and a structure that can be stored. `describe` walks a tree once
and gives its leaves in the order of `jax.tree.leaves`, a stored name for each, and the inner nodes
as the manifest has them. `unflatten` is the inverse.

Unflattening: a stored structure and its leaves become the PyTree again, without the original.
Built-in containers are made as they were, and nodes of other classes if this process has those;
otherwise they become an `UnknownNode`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType, MappingProxyType
from typing import Any

import jax
import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._arguments import refuse_orbax_argument
from ckpt._format.manifest import JsonValue, Node
from ckpt._tree.boxes import is_box
from ckpt._tree.leaf_names import MAX_DEPTH, join_keys, sibling_names
from ckpt._tree.registered_nodes import (
    UnknownReason,
    build_namedtuple,
    build_registered,
    is_plain_namedtuple,
    open_registered,
    refuse_undeclared,
)
from ckpt._tree.static_values import Classes, UnknownNode, class_name, decode_key, encode_key
from ckpt.errors import CorruptCheckpointError, UnsupportedLeafError

PyTree = Any

# Leaves of exactly these classes: a subclass can be registered with jax as a node.
_PLAIN_LEAVES = frozenset(
    {bool, int, float, complex, str, bytes, np.ndarray, jax.ShapeDtypeStruct, EllipsisType}
)
# Factories of a defaultdict that are stored under their bare name.
FACTORIES: Mapping[str, type] = MappingProxyType(
    {kind.__name__: kind for kind in (list, dict, int, float, set, str, tuple)}
)


class Structure(Struct, frozen=True):
    """The leaves and the inner nodes of a tree, from `describe`.

    Attributes:
        nodes: Inner nodes, root first; empty where the tree is a single leaf.
        names: Stored name of every leaf, in the order of `jax.tree.leaves`; all different.
        leaves: The leaves themselves, in the same order.
    """

    nodes: tuple[Node, ...]
    names: tuple[str, ...]
    leaves: tuple[Any, ...]


class _Flattening(Struct):
    nodes: list[Node] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    # Types whose objects are always leaves.
    plain: set[type] = field(default_factory=lambda: set(_PLAIN_LEAVES))
    # True refuses attributes that are not stored.
    saved: bool = False
    is_leaf: Callable[[Any], bool] | None = None

    def visit(self, tree: PyTree, path: tuple[str, ...]) -> int:
        """Add `tree` with everything below it; return its number as a child."""
        is_leaf = self.is_leaf is not None and self.is_leaf(tree)
        opened = None if is_leaf else _open(tree, path)
        if len(path) > MAX_DEPTH:
            raise RecursionError
        if opened is None:
            if isinstance(tree, jax.Array):
                self.plain.add(type(tree))
            refuse_orbax_argument(tree, leaf=join_keys(path))
            return self._leaf(join_keys(path), tree)
        if self.saved and type(tree) not in (list, tuple, dict):
            refuse_undeclared(tree, opened.node, path)
        number = len(self.nodes)
        self.nodes.append(opened.node)
        try:
            names = sibling_names(opened.keys)
        except ValueError as error:
            raise UnsupportedLeafError(str(error), leaf=join_keys(path)) from error
        numbers = [0] * len(opened.keys)
        # jax visits some containers in another order than their own (sorted dict keys); leaves are
        # numbered in jax's order, keys stay in the container's.
        children, plain = opened.children, self.plain if len(path) < MAX_DEPTH else ()
        prefix = f"{join_keys(path)}." if path else ""
        for position in opened.order:
            child = children[position]
            if type(child) in plain:
                # A shortcut: thousands of siblings are arrays.
                numbers[position] = self._leaf(prefix + names[position], child)
            else:
                numbers[position] = self.visit(child, (*path, names[position]))
        self.nodes[number] = replace(opened.node, children=numbers)
        return -number

    def _leaf(self, name: str, leaf: Any) -> int:
        self.names.append(name)
        self.leaves.append(leaf)
        return len(self.leaves) - 1


class _Opened(Struct, frozen=True):
    node: Node
    keys: Sequence[Any]
    children: Sequence[Any]
    order: Sequence[int]


def describe(
    tree: PyTree, saved: bool = False, is_leaf: Callable[[Any], bool] | None = None
) -> Structure:
    """Return the leaves, their stored names and the inner nodes of `tree`.

    A tree that is described already, as one from a checkpoint, is returned as it is.

    Args:
        tree: The tree.
        saved: True if it is stored, so that no attribute of a node may be left out. A target may
            have further attributes: nothing is restored into them.
        is_leaf: As of `jax.tree.map`, but not asked about arrays and plain values.

    Raises:
        UnsupportedLeafError: A key cannot be stored, two keys cannot be told apart, the tree
            contains itself, or an attribute would be lost. (Leaves are checked later, by
            `classify`.)
    """
    if isinstance(tree, Structure):
        return tree
    walk = _Flattening(saved=saved, is_leaf=is_leaf)
    try:
        walk.visit(tree, ())
    except RecursionError:
        raise UnsupportedLeafError(
            f"the tree contains itself, or is nested deeper than {MAX_DEPTH} levels"
        ) from None
    return Structure(tuple(walk.nodes), tuple(walk.names), tuple(walk.leaves))


def branch_at(tree: PyTree, path: str) -> PyTree:
    """Return the branch or the leaf at a leaf path, which has no keys of boxes (see `is_box`).

    Raises:
        KeyError: There is nothing at that path.
    """
    passed: tuple[str, ...] = ()
    keys = path.split(".")
    while keys:
        opened = _open(tree, passed)
        if opened is None:
            raise KeyError(path)
        key = keys[0]
        if is_box(replace(opened.node, children=range(len(opened.keys)))):
            key = "value"
        else:
            del keys[0]
        names = sibling_names(opened.keys)
        if key not in names:
            raise KeyError(path)
        tree, passed = opened.children[names.index(key)], (*passed, key)
    return tree


def _open(tree: PyTree, path: tuple[str, ...]) -> _Opened | None:
    """Return the children of an inner node, or None for a leaf."""
    if tree is None:
        return _Opened(Node(kind="none"), (), (), ())
    kind = type(tree)
    if kind is list or kind is tuple:
        places = range(len(tree))
        return _Opened(Node(kind=kind.__name__), places, tree, places)
    if kind in (dict, OrderedDict, defaultdict):
        return _open_mapping(tree, path)
    if kind in _PLAIN_LEAVES or isinstance(tree, jax.Array | np.generic):
        return None
    if isinstance(tree, tuple) and is_plain_namedtuple(tree):
        fields: list[str] = list(kind._fields)
        node = Node(kind="namedtuple", keys=list(fields), class_name=class_name(kind))
        return _Opened(node, fields, tree, range(len(fields)))
    if kind is UnknownNode:
        return _open_unknown(tree, path)
    opened = open_registered(tree)
    if opened is None:
        return None
    node = Node(
        kind="custom",
        keys=_encode_keys(opened.keys, path),
        class_name=opened.name,
        static=opened.static,
        unstored=opened.unstored,
    )
    return _Opened(node, opened.keys, opened.children, range(len(opened.keys)))


def _open_unknown(unknown: UnknownNode, path: tuple[str, ...]) -> _Opened:
    keys = list(unknown.fields)
    node = Node(
        kind=unknown.kind,
        keys=_encode_keys(keys, path),
        class_name=unknown.class_name,
        static=unknown.static,
        unstored=list(unknown.unstored),
    )
    return _Opened(node, keys, list(unknown.fields.values()), range(len(keys)))


def _open_mapping(tree: Mapping[Any, Any], path: tuple[str, ...]) -> _Opened:
    keys = list(tree)
    stored = _encode_keys(keys, path)
    order: Sequence[int] = range(len(keys))
    if type(tree) is not OrderedDict:
        try:
            order = sorted(order, key=keys.__getitem__)
        except TypeError as error:
            raise UnsupportedLeafError(
                f"dict keys that cannot be sorted among each other ({error}); jax needs an order",
                leaf=join_keys(path),
            ) from error
    kind, name = "dict", None
    if type(tree) is defaultdict:
        kind, name = "default_dict", _factory_name(tree.default_factory)
    elif type(tree) is OrderedDict:
        kind = "ordered_dict"
    node = Node(kind=kind, keys=stored, class_name=name)
    return _Opened(node, keys, [tree[key] for key in keys], order)


def _factory_name(factory: Any) -> str | None:
    if factory is None:
        return None
    name = getattr(factory, "__qualname__", type(factory).__qualname__)
    if FACTORIES.get(name) is factory:
        return str(name)
    return f"{getattr(factory, '__module__', None) or '?'}:{name}"


def _encode_keys(keys: Sequence[Any], path: tuple[str, ...]) -> list[JsonValue]:
    if all(type(key) is str and key.isascii() for key in keys):
        return list(keys)
    stored = []
    for key in keys:
        try:
            stored.append(encode_key(key))
        except ValueError as error:
            raise UnsupportedLeafError(
                f"a dict key of type {type(key).__name__} ({key!r:.60}) cannot be stored: {error}",
                leaf=join_keys(path),
            ) from error
    return stored


_NO_CLASSES: Classes = MappingProxyType({})


def unflatten(
    nodes: Sequence[Node], leaves: Sequence[Any], classes: Classes = _NO_CLASSES
) -> tuple[PyTree, dict[str, str]]:
    """Make the tree of `nodes` with `leaves` in place.

    Args:
        nodes: Inner nodes, root first.
        leaves: The leaves, in the order of `jax.tree.leaves`.
        classes: Classes that were passed, by name; others are looked up among the imported modules.

    Returns:
        The tree, and the reason for every class whose nodes became `UnknownNode`s.

    Raises:
        CorruptCheckpointError: The nodes are not a tree with exactly these leaves.
    """
    work = _Unflattening(nodes, leaves, classes)
    try:
        tree = work.make_node(0) if nodes else work.make(0, 0)
    except RecursionError:
        raise CorruptCheckpointError("the stored tree is nested too deeply") from None
    if next(work.unused, None) is not None:
        raise CorruptCheckpointError("the stored tree does not use all of its leaves")
    return tree, work.unknown


class _Unflattening:
    def __init__(self, nodes: Sequence[Node], leaves: Sequence[Any], classes: Classes) -> None:
        self.nodes = nodes
        self.leaves = leaves
        self.classes = classes
        self.unused = iter(range(len(leaves)))
        self.used: set[int] = set()
        self.unknown: dict[str, str] = {}

    def make(self, number: int, parent: int) -> Any:
        if number >= 0:
            if number != next(self.unused, None):
                raise CorruptCheckpointError(f"leaf {number} is missing, out of order or twice")
            return self.leaves[number]
        # Children come after their parents, so the numbers cannot form a cycle.
        if not parent < -number < len(self.nodes) or -number in self.used:
            raise CorruptCheckpointError(f"node {-number} does not belong below node {parent}")
        self.used.add(-number)
        return self.make_node(-number)

    def make_node(self, number: int) -> Any:
        node = self.nodes[number]
        keys = self._keys(node)
        children: list[Any] = [None] * len(node.children)
        for position in _leaf_order(node, keys):
            children[position] = self.make(node.children[position], number)
        if node.kind == "none":
            if children:
                raise CorruptCheckpointError("a stored None has children")
            return None
        if node.kind == "list":
            return children
        if node.kind == "tuple":
            return tuple(children)
        pairs = list(zip(keys, children, strict=True))
        if node.kind == "dict":
            return dict(pairs)
        if node.kind == "ordered_dict":
            return OrderedDict(pairs)
        if node.kind == "default_dict":
            return defaultdict(self._factory(node), pairs)
        return self._custom(node, keys, children)

    def _keys(self, node: Node) -> list[Any]:
        if node.kind in ("none", "list", "tuple"):
            return []
        keys = [decode_key(key, self.classes) for key in node.keys]
        if len(keys) != len(node.children):
            raise CorruptCheckpointError(
                f"a stored {node.kind:.40} has {len(keys)} keys and {len(node.children)} children"
            )
        if len(set(keys)) != len(keys):
            raise CorruptCheckpointError("a stored node has two children under one key")
        return keys

    def _factory(self, node: Node) -> Any:
        name = node.class_name
        if name is None:
            return None
        # A name in a file chooses the function that makes missing values, so only these are
        # allowed.
        factory = FACTORIES.get(name) or self.classes.get(name)
        if factory is None:
            self.unknown.setdefault(
                name,
                "the factory of a defaultdict, which has none now: pass like=, or if it is a class "
                "PyTreeHandler(classes=[...])",
            )
        return factory

    def _custom(self, node: Node, keys: Sequence[Any], children: list[Any]) -> Any:
        if node.kind == "namedtuple":
            made = build_namedtuple(node, children, self.classes)
        elif node.kind == "custom":
            made = build_registered(node, keys, children, self.classes)
        else:
            raise CorruptCheckpointError(f"a tree node of no known kind: {node.kind!r:.80}")
        if not isinstance(made, UnknownReason):
            return made
        self.unknown.setdefault(made.name, made.reason)
        fields: Mapping[Any, Any] = MappingProxyType(dict(zip(keys, children, strict=True)))
        return UnknownNode(made.name, fields, node.kind, node.static, tuple(node.unstored))


def _leaf_order(node: Node, keys: Sequence[Any]) -> Iterator[int]:
    if node.kind in ("dict", "default_dict"):
        try:
            return iter(sorted(range(len(keys)), key=keys.__getitem__))
        except TypeError as error:
            raise CorruptCheckpointError("stored dict keys cannot be sorted") from error
    return iter(range(len(node.children)))
