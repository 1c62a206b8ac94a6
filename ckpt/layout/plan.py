"""What is written where: leaves to chunks, chunks to granules.

A plan depends on the specs of the leaves alone, so one plan serves every save of a tree of the same
structure. A granule is the unit of work of the engine: a batch of chunks that are staged together
into one block of the arena, and written as they lie there as one data file. Leaves of a few
kilobytes are packed: the whole array is one chunk, gathered from its shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt.errors import UnsupportedLeafError
from ckpt.layout.chunks import choose_chunk, chunk_key, zarr_metadata_bytes
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.formats import ArrayFormat, Compression
from ckpt.layout.leaves import ARRAY_KINDS, LeafSpec
from ckpt.layout.ocdbt import MAX_KEY_BYTES, Entry
from ckpt.layout.shards import (
    Region,
    addressable_regions,
    chunk_grid,
    chunk_region,
    chunks_touching,
    position_in_grid,
    whole,
)

__all__ = [
    "CHUNK_ALIGNMENT",
    "GRANULE_BYTES",
    "PACKED_BYTES",
    "SECTOR",
    "Chunk",
    "Granule",
    "LeafPlan",
    "Part",
    "Place",
    "Places",
    "SavePlan",
    "aligned",
    "alignment_of",
    "database_entries",
    "encoded_bound",
    "file_size",
    "plan_save",
]

# A leaf up to this size is packed. Gathering whole leaves costs a few microseconds each; what is
# larger is worth a chunk for every shard, so that each owner writes its own.
PACKED_BYTES = 256 << 10
# A granule must be large against the few milliseconds a file of its own costs, and small enough
# that several fit the budget and every lane has some; a chunk must be small enough for resharded
# reads. A large item has larger granules, so that it has not more than about so many files.
GRANULE_BYTES = 48 << 20
CHUNK_BYTES = 32 << 20
# Chunks to be compressed are smaller: a chunk keeps one thread busy, and is held three times
# meanwhile.
COMPRESSED_CHUNK_BYTES = 8 << 20
_ENCODING_COPIES = 3
_MOST_FILES = 256
# Chunks start on cache lines, so that copies and hashes run at full speed and jax can take over the
# memory they are read into; larger ones on the sectors of disks, so that they can be read past the
# page cache.
CHUNK_ALIGNMENT = 64
SECTOR = 4096
DIRECT_BYTES = 1 << 20
_METADATA_KEY = "zarr.json"
_NO_FORMAT = ArrayFormat()


@dataclass(frozen=True, slots=True)
class Part:
    """What one shard holds of a chunk.

    Attributes:
        shard: Position of the shard in `addressable_shards`.
        source: The part relative to the shard.
        target: The same relative to the chunk.
    """

    shard: int
    source: Region
    target: Region


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored chunk and where its bytes come from.

    Attributes:
        leaf: Number of the leaf.
        number: Number of the chunk within the leaf, in C order of the chunk grid.
        parts: The shards it is copied from, almost always one; none where the chunk is the whole
            array of a packed leaf.
        place: Place in the chunk grid.
        region: Part of the global array it covers.
        offset: First byte within the granule's block.
        nbytes: Its bytes.
        stored_nbytes: Bytes of a whole chunk: zarr wants padding beyond the edge of an array.
    """

    leaf: int
    number: int
    parts: tuple[Part, ...]
    place: tuple[int, ...]
    region: Region
    offset: int
    nbytes: int
    stored_nbytes: int


@dataclass(frozen=True, slots=True)
class Granule:
    """Chunks that are staged and written together, as one file.

    The chunks of a granule that is to be encoded lie at the end of a larger block, whose beginning
    takes the encoded ones: none gets in the way of one that is still to be encoded.

    Attributes:
        packed: Whether its chunks are whole packed leaves.
        chunks: The chunks, in the order in which they lie.
        nbytes: Bytes of the chunks as they are staged, alignment included; the size of the file
            where they are not encoded.
        encoded: Whether the chunks are encoded before they are written.
        lead: Where the staged chunks begin in the block.
        block_bytes: Staging memory that it takes, all copies included that encoding makes.
    """

    packed: bool
    chunks: tuple[Chunk, ...]
    nbytes: int
    encoded: bool = False
    lead: int = 0
    block_bytes: int = 0

    def __post_init__(self) -> None:
        """Take as much memory as is staged, if nothing else is said."""
        object.__setattr__(self, "block_bytes", max(self.block_bytes, self.nbytes))


@dataclass(frozen=True, slots=True)
class Place:
    """Where an encoded chunk lies in its file."""

    offset: int
    length: int


# By the number of the granule the places of its chunks; only of those that were encoded.
Places = Mapping[int, Sequence[Place]]


