"""Stored arrays, read in pieces: every chunk once, checked against its digest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckpt._inspection.places import Checkpoint

if TYPE_CHECKING:
    import numpy as np

    from ckpt._format.manifest import ItemEntry
    from ckpt._inspection.values.leaf_index import ArrayPiece

    Array = np.ndarray[Any, Any]

# Bytes that are read at once, and looked at before the next are read.
PIECE_BYTES = 32 << 20


class WantedPiece(Struct, frozen=True):
    """A piece of a leaf of an item.

    Attributes:
        leaf: Number of the leaf.
        piece: The piece.
        nbytes: Its bytes.
    """

    leaf: int
    piece: ArrayPiece
    nbytes: int


class StoredArrays:
    """The arrays of one item of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, item: str) -> None:
        """Read from `item`.

        Raises:
            CorruptCheckpointError: Its entry contradicts itself.
            UnsupportedFormatError: Every process has a part of it on a disk of its own.
        """
        # They import jax, which what reads manifests alone need not wait for.
        from ckpt._engine.restore.item_reader import EngineItemReader
        from ckpt._format.manifest_head import OWN_DISKS
        from ckpt._plan.leaf_entries import check_leaves
        from ckpt._plan.multihost.per_process import ProcessPart
        from ckpt._settings import Staging
        from ckpt._steps.factory import make_engine
        from ckpt._steps.restores.requests import context_of
        from ckpt.errors import UnsupportedFormatError, located

        self._checkpoint = checkpoint
        self._item = item
        opened = checkpoint.opened
        manifest = opened.manifest
        self._entry: ItemEntry = manifest.items[item]
        with located(step=manifest.step, item=item):
            if OWN_DISKS in manifest.requires:
                raise UnsupportedFormatError(
                    "every process has a part of this step on a disk of its own: its values can "
                    "be read in a job of as many processes only"
                )
            check_leaves(self._entry)
        context = context_of(
            opened, checkpoint.storage, make_engine(Staging(), (), ()), process=0, count=1
        )
        self._reader = EngineItemReader(context, item, ProcessPart(self._entry))

    async def read(self, wanted: Sequence[WantedPiece]) -> list[Array]:
        """Return pieces, each with what is taken of it.

        Raises:
            CorruptCheckpointError: A chunk is damaged or missing; names the leaf.
        """
        from ckpt._format.dtypes import parse_dtype
        from ckpt._format.regions import Region, whole
        from ckpt._plan.slices.array_slices import ArraySlice
        from ckpt._plan.targets import ArrayRead, ArrayTarget
        from ckpt.errors import located
        from ckpt.storage._manifests import while_read

        reads = []
        for each in wanted:
            leaf, piece = self._entry.leaves[each.leaf], each.piece
            target = ArrayTarget("numpy", parse_dtype(leaf.dtype))
            region = Region(piece.offset, piece.shape)
            source = each.leaf if leaf.same_as is None else leaf.same_as
            taken = ArraySlice(source, region, whole(piece.shape))
            dtype = leaf.dtype or ""
            reads.append(ArrayRead(target, piece.shape, dtype, None, leaf.name, (taken,)))
        opened = self._checkpoint.opened
        async with while_read(self._checkpoint.storage, opened.step_dir, opened.manifest):
            with located(step=opened.manifest.step, item=self._item):
                found = await self._reader.read(self._entry, reads)
        return [
            # The dots: without axes, indexing would give a value instead of a view.
            array[(*each.piece.within, ...)]
            for array, each in zip(found, wanted, strict=True)
        ]

    async def batches(
        self, wanted: Sequence[WantedPiece]
    ) -> AsyncIterator[tuple[list[WantedPiece], list[Array]]]:
        """Yield pieces in batches, each read at once: many small ones, or one large one.

        Raises:
            CorruptCheckpointError: As by `read`.
        """
        for batch in batched(wanted):
            yield batch, await self.read(batch)


def batched(wanted: Sequence[WantedPiece]) -> list[list[WantedPiece]]:
    """Return pieces in batches of at most `PIECE_BYTES`, unless one has more."""
    found: list[list[WantedPiece]] = []
    total = PIECE_BYTES
    for each in wanted:
        if not found or total + each.nbytes > PIECE_BYTES:
            found.append([])
            total = 0
        found[-1].append(each)
        total += each.nbytes
    return found
