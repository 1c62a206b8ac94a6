"""The PyTree handler: any tree of arrays and Python scalars."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from typing import Any

import jax

from ckpt.handlers.base import Deferred, ItemReader, ItemWriter
from ckpt.layout.leaves import ARRAY_KINDS, decode_scalar
from ckpt.layout.match import match_target, targets_as_saved
from ckpt.layout.records import check_leaves
from ckpt.layout.structure import describe, rebuild
from ckpt.manifest import ItemEntry

__all__ = ["PyTreeHandler"]

logger = logging.getLogger("ckpt")


class PyTreeHandler:
    """Saves every leaf of a tree, and the tree itself."""

    name = "pytree"

    def accepts(self, item: Any) -> bool:
        """Tell whether `item` can be saved as a tree; leaves are judged one by one later."""
        return True

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Take a snapshot of the tree; see `Handler.stage`.

        Raises:
            UnsupportedLeafError: A leaf or key cannot be stored; names its path.
        """
        structure = await writer.in_thread(describe, item)
        records = await writer.stage(structure)
        # Only the nodes: what waits for the commit must not keep the caller's arrays alive.
        nodes = list(structure.nodes)
        del structure, item

        async def commit() -> ItemEntry:
            done = await records
            return ItemEntry(
                handler=self.name,
                nodes=nodes,
                leaves=done.leaves,
                shardings=done.shardings,
                data_files=done.data_files,
                nbytes=done.nbytes,
            )

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, reader: ItemReader) -> Any:
        """Return the tree, onto the target `like` where there is one; see `Handler.load`.

        Raises:
            TargetMismatchError: The target does not fit; lists every leaf.
            CorruptCheckpointError: What is stored is damaged.
        """
        await reader.in_thread(check_leaves, entry)
        if like is None:
            targets, moved = await reader.in_thread(targets_as_saved, entry)
            if moved:
                logger.warning(
                    "%d arrays (%s, ...) were saved on devices this process does not have; they "
                    "are restored to the default device. Pass like= with shardings to place them",
                    len(moved),
                    moved[0],
                )
            leaves = _with_scalars(entry, await reader.read(entry, targets))
            tree, unknown = await reader.in_thread(rebuild, entry.nodes, leaves)
            if unknown:
                logger.warning(
                    "restored as read-only ckpt.Record, since this process has not imported them: "
                    "%s. Import their modules first, or pass like=",
                    ", ".join(sorted(unknown)),
                )
            return tree
        structure = await reader.in_thread(describe, like)
        match = await reader.in_thread(match_target, entry, structure)
        leaves = _with_scalars(entry, await reader.read(entry, match.targets))
        placed = [... if number is None else leaves[number] for number in match.stored]
        return jax.tree.unflatten(jax.tree.structure(like), placed)


def _with_scalars(entry: ItemEntry, arrays: Sequence[Any]) -> list[Any]:
    return [
        array if leaf.kind in ARRAY_KINDS else decode_scalar(leaf)
        for leaf, array in zip(entry.leaves, arrays, strict=True)
    ]
