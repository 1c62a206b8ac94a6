"""The bytes of data files to read, and the boxes of arrays that they fill. Pure.

`plan_chunk_reads` finds the stored chunks that the arrays need, each once. `plan_requests` turns
them into read requests: small chunks that are neighbours in a file are read in one request.

Neither knows of devices: an array lists the regions of it that are needed. So the same plan is made
for a process that restores and for one that exists only on paper. This module needs no jax.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from ckpt._format.array_format import parse_dtype
from ckpt._format.leaf_table import UNCHECKED, LeafEntry
from ckpt._format.regions import (
    Region,
    chunk_grid,
    chunk_region,
    chunks_touching,
    position_in_grid,
    whole,
)
from ckpt._plan.slices import ArraySlice, Stride
from ckpt._plan.write_batches import BATCH_BYTES
from ckpt.errors import TargetMismatchError

# Largest chunk that is read in one request with others; a larger one is read straight into its
# place. Up to this size a copy costs less than a request: 500 leaves of 512 KiB took twice the
# processor time singly.
COALESCED_BYTES = 1 << 20
# Largest gap that is read along with its neighbours; a shorter read would not be faster.
_LARGEST_GAP = 64 << 10

# Most requests in progress, over all items: enough to keep the cores and the queue of a disk busy.
# The thread that has read an encoded chunk decodes it.
CONCURRENT_REQUESTS = max(4, min(os.cpu_count() or 1, 16))

_Places = dict[tuple[int, ...], list["ChunkUse"]]


class NeededArray(Protocol):
    """An array of which a process needs regions."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""

    @property
    def leaf(self) -> int | None:
        """Number of the stored leaf that it is as a whole, or None."""

    @property
    def pieces(self) -> tuple[ArraySlice, ...]:
        """The slices that it is made of if it is no whole leaf."""

    @property
    def regions(self) -> Sequence[Region]:
        """The distinct regions that the process needs."""


# Not frozen, like `ChunkRead`: there may be a hundred thousand, and frozen ones take three times as
# long to make.
class ChunkUse(Struct, eq=False, gc=False):
    """A box of a stored chunk and its place in an array.

    Attributes:
        read: Number of the array that is read.
        region: Number of the region of it that this process needs.
        source: The box, within the chunk.
        target: The same box within the region; lengths are equal but for axes of length one.
        strides: Strides of the elements that go from one box to the other; empty for all elements.
    """

    read: int
    region: int
    source: Region
    target: Region
    strides: tuple[Stride, ...] = ()


class ChunkRead(Struct, eq=False, gc=False):
    """One stored chunk to read.

    Attributes:
        leaf: The stored leaf's entry.
        number: Number of the chunk in C order of the leaf's chunk grid.
        covered: The part of the stored array that the chunk holds.
        uses: The boxes that the chunk is read for.
        file: Number of its data file, among the data files of the item.
        start, end: First byte to read and the byte after the last; padding after the elements is
            left out.
        nbytes: Bytes of its elements.
    """

    leaf: LeafEntry
    number: int
    covered: Region
    uses: tuple[ChunkUse, ...]
    file: int
    start: int
    end: int
    nbytes: int

    @property
    def is_plain(self) -> bool:
        """True if the bytes to read are the elements: not encoded, and without padding."""
        return self.leaf.codec is None and self.end - self.start == self.nbytes


class ByteRange(Struct, frozen=True, order=True, gc=False):
    """Bytes of a data file.

    Attributes:
        path: The file, relative to the step.
        start, end: Offsets of the first byte and of the byte after the last.
    """

    path: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class ReadRequest(Struct, frozen=True):
    """Bytes that are read in one request, with the chunks in them.

    Attributes:
        source: The bytes to read.
        chunks: The chunks among them, in their order in the file.
        nbytes: Bytes of the elements of these chunks.
    """

    source: ByteRange
    chunks: tuple[ChunkRead, ...]
    nbytes: int


