"""PyTree to leaves and a storable structure, and back.

`describe` walks a tree once and gives its leaves in the order of `jax.tree.leaves`, a stored name
for each, and the inner nodes as manifest records. `rebuild` makes the tree again from the records,
without the original object: built-in containers natively, namedtuples by the class the process
already has, anything else as a `Record`. Nothing is ever imported by a name found in a file.
"""

from __future__ import annotations

import base64
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType, MappingProxyType
from typing import Any, cast

import jax
import numpy as np

from ckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from ckpt.layout.names import join_keys, sibling_names
from ckpt.manifest import JsonValue, Node

__all__ = ["Record", "Structure", "decode_key", "describe", "rebuild"]

PyTree = Any

_PLAIN_LEAVES = (
    jax.Array,
    np.ndarray,
    np.generic,
    jax.ShapeDtypeStruct,
    int,
    float,
    complex,
    str,
    bytes,
    EllipsisType,
)
# Far deeper than any model, and far from Python's own limit on the way back.
_MAX_DEPTH = 200
_MAX_KEY_DEPTH = 16
# Factories of a defaultdict that can be named without importing anything.
_FACTORIES: Mapping[str, type] = MappingProxyType(
    {kind.__name__: kind for kind in (list, dict, int, float, set, str, tuple)}
)


@dataclass(frozen=True, slots=True)
class Record:
    """Stands for a node whose class this process does not know; read-only.

    Attributes:
        class_name: `module:qualified name` of the class that was saved.
        fields: Its children by field name.
    """

    class_name: str
    fields: Mapping[str, Any]


jax.tree_util.register_pytree_with_keys(
    Record,
    lambda record: (
        [(jax.tree_util.DictKey(name), child) for name, child in record.fields.items()],
        (record.class_name, tuple(record.fields)),
    ),
    lambda aux, children: Record(
        aux[0], MappingProxyType(dict(zip(aux[1], children, strict=True)))
    ),
)


@dataclass(frozen=True, slots=True)
class Structure:
    """What `describe` finds.

    Attributes:
        nodes: Inner nodes, root first; empty where the tree is a single leaf.
        names: Stored name of every leaf, in the order of `jax.tree.leaves`; all different.
        leaves: The leaves themselves, in the same order.
    """

    nodes: tuple[Node, ...]
    names: tuple[str, ...]
    leaves: tuple[Any, ...]


@dataclass(slots=True)
class _Walk:
    nodes: list[Node] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)

    def visit(self, tree: PyTree, path: tuple[str, ...]) -> int:
        """Record `tree` and what is below it; return its number as a child."""
        opened = _open(tree, path)
        if len(path) > _MAX_DEPTH:
            raise RecursionError
        if opened is None:
            self.names.append(join_keys(path))
            self.leaves.append(tree)
            return len(self.leaves) - 1
        number = len(self.nodes)
        node = Node(kind=opened.kind, keys=opened.stored_keys, class_name=opened.class_name)
        self.nodes.append(node)
        try:
            names = sibling_names(opened.keys)
        except ValueError as error:
            raise UnsupportedLeafError(str(error), leaf=join_keys(path)) from error
        numbers = [0] * len(opened.keys)
        # jax visits some containers in another order than the one they are kept in (sorted dict
        # keys); leaves are numbered in jax's order, keys stay in the container's own.
        for position in opened.order:
            numbers[position] = self.visit(opened.children[position], (*path, names[position]))
        self.nodes[number] = node.model_copy(update={"children": numbers})
        return -number


@dataclass(frozen=True, slots=True)
class _Opened:
    kind: str
    keys: Sequence[Any]
    children: Sequence[Any]
    order: Sequence[int]
    stored_keys: list[JsonValue]
    class_name: str | None = None


def describe(tree: PyTree) -> Structure:
    """Return the leaves, their stored names and the inner nodes of `tree`.

    Raises:
        UnsupportedLeafError: A key cannot be stored, two keys cannot be told apart, or the tree
            contains itself. (Leaves are judged later, by `layout.leaves`.)
    """
    walk = _Walk()
    try:
        walk.visit(tree, ())
    except RecursionError:
        raise UnsupportedLeafError(
            f"the tree contains itself, or is nested deeper than {_MAX_DEPTH} levels"
        ) from None
    return Structure(tuple(walk.nodes), tuple(walk.names), tuple(walk.leaves))


