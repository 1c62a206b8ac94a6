"""One item on its way in: stored chunks to host buffers to devices.

Every stored chunk that a target needs is read once, its digest is checked, and its bytes go to each
region of each target that wants them. A chunk that is one run of memory in the only region that
wants it is read straight into place; others pass through the arena. On CPU devices a finished
buffer becomes the jax array itself, without another copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import anyio
import jax
import numpy as np
import tensorstore as ts

from ckpt.engine.arena import Arena
from ckpt.engine.lanes import array_digest
from ckpt.engine.tensors import as_stored, open_array, read_context, settle, translated
from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.events import Recorder
from ckpt.layout.chunks import chunk_key, stored_dtype
from ckpt.layout.leaves import parse_dtype
from ckpt.layout.match import ArrayTarget
from ckpt.layout.plan import GRANULE_BYTES
from ckpt.layout.shards import (
    Region,
    addressable_regions,
    chunk_grid,
    chunk_region,
    chunks_touching,
    whole,
)
from ckpt.manifest import ItemEntry, LeafEntry, digest

__all__ = ["EngineItemReader"]

T = TypeVar("T")
Array = np.ndarray[Any, Any]

# Granules in flight: enough to keep two cores and a disk queue busy.
_CONCURRENT_GRANULES = 4
# jax takes over a host buffer without a copy only if it is aligned to a cache line.
_ALIGNMENT = 64


@dataclass(slots=True)
class _LeafRead:
    """One array leaf while it is read.

    Attributes:
        number: Number of the leaf.
        entry: Its manifest entry.
        target: What it comes back as.
        regions: The distinct regions that this process needs, each with its host buffer.
        left: Chunks still to be read.
    """

    number: int
    entry: LeafEntry
    target: ArrayTarget
    regions: list[tuple[Region, Array]]
    left: int


@dataclass(frozen=True, slots=True)
class _ChunkRead:
    leaf: _LeafRead
    place: tuple[int, ...]
    region: Region
    nbytes: int


class EngineItemReader:
    """The engine's `ItemReader` for one item."""

    def __init__(self, url: str, item: str, arena: Arena, recorder: Recorder) -> None:
        """Read the item called `item` whose database is at `url`."""
        self._url = url
        self._item = item
        self._arena = arena
        self._recorder = recorder
        self._context = read_context()

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow pure function off the engine's loop."""
        return await anyio.to_thread.run_sync(partial(function, *args))

    async def read(self, entry: ItemEntry, targets: Sequence[ArrayTarget | None]) -> list[Any]:
        """Read the arrays of the leaves that have a target; see `ItemReader.read`.

        Raises:
            CorruptCheckpointError: A chunk is missing or was changed; names the leaf.
        """
        wanted = [
            (number, leaf, target)
            for number, (leaf, target) in enumerate(zip(entry.leaves, targets, strict=True))
            if target is not None
        ]
        results: list[Any] = [None] * len(entry.leaves)
        if not wanted:
            return results
        database = await self.in_thread(self._open)
        async with anyio.create_task_group() as tasks:
            packed = [each for each in wanted if each[1].packed or 0 in each[1].shape]
            if packed:
                tasks.start_soon(self._read_packed, database, packed, results)
            large = [each for each in wanted if not (each[1].packed or 0 in each[1].shape)]
            slots = anyio.Semaphore(_CONCURRENT_GRANULES)
            for granule in self._granules(large):
                await slots.acquire()
                tasks.start_soon(self._read_granule, database, granule, results, slots)
        return results

    def _open(self) -> ts.KvStore:
        with translated(f"open the database of item {self._item!r}", reading=True):
            spec = {"driver": "ocdbt", "base": self._url}
            return ts.KvStore.open(spec, context=self._context).result()

    async def _read_packed(
        self,
        database: ts.KvStore,
        wanted: Sequence[tuple[int, LeafEntry, ArrayTarget]],
        results: list[Any],
    ) -> None:
        stored = [leaf for _, leaf, _ in wanted if leaf.digests]
        nbytes = sum(math.prod(leaf.shape) * parse_dtype(leaf.dtype).itemsize for leaf in stored)
        with self._recorder.phase("read", nbytes):
            futures = await self.in_thread(_start_packed, database, stored)
            for future in futures:
                await settle(future)
            arrays = await self.in_thread(_check_packed, stored, futures)
        with self._recorder.phase("place", nbytes):
            hosts = [
                arrays.pop(leaf.name) if leaf.digests else _empty(leaf) for _, leaf, _ in wanted
            ]
            targets = [target for _, _, target in wanted]
            placed = await self.in_thread(_place_whole, hosts, targets)
        for (number, _, _), value in zip(wanted, placed, strict=True):
            results[number] = value

    def _granules(
        self, wanted: Sequence[tuple[int, LeafEntry, ArrayTarget]]
    ) -> Iterator[list[_ChunkRead]]:
        """Yield batches of chunk reads; buffers are made only when their batch is due."""
        limit = min(GRANULE_BYTES, self._arena.capacity // _CONCURRENT_GRANULES)
        batch: list[_ChunkRead] = []
        total = 0
        for number, leaf, target in wanted:
            for chunk in _leaf_chunks(number, leaf, target):
                if batch and total + chunk.nbytes > limit:
                    yield batch
                    batch, total = [], 0
                batch.append(chunk)
                total += chunk.nbytes
        if batch:
            yield batch

    async def _read_granule(
        self,
        database: ts.KvStore,
        granule: list[_ChunkRead],
        results: list[Any],
        slots: anyio.Semaphore,
    ) -> None:
        nbytes = sum(chunk.nbytes for chunk in granule)
        indirect = [chunk for chunk in granule if _direct_view(chunk) is None]
        scratch_bytes = sum(_aligned(chunk.nbytes) for chunk in indirect)
        block = None
        try:
            if 0 < scratch_bytes <= self._arena.capacity:
                block = await self._arena.allocate(scratch_bytes)
                memory = block.memory
            else:
                # A chunk written with a larger budget than this reader's still has to be whole
                # in memory to be checked.
                memory = np.empty(scratch_bytes, np.uint8)
            with self._recorder.phase("read", nbytes):
                buffers = _chunk_buffers(granule, memory)
                futures = await self.in_thread(
                    _start_granule, database, self._context, granule, buffers
                )
                for future in futures:
                    await settle(future)
                await self.in_thread(_finish_granule, granule, buffers, futures)
            finished = []
            for chunk in granule:
                chunk.leaf.left -= 1
                if not chunk.leaf.left:
                    finished.append(chunk.leaf)
            if finished:
                with self._recorder.phase("place", nbytes):
                    placed = await self.in_thread(_place_regions, finished)
                for leaf, value in zip(finished, placed, strict=True):
                    results[leaf.number] = value
        finally:
            if block is not None:
                self._arena.free(block)
            slots.release()


def _leaf_chunks(number: int, leaf: LeafEntry, target: ArrayTarget) -> Iterator[_ChunkRead]:
    shape = tuple(leaf.shape)
    dtype = parse_dtype(leaf.dtype)
    if target.kind == "jax" and target.sharding is not None:
        regions = [region for region, _ in addressable_regions(target.sharding, shape)]
    else:
        regions = [whole(shape)]
    buffers = [(region, _aligned_empty(region.shape, dtype)) for region in regions]
    places = sorted({place for region in regions for place in chunks_touching(region, leaf.chunks)})
    read = _LeafRead(number, leaf, target, buffers, len(places))
    for place in places:
        region = chunk_region(place, leaf.chunks, shape)
        yield _ChunkRead(read, place, region, region.size * dtype.itemsize)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as error:
        raise CheckpointError(
            f"there is no memory for an array of shape {list(shape)[:8]} and {nbytes} bytes. Skip "
            "it with ... in like=, or shard it over more devices"
        ) from error
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _direct_view(chunk: _ChunkRead) -> Array | None:
    """Return the place of the chunk in the one buffer that wants all of it, or None."""
    touching = [
        (region, buffer)
        for region, buffer in chunk.leaf.regions
        if region.intersect(chunk.region) is not None
    ]
    if len(touching) != 1:
        return None
    region, buffer = touching[0]
    if region.intersect(chunk.region) != chunk.region:
        return None
    inside = chunk.region.within(region)
    return buffer[inside.slices] if inside.is_contiguous_in(region.shape) else None


def _chunk_buffers(granule: Sequence[_ChunkRead], memory: Array) -> list[Array]:
    """Return for every chunk the host memory it is read into, C-contiguous."""
    buffers, end = [], 0
    for chunk in granule:
        view = _direct_view(chunk)
        if view is None:
            dtype = parse_dtype(chunk.leaf.entry.dtype)
            view = memory[end : end + chunk.nbytes].view(dtype).reshape(chunk.region.shape)
            end += _aligned(chunk.nbytes)
        buffers.append(view)
    return buffers


def _start_granule(
    database: ts.KvStore,
    context: ts.Context,
    granule: Sequence[_ChunkRead],
    buffers: Sequence[Array],
) -> list[Any]:
    opened: dict[int, ts.TensorStore] = {}
    futures = []
    for chunk, buffer in zip(granule, buffers, strict=True):
        entry, number = chunk.leaf.entry, chunk.leaf.number
        with translated("open an array", reading=True, leaf=entry.name):
            if number not in opened:
                dtype = stored_dtype(entry.dtype or "")
                opened[number] = open_array(
                    database, context, entry.name, entry.shape, entry.chunks, dtype
                )
            source = opened[number][chunk.region.slices]
            futures.append(ts.array(as_stored(buffer)).write(source))
    return futures


def _finish_granule(
    granule: Sequence[_ChunkRead], buffers: Sequence[Array], futures: Sequence[Any]
) -> None:
    """Check every chunk and bring it to the regions it was not read straight into."""
    for chunk, buffer, future in zip(granule, buffers, futures, strict=True):
        entry = chunk.leaf.entry
        with translated("read an array", reading=True, leaf=entry.name):
            future.result()
        number = int(np.ravel_multi_index(chunk.place, chunk_grid(entry.shape, entry.chunks)))
        _check(entry, number, array_digest(buffer))
        if _direct_view(chunk) is None:
            for region, target in chunk.leaf.regions:
                part = region.intersect(chunk.region)
                if part is not None:
                    target[part.within(region).slices] = buffer[part.within(chunk.region).slices]


def _check(entry: LeafEntry, number: int, found: str) -> None:
    if found != entry.digests[number]:
        raise CorruptCheckpointError(
            f"chunk {number} of {len(entry.digests)} is not what was saved: its digest is {found}, "
            f"the manifest says {entry.digests[number]:.32}. The data was damaged or is missing; "
            "restore another step",
            leaf=entry.name,
        )


def _start_packed(database: ts.KvStore, stored: Sequence[LeafEntry]) -> list[Any]:
    batch = ts.Batch()
    futures = []
    for leaf in stored:
        key = f"{leaf.name}/{chunk_key((0,) * len(leaf.shape))}"
        futures.append(database.read(key, batch=batch))
    batch.submit()
    return futures


def _check_packed(stored: Sequence[LeafEntry], futures: Sequence[Any]) -> dict[str, Array]:
    arrays = {}
    for leaf, future in zip(stored, futures, strict=True):
        with translated("read an array", reading=True, leaf=leaf.name):
            data = future.result().value
        _check(leaf, 0, digest(data))
        dtype = parse_dtype(leaf.dtype)
        if len(data) != math.prod(leaf.shape) * dtype.itemsize:
            raise CorruptCheckpointError(
                f"{len(data)} bytes are stored for shape {leaf.shape[:8]}", leaf=leaf.name
            )
        arrays[leaf.name] = np.frombuffer(data, dtype).reshape(leaf.shape)
    return arrays


def _empty(leaf: LeafEntry) -> Array:
    return np.empty(leaf.shape, parse_dtype(leaf.dtype))


def _place_whole(hosts: Sequence[Array], targets: Sequence[ArrayTarget]) -> list[Any]:
    """Return whole arrays as their targets want them, jax arrays in as few calls as can be."""
    placed: list[Any] = [None] * len(hosts)
    bound: list[int] = []
    free: list[int] = []
    cast = [
        host if host.dtype == target.dtype else host.astype(target.dtype)
        for host, target in zip(hosts, targets, strict=True)
    ]
    for number, (host, target) in enumerate(zip(cast, targets, strict=True)):
        if target.kind == "numpy":
            placed[number] = host if host.flags.writeable else host.copy()
        elif target.kind == "numpy_scalar":
            placed[number] = host[()]
        elif target.sharding is None:
            free.append(number)
        else:
            bound.append(number)
    shardings = [targets[number].sharding for number in bound]
    for number, array in zip(
        bound, jax.device_put([cast[number] for number in bound], shardings), strict=True
    ):
        placed[number] = array
    for number, array in zip(free, jax.device_put([cast[n] for n in free]), strict=True):
        placed[number] = array
    return placed


def _place_regions(leaves: Sequence[_LeafRead]) -> list[Any]:
    return [_place_leaf(leaf) for leaf in leaves]


def _place_leaf(leaf: _LeafRead) -> Any:
    target, shape = leaf.target, tuple(leaf.entry.shape)
    buffers = {
        region: buffer if buffer.dtype == target.dtype else buffer.astype(target.dtype)
        for region, buffer in leaf.regions
    }
    if target.kind != "jax" or target.sharding is None:
        return _place_whole([buffers[whole(shape)]], [target])[0]
    devices = list(target.sharding.addressable_devices_indices_map(shape))
    memory_kind = target.sharding.memory_kind
    hosts: list[Array] = []
    places = []
    for region, positions in addressable_regions(target.sharding, shape):
        for position in positions:
            hosts.append(buffers[region])
            places.append(
                jax.sharding.SingleDeviceSharding(devices[position], memory_kind=memory_kind)
            )
    arrays = jax.device_put(hosts, places)
    return jax.make_array_from_single_device_arrays(
        shape, target.sharding, arrays, dtype=target.dtype
    )
