"""Which bytes of data files are read for which boxes of which arrays. Pure.

`plan_chunk_reads` finds the stored chunks that the arrays need, each once. `plan_requests` turns
them into read requests: small chunks that are neighbours in a file are read at once.

Neither knows of devices: an array says which regions of it are needed. So the same plan is made for
a process that restores and for one that exists only on paper. This module needs no jax.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from ckpt._format.dtypes import parse_dtype
from ckpt._format.leaf_table import UNCHECKED, LeafEntry
from ckpt._format.regions import (
    Region,
    chunk_grid,
    chunk_region,
    chunks_touching,
    position_in_grid,
    whole,
)
from ckpt._plan.slices.array_slices import ArraySlice
from ckpt._plan.slices.strides import Stride
from ckpt._plan.write_batches import BATCH_BYTES
from ckpt.errors import TargetMismatchError

# Larger chunks get a request of their own, straight into their place in memory. Up to this size a
# copy costs less than a request: 500 leaves of 512 KiB took twice the processor time singly.
COALESCED_BYTES = 1 << 20
# The largest gap that is read along with its neighbours; shorter reads would not be faster.
_LARGEST_GAP = 64 << 10

# Requests in progress, of all items: enough to keep the cores and the queue of a disk busy. What is
# compressed is decoded by the thread that has read it.
CONCURRENT_REQUESTS = max(4, min(os.cpu_count() or 1, 16))

_Places = dict[tuple[int, ...], list["Use"]]


class NeededArray(Protocol):
    """An array of which a process needs regions."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def leaf(self) -> int | None:
        """Number of the stored leaf that it is as a whole, or None."""

    @property
    def pieces(self) -> tuple[ArraySlice, ...]:
        """Otherwise the slices that it is made of."""

    @property
    def regions(self) -> Sequence[Region]:
        """The distinct regions that the process needs."""


# Not frozen, nor is `ChunkRead`: there may be a hundred thousand, and frozen ones take three times
# as long to make.
class Use(Struct, eq=False, gc=False):
    """Which box of a stored chunk goes where.

    Attributes:
        read: Number of the array that is read.
        region: Number of the region of it that this process needs.
        source: The box, within the chunk.
        target: The same box within the region; its lengths are equal but for axes of length one.
        strides: If there are any, those of the elements that go from one box to the other.
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
        covered: The part of the stored array that it holds.
        uses: What it is read for.
        file: Number of its data file, among those of the item.
        start, end: The bytes to read there; padding behind the elements is left out.
        nbytes: Bytes of its elements.
    """

    leaf: LeafEntry
    number: int
    covered: Region
    uses: tuple[Use, ...]
    file: int
    start: int
    end: int
    nbytes: int

    @property
    def is_plain(self) -> bool:
        """Whether the bytes to read are the elements: not encoded, and without padding."""
        return self.leaf.codec is None and self.end - self.start == self.nbytes


class ByteRange(Struct, frozen=True, order=True, gc=False):
    """Bytes of a data file.

    Attributes:
        path: The file, relative to the step.
        start, end: Its first byte, and the one behind its last.
    """

    path: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many there are."""
        return self.end - self.start


class ReadRequest(Struct, frozen=True):
    """What is read at once.

    Attributes:
        source: The bytes.
        chunks: The chunks among them, in their order in the file.
        nbytes: Bytes of the elements of these chunks.
    """

    source: ByteRange
    chunks: tuple[ChunkRead, ...]
    nbytes: int


def is_read_whole(leaf: LeafEntry) -> bool:
    """Tell whether a leaf is read as one region, however the array is sharded.

    A packed leaf is: it is small, and jax cuts many such arrays in one call.
    """
    return leaf.packed and bool(leaf.digests)


def plan_chunk_reads(leaves: Sequence[LeafEntry], reads: Sequence[NeededArray]) -> list[ChunkRead]:
    """Return the chunks that `reads` need, each once: those of packed leaves, then all others.

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
                # Thousands of leaves are one chunk for one array, and take a short way.
                use = Use(number, 0, everything, everything)
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
    # A leaf of which another array wants a part is read once, too.
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
    """Note which chunks of `leaf` a region of an array needs by way of `piece`."""
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
        use = Use(read, position, source.within(covered), target.within(region))
        places.setdefault(place, []).append(use)


def _add_strided_uses(
    places: _Places, leaf: LeafEntry, piece: ArraySlice, read: int, position: int, region: Region
) -> None:
    for part in piece.in_target(region):
        for place in chunks_touching(part.source, leaf.chunks):
            covered = chunk_region(place, leaf.chunks, leaf.shape)
            for each in part.in_source(covered):
                source, target = each.source.within(covered), each.target.within(region)
                use = Use(read, position, source, target, each.strides)
                places.setdefault(place, []).append(use)


def _chunk_read(leaf: LeafEntry, place: tuple[int, ...], uses: tuple[Use, ...]) -> ChunkRead:
    if leaf.packed:
        # There may be thousands, each of one chunk that is the array.
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

    A copy that was written anew may have cut an array otherwise. A chunk without a digest could be
    anything.

    Args:
        chunks: The chunks.
        leaves: The leaves of the copy, by name.

    Returns:
        The chunks as they are in the copy, and the others as they were.
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


# Thousands of chunks have a few shapes.
@functools.lru_cache(maxsize=1024)
def _nbytes(dtype: str | None, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * parse_dtype(dtype).itemsize


def _is_contiguous(inside: tuple[int, ...], chunk: tuple[int, ...]) -> bool:
    """Tell whether the corner of shape `inside` is one run of the memory of a chunk."""
    return inside == chunk or Region((0,) * len(chunk), inside).is_contiguous_in(chunk)


def request_bytes(budget: int) -> int:
    """Return the most bytes of a coalesced request of a process with this budget of memory."""
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
    """Yield neighbours among chunks that are sorted by their places."""
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
