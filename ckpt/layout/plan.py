"""What is written where: leaves to chunks, chunks to granules.

A plan depends on the specs of the leaves alone, so one plan serves every save of a tree of the same
structure. A granule is the unit of work of the engine: a batch of chunks that are staged together
into one block of the arena, and written as they lie there as one data file. Leaves of a few
kilobytes are packed: the whole array is one chunk, gathered from its shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckpt.errors import UnsupportedLeafError
from ckpt.layout.chunks import choose_chunk, chunk_key, zarr_metadata_bytes
from ckpt.layout.leaves import ARRAY_KINDS, DTYPES, LeafSpec
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
    "SavePlan",
    "aligned",
    "database_entries",
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
_MOST_FILES = 256
# Chunks start on cache lines, so that copies and hashes run at full speed and jax can take over the
# memory they are read into; larger ones on the sectors of disks, so that they can be read past the
# page cache.
CHUNK_ALIGNMENT = 64
SECTOR = 4096
DIRECT_BYTES = 1 << 20
_METADATA_KEY = "zarr.json"


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

    Attributes:
        packed: Whether its chunks are whole packed leaves.
        chunks: The chunks, in the order in which they lie.
        nbytes: Size of the block that holds them, and of the file: alignment included.
    """

    packed: bool
    chunks: tuple[Chunk, ...]
    nbytes: int


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
    """

    name: str
    spec: LeafSpec
    chunk: tuple[int, ...]
    grid: tuple[int, ...]
    packed: bool
    metadata: bytes | None


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The plan of one item.

    Attributes:
        leaves: A plan for every leaf, in tree order.
        granules: The granules, biggest first.
        nbytes: Logical bytes of all arrays; Python scalars do not count.
    """

    leaves: tuple[LeafPlan, ...]
    granules: tuple[Granule, ...]
    nbytes: int


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
    nbytes = sum(spec.nbytes for spec in specs if spec.kind in ARRAY_KINDS)
    granule_bytes = min(max(GRANULE_BYTES, nbytes // _MOST_FILES), budget_bytes // 4)
    chunk_bytes = min(CHUNK_BYTES, granule_bytes) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
    encoded: dict[tuple[object, ...], bytes] = {}
    leaves = []
    packed: list[Chunk] = []
    large: list[Chunk] = []
    for number, (name, spec) in enumerate(zip(names, specs, strict=True)):
        leaf = _plan_leaf(name, spec, chunk_bytes, encoded)
        leaves.append(leaf)
        if leaf.metadata is None or 0 in spec.shape:
            continue
        if leaf.packed:
            everything = whole(spec.shape)
            place = (0,) * len(spec.shape)
            size = spec.nbytes
            packed.append(Chunk(number, 0, (), place, everything, 0, size, size))
        else:
            large.extend(_leaf_chunks(number, leaf))
    granules = [
        *_pack(packed, granule_bytes, packed=True),
        *_pack(large, granule_bytes, packed=False),
    ]
    granules.sort(key=lambda granule: granule.nbytes, reverse=True)
    return SavePlan(tuple(leaves), tuple(granules), nbytes)


def database_entries(plan: SavePlan) -> Iterable[Entry]:
    """Yield the keys of the item's database; granule `n` is its data file `n`."""
    for leaf in plan.leaves:
        if leaf.metadata is not None:
            yield Entry(f"{leaf.name}/{_METADATA_KEY}".encode(), leaf.metadata)
    for file, granule in enumerate(plan.granules):
        for chunk in granule.chunks:
            key = f"{plan.leaves[chunk.leaf].name}/{chunk_key(chunk.place)}"
            yield Entry(key.encode(), None, file, chunk.offset, chunk.stored_nbytes)


def _plan_leaf(
    name: str, spec: LeafSpec, chunk_bytes: int, encoded: dict[tuple[object, ...], bytes]
) -> LeafPlan:
    if spec.dtype is None:
        return LeafPlan(name, spec, (), (), packed=False, metadata=None)
    itemsize = DTYPES[spec.dtype].itemsize
    packed = spec.nbytes <= min(PACKED_BYTES, chunk_bytes // 2)
    shard = spec.shape
    if not packed and spec.sharding is not None:
        shard = spec.sharding.shard_shape(spec.shape)
    chunk = choose_chunk(spec.shape, shard, itemsize, max(chunk_bytes, itemsize))
    key = (spec.shape, chunk, spec.dtype)
    if key not in encoded:
        encoded[key] = zarr_metadata_bytes(spec.shape, chunk, spec.dtype)
    grid = chunk_grid(spec.shape, chunk)
    _check_name(name, grid)
    return LeafPlan(name, spec, chunk, grid, packed, encoded[key])


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
        start = aligned(end, SECTOR if length > SECTOR else CHUNK_ALIGNMENT)
        if batch and start + length > granule_bytes:
            yield _granule(batch, end, packed=packed)
            batch, start = [], 0
        batch.append(replace(chunk, offset=start))
        end = start + length
    if batch:
        yield _granule(batch, end, packed=packed)


def _granule(chunks: Sequence[Chunk], end: int, *, packed: bool) -> Granule:
    # Only whole sectors can be written past the page cache; a small file is not worth it.
    size = aligned(end, SECTOR if end >= DIRECT_BYTES else CHUNK_ALIGNMENT)
    return Granule(packed, tuple(chunks), size)


def aligned(nbytes: int, alignment: int) -> int:
    """Return the least multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment
