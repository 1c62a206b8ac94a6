"""Chunk locations: found by file, checked, and cut into pieces of limited size. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec import Struct

from ckpt._format.array_format import parse_dtype
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.manifest import ItemEntry
from ckpt._format.manifest_head import FileEntry
from ckpt._format.regions import Region, chunk_region
from ckpt._format.step_files import SourceFile

Shape = tuple[int, ...]


class ChunkLocation(Struct, frozen=True):
    """The location of one chunk.

    Attributes:
        file: Number of its data file.
        start: Offset of its first byte in the file.
        end: Offset of the byte after its last one.
        leaf: Number of its leaf, or of the first of several leaves that share the chunk.
        number: Number of the chunk in C order of the leaf's chunk grid.
    """

    file: int
    start: int
    end: int
    leaf: int
    number: int


class ChunkSlice(Struct, frozen=True):
    """Bytes of a chunk, as a small array with a corner that belongs to the stored array.

    Attributes:
        offset: Offset of the first byte in the chunk.
        shape: Shape of the small array.
        inside: Shape of the corner; the rest is padding.
    """

    offset: int
    shape: Shape
    inside: Shape


class FileSegment(Struct, frozen=True):
    """Bytes of a data file: a part of a chunk, or a gap between chunks.

    Attributes:
        start: Offset of the first byte in the file.
        place: The chunk; None in a gap.
        part: The part of the chunk; None in a gap.
    """

    start: int
    nbytes: int
    place: ChunkLocation | None = None
    part: ChunkSlice | None = None


def places_in(item: ItemEntry, files: Collection[int]) -> list[ChunkLocation]:
    """Return the locations of all chunks in the data files with these numbers, in file order.

    Every chunk is returned once, with the first of the leaves that share it. The leaves must have
    passed `check_leaves`.
    """
    found = [
        place
        for number, leaf in enumerate(item.leaves)
        if leaf.offsets and leaf.same_as is None
        for place in _places_of(number, leaf)
        if place.file in files
    ]
    found.sort(key=lambda place: (place.file, place.start))
    return found


def _places_of(number: int, leaf: LeafEntry) -> Iterator[ChunkLocation]:
    itemsize = parse_dtype(leaf.dtype).itemsize
    whole = math.prod(leaf.chunks) * itemsize
    for chunk, start in enumerate(leaf.offsets):
        if not leaf.digests[chunk]:
            # The chunk is on the disk of another process.
            continue
        length = leaf.lengths[chunk] if leaf.codec is not None else whole
        if leaf.codec is None and len(leaf.offsets) > 1:
            length -= _padding_after(leaf, chunk) * itemsize
        file = leaf.files[chunk] if leaf.files else 0
        yield ChunkLocation(file, start, start + length, number, chunk)


def _padding_after(leaf: LeafEntry, number: int) -> int:
    """Return the number of elements of a chunk after the last one that is in the array.

    Other libraries do not store them.
    """
    inside = region_of(leaf, number).shape
    after, stride = 0, 1
    for used, length in zip(reversed(inside), reversed(leaf.chunks), strict=True):
        after += (length - used) * stride
        stride *= length
    return after


def misplaced_leaves(
    name: str, item: ItemEntry, files: Mapping[str, FileEntry | SourceFile]
) -> dict[int, str]:
    """Return the faults in the chunk locations of leaves, by number of the leaf.

    Chunks must be within files that the manifest lists, and must not overlap. A reader of the
    chunks of all other leaves thus reads no byte twice, whatever the manifest says.

    The leaves of `item` must have passed `check_leaves`; `files` are those that the manifest lists.
    """
    wrong: dict[int, str] = {}
    last: ChunkLocation | None = None
    for place in places_in(item, range(len(item.data_files))):
        reason = _contradiction(name, item, place, last, files)
        if reason is not None:
            wrong.setdefault(place.leaf, reason)
        if place.leaf not in wrong:
            last = place
    return wrong


def _contradiction(
    name: str,
    item: ItemEntry,
    place: ChunkLocation,
    last: ChunkLocation | None,
    files: Mapping[str, FileEntry | SourceFile],
) -> str | None:
    path = f"{name}/{item.data_files[place.file]}"
    known = files.get(path)
    if known is None:
        return f"its chunks are in {path}, which is not among the listed files"
    where = f"chunk {place.number}, bytes {place.start} to {place.end} of {path},"
    if place.end > known.size:
        return f"{where} would lie beyond the end: the file has {known.size} bytes"
    if last is not None and last.file == place.file and place.start < last.end:
        return f"{where} would lie within a chunk of {item.leaves[last.leaf].name!r:.200}"
    return None


def region_of(leaf: LeafEntry, number: int) -> Region:
    """Return the region of the array that chunk `number` of a leaf holds."""
    place = []
    for length, chunk in zip(reversed(leaf.shape), reversed(leaf.chunks), strict=True):
        number, index = divmod(number, -(-length // chunk))
        place.append(index)
    return chunk_region(place[::-1], leaf.chunks, leaf.shape)


def segments(
    places: Sequence[ChunkLocation], leaves: Sequence[LeafEntry], nbytes: int, limit: int
) -> Iterator[FileSegment]:
    """Yield all bytes of a data file, each once and in order, as segments of at most `limit` bytes.

    Args:
        places: Chunks in the file, in order and without overlaps; none of them encoded.
        leaves: The leaves of the item.
        nbytes: Size of the file.
        limit: Most bytes of one segment.
    """
    end = 0
    for place in places:
        leaf = leaves[place.leaf]
        itemsize = parse_dtype(leaf.dtype).itemsize
        for part in parts_of(leaf, place.number, limit):
            start = place.start + part.offset
            yield from _between(end, start, limit)
            end = start + math.prod(part.shape) * itemsize
            yield FileSegment(start, end - start, place, part)
    yield from _between(end, nbytes, limit)


def _between(start: int, end: int, limit: int) -> Iterator[FileSegment]:
    for first in range(start, end, limit):
        yield FileSegment(first, min(limit, end - first))


def parts_of(leaf: LeafEntry, number: int, limit: int) -> Iterator[ChunkSlice]:
    """Yield the bytes of chunk `number` of a leaf that hold elements of the array, in C order."""
    inside = region_of(leaf, number).shape
    shape = tuple(leaf.chunks)
    if Region((0,) * len(inside), inside).is_contiguous_in(shape):
        # Contiguous memory, whose parts need not end with a row.
        shape = inside = (math.prod(inside),)
    return parts_inside(shape, inside, parse_dtype(leaf.dtype).itemsize, limit)


def parts_inside(
    shape: Sequence[int], inside: Sequence[int], itemsize: int, limit: int
) -> Iterator[ChunkSlice]:
    """Yield the bytes of a chunk that hold elements of the array, in C order.

    Args:
        shape: Shape of the chunk.
        inside: Shape of its corner that belongs to the array.
        itemsize: Bytes of an element.
        limit: Most bytes of one part; at least `itemsize`.
    """
    yield from _split_chunk(tuple(shape), tuple(inside), itemsize, limit, 0)


def _split_chunk(
    shape: Shape, inside: Shape, itemsize: int, limit: int, offset: int
) -> Iterator[ChunkSlice]:
    nbytes = math.prod(shape) * itemsize
    if nbytes <= limit:
        yield ChunkSlice(offset, shape, inside)
        return
    row = nbytes // shape[0]
    if row > limit:
        for index in range(inside[0]):
            yield from _split_chunk(shape[1:], inside[1:], itemsize, limit, offset + index * row)
        return
    step = limit // row
    for start in range(0, inside[0], step):
        count = min(step, inside[0] - start)
        yield ChunkSlice(offset + start * row, (count, *shape[1:]), (count, *inside[1:]))
