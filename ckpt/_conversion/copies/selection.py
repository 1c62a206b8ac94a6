"""Selections: the part of a step that patterns choose, as the manifest of a separate step. Pure.

Patterns are those of leaf paths. The name of an item chooses the whole item. The name with a colon
and a pattern behind it applies the pattern to that item alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry, Manifest, Node
from ckpt._tree.boxes import is_box, unboxed_names
from ckpt._tree.leaf_names import (
    Pattern,
    compile_pattern,
    leaf_of_item,
    sibling_names,
    split_leaf,
    suggestion,
)
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError
from ckpt.extensions._readers import notes_on_step

_EVERYTHING = ("*", "**")
# Kinds of containers that become dicts when they lose children: leaves keep paths and order.
_SEQUENCES, _RECORDS = ("list", "tuple"), ("namedtuple", "custom")
_PLAIN_TREE = "pytree"


class Selection(Struct, frozen=True):
    """The chosen part of a step.

    Attributes:
        manifest: The manifest of that part; the data files of cut items also hold unselected
            leaves.
        cut: Items of which only a part was chosen.
        left_out: Unselected parts, for people: names of items, and numbers of leaves.
        is_reshaped: True if lists, tuples or records have become dicts, since they lost children.
    """

    manifest: Manifest
    cut: tuple[str, ...]
    left_out: tuple[str, ...]
    is_reshaped: bool = False

    @property
    def is_all(self) -> bool:
        """True if nothing is left out."""
        return not self.left_out


# The chosen part of an item: all of it, nothing, or the leaves that patterns cover.
Chosen = Literal["all", "nothing"] | tuple[Pattern, ...]


def everything(manifest: Manifest) -> Selection:
    """Return a selection of a whole step."""
    return Selection(manifest, (), ())


def selected(manifest: Manifest, patterns: Sequence[str]) -> Selection | None:
    """Return the part of a step that patterns choose; None if they choose nothing.

    Raises:
        InvalidArgumentError: A text is not a pattern, or a pattern chooses a part of an item whose
            handler needs all of it.
        CorruptCheckpointError: The manifest contradicts itself.
    """
    if not patterns:
        return everything(manifest)
    items: dict[str, ItemEntry] = {}
    cut, left_out = [], []
    is_reshaped = False
    for name, item in manifest.items.items():
        chosen = _chosen(manifest, name, item, patterns)
        pruned = _Pruned(item) if chosen == "all" else None
        if isinstance(chosen, tuple):
            pruned = _pruned(name, item, chosen)
        if pruned is None:
            left_out.append(f"the item {name}")
            continue
        items[name] = pruned.entry
        is_reshaped = is_reshaped or pruned.is_reshaped
        count = len(item.leaves) - len(pruned.entry.leaves)
        if count:
            _check_handler(manifest, name, item)
            cut.append(name)
            of = "" if manifest.unnamed else f" of {name}"
            left_out.append(f"{count:,} {'leaf' if count == 1 else 'leaves'}{of}")
    if not items:
        return None
    if not left_out:
        return everything(manifest)
    dropped = tuple(f"{name}/" for name in manifest.items if name not in items)
    files = {path: file for path, file in manifest.files.items() if not path.startswith(dropped)}
    sources = {
        path: each for path, each in manifest.sources.items() if not path.startswith(dropped)
    }
    notes = notes_on_step(items, manifest.extensions)
    found = replace(manifest, items=items, files=files, sources=sources, extensions=notes)
    return Selection(found, tuple(cut), tuple(left_out), is_reshaped)


def unmatched(manifest: Manifest, patterns: Sequence[str]) -> list[str]:
    """Return the patterns that choose nothing of a step."""
    return [each for each in patterns if not _is_matched(manifest, each)]


def nothing_selected(where: str, manifest: Manifest, pattern: str) -> InvalidArgumentError:
    """Return the error for a pattern that chooses nothing, with a suggestion."""
    owner, rest = _split(manifest, pattern)
    if owner is not None:
        item = manifest.items[owner]
        hint = _suggestion(rest, unboxed_names(item.nodes, item.leaves.names))
        return InvalidArgumentError(
            f"--select {pattern!r:.80}: the item {owner} of {where} has no leaf that fits "
            f"{rest!r:.80}{hint}"
        )
    names = [] if manifest.unnamed else list(manifest.items)
    # With a dot, the text would be a leaf path in every item.
    dotted = next((name for name in names if pattern.startswith((f"{name}.", f"{name}/"))), None)
    for item in manifest.items.values():
        names += unboxed_names(item.nodes, item.leaves.names)
    if dotted is not None:
        meant = leaf_of_item(dotted, pattern[len(dotted) + 1 :].replace("/", "."))
        hint = f" (is it {meant!r:.80}?)"
    else:
        hint = _suggestion(pattern, names)
    what = "leaf" if manifest.unnamed else "item and no leaf"
    return InvalidArgumentError(f"--select {pattern!r:.80}: {where} has no {what} that fits{hint}")


def _suggestion(pattern: str, names: Sequence[str]) -> str:
    """Return a hint at the pattern that was meant, with dots for slashes."""
    dotted = pattern.replace("%2F", "/").replace("/", ".")
    if dotted != pattern and any(map(compile_pattern(dotted).covers, names)):
        return f" (is it {dotted!r:.80}?)"
    return suggestion(dotted, names)


def _is_matched(manifest: Manifest, pattern: str) -> bool:
    return any(
        chosen == "all" or (isinstance(chosen, tuple) and _pruned(name, item, chosen) is not None)
        for name, item in manifest.items.items()
        for chosen in [_chosen(manifest, name, item, [pattern])]
    )


def _chosen(manifest: Manifest, name: str, item: ItemEntry, patterns: Sequence[str]) -> Chosen:
    found: list[Pattern] = []
    for text in patterns:
        owner, rest = _split(manifest, text)
        if rest in _EVERYTHING or (owner is not None and not rest):
            if owner in (None, name):
                return "all"
        elif owner is None:
            compiled = compile_pattern(rest)
            if not manifest.unnamed and _is_name(compiled, name):
                return "all"
            found.append(compiled)
        elif owner == name:
            found.append(compile_pattern(rest))
    return tuple(found) if found and len(item.leaves) else "nothing"


def _split(manifest: Manifest, text: str) -> tuple[str | None, str]:
    """Return the item that a pattern names, and its leaves."""
    return split_leaf(text, () if manifest.unnamed else manifest.items)


def _is_name(pattern: Pattern, item: str) -> bool:
    """Return True if a pattern fits the name of an item."""
    found = None if None in pattern.keys else pattern.split(item)
    return found is not None and not found[1]


def _check_handler(manifest: Manifest, name: str, item: ItemEntry) -> None:
    if item.handler != _PLAIN_TREE:
        raise InvalidArgumentError(
            f"--select chooses a part of the item {name}, which was saved by the handler "
            f"{item.handler!r:.80} and can only be read whole. Select {name!r} or none of it",
            step=manifest.step,
            item=name,
        )


class _Pruned(Struct, frozen=True):
    """An item without some of its leaves; records whether containers have become dicts."""

    entry: ItemEntry
    is_reshaped: bool = False


def _pruned(name: str, item: ItemEntry, patterns: Sequence[Pattern]) -> _Pruned | None:
    """Return an item with only the leaves that patterns cover; None if there are none."""
    # This detects faults of the nodes before the walk.
    paths = unboxed_names(item.nodes, item.leaves.names)
    if not item.nodes:
        is_covered = any(pattern.covers(path) for pattern in patterns for path in paths)
        return _Pruned(item) if is_covered else None
    walk = _Pruning(item.nodes, patterns)
    try:
        walk.visit(0, (), is_covered=False)
    except (RecursionError, IndexError, ValueError) as error:
        raise CorruptCheckpointError("the nodes are not a tree", item=name) from error
    if not walk.leaves:
        return None
    if len(walk.leaves) == len(item.leaves):
        return _Pruned(item)
    leaves = list(_renumbered(item.leaves, sorted(walk.leaves)))
    numbers = {old: new for new, old in enumerate(sorted(walk.leaves))}
    nodes = [
        replace(
            node,
            children=[child if child < 0 else numbers[child] for child in node.children],
        )
        for node in walk.nodes
    ]
    return _Pruned(replace(item, nodes=nodes, leaves=LeafTable.of(leaves)), walk.has_reshaped)


def _renumbered(leaves: Sequence[LeafEntry], kept: Sequence[int]) -> Iterator[LeafEntry]:
    """Yield the kept leaves; a leaf that was the same as another refers to the first kept one."""
    new: dict[int, int] = {}
    for number, old in enumerate(kept):
        leaf = leaves[old]
        first = old if leaf.same_as is None else leaf.same_as
        # Its chunks are those of the first leaf, whether or not that is kept.
        yield replace(leaf, same_as=new.get(first))
        new.setdefault(first, number)


class _Pruning:
    """A walk through the nodes of an item that keeps the leaves that patterns cover."""

    def __init__(self, nodes: Sequence[Node], patterns: Sequence[Pattern]) -> None:
        self._old = nodes
        self._patterns = patterns
        self.nodes: list[Node] = []
        # Numbers of the kept leaves.
        self.leaves: set[int] = set()
        self.has_reshaped = False

    def visit(self, number: int, path: tuple[str, ...], *, is_covered: bool) -> int | None:
        """Add a node with the kept leaves below it; return its new number, None without such."""
        node = self._old[number]
        place = len(self.nodes)
        self.nodes.append(node)
        names = _child_names(node)
        kept: list[tuple[int, int]] = []
        for position, (name, child) in enumerate(zip(names, node.children, strict=True)):
            # As in leaf paths, which leave out the keys of boxes.
            below = path if is_box(node) else (*path, name)
            covered = is_covered or (bool(below) and self._covers(below))
            if child >= 0:
                if covered:
                    self.leaves.add(child)
                    kept.append((position, child))
                continue
            found = self.visit(-child, below, is_covered=covered)
            if found is not None:
                kept.append((position, -found))
        if not kept and not (is_covered or not place):
            del self.nodes[place:]
            return None
        made = _with_children(node, kept)
        self.has_reshaped = self.has_reshaped or made.kind != node.kind
        self.nodes[place] = made
        return place

    def _covers(self, path: tuple[str, ...]) -> bool:
        text = ".".join(path)
        return any(pattern.covers(text) for pattern in self._patterns)


def _child_names(node: Node) -> Sequence[str]:
    # Imported only here, since copies of whole steps need no jax.
    from ckpt._tree.static_values import decode_key

    if node.kind in _SEQUENCES:
        return [str(number) for number in range(len(node.children))]
    return sibling_names([decode_key(key) for key in node.keys])


def _with_children(node: Node, kept: Sequence[tuple[int, int]]) -> Node:
    children = [child for _, child in kept]
    if len(kept) == len(node.children):
        return replace(node, children=children)
    if node.kind in _SEQUENCES:
        return Node("dict", [position for position, _ in kept], children)
    keys = [node.keys[position] for position, _ in kept]
    if node.kind in _RECORDS:
        return Node("ordered_dict", keys, children)
    return replace(node, keys=keys, children=children)