def _open(tree: PyTree, path: tuple[str, ...]) -> _Opened | None:
    """Return the children of an inner node, or None for a leaf."""
    if tree is None:
        return _Opened("none", (), (), (), [])
    kind = type(tree)
    if kind is list or kind is tuple:
        places = range(len(tree))
        return _Opened(kind.__name__, places, tree, places, [])
    if kind in (dict, OrderedDict, defaultdict):
        return _open_mapping(tree, path)
    if isinstance(tree, _PLAIN_LEAVES):
        return None
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind is Record:
        name = tree.class_name
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        fields = list(tree._fields)
        return _Opened("namedtuple", fields, tree, range(len(fields)), list(fields), name)
    entries, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if len(entries) == 1 and not entries[0][0]:
        return None
    fields = [_entry_text(keys[0]) for keys, _ in entries]
    children = [child for _, child in entries]
    return _Opened("custom", fields, children, range(len(fields)), list(fields), name)


def _open_mapping(tree: Mapping[Any, Any], path: tuple[str, ...]) -> _Opened:
    keys = list(tree)
    stored = [_encode_key(key, path) for key in keys]
    order: Sequence[int] = range(len(keys))
    if type(tree) is not OrderedDict:
        try:
            order = sorted(order, key=keys.__getitem__)
        except TypeError as error:
            raise UnsupportedLeafError(
                f"dict keys that cannot be sorted among each other ({error}); jax needs an order",
                leaf=join_keys(path),
            ) from error
    children = [tree[key] for key in keys]
    if type(tree) is defaultdict:
        factory = getattr(tree.default_factory, "__name__", None)
        known = factory if _FACTORIES.get(factory or "") is tree.default_factory else None
        return _Opened("default_dict", keys, children, order, stored, known)
    kind = "ordered_dict" if type(tree) is OrderedDict else "dict"
    return _Opened(kind, keys, children, order, stored)


