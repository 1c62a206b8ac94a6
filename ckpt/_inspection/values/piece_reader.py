"""Stored arrays, read in pieces: every chunk is read once and checked against its digest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckpt._inspection.locations import Checkpoint

if TYPE_CHECKING:
    import numpy as np

    from ckpt._inspection.values.leaf_index import ArrayBox

    Array = np.ndarray[Any, Any]

# Bytes that are read at once, and processed before the next are read.
PIECE_BYTES = 32 << 20


class WantedPiece(Struct, frozen=True):
    """A piece of a leaf of an item.

    Attributes:
        leaf: Number of the leaf.
        piece: The piece.
        nbytes: Its bytes.
    """

    leaf: int
    piece: ArrayBox
    nbytes: int


class PieceReader:
    """The arrays of one item of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, item: str) -> None:
        """Read from `item`.

        Raises:
            CorruptCheckpointError: The entry of the item contradicts itself.
            UnsupportedFormatError: Every process has a part of the item on a disk of its own.
        """
        # Imported only here: they import jax, for which readers of manifests alone need not wait.
        from ckpt._engine.restore.item_reader import RegionReader
        from ckpt._format.manifest_head import OWN_DISKS
        from ckpt._plan.leaf_entries import check_leaves
        from ckpt._settings import Staging
        from ckpt._steps.factory import make_engine
        from ckpt._steps.restores.restore_arguments import context_of
        from ckpt.errors import UnsupportedFormatError, located

        manifest = checkpoint.opened.manifest
        with located(step=manifest.step, item=item):
            if OWN_DISKS in manifest.requires:
                raise UnsupportedFormatError(
                    "every process has a part of this step on a disk of its own: its values can "
                    "be read in a job of as many processes only"
                )
            check_leaves(manifest.items[item])
        context = context_of(checkpoint.opened, make_engine(Staging(), ()))
        self._reader = RegionReader(context, item, None)

    async def read(self, wanted: Sequence[WantedPiece]) -> list[Array]:
        """Return the elements to take from each piece.

        Raises:
            CorruptCheckpointError: A chunk is damaged or missing; names the leaf.
        """
        from ckpt._format.regions import Region

        found = await self._reader.read(
            [(each.leaf, Region(each.piece.offset, each.piece.shape)) for each in wanted]
        )
        # With the dots, indexing without axes gives a view instead of a value.
        indexes: list[tuple[Any, ...]] = [(*each.piece.within, ...) for each in wanted]
        return [array[index] for array, index in zip(found, indexes, strict=True)]

    async def batches(
        self, wanted: Sequence[WantedPiece]
    ) -> AsyncIterator[tuple[list[WantedPiece], list[Array]]]:
        """Yield pieces in batches that are read at once: many small pieces, or one large piece.

        Raises:
            CorruptCheckpointError: As in `read`.
        """
        for batch in batched(wanted):
            yield batch, await self.read(batch)


def batched(wanted: Sequence[WantedPiece]) -> list[list[WantedPiece]]:
    """Return pieces in batches of at most `PIECE_BYTES`, unless a single piece has more."""
    found: list[list[WantedPiece]] = []
    total = PIECE_BYTES
    for each in wanted:
        if not found or total + each.nbytes > PIECE_BYTES:
            found.append([])
            total = 0
        found[-1].append(each)
        total += each.nbytes
    return found