@dataclass(frozen=True, slots=True)
class LeafPlan:
    """Where one leaf goes.

    Attributes:
        name: Its stored name.
        spec: What it is.
        chunk: Chunk shape of its array.
        grid: Number of chunks along every axis.
        packed: Whether it is a packed leaf.
        metadata: Its `zarr.json`, or None where nothing of it is in the database.
        compression: How its chunks are encoded, or None.
    """

    name: str
    spec: LeafSpec
    chunk: tuple[int, ...]
    grid: tuple[int, ...]
    packed: bool
    metadata: bytes | None
    compression: Compression | None = None


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The plan of one item.

    Attributes:
        leaves: A plan for every leaf, in tree order.
        granules: The granules, biggest first.
        nbytes: Logical bytes of all arrays, shared ones once; Python scalars do not count.
    """

    leaves: tuple[LeafPlan, ...]
    granules: tuple[Granule, ...]
    nbytes: int

    @property
    def is_encoded(self) -> bool:
        """Whether the places of some chunks are only known once they are encoded."""
        return any(granule.encoded for granule in self.granules)


def plan_save(names: Sequence[str], specs: Sequence[LeafSpec], budget_bytes: int) -> SavePlan:
    """Plan the save of leaves `specs` stored under `names`.

    Args:
        names: Stored name of every leaf.
        specs: What every leaf is.
        budget_bytes: The staging budget; granules are kept to a quarter of it, so that staging and
            writing can overlap within it. (A single chunk that cannot be smaller may be larger.)

    Raises:
        UnsupportedLeafError: The name of a leaf is too long to be a key of a database.
    """
    owned = [spec for spec in specs if spec.kind in ARRAY_KINDS and spec.same_as is None]
    nbytes = sum(spec.nbytes for spec in owned)
    granule_bytes = min(max(GRANULE_BYTES, nbytes // _MOST_FILES), budget_bytes // 4)
    documents: dict[tuple[object, ...], bytes] = {}
    leaves = []
    packed: list[Chunk] = []
    large: list[Chunk] = []
    encoded: list[Chunk] = []
    for number, (name, spec) in enumerate(zip(names, specs, strict=True)):
        leaf = _plan_leaf(name, spec, granule_bytes, documents)
        leaves.append(leaf)
        if leaf.metadata is None or 0 in spec.shape or spec.same_as is not None:
            continue
        if leaf.packed:
            everything = whole(spec.shape)
            place = (0,) * len(spec.shape)
            size = spec.nbytes
            packed.append(Chunk(number, 0, (), place, everything, 0, size, size))
        else:
            chunks = large if leaf.compression is None else encoded
            chunks.extend(_leaf_chunks(number, leaf))
    granules = [
        *_pack(packed, granule_bytes, packed=True),
        *_pack(large, granule_bytes, packed=False),
        *map(_to_encode, _pack(encoded, granule_bytes, packed=False)),
    ]
    granules.sort(key=lambda granule: granule.nbytes, reverse=True)
    return SavePlan(tuple(leaves), tuple(granules), nbytes)


def database_entries(plan: SavePlan, places: Places | None = None) -> Iterable[Entry]:
    """Yield the keys of the item's database; granule `n` is its data file `n`."""
    placed = places or {}
    sharers: dict[int, list[LeafPlan]] = {}
    for leaf in plan.leaves:
        if leaf.metadata is not None:
            yield Entry(f"{leaf.name}/{_METADATA_KEY}".encode(), leaf.metadata)
        if leaf.spec.same_as is not None:
            sharers.setdefault(leaf.spec.same_as, []).append(leaf)
    for file, granule in enumerate(plan.granules):
        found = placed.get(file) or [
            Place(chunk.offset, chunk.stored_nbytes) for chunk in granule.chunks
        ]
        for chunk, place in zip(granule.chunks, found, strict=True):
            for leaf in (plan.leaves[chunk.leaf], *sharers.get(chunk.leaf, ())):
                key = f"{leaf.name}/{chunk_key(chunk.place)}"
                yield Entry(key.encode(), None, file, place.offset, place.length)


