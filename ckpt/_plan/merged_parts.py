"""A tree that arrives in parts: dicts are merged, and keys are only ever added. Pure.

What comes out is what describing and saving the whole tree at once would have given, but for the
names of data files and where in them the chunks lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeAlias

from ckpt._format.manifest import (
    ItemEntry,
    JsonValue,
    LeafEntry,
    Node,
    ShardingEntry,
)
from ckpt._format.ocdbt import KeyValue
from ckpt._plan.save_plan import Places, SavePlan, database_entries
from ckpt._tree.leaf_names import join_keys, sibling_names
from ckpt._tree.static_values import decode_key
from ckpt.errors import InvalidArgumentError

__all__ = ["Merged", "PartPlan", "TreeParts", "merge_database", "merge_entries"]

_SORTED = frozenset({"dict", "default_dict"})
_DICTS = _SORTED | {"ordered_dict"}


@dataclass(frozen=True, slots=True)
class Merged:
    """A whole tree.

    Attributes:
        nodes: Its inner nodes, root first.
        names: Stored name of every leaf, in the order of `jax.tree.leaves`.
        sources: Number of the part that each leaf came with, and its number there.
    """

    nodes: list[Node]
    names: list[str]
    sources: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Where the arrays of one part went.

    Attributes:
        save: Its plan.
        places: Where the chunks lie that were encoded.
        files: Paths of the data files of its batches, relative to the item.
    """

    save: SavePlan
    places: Places
    files: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Leaf:
    part: int
    number: int


@dataclass(slots=True)
class _Branch:
    """An inner node that may grow.

    Attributes:
        node: The node it came as.
        children: By key, by place in a sequence: the key as it is stored, and what is below it.
    """

    node: Node
    children: dict[Any, tuple[JsonValue, _Tree]]


_Tree: TypeAlias = _Leaf | _Branch


@dataclass(slots=True)
class TreeParts:
    """The parts of one tree so far.

    Attributes:
        count: How many there are.
    """

    count: int = 0
    _root: _Tree | None = None

    def add(self, nodes: Sequence[Node]) -> int:
        """Take the structure of one more part; return its number.

        Raises:
            InvalidArgumentError: There is something already at one of its paths, or its keys
                cannot stand beside those that are there; names the path. Nothing was added.
        """
        part = _tree_of(nodes, self.count)
        if self._root is None:
            self._root = part
        else:
            _check(self._root, part, ())
            _join(self._root, part)
        self.count += 1
        return self.count - 1

    def merged(self) -> Merged:
        """Return the tree that the parts make; there must be one."""
        assert self._root is not None
        walk = _Numbering()
        walk.visit(self._root, ())
        return Merged(walk.nodes, walk.names, walk.sources)


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
    """Raise unless `new` can be put into `old`."""
    if not (isinstance(old, _Branch) and isinstance(new, _Branch) and _can_grow(old, new)):
        raise InvalidArgumentError(
            f"{_what(new)} was given where an earlier part has {_what(old)}. Parts may only add "
            "keys to dicts of the same kind",
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


def _what(tree: _Tree) -> str:
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


@dataclass(slots=True)
class _Numbering:
    """Numbers nodes and leaves as `layout.structure` does."""

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
        # Fields of classes have their stored keys for names, sequences their places.
        own = keys if tree.node.kind in _DICTS or not tree.node.keys else map(decode_key, stored)
        names = sibling_names(list(own))
        numbers = [0] * len(keys)
        for place in _ordered(tree.node, keys):
            _, child = tree.children[keys[place]]
            numbers[place] = self.visit(child, (*path, names[place]))
        update: dict[str, Any] = {"children": numbers}
        if tree.node.kind in _DICTS:
            update["keys"] = stored
        self.nodes[number] = tree.node.model_copy(update=update)
        return -number


def merge_entries(entries: Sequence[ItemEntry], merged: Merged) -> ItemEntry:
    """Return the manifest entry of the whole tree.

    Args:
        entries: The entry of every part, by its number.
        merged: The tree.
    """
    first_files = _starts([len(entry.data_files) for entry in entries])
    shardings: dict[str, tuple[int, ShardingEntry]] = {}
    known: dict[tuple[int, int], int] = {}
    firsts: dict[tuple[int, int], int] = {}

    def sharding_of(part: int, number: int) -> int:
        if (part, number) not in known:
            entry = entries[part].shardings[number]
            text = entry.model_dump_json()
            known[part, number] = shardings.setdefault(text, (len(shardings), entry))[0]
        return known[part, number]

    leaves: list[LeafEntry] = []
    for name, (part, number) in zip(merged.names, merged.sources, strict=True):
        leaf = entries[part].leaves[number]
        # Keys of ordered dicts keep the places they came to, so of the leaves that are one array
        # another may come first than in the part.
        array = (part, number if leaf.same_as is None else leaf.same_as)
        first = firsts.setdefault(array, len(leaves))
        same_as = None if first == len(leaves) else first
        update: dict[str, Any] = {"name": name, "same_as": same_as}
        if leaf.offsets and first_files[part]:
            here = leaf.files or [0] * len(leaf.offsets)
            update["files"] = [file + first_files[part] for file in here]
        if leaf.sharding is not None:
            update["sharding"] = sharding_of(part, leaf.sharding)
        leaves.append(leaf.model_copy(update=update))
    return entries[0].model_copy(
        update={
            "nodes": merged.nodes,
            "leaves": leaves,
            "shardings": [entry for _, entry in shardings.values()],
            "data_files": [path for entry in entries for path in entry.data_files],
            "nbytes": sum(entry.nbytes for entry in entries),
        }
    )


def merge_database(plans: Sequence[PartPlan], merged: Merged) -> list[KeyValue]:
    """Return the keys of the database of the whole tree.

    Its data files are those of all parts, one part after the other.
    """
    first_files = _starts([len(plan.files) for plan in plans])
    names: list[dict[int, str]] = [{} for _ in plans]
    for name, (part, number) in zip(merged.names, merged.sources, strict=True):
        names[part][number] = name
    found = []
    for part, plan in enumerate(plans):
        # A key that is no string is marked beside a string of the same text.
        leaves = tuple(
            leaf if leaf.name == names[part][number] else replace(leaf, name=names[part][number])
            for number, leaf in enumerate(plan.save.leaves)
        )
        for entry in database_entries(replace(plan.save, leaves=leaves), plan.places):
            shifted = entry.inline is None and first_files[part]
            found.append(replace(entry, file=entry.file + first_files[part]) if shifted else entry)
    return found


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]