def is_read_whole(leaf: LeafEntry) -> bool:
    """Return True if a leaf is read as one region, however the array is sharded.

    Packed leaves are: they are small, and jax cuts many such arrays in one call.
    """
    return leaf.packed and bool(leaf.digests)


def plan_chunk_reads(leaves: Sequence[LeafEntry], reads: Sequence[NeededArray]) -> list[ChunkRead]:
    """Return the chunks that `reads` need, each once: chunks of packed leaves, then all others.

    Both are in the order of the first array that needs each leaf.

    Raises:
        TargetMismatchError: A chunk is on the disk of another process.
    """
    wanted: dict[int, _Places] = {}
    packed: dict[int, ChunkRead] = {}
    leaves = list(leaves)
    for number, read in enumerate(reads):
        pieces = read.pieces
        if read.leaf is not None:
            everything = whole(read.shape)
            leaf = leaves[read.leaf]
            if is_read_whole(leaf):
                # Fast path: thousands of leaves are one chunk for one array.
                use = ChunkUse(number, 0, everything, everything)
                known = packed.get(read.leaf)
                if known is None:
                    packed[read.leaf] = _chunk_read(leaf, everything.offset, (use,))
                else:
                    known.uses = (*known.uses, use)
                continue
            pieces = (ArraySlice(read.leaf, everything, everything),)
        for position, region in enumerate(read.regions):
            for piece in pieces:
                places = wanted.setdefault(piece.leaf, {})
                _add_uses(places, leaves[piece.leaf], piece, number, position, region)
    # If another array wants a part of such a leaf, the leaf is read once, too.
    for leaf_number in packed.keys() & wanted.keys():
        for uses in wanted.pop(leaf_number).values():
            packed[leaf_number].uses += tuple(uses)
    large = [
        _chunk_read(leaves[leaf], place, tuple(uses))
        for leaf, places in wanted.items()
        for place, uses in sorted(places.items())
    ]
    return [*packed.values(), *large]


def _add_uses(
    places: _Places, leaf: LeafEntry, piece: ArraySlice, read: int, position: int, region: Region
) -> None:
    """Note the chunks of `leaf` that a region of an array needs by way of `piece`."""
    part = region.intersect(piece.target)
    if part is None:
        return
    if piece.strides:
        _add_strided_uses(places, leaf, piece, read, position, region)
        return
    needed = piece.to_source(part)
    for place in chunks_touching(needed, leaf.chunks):
        covered = chunk_region(place, leaf.chunks, leaf.shape)
        source = needed.intersect(covered)
        assert source is not None
        target = piece.to_target(source)
        use = ChunkUse(read, position, source.within(covered), target.within(region))
        places.setdefault(place, []).append(use)


def _add_strided_uses(
    places: _Places, leaf: LeafEntry, piece: ArraySlice, read: int, position: int, region: Region
) -> None:
    for part in piece.in_target(region):
        for place in chunks_touching(part.source, leaf.chunks):
            covered = chunk_region(place, leaf.chunks, leaf.shape)
            for each in part.in_source(covered):
                source, target = each.source.within(covered), each.target.within(region)
                use = ChunkUse(read, position, source, target, each.strides)
                places.setdefault(place, []).append(use)


def _chunk_read(leaf: LeafEntry, place: tuple[int, ...], uses: tuple[ChunkUse, ...]) -> ChunkRead:
    if leaf.packed:
        # Fast path: there may be thousands of leaves whose one chunk is the array.
        number, covered = 0, whole(leaf.shape)
    else:
        number = position_in_grid(place, chunk_grid(leaf.shape, leaf.chunks))
        covered = chunk_region(place, leaf.chunks, leaf.shape)
    if not leaf.digests[number]:
        raise TargetMismatchError(
            f"chunk {number} of {len(leaf.digests)} is on the disk of another process, where each "
            "has its own. Restore with the number of processes and the shardings of the save",
            leaf=leaf.name,
        )
    file = leaf.files[number] if leaf.files else 0
    start = leaf.offsets[number]
    nbytes = _nbytes(leaf.dtype, covered.shape)
    stored = nbytes
    if leaf.codec is not None:
        stored = leaf.lengths[number]
    elif not (leaf.packed or _is_contiguous(covered.shape, tuple(leaf.chunks))):
        stored = _nbytes(leaf.dtype, tuple(leaf.chunks))
    return ChunkRead(leaf, number, covered, uses, file, start, start + stored, nbytes)