def _plan_leaf(
    name: str, spec: LeafSpec, granule_bytes: int, documents: dict[tuple[object, ...], bytes]
) -> LeafPlan:
    if spec.dtype is None:
        return LeafPlan(name, spec, (), (), packed=False, metadata=None)
    itemsize = DTYPES[spec.dtype].itemsize
    chosen = spec.format or _NO_FORMAT
    largest = min(CHUNK_BYTES, granule_bytes) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
    most = granule_bytes if chosen.chunk_bytes is None else chosen.chunk_bytes
    packed = spec.nbytes <= min(PACKED_BYTES, largest // 2, most)
    compression = None if packed else chosen.codec
    if compression is not None:
        largest, granule_bytes = COMPRESSED_CHUNK_BYTES, granule_bytes // 2
    chunk_bytes = min(chosen.chunk_bytes or largest, granule_bytes)
    shard = spec.shape
    if not packed and spec.sharding is not None:
        shard = spec.sharding.shard_shape(spec.shape)
    axes = () if packed else _axes_first(spec, chosen, shard)
    chunk = choose_chunk(spec.shape, shard, itemsize, max(chunk_bytes, itemsize), axes)
    key = (spec.shape, chunk, spec.dtype, compression)
    if key not in documents:
        documents[key] = zarr_metadata_bytes(spec.shape, chunk, spec.dtype, compression)
    grid = chunk_grid(spec.shape, chunk)
    _check_name(name, grid)
    return LeafPlan(name, spec, chunk, grid, packed, documents[key], compression)


def _axes_first(spec: LeafSpec, chosen: ArrayFormat, shard: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that are cut before the leading ones."""
    if chosen.split_axes is not None:
        return tuple(dict.fromkeys(axis % len(spec.shape) for axis in chosen.split_axes))
    if chosen.chunk_bytes is None:
        return ()
    lengths = zip(shard, spec.shape, strict=True)
    return tuple(axis for axis, (part, length) in enumerate(lengths) if part < length)


def _check_name(name: str, grid: tuple[int, ...]) -> None:
    last = chunk_key([max(n - 1, 0) for n in grid])
    longest = MAX_KEY_BYTES - 1 - max(len(last), len(_METADATA_KEY))
    nbytes = len(name.encode())
    if nbytes > longest:
        raise UnsupportedLeafError(
            f"the leaf's name has {nbytes} bytes, of which at most {longest} can be stored; use "
            "shorter keys",
            leaf=name,
        )


def _leaf_chunks(number: int, leaf: LeafPlan) -> Iterable[Chunk]:
    shape = leaf.spec.shape
    itemsize = DTYPES[leaf.spec.dtype or ""].itemsize
    stored = math.prod(leaf.chunk) * itemsize
    parts: dict[tuple[int, ...], list[Part]] = {}
    for region, holders in addressable_regions(leaf.spec.sharding, shape):
        for place in chunks_touching(region, leaf.chunk):
            covered = chunk_region(place, leaf.chunk, shape)
            common = region.intersect(covered)
            assert common is not None
            part = Part(holders[0], common.within(region), common.within(covered))
            parts.setdefault(place, []).append(part)
    for place, found in parts.items():
        covered = chunk_region(place, leaf.chunk, shape)
        position = position_in_grid(place, leaf.grid)
        nbytes = covered.size * itemsize
        yield Chunk(number, position, tuple(found), place, covered, 0, nbytes, stored)


def _pack(chunks: Iterable[Chunk], granule_bytes: int, *, packed: bool) -> Iterable[Granule]:
    """Put chunks together until the next one would make the block larger than `granule_bytes`."""
    batch: list[Chunk] = []
    end = 0
    for chunk in chunks:
        length = chunk.stored_nbytes
        start = aligned(end, alignment_of(length))
        if batch and start + length > granule_bytes:
            yield Granule(packed, tuple(batch), file_size(end))
            batch, start = [], 0
        batch.append(replace(chunk, offset=start))
        end = start + length
    if batch:
        yield Granule(packed, tuple(batch), file_size(end))


def _to_encode(granule: Granule) -> Granule:
    sizes = [chunk.stored_nbytes for chunk in granule.chunks]
    # So much longer than staged the chunks can become, one after the other.
    growth = sum(encoded_bound(size) + alignment_of(encoded_bound(size)) - size for size in sizes)
    lead = aligned(growth, SECTOR)
    more = _ENCODING_COPIES * encoded_bound(max(sizes))
    block_bytes = aligned(lead + granule.nbytes, SECTOR) + more
    return replace(granule, encoded=True, lead=lead, block_bytes=block_bytes)


def encoded_bound(nbytes: int) -> int:
    """Return how long a chunk of `nbytes` can get when it is encoded, whatever it holds."""
    # zstd adds 1/256 and up to 64 bytes, blosc 16 bytes.
    return nbytes + nbytes // 128 + 128


def alignment_of(length: int) -> int:
    """Return what the place of a chunk of `length` bytes is a multiple of."""
    return SECTOR if length > SECTOR else CHUNK_ALIGNMENT


def file_size(end: int) -> int:
    """Return the size of a data file whose last chunk ends at `end`."""
    # Only whole sectors can be written past the page cache; a small file is not worth it.
    return aligned(end, SECTOR if end >= DIRECT_BYTES else CHUNK_ALIGNMENT)


def aligned(nbytes: int, alignment: int) -> int:
    """Return the least multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment
