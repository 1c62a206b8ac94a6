"""Merged parts: joins the parts in which a tree was saved. Pure.

Dicts are merged, and a part may only add keys. The result equals that of describing and saving the
whole tree at once, except for the names of data files and the places of chunks in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._format.manifest import JsonValue, Node
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import Array, ChunkNotes, ItemReport, PlannedTree
from ckpt._tree.leaf_names import join_keys, sibling_names
from ckpt._tree.static_values import decode_key
from ckpt.errors import InvalidArgumentError

_SORTED = frozenset({"dict", "default_dict"})
_DICTS = _SORTED | {"ordered_dict"}


class MergedTree(Struct, frozen=True):
    """The structure of a whole tree.

    Attributes:
        nodes: Its inner nodes, root first.
        names: Stored name of every leaf, in the order of `jax.tree.leaves`.
        sources: Number of the part of each leaf, and its number in that part.
    """

    nodes: list[Node]
    names: list[str]
    sources: list[tuple[int, int]]

    def planned(
        self, parts: Sequence[PlannedTree], reports: Sequence[ItemReport]
    ) -> tuple[PlannedTree, list[ItemReport]]:
        """Return the whole tree with its plan, and the reports on it.

        Args:
            parts: The parts, by number.
            reports: The report on each part, with leaf numbers of the part.
        """
        firsts: dict[tuple[int, int], int] = {}
        leaves: list[LeafPlan] = []
        values = []
        for name, (part, number) in zip(self.names, self.sources, strict=True):
            leaf = parts[part].leaves[number]
            # Keys of ordered dicts stay where they came first. So the first of several leaves that
            # are one array may be another than in the part.
            array = (part, number if leaf.spec.same_as is None else leaf.spec.same_as)
            first = firsts.setdefault(array, len(leaves))
            same_as = None if first == len(leaves) else first
            # A key that is not a string is marked if a string key has the same text.
            if leaf.name != name or leaf.spec.same_as != same_as:
                leaf = replace(leaf, name=name, spec=replace(leaf.spec, same_as=same_as))
            leaves.append(leaf)
            values.append(parts[part].values[number])
        numbers = [np.zeros(len(part.leaves), np.uint32) for part in parts]
        for (part, number), first in firsts.items():
            numbers[part][number] = first
        moved = []
        for table, report in zip(numbers, reports, strict=True):
            rows = report.rows.copy()
            rows["leaf"] = table[rows["leaf"]]
            notes = {name: _renumbered(each, table) for name, each in report.notes.items()}
            moved.append(replace(report, rows=rows, notes=notes))
        return PlannedTree(self.nodes, leaves, values), moved


class _Leaf(Struct, frozen=True):
    part: int
    number: int


class _Branch(Struct):
    """An inner node that may grow.

    Attributes:
        node: The node of the first part that has it.
        children: By key, or by place in a sequence: the stored key, and the tree below it.
    """

    node: Node
    children: dict[Any, tuple[JsonValue, _Tree]]


_Tree: TypeAlias = _Leaf | _Branch


class TreeParts(Struct):
    """The parts of one tree so far.

    Attributes:
        count: Number of parts.
    """

    count: int = 0
    _root: _Tree | None = None

    def add(self, nodes: Sequence[Node]) -> int:
        """Add the structure of one more part; return its number.

        Raises:
            InvalidArgumentError: A path of the part is taken, or its keys cannot stand beside the
                present ones; names the path. Nothing was added.
        """
        part = _tree_of(nodes, self.count)
        if self._root is None:
            self._root = part
        else:
            _check(self._root, part, ())
            _join(self._root, part)
        self.count += 1
        return self.count - 1

    def merged(self) -> MergedTree:
        """Return the tree that the parts form; there must be at least one."""
        assert self._root is not None
        walk = _Numbering()
        walk.visit(self._root, ())
        return MergedTree(walk.nodes, walk.names, walk.sources)


def _tree_of(nodes: Sequence[Node], part: int) -> _Tree:
    def grown(child: int) -> _Tree:
        if child >= 0:
            return _Leaf(part, child)
        return branch(nodes[-child])

    def branch(node: Node) -> _Branch:
        if node.kind in _DICTS:
            keys = [decode_key(key) for key in node.keys]
        else:
            keys = list(range(len(node.children)))
        stored = node.keys or [None] * len(node.children)
        below = map(grown, node.children)
        return _Branch(node, dict(zip(keys, zip(stored, below, strict=True), strict=True)))

    return branch(nodes[0]) if nodes else _Leaf(part, 0)


def _check(old: _Tree, new: _Tree, path: tuple[str, ...]) -> None:
    """Raise an error unless `new` can be put into `old`."""
    if not (isinstance(old, _Branch) and isinstance(new, _Branch) and _can_grow(old, new)):
        raise InvalidArgumentError(
            f"{_described(new)} was given where an earlier part has {_described(old)}. Parts may "
            "only add keys to dicts of the same kind",
            leaf=join_keys(path),
        )
    keys = list(dict.fromkeys([*old.children, *new.children]))
    names = dict(zip(keys, _sibling_names(old.node, keys, path), strict=True))
    for key, (_, child) in new.children.items():
        if key in old.children:
            _check(old.children[key][1], child, (*path, names[key]))


def _can_grow(old: _Branch, new: _Branch) -> bool:
    kinds = {(each.node.kind, each.node.class_name) for each in (old, new)}
    return len(kinds) == 1 and old.node.kind in _DICTS


def _described(tree: _Tree) -> str:
    if isinstance(tree, _Leaf):
        return "a leaf"
    name = tree.node.class_name
    return f"a node of kind {tree.node.kind!r}" + (f" ({name:.80})" if name else "")


def _sibling_names(node: Node, keys: Sequence[Any], path: tuple[str, ...]) -> list[str]:
    try:
        _ordered(node, keys)
        return sibling_names(keys)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"its keys cannot stand beside those of an earlier part: {error}",
            leaf=join_keys(path),
        ) from error


def _join(old: _Tree, new: _Tree) -> None:
    assert isinstance(old, _Branch)
    assert isinstance(new, _Branch)
    for key, child in new.children.items():
        if key in old.children:
            _join(old.children[key][1], child[1])
        else:
            old.children[key] = child


def _ordered(node: Node, keys: Sequence[Any]) -> Iterable[int]:
    """Return the places of the keys in the order in which jax visits them."""
    places = range(len(keys))
    return sorted(places, key=keys.__getitem__) if node.kind in _SORTED else places


class _Numbering(Struct):
    """Numbers nodes and leaves in the order of `describe`."""

    nodes: list[Node] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sources: list[tuple[int, int]] = field(default_factory=list)

    def visit(self, tree: _Tree, path: tuple[str, ...]) -> int:
        if isinstance(tree, _Leaf):
            self.names.append(join_keys(path))
            self.sources.append((tree.part, tree.number))
            return len(self.sources) - 1
        number = len(self.nodes)
        self.nodes.append(tree.node)
        keys = list(tree.children)
        stored = [each for each, _ in tree.children.values()]
        # Fields of classes are named by their stored keys, elements of sequences by their places.
        own = keys if tree.node.kind in _DICTS or not tree.node.keys else map(decode_key, stored)
        names = sibling_names(list(own))
        numbers = [0] * len(keys)
        for place in _ordered(tree.node, keys):
            _, child = tree.children[keys[place]]
            numbers[place] = self.visit(child, (*path, names[place]))
        update: dict[str, Any] = {"children": numbers}
        if tree.node.kind in _DICTS:
            update["keys"] = stored
        self.nodes[number] = replace(tree.node, **update)
        return -number


def _renumbered(notes: ChunkNotes, table: Array) -> ChunkNotes:
    """Return notes with other numbers of leaves; `table` has the new number of each."""
    others = notes.others.copy()
    others["leaf"] = table[others["leaf"]]
    return replace(notes, others=others)
