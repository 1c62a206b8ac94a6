"""What is written where: leaves to chunks, chunks to granules.

A plan depends on the specs of the leaves alone, so one plan serves every save of a tree of the same
structure. A granule is the unit of work of the engine: a batch of chunks that are staged together
into one block of the arena and written in one transaction. Leaves of a few kilobytes are packed:
the whole array is one chunk, written as key-value pairs beside its metadata.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt.layout.chunks import choose_chunk, zarr_metadata_bytes
from ckpt.layout.leaves import ARRAY_KINDS, DTYPES, LeafSpec
from ckpt.layout.shards import (
    Region,
    addressable_regions,
    chunk_grid,
    chunk_region,
    chunks_touching,
    whole,
)

__all__ = ["Chunk", "Granule", "LeafPlan", "SavePlan", "plan_save"]

# A leaf up to this size is packed. Through an array of its own a leaf costs 0.2 to 0.3 ms, as
# key-value pairs 15 us plus two copies of its bytes; they break even at about half a megabyte.
PACKED_BYTES = 256 << 10
# A granule must be large against the 0.2 ms it costs, and small enough that several fit the budget
# and every lane has some; a chunk must be small enough for resharded reads.
GRANULE_BYTES = 48 << 20
CHUNK_BYTES = 32 << 20
# Chunks start on cache lines within a block, so that copies and hashes run at full speed.
CHUNK_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored chunk and where its bytes come from.

    Attributes:
        leaf: Number of the leaf.
        shard: Position in `addressable_shards` of the shard that holds it; None where the chunk is
            the whole array of a packed leaf, gathered from all shards.
        place: Place in the chunk grid.
        region: Part of the global array it covers.
        source: The same part relative to the shard.
        offset: First byte within the granule's block.
        nbytes: Its bytes.
    """

    leaf: int
    shard: int | None
    place: tuple[int, ...]
    region: Region
    source: Region
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Granule:
    """Chunks that are staged and written together.

    Attributes:
        packed: Whether its chunks are whole packed leaves.
        chunks: The chunks.
        nbytes: Size of the block that holds them, alignment included.
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
        chunk: Chunk shape of its array; empty for scalars kept in the manifest.
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
        nbytes: Logical bytes of all arrays.
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
    """
    granule_bytes = min(GRANULE_BYTES, budget_bytes // 4)
    chunk_bytes = min(CHUNK_BYTES, granule_bytes) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
    encoded: dict[tuple[object, ...], bytes] = {}
    leaves = []
    packed: list[Chunk] = []
    large: list[Chunk] = []
    for number, (name, spec) in enumerate(zip(names, specs, strict=True)):
        leaf = _plan_leaf(name, spec, chunk_bytes, encoded)
        leaves.append(leaf)
        if leaf.metadata is None or spec.kind not in ARRAY_KINDS or 0 in spec.shape:
            continue
        if leaf.packed:
            everything = whole(spec.shape)
            place = (0,) * len(spec.shape)
            packed.append(Chunk(number, None, place, everything, everything, 0, spec.nbytes))
        else:
            large.extend(_leaf_chunks(number, leaf))
    granules = [
        # Packed leaves are in memory twice while they are written.
        *_pack(packed, granule_bytes // 2, packed=True),
        *_pack(large, granule_bytes, packed=False),
    ]
    granules.sort(key=lambda granule: granule.nbytes, reverse=True)
    return SavePlan(tuple(leaves), tuple(granules), sum(leaf.spec.nbytes for leaf in leaves))


def _plan_leaf(
    name: str, spec: LeafSpec, chunk_bytes: int, encoded: dict[tuple[object, ...], bytes]
) -> LeafPlan:
    dtype = spec.dtype or {"bool": "bool", "int": "int64", "float": "float64"}.get(spec.kind)
    if dtype is None:
        return LeafPlan(name, spec, (), (), packed=False, metadata=None)
    itemsize = DTYPES[dtype].itemsize
    packed = spec.nbytes <= min(PACKED_BYTES, chunk_bytes // 2)
    shard = spec.shape
    if not packed and spec.sharding is not None:
        shard = spec.sharding.shard_shape(spec.shape)
    chunk = choose_chunk(spec.shape, shard, itemsize, max(chunk_bytes, itemsize))
    key = (spec.shape, chunk, dtype)
    if key not in encoded:
        encoded[key] = zarr_metadata_bytes(spec.shape, chunk, dtype)
    return LeafPlan(name, spec, chunk, chunk_grid(spec.shape, chunk), packed, encoded[key])


def _leaf_chunks(number: int, leaf: LeafPlan) -> Iterable[Chunk]:
    shape = leaf.spec.shape
    itemsize = DTYPES[leaf.spec.dtype or ""].itemsize
    for region, holders in addressable_regions(leaf.spec.sharding, shape):
        for place in chunks_touching(region, leaf.chunk):
            part = chunk_region(place, leaf.chunk, shape)
            nbytes = math.prod(part.shape) * itemsize
            yield Chunk(number, holders[0], place, part, part.within(region), 0, nbytes)


def _pack(chunks: Iterable[Chunk], granule_bytes: int, *, packed: bool) -> Iterable[Granule]:
    """Put chunks together until the next one would make the block larger than `granule_bytes`."""
    batch: list[Chunk] = []
    end = 0
    for chunk in chunks:
        length = -(-chunk.nbytes // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
        if batch and end + length > granule_bytes:
            yield Granule(packed, tuple(batch), end)
            batch, end = [], 0
        batch.append(
            Chunk(
                chunk.leaf,
                chunk.shard,
                chunk.place,
                chunk.region,
                chunk.source,
                end,
                chunk.nbytes,
            )
        )
        end += length
    if batch:
        yield Granule(packed, tuple(batch), end)
