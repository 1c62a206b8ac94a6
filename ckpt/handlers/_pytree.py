"""The PyTree handler, for trees of arrays, PRNG keys and Python scalars, or a single array."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from ckpt._format.manifest import ItemEntry
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.classes import known_classes
from ckpt._tree.flatten import describe
from ckpt._tree.leaf_names import nested
from ckpt._tree.leaf_specs import is_function
from ckpt.handlers._base import Deferred, ItemReader, ItemWriter
from ckpt.handlers._leaf_types import PACKED, LeafType, LeafTypes

if TYPE_CHECKING:
    from ckpt._plan.adapt import Adapt, SourceArrays
    from ckpt._plan.match import Match

logger = logging.getLogger("ckpt")


class PyTreeHandler:
    """Saves every leaf of a tree, and the tree itself.

    Example:
        ```python
        handlers = [ckpt.handlers.PyTreeHandler(classes=[TrainState])]
        tree = await ckpt.load("runs/a/100", handlers=handlers)
        ```
    """

    name = "pytree"

    def __init__(
        self,
        classes: Mapping[str, type] | Iterable[type] = (),
        leaf_types: Iterable[LeafType] = (),
    ) -> None:
        """Rebuild also nodes of these classes, and save leaves of these types.

        A class is found by its name if its module is imported, so only others are needed here:
        classes made inside functions, and those renamed or moved since they were saved.

        Args:
            classes: The classes; or `{"module:name as saved": class}`.
            leaf_types: The types of leaves that are objects of your own classes.

        Raises:
            InvalidArgumentError: Something else is among the classes or the leaf types.
        """
        self._classes = known_classes(classes)
        self._leaf_types = LeafTypes(leaf_types)
        # Classes that were not found, with the reasons; each is logged once.
        self._said: set[tuple[str, str]] = set()

    def packs(self, item: Any) -> bool:
        """Return True if `item` itself is of one of the leaf types."""
        return self._leaf_types.is_one(item)

    def accepts(self, item: Any) -> bool:
        """Return True if `item` can be saved as a tree; leaves are checked one by one later."""
        # Only the name of a function is stored, so a function makes no item.
        return not is_function(item)

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Take a snapshot of the tree; see `Handler.stage`.

        Raises:
            UnsupportedLeafError: A leaf or key cannot be stored; the message names its path.
        """
        await writer.stage(await self._packed(item, True, writer))

        async def commit() -> ItemEntry:
            return ItemEntry(handler=self.name)

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        """Return the tree, onto the target `like` where there is one; see `Handler.load`.

        Raises:
            TargetMismatchError: The target does not fit; the message lists every leaf.
            CorruptCheckpointError: The stored tree is damaged.
        """
        from ckpt._plan.adapt import adapted
        from ckpt._plan.leaf_entries import check_leaves
        from ckpt._plan.match import match_as_saved, match_target

        await reader.in_thread(check_leaves, entry)
        stored = await reader.in_thread(adapted, entry, adapt)
        if like is None:
            match = await reader.in_thread(match_as_saved, entry, stored, adapt)
            leaves = match.leaves(await reader.read(entry, match.reads))
            tree = await reader.in_thread(self._rebuilt, entry, stored, leaves)
            if any(node.class_name == PACKED for node in entry.nodes):
                tree = await reader.in_thread(self._unpacked, tree)
        else:
            like = await self._packed(like, False, reader)
            structure = await reader.in_thread(describe, like)
            match = await reader.in_thread(match_target, structure, stored, adapt)
            leaves = match.leaves(await reader.read(entry, match.reads))
            tree = jax.tree.unflatten(jax.tree.structure(like), leaves)
            if self._leaf_types:
                tree = await reader.in_thread(self._unpacked, tree)
        _report(entry, match, adapt, reader.item)
        return tree

    async def _packed(self, tree: Any, saved: bool, engine: ItemWriter | ItemReader) -> Any:
        if not self._leaf_types:
            return tree
        # Checked before packing, which makes the nodes anew, without attributes that jax ignores.
        await engine.in_thread(describe, tree, saved, self._leaf_types.is_one)
        return self._leaf_types.packed(tree)

    def _unpacked(self, tree: Any) -> Any:
        unknown: set[str] = set()
        tree = self._leaf_types.unpacked(tree, unknown)
        new = sorted((name, "") for name in unknown if (name, "") not in self._said)
        if new:
            self._said.update(new)
            logger.warning(
                "leaves of the types %s are restored as ckpt.handlers.PackedLeaf: pass their "
                "LeafType as PyTreeHandler(leaf_types=[...])",
                ", ".join(name for name, _ in new),
            )
        return tree

    def _rebuilt(self, entry: ItemEntry, stored: SourceArrays, leaves: list[Any]) -> Any:
        from ckpt._tree.unflatten import unflatten

        if stored.moved:
            return nested(dict(zip(stored.sources, leaves, strict=True)))
        tree, unknown = unflatten(entry.nodes, leaves, self._classes)
        new = sorted(set(unknown.items()) - self._said)
        if new:
            self._said.update(new)
            logger.warning(
                "restored as read-only ckpt.types.UnknownNode: %s",
                "; ".join(f"{name} ({why})" for name, why in new),
            )
        return tree


def _report(entry: ItemEntry, match: Match, adapt: Adapt, item: str) -> None:
    if match.moved:
        logger.warning(
            "%d arrays are not placed as they were: %s. Pass like= with shardings to place them",
            len(match.moved),
            "; ".join(
                f"{count} ({path}{', ...' if count > 1 else ''}): {lost}"
                for lost, (count, path) in _by_value(match.moved).items()
            ),
        )
    if adapt.report is not None:
        from ckpt._plan.adapt import RestoreReport

        used = set(match.used)
        names = unboxed_names(entry.nodes, entry.leaves.names)
        adapt.report(
            RestoreReport(
                item=item,
                used=tuple(name for name in names if name in used),
                unused=tuple(name for name in names if name not in used),
                kept=tuple(match.kept),
            )
        )


def _by_value(texts: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """Return, by text, the number of paths that have it and the first of them."""
    found: dict[str, tuple[int, str]] = {}
    for path, text in texts.items():
        count, first = found.get(text, (0, path))
        found[text] = count + 1, first
    return found
