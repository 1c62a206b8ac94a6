"""Chunking: cuts one leaf into chunks, and finds those that this process writes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from ckpt._format.array_format import (
    DTYPES,
    MAX_KEY_BYTES,
    ArrayFormat,
    Compression,
    choose_chunk,
    chunk_key,
    zarr_metadata_bytes,
)
from ckpt._format.regions import (
    addressable_regions,
    chunk_grid,
    chunk_region,
    chunks_touching,
    position_in_grid,
    whole,
)
from ckpt._plan.write_batches import BATCH_BYTES, CHUNK_ALIGNMENT, SECTOR, Chunk, ChunkPart
from ckpt._tree.leaf_specs import LeafSpec
from ckpt.errors import UnsupportedLeafError

if TYPE_CHECKING:
    import jax

    from ckpt._job.division import ArrayPlacement

Shape = tuple[int, ...]

# Largest leaf that is packed. Gathering a whole leaf costs a few microseconds; for a larger one a
# chunk for every shard is worth it, so that each owner writes its own.
PACKED_BYTES = 256 << 10
# Largest chunk: chunks must be small enough for resharded reads.
CHUNK_BYTES = 32 << 20
# Largest chunk to be compressed: each keeps one thread busy, and takes its memory three times
# meanwhile.
COMPRESSED_CHUNK_BYTES = 8 << 20
# Approximate limit of files in an item: a large item has larger batches instead.
_MOST_FILES = 256
METADATA_KEY = "zarr.json"
_NO_FORMAT = ArrayFormat()


class LeafPlan(Struct, frozen=True, gc=False):
    """The chunks of one leaf, and its entries in the database.

    Attributes:
        name: Stored name of the leaf.
        spec: Spec of the leaf.
        chunk: Chunk shape of its array.
        grid: Number of chunks along every axis.
        packed: True if the whole array is one chunk, in a batch with other small leaves.
        metadata: Its `zarr.json`, or None for a leaf that is not in the database.
        compression: Compression of its chunks, or None.
    """

    name: str
    spec: LeafSpec
    chunk: tuple[int, ...]
    grid: tuple[int, ...]
    packed: bool
    metadata: bytes | None
    compression: Compression | None = None

    @property
    def has_chunks(self) -> bool:
        """True if the leaf has stored chunks of its own."""
        return self.metadata is not None and 0 not in self.spec.shape and self.spec.same_as is None


class Limits(Struct, frozen=True):
    """Most bytes of a batch, of a batch to be encoded, and of a chunk that cannot be smaller."""

    batch: int
    encoded: int
    chunk: int


def limits_of(
    nbytes: int,
    budget_bytes: int,
    processes: int,
    largest: int | None,
    usual: int | None = None,
) -> Limits:
    """Return the limits of a tree of `nbytes`, written by a number of processes.

    Args:
        nbytes: Bytes of all its arrays.
        budget_bytes: The staging budget of every process.
        processes: Number of processes.
        largest: Most bytes of a file, or None.
        usual: Approximate best size of a file, or None for the best on a disk.
    """
    share = nbytes // processes
    batch = min(max(usual or BATCH_BYTES, share // _MOST_FILES), budget_bytes // 4)
    if largest is None:
        return Limits(batch, batch, budget_bytes // 2)
    largest = largest // SECTOR * SECTOR
    batch = min(batch, largest)
    # Alignment can make small chunks three times as long.
    return Limits(batch, min(batch, largest // 4), min(budget_bytes // 2, largest))


class LeafPlanner:
    """Plans leaf by leaf. Thousands of leaves differ only in their names."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # Keyed by identity: leaves that are alike have the same spec, and the plans keep it alive.
        self._alike: dict[int, tuple[LeafPlan, int]] = {}
        # The `zarr.json` of each kind of array so far.
        self._documents: dict[tuple[object, ...], bytes] = {}

    def plan(self, name: str, spec: LeafSpec, placement: ArrayPlacement | None) -> LeafPlan:
        """Return the plan of one leaf.

        Args:
            name: Stored name of the leaf.
            spec: Spec of the leaf.
            placement: Its placement on several processes, or None if it is on this one alone.

        Raises:
            UnsupportedLeafError: The name is too long to be a key of a database.
        """
        if spec.dtype is None:
            return LeafPlan(name, spec, (), (), packed=False, metadata=None)
        known = self._alike.get(id(spec)) if placement is None else None
        if known is None:
            first = _plan_leaf(name, spec, self._limits, self._documents, placement)
            # The most bytes of a name with which the keys of its chunks fit a database.
            last = chunk_key([max(n - 1, 0) for n in first.grid])
            known = first, MAX_KEY_BYTES - 1 - max(len(last), len(METADATA_KEY))
            if placement is None:
                self._alike[id(spec)] = known
        like, longest = known
        nbytes = len(name) if name.isascii() else len(name.encode())
        if nbytes > longest:
            raise UnsupportedLeafError(
                f"the leaf's name has {nbytes} bytes, of which at most {longest} can be stored; "
                "use shorter keys",
                leaf=name,
            )
        return LeafPlan(
            name, spec, like.chunk, like.grid, like.packed, like.metadata, like.compression
        )


