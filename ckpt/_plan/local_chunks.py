"""The chunks of a leaf that one process writes, and where it copies them from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ckpt._format.dtypes import DTYPES
from ckpt._format.regions import (
    Region,
    addressable_regions,
    chunk_grid,
    chunk_region,
    chunks_touching,
    position_in_grid,
    whole,
)
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.data_files import Chunk, ChunkPart
from ckpt._plan.ownership import (
    ArrayPlacement,
    Partitioner,
    ProcessGroup,
    ReplicaGroup,
)

__all__ = ["add_jobs", "has_chunks", "own_chunks", "shared_chunks"]

Shape = tuple[int, ...]


def has_chunks(leaf: LeafPlan) -> bool:
    """Tell whether chunks of a leaf are stored for its own sake."""
    return leaf.metadata is not None and 0 not in leaf.spec.shape and leaf.spec.same_as is None


def own_chunks(number: int, leaf: LeafPlan, team: ProcessGroup | None) -> Iterable[Chunk]:
    """Yield the chunks of a leaf that lies on this process alone."""
    spec = leaf.spec
    shape = spec.shape
    if leaf.packed:
        place = (0,) * len(shape)
        yield Chunk(number, 0, (), place, whole(shape), 0, spec.nbytes, spec.nbytes)
        return
    itemsize = DTYPES[spec.dtype or ""].itemsize
    stored = math.prod(leaf.chunk) * itemsize
    parts: dict[tuple[int, ...], list[ChunkPart]] = {}
    process = None if team is None else team.index
    for region, holders in addressable_regions(spec.sharding, shape, process):
        for place in chunks_touching(region, leaf.chunk):
            covered = chunk_region(place, leaf.chunk, shape)
            common = region.intersect(covered)
            assert common is not None
            part = ChunkPart(holders[0], common.within(region), common.within(covered))
            parts.setdefault(place, []).append(part)
    for place, found in parts.items():
        covered = chunk_region(place, leaf.chunk, shape)
        position = position_in_grid(place, leaf.grid)
        nbytes = covered.size * itemsize
        yield Chunk(number, position, tuple(found), place, covered, 0, nbytes, stored)


def add_jobs(deal: Partitioner, number: int, leaf: LeafPlan, spread: ArrayPlacement) -> None:
    """Say which crews of this process have to write what of a leaf."""
    stored = math.prod(leaf.chunk) * DTYPES[leaf.spec.dtype or ""].itemsize
    if leaf.packed:
        if spread.whole is not None:
            deal.add(spread.whole, number, 1, stored)
        return
    each = math.prod(_chunks_of_shard(leaf))
    for crew, cells in spread.shares:
        deal.add(crew, number, each * len(cells), stored)


def shared_chunks(
    number: int,
    leaf: LeafPlan,
    spread: ArrayPlacement,
    shares: Mapping[tuple[int, ReplicaGroup], range],
) -> Iterable[Chunk]:
    """Yield the chunks that this process writes of a leaf that lies on several."""
    if leaf.packed:
        if spread.whole is not None and (number, spread.whole) in shares:
            yield from own_chunks(number, leaf, None)
        return
    assert leaf.spec.sharding is not None
    shape = leaf.spec.shape
    shard = leaf.spec.sharding.shard_shape(shape)
    itemsize = DTYPES[leaf.spec.dtype or ""].itemsize
    stored = math.prod(leaf.chunk) * itemsize
    within = chunk_grid(shard, leaf.chunk)
    each = math.prod(within)
    for crew, cells in spread.shares:
        for turn in shares.get((number, crew), ()):
            cell = cells[turn // each]
            place = _place(cell.place, within, turn % each)
            covered = chunk_region(place, leaf.chunk, shape)
            corner = tuple(at * length for at, length in zip(cell.place, shard, strict=True))
            # No other shard has a part of it.
            source = covered.within(Region(corner, shard))
            part = ChunkPart(cell.shard, source, whole(covered.shape))
            position = position_in_grid(place, leaf.grid)
            nbytes = covered.size * itemsize
            yield Chunk(number, position, (part,), place, covered, 0, nbytes, stored)


def _place(shard: Shape, within: Shape, number: int) -> Shape:
    """Return the place in the grid of chunk `number` of a shard that has `within` chunks."""
    place = []
    for first, count in zip(reversed(shard), reversed(within), strict=True):
        number, index = divmod(number, count)
        place.append(first * count + index)
    return tuple(reversed(place))


def _chunks_of_shard(leaf: LeafPlan) -> Shape:
    assert leaf.spec.sharding is not None
    return chunk_grid(leaf.spec.sharding.shard_shape(leaf.spec.shape), leaf.chunk)
