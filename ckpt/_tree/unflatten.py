"""Unflattening: a stored structure and its leaves become the PyTree again, without the original.

Built-in containers are made as they were, and nodes of other classes if this process has those;
otherwise they become an `UnknownNode`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ckpt._format.manifest import Node
from ckpt._tree.classes import Classes, UnknownNode
from ckpt._tree.flatten import FACTORIES
from ckpt._tree.registered_nodes import UnknownReason, build_namedtuple, build_registered
from ckpt._tree.static_values import decode_key
from ckpt.errors import CorruptCheckpointError

PyTree = Any
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
