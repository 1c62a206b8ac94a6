"""Which stored chunks have to be read for which boxes of which arrays; each chunk once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt._format.manifest import LeafEntry
from ckpt._format.regions import (
    Region,
    addressable_regions,
    chunk_grid,
    chunk_region,
    chunks_touching,
    position_in_grid,
    whole,
)
from ckpt._plan.targets import ArrayRead
from ckpt._plan.virtual_arrays import ArraySlice
from ckpt.errors import TargetMismatchError

__all__ = ["ChunkRead", "Use", "plan_chunk_reads", "regions_of"]

_Places = dict[tuple[int, ...], list["Use"]]


@dataclass(frozen=True, slots=True)
class Use:
    """What of a stored chunk goes where.

    Attributes:
        read: Number of the array that is read.
        region: Number of the region of it that this process needs.
        source: The box, within the chunk.
        target: The same box within the region; its lengths are equal but for axes of length one.
    """

    read: int
    region: int
    source: Region
    target: Region


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One stored chunk to read.

    Attributes:
        leaf: The stored leaf's entry.
        number: Number of the chunk in C order of the leaf's chunk grid.
        covered: The part of the stored array that it holds.
        uses: What it is read for.
    """

    leaf: LeafEntry
    number: int
    covered: Region
    uses: tuple[Use, ...]


def regions_of(read: ArrayRead) -> list[Region]:
    """Return the distinct regions of an array that this process needs."""
    target = read.target
    if target.kind in ("jax", "key") and target.sharding is not None:
        return [region for region, _ in addressable_regions(target.sharding, read.shape)]
    return [whole(read.shape)]


def plan_chunk_reads(
    leaves: Sequence[LeafEntry], reads: Sequence[tuple[int, ArrayRead]]
) -> list[ChunkRead]:
    """Return the chunks that `reads` need, in the order of the first array that needs each leaf.

    Args:
        leaves: The stored leaves.
        reads: The arrays to read, each with its number.

    Raises:
        TargetMismatchError: A chunk is on the disk of another process.
    """
    wanted: dict[int, _Places] = {}
    for number, read in reads:
        everything = whole(read.shape)
        pieces = read.pieces
        if read.leaf is not None:
            pieces = (ArraySlice(read.leaf, everything, everything),)
        for position, region in enumerate(regions_of(read)):
            for piece in pieces:
                places = wanted.setdefault(piece.leaf, {})
                _add_uses(places, leaves[piece.leaf], piece, number, position, region)
    return [
        _chunk_read(leaves[leaf], place, tuple(uses))
        for leaf, places in wanted.items()
        for place, uses in sorted(places.items())
    ]


def _add_uses(
    places: _Places, leaf: LeafEntry, piece: ArraySlice, read: int, position: int, region: Region
) -> None:
    """Note which chunks of `leaf` a region of an array needs by way of `piece`."""
    part = region.intersect(piece.target)
    if part is None:
        return
    needed = piece.to_source(part)
    for place in chunks_touching(needed, leaf.chunks):
        covered = chunk_region(place, leaf.chunks, leaf.shape)
        source = needed.intersect(covered)
        assert source is not None
        target = piece.to_target(source)
        use = Use(read, position, source.within(covered), target.within(region))
        places.setdefault(place, []).append(use)


def _chunk_read(leaf: LeafEntry, place: tuple[int, ...], uses: tuple[Use, ...]) -> ChunkRead:
    number = position_in_grid(place, chunk_grid(leaf.shape, leaf.chunks))
    if leaf.digests and not leaf.digests[number]:
        raise TargetMismatchError(
            f"chunk {number} of {len(leaf.digests)} is on the disk of another process, where each "
            "has its own. Restore with the number of processes and the shardings of the save",
            leaf=leaf.name,
        )
    return ChunkRead(leaf, number, chunk_region(place, leaf.chunks, leaf.shape), uses)
