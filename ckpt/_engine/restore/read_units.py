"""What a restore reads at once: runs of packed leaves, and granules of chunks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ckpt._engine.restore.chunk_sources import DataFiles, StoredChunk
from ckpt._engine.restore.packed_runs import (
    PackedRead,
    Run,
    parts_of,
    runs_of,
)
from ckpt._format.dtypes import parse_dtype
from ckpt._format.manifest import LeafEntry
from ckpt._plan.chunk_reads import ChunkRead
from ckpt._plan.multihost.read_groups import ByteRange, Grouping
from ckpt._plan.targets import ArrayRead

__all__ = [
    "Granule",
    "Unit",
    "chunk_nbytes",
    "extents_of",
    "leaves_of",
    "lots_of",
    "sorted_out",
    "stored_chunk",
    "unit_nbytes",
]

# Chunks that are read from one source.
Granule = list[ChunkRead]
Unit = Run | Granule


def sorted_out(
    leaves: Sequence[LeafEntry], reads: Sequence[ArrayRead]
) -> tuple[list[PackedRead], list[tuple[int, ArrayRead]]]:
    """Return packed leaves that are wanted once and as they are, and all other reads."""
    counts = Counter(read.leaf for read in reads)
    counts.update({piece.leaf for read in reads for piece in read.pieces})
    packed: list[PackedRead] = []
    others: list[tuple[int, ArrayRead]] = []
    for number, read in enumerate(reads):
        leaf = None if read.leaf is None else leaves[read.leaf]
        if leaf is not None and leaf.packed and leaf.digests and counts[read.leaf] == 1:
            packed.append(PackedRead(number, read, leaf))
        else:
            others.append((number, read))
    return packed, others


def lots_of(
    packed: Sequence[PackedRead],
    chunks: Sequence[ChunkRead],
    groupings: Mapping[str, Grouping],
    limits: Mapping[Grouping | None, int],
) -> dict[Grouping | None, list[Unit]]:
    """Return what is read by whom: the units of every grouping, and of this process alone.

    Args:
        packed: Packed leaves that lie in data files.
        chunks: All other chunks.
        groupings: By name of the leaf who reads it; this process alone reads all others.
        limits: About how many bytes a unit may have, by who reads it.
    """
    of_packed: dict[Grouping | None, list[PackedRead]] = {who: [] for who in limits}
    of_chunks: dict[Grouping | None, list[ChunkRead]] = {who: [] for who in limits}
    for each in packed:
        of_packed[groupings.get(each.leaf.name)].append(each)
    for chunk in chunks:
        of_chunks[groupings.get(chunk.leaf.name)].append(chunk)
    return {
        who: [*runs_of(of_packed[who], limit), *_granules(of_chunks[who], limit)]
        for who, limit in limits.items()
    }


def _granules(chunks: Sequence[ChunkRead], limit: int) -> Iterator[Granule]:
    batch: Granule = []
    total = 0
    for chunk in chunks:
        # With its padding, which is read, too.
        nbytes = math.prod(chunk.leaf.chunks) * parse_dtype(chunk.leaf.dtype).itemsize
        if batch and (
            total + nbytes > limit or bool(chunk.leaf.offsets) != bool(batch[0].leaf.offsets)
        ):
            yield batch
            batch, total = [], 0
        batch.append(chunk)
        total += nbytes
    if batch:
        yield batch


def chunk_nbytes(chunk: ChunkRead) -> int:
    """Return the bytes of the array that a chunk holds."""
    return chunk.covered.size * parse_dtype(chunk.leaf.dtype).itemsize


def unit_nbytes(unit: Unit) -> int:
    """Return the bytes of what a unit reads."""
    return unit.end - unit.start if isinstance(unit, Run) else sum(map(chunk_nbytes, unit))


def extents_of(unit: Unit, files: DataFiles) -> list[ByteRange]:
    """Return the bytes of data files that reading a unit takes; it lies in data files."""
    if isinstance(unit, Run):
        return [files.extent_of_run(unit.file, unit.start, unit.end)]
    return [files.extent(stored_chunk(chunk)) for chunk in unit]


def leaves_of(unit: Unit, files: DataFiles) -> Iterator[tuple[str, ByteRange]]:
    """Yield the leaves of a unit by name, each with bytes that reading it takes."""
    if isinstance(unit, Run):
        for leaf, part in parts_of(unit):
            start, end = unit.start + part.start, unit.start + part.stop
            yield leaf.name, files.extent_of_run(unit.file, start, end)
    else:
        for chunk in unit:
            yield chunk.leaf.name, files.extent(stored_chunk(chunk))


def stored_chunk(chunk: ChunkRead) -> StoredChunk:
    """Return what is stored of a chunk that is read."""
    return StoredChunk(chunk.leaf, chunk.number, chunk.covered)