def _entry_text(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _encode_key(key: Any, path: tuple[str, ...], depth: int = 0) -> JsonValue:
    if type(key) is int or (type(key) is str and key.isascii()):
        return cast("JsonValue", key)
    if type(key) is str:
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedLeafError(
                f"the dict key {key!r:.60} has lone surrogates and cannot be stored; use bytes",
                leaf=join_keys(path),
            ) from error
        return key
    if type(key) is bool:
        return {"bool": key}
    if type(key) is float:
        return {"float": repr(key)}
    if type(key) is bytes:
        return {"bytes": base64.b64encode(key).decode()}
    if type(key) is tuple and depth < _MAX_KEY_DEPTH:
        return {"tuple": [_encode_key(part, path, depth + 1) for part in key]}
    raise UnsupportedLeafError(
        f"a dict key of type {type(key).__name__} ({key!r:.60}) cannot be stored; "
        "use str, int, bool, float, bytes or tuples of them",
        leaf=join_keys(path),
    )


def decode_key(key: JsonValue) -> Any:
    """Return the dict key stored as `key`; raises `CorruptCheckpointError` for no known kind."""
    if type(key) is str or type(key) is int:
        return key
    try:
        match key:
            case {"bool": bool(value)}:
                return value
            case {"float": str(text)}:
                return float(text)
            case {"bytes": str(text)}:
                return base64.b64decode(text, validate=True)
            case {"tuple": list(parts)}:
                return tuple(decode_key(part) for part in parts)
    except ValueError as error:
        raise CorruptCheckpointError(f"a stored dict key is no value: {key!r:.80}") from error
    raise CorruptCheckpointError(f"a stored dict key is of no known kind: {key!r:.80}")


def rebuild(nodes: Sequence[Node], leaves: Sequence[Any]) -> tuple[PyTree, frozenset[str]]:
    """Make the tree of `nodes` with `leaves` in place.

    Returns:
        The tree, and the names of the classes that became a `Record` because this process does not
        have them.

    Raises:
        CorruptCheckpointError: The records are not a tree over exactly these leaves.
    """
    unknown: set[str] = set()
    unused = iter(range(len(leaves)))
    used: set[int] = set()

    def make(number: int, parent: int) -> Any:
        if number >= 0:
            if number != next(unused, None):
                raise CorruptCheckpointError(f"leaf {number} is missing, out of order or twice")
            return leaves[number]
        # Children come after their parents, so no chain of numbers can be a circle.
        if not parent < -number < len(nodes) or -number in used:
            raise CorruptCheckpointError(f"node {-number} does not belong below node {parent}")
        used.add(-number)
        return make_node(-number)

    def make_node(number: int) -> Any:
        node = nodes[number]
        order = _leaf_order(node)
        made: list[Any] = [None] * len(node.children)
        for position in order:
            made[position] = make(node.children[position], number)
        return _assemble(node, made, unknown)

    try:
        tree = make_node(0) if nodes else make(0, 0)
    except RecursionError:
        raise CorruptCheckpointError("the stored tree is nested too deeply") from None
    if next(unused, None) is not None:
        raise CorruptCheckpointError("the stored tree does not use all of its leaves")
    return tree, frozenset(unknown)


def _leaf_order(node: Node) -> Iterator[int]:
    if node.kind in ("dict", "default_dict"):
        keys = [decode_key(key) for key in node.keys]
        if len(keys) != len(node.children):
            raise CorruptCheckpointError("a stored dict has not as many keys as children")
        try:
            return iter(sorted(range(len(keys)), key=keys.__getitem__))
        except TypeError as error:
            raise CorruptCheckpointError("stored dict keys cannot be sorted") from error
    return iter(range(len(node.children)))


def _assemble(node: Node, children: list[Any], unknown: set[str]) -> Any:
    if node.kind == "none" and not children:
        return None
    if node.kind == "list":
        return children
    if node.kind == "tuple":
        return tuple(children)
    if len(node.keys) != len(children):
        raise CorruptCheckpointError(f"a stored {node.kind} has not as many keys as children")
    if node.kind in ("dict", "ordered_dict", "default_dict"):
        keys = [decode_key(key) for key in node.keys]
        _refuse_twice(keys)
        pairs = zip(keys, children, strict=True)
        if node.kind == "dict":
            return dict(pairs)
        if node.kind == "ordered_dict":
            return OrderedDict(pairs)
        return defaultdict(_FACTORIES.get(node.class_name or ""), pairs)
    fields = [str(key) for key in node.keys]
    _refuse_twice(fields)
    if node.kind == "namedtuple":
        known = _find_namedtuple(node.class_name or "", fields)
        if known is not None:
            # Not called: a constructor of the class's own may take other arguments.
            return tuple.__new__(known, children)
    elif node.kind != "custom":
        raise CorruptCheckpointError(f"a tree node of no known kind: {node.kind!r:.80}")
    name = node.class_name or "?"
    if name != f"{Record.__module__}:{Record.__qualname__}":
        unknown.add(name)
    return Record(name, MappingProxyType(dict(zip(fields, children, strict=True))))


def _find_namedtuple(class_name: str, fields: Sequence[str]) -> type | None:
    """Return the namedtuple class of that name if this process already has it with these fields.

    The name comes from a file: modules are looked up among the imported ones only, and through
    their dictionaries, so that no module-level `__getattr__` runs and nothing is imported.
    """
    module_name, _, qualified = class_name.partition(":")
    scope: Any = sys.modules.get(module_name)
    for part in qualified.split("."):
        if scope is None:
            return None
        try:
            # Past any __getattribute__ of its own: a lazily loaded module would load itself there.
            scope = object.__getattribute__(scope, "__dict__").get(part)
        except AttributeError:
            return None
    if isinstance(scope, type) and issubclass(scope, tuple) and hasattr(scope, "_fields"):
        return scope if list(scope._fields) == list(fields) else None
    return None


def _refuse_twice(keys: Sequence[Any]) -> None:
    if len(set(keys)) != len(keys):
        raise CorruptCheckpointError("a stored node has two children under one key")