def _plan_leaf(
    name: str,
    spec: LeafSpec,
    limits: Limits,
    documents: dict[tuple[object, ...], bytes],
    placement: ArrayPlacement | None,
) -> LeafPlan:
    assert spec.dtype is not None
    itemsize = DTYPES[spec.dtype].itemsize
    chosen = spec.format or _NO_FORMAT
    batch_bytes = limits.batch
    most_bytes = None if placement is None else limits.chunk
    largest = min(CHUNK_BYTES, batch_bytes) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
    most = batch_bytes if chosen.chunk_bytes is None else chosen.chunk_bytes
    packed = spec.nbytes <= min(PACKED_BYTES, largest // 2, most)
    packed = packed and (placement is None or placement.is_whole_somewhere)
    compression = None if packed else chosen.codec
    if compression is not None:
        largest, batch_bytes = COMPRESSED_CHUNK_BYTES, limits.encoded // 2
        most_bytes = None if placement is None else limits.chunk // 4
    chunk_bytes = min(chosen.chunk_bytes or largest, batch_bytes)
    shard = spec.shape
    if not packed and spec.sharding is not None:
        shard = spec.sharding.shard_shape(spec.shape)
    axes = () if packed else _axes_first(spec, chosen, shard)
    if spec.chunk is not None and math.prod(spec.chunk) * itemsize <= chunk_bytes and not packed:
        # With other chunks, a chunk of the source would be read several times, once for each new
        # chunk that has a part of it.
        chunk = spec.chunk
    else:
        most = max(chunk_bytes, itemsize)
        chunk = choose_chunk(spec.shape, shard, itemsize, most, axes, most_bytes)
    key = (spec.shape, chunk, spec.dtype, compression)
    if key not in documents:
        documents[key] = zarr_metadata_bytes(spec.shape, chunk, spec.dtype, compression)
    grid = chunk_grid(spec.shape, chunk)
    return LeafPlan(name, spec, chunk, grid, packed, documents[key], compression)


def _axes_first(spec: LeafSpec, chosen: ArrayFormat, shard: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that are cut before the others."""
    if chosen.split_axes is not None:
        return tuple(dict.fromkeys(axis % len(spec.shape) for axis in chosen.split_axes))
    if chosen.chunk_bytes is None:
        return ()
    lengths = zip(shard, spec.shape, strict=True)
    return tuple(axis for axis, (part, length) in enumerate(lengths) if part < length)


def whole_leaf_chunks(number: int, leaf: LeafPlan, process: int | None = None) -> Iterable[Chunk]:
    """Yield the chunks of a leaf that this process writes alone; None is a job of this one."""
    spec = leaf.spec
    shape = spec.shape
    if leaf.packed:
        place = (0,) * len(shape)
        yield Chunk(number, 0, (), place, whole(shape), 0, spec.nbytes, spec.nbytes)
        return
    stored, itemsize = stored_bytes(leaf), DTYPES[spec.dtype or ""].itemsize
    parts: dict[Shape, list[ChunkPart]] = {}
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


def stored_bytes(leaf: LeafPlan) -> int:
    """Return the bytes of a chunk, as it is stored."""
    return math.prod(leaf.chunk) * DTYPES[leaf.spec.dtype or ""].itemsize


def regions_by_process(
    sharding: jax.sharding.Sharding, shape: Shape
) -> dict[int, frozenset[Shape]]:
    """Return for every process the places in the shard grid that its devices hold."""
    return {
        process: frozenset(found)
        for process, found in held_places(
            places_by_device(sharding, shard_grid(sharding, shape))
        ).items()
    }


def holders_of(sharding: jax.sharding.Sharding, shape: Shape, offset: Shape) -> tuple[int, ...]:
    """Return the processes that hold the element of an array at `offset`, for messages."""
    parts = shard_grid(sharding, shape)
    wanted = tuple(o * p // n for o, p, n in zip(offset, parts, shape, strict=True))
    places = places_by_device(sharding, parts)
    return tuple(sorted({process for process, place in places if place == wanted}))


def held_places(places: Iterable[tuple[int, Shape]]) -> dict[int, set[Shape]]:
    """Return the places in the shard grid that each process holds."""
    held: dict[int, set[Shape]] = {}
    for process, place in places:
        held.setdefault(process, set()).add(place)
    return held


def shard_grid(sharding: jax.sharding.Sharding, shape: Shape) -> Shape:
    """Return the number of shards along every axis."""
    shard = sharding.shard_shape(shape)
    return tuple(n // s if s else 1 for n, s in zip(shape, shard, strict=True))


def places_by_device(sharding: jax.sharding.Sharding, parts: Shape) -> list[tuple[int, Shape]]:
    """Return for every device its process, and the place in the shard grid that it holds."""
    devices: Mapping[jax.Device, tuple[slice, ...]] = sharding.devices_indices_map(parts)
    return [
        (device.process_index, tuple(part.start or 0 for part in index))
        for device, index in devices.items()
    ]