def chunks_elsewhere(
    chunks: Sequence[ChunkRead], leaves: Mapping[str, LeafEntry]
) -> tuple[list[ChunkRead], list[ChunkRead]]:
    """Return the chunks that another copy of their item has, and those that it does not have.

    A copy that was written anew may have cut an array in another way. A chunk without a digest
    cannot be compared.

    Args:
        chunks: The chunks.
        leaves: The leaves of the copy, by name.

    Returns:
        The chunks with their places in the copy, and the other chunks unchanged.
    """
    there: list[ChunkRead] = []
    left: list[ChunkRead] = []
    for chunk in chunks:
        own, leaf = chunk.leaf, leaves.get(chunk.leaf.name)
        digest = own.digests[chunk.number]
        if (
            leaf is None
            or (leaf.dtype, leaf.shape) != (own.dtype, own.shape)
            or leaf.packed != own.packed
            or (not own.packed and tuple(leaf.chunks) != tuple(own.chunks))
            or digest == UNCHECKED
            or leaf.digests[chunk.number] != digest
        ):
            left.append(chunk)
            continue
        place: tuple[int, ...] = ()
        if not own.packed:
            pairs = zip(chunk.covered.offset, own.chunks, strict=True)
            place = tuple(first // length for first, length in pairs)
        there.append(_chunk_read(leaf, place, chunk.uses))
    return there, left


# Cached: thousands of chunks have a few shapes.
@functools.lru_cache(maxsize=1024)
def _nbytes(dtype: str | None, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * parse_dtype(dtype).itemsize


def _is_contiguous(inside: tuple[int, ...], chunk: tuple[int, ...]) -> bool:
    """Return True if the corner of shape `inside` is one run of the memory of a chunk."""
    return inside == chunk or Region((0,) * len(chunk), inside).is_contiguous_in(chunk)


def request_bytes(budget: int) -> int:
    """Return the most bytes of a coalesced request in a process with this memory budget."""
    return min(BATCH_BYTES, budget // CONCURRENT_REQUESTS)


def plan_requests(
    chunks: Sequence[ChunkRead], data_files: Sequence[str], limit: int
) -> list[ReadRequest]:
    """Return the requests that read `chunks`: coalesced ones first, then one for each large chunk.

    Args:
        chunks: The chunks to read.
        data_files: The data files of the item, by number and relative to the step.
        limit: Most bytes of a coalesced request, unless a single chunk has more.
    """
    small: list[ChunkRead] = []
    large: list[ChunkRead] = []
    for chunk in chunks:
        is_small = max(chunk.end - chunk.start, chunk.nbytes) <= COALESCED_BYTES
        (small if is_small else large).append(chunk)
    small.sort(key=lambda chunk: (chunk.file, chunk.start))
    groups = [*_coalesced(small, limit), *([chunk] for chunk in large)]
    return [
        ReadRequest(
            ByteRange(data_files[group[0].file], group[0].start, max(each.end for each in group)),
            tuple(group),
            sum(each.nbytes for each in group),
        )
        for group in groups
    ]


def _coalesced(chunks: Sequence[ChunkRead], limit: int) -> Iterator[list[ChunkRead]]:
    """Yield groups of neighbours among chunks that are sorted by their places."""
    group: list[ChunkRead] = []
    end = 0
    for chunk in chunks:
        if group and not (
            chunk.file == group[0].file
            and chunk.start - end <= _LARGEST_GAP
            and max(end, chunk.end) - group[0].start <= limit
        ):
            yield group
            group = []
        end = max(end, chunk.end) if group else chunk.end
        group.append(chunk)
    if group:
        yield group
