"""One item on its way in: stored chunks to host buffers to devices.

Every stored chunk that a target needs is read once, its digest is checked, and its bytes go to each
region of each target that wants them. A chunk that is one run of memory in the only region that
wants it is read straight into place; others pass through the arena. On CPU devices a finished
buffer becomes the jax array itself, without another copy. Packed leaves lie side by side, so runs
of them are read at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import anyio
import numpy as np

from ckpt.engine.arena import Arena
from ckpt.engine.buffers import Buffers
from ckpt.engine.placing import place_regions, place_whole
from ckpt.engine.sources import ChunkSource, DataFiles, ItemDatabase, StoredChunk
from ckpt.errors import CorruptCheckpointError, located
from ckpt.events import Recorder
from ckpt.layout.leaves import parse_dtype
from ckpt.layout.match import ArrayTarget
from ckpt.layout.plan import CHUNK_ALIGNMENT, GRANULE_BYTES, aligned
from ckpt.layout.shards import (
    Region,
    addressable_regions,
    chunk_grid,
    chunk_region,
    chunks_touching,
    position_in_grid,
    whole,
)
from ckpt.manifest import ItemEntry, LeafEntry, digest
from ckpt.storage.base import Storage

__all__ = ["EngineItemReader"]

T = TypeVar("T")
Array = np.ndarray[Any, Any]
Wanted = tuple[int, LeafEntry, ArrayTarget]

# Granules in flight: enough to keep two cores and a disk queue busy.
_CONCURRENT_GRANULES = 4
# Packed leaves that are not wanted are read over if there is not more than this between two that
# are: a device does not read less at a time.
_MOST_SKIPPED = 64 << 10


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
    stored: StoredChunk
    nbytes: int


@dataclass(slots=True)
class _Run:
    """Packed leaves that lie side by side in one data file, each with its first byte there."""

    file: int
    start: int
    end: int
    leaves: list[tuple[Wanted, int]]


class EngineItemReader:
    """The engine's `ItemReader` for one item."""

    def __init__(
        self,
        storage: Storage,
        entry: str,
        item: str,
        arena: Arena,
        buffers: Buffers,
        recorder: Recorder,
    ) -> None:
        """Read the item called `item` of an entry."""
        self._storage = storage
        self._entry = entry
        self._item = item
        self._arena = arena
        self._buffers = buffers
        self._recorder = recorder

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
        files = DataFiles(self._read_block, entry, self._buffers)
        database = ItemDatabase(self._storage.database_url(self._entry, self._item), self._item)
        slots = anyio.Semaphore(_CONCURRENT_GRANULES)
        limit = min(GRANULE_BYTES, self._arena.capacity // _CONCURRENT_GRANULES)
        empty, packed, large = _sorted_out(wanted)
        async with anyio.create_task_group() as tasks:
            for leaves, function in ((empty, _read_empty), (packed[1], database.read_values)):
                if leaves:
                    tasks.start_soon(self._read_whole, function, leaves, results)
            for run in _runs(packed[0], limit):
                await slots.acquire()
                tasks.start_soon(self._read_run, files, run, results, slots)
            for source, leaves in ((files, large[0]), (database, large[1])):
                for granule in _granules(leaves, limit, self._buffers):
                    await slots.acquire()
                    tasks.start_soon(self._read_granule, source, granule, results, slots)
        return results

    async def _read_block(self, path: str, offset: int, target: memoryview) -> None:
        await self._storage.read_block(self._entry, f"{self._item}/{path}", offset, target)

    async def _read_whole(
        self,
        function: Callable[[Sequence[LeafEntry]], Any],
        wanted: Sequence[Wanted],
        results: list[Any],
    ) -> None:
        """Place leaves that `function` returns whole."""
        with self._recorder.phase("read"):
            arrays = await function([leaf for _, leaf, _ in wanted])
            await self.in_thread(_check_whole, wanted, arrays)
        await self._place_whole(wanted, arrays, results)

    async def _read_run(
        self, files: DataFiles, run: _Run, results: list[Any], slots: anyio.Semaphore
    ) -> None:
        nbytes = run.end - run.start
        try:
            memory = self._buffers.empty((nbytes,), np.dtype(np.uint8))
            with self._recorder.phase("read", nbytes), located(leaf=run.leaves[0][0][1].name):
                await files.read_run(run.file, run.start, memory)
                arrays = await self.in_thread(_cut, run, memory)
            await self._place_whole([wanted for wanted, _ in run.leaves], arrays, results)
        finally:
            slots.release()

    async def _place_whole(
        self, wanted: Sequence[Wanted], arrays: Sequence[Array], results: list[Any]
    ) -> None:
        targets = [target for _, _, target in wanted]
        with self._recorder.phase("place"):
            placed = await self.in_thread(place_whole, arrays, targets)
        for (number, _, _), value in zip(wanted, placed, strict=True):
            results[number] = value

    async def _read_granule(
        self,
        source: ChunkSource,
        granule: list[_ChunkRead],
        results: list[Any],
        slots: anyio.Semaphore,
    ) -> None:
        nbytes = sum(chunk.nbytes for chunk in granule)
        indirect = [chunk for chunk in granule if _direct_view(chunk) is None]
        scratch_bytes = sum(aligned(chunk.nbytes, CHUNK_ALIGNMENT) for chunk in indirect)
        block = None
        try:
            if not scratch_bytes:
                memory = np.empty(0, np.uint8)
            elif scratch_bytes <= self._arena.capacity:
                block = await self._arena.allocate(scratch_bytes)
                memory = block.memory
            else:
                # A chunk written with a larger budget than this reader's still has to be whole
                # in memory to be checked.
                memory = self._buffers.empty((scratch_bytes,), np.dtype(np.uint8))
            with self._recorder.phase("read", nbytes):
                buffers = _chunk_buffers(granule, memory)
                await source.read([chunk.stored for chunk in granule], buffers)
                await self.in_thread(_finish_granule, granule, buffers)
            finished = []
            for chunk in granule:
                chunk.leaf.left -= 1
                if not chunk.leaf.left:
                    finished.append(chunk.leaf)
            if finished:
                with self._recorder.phase("place", nbytes):
                    placed = await self.in_thread(_place_leaves, finished)
                for leaf, value in zip(finished, placed, strict=True):
                    results[leaf.number] = value
        finally:
            if block is not None:
                self._arena.free(block)
            slots.release()


def _sorted_out(
    wanted: Sequence[Wanted],
) -> tuple[list[Wanted], tuple[list[Wanted], list[Wanted]], tuple[list[Wanted], list[Wanted]]]:
    """Return leaves without elements, packed leaves and others, the latter by whether located."""
    empty: list[Wanted] = []
    packed: tuple[list[Wanted], list[Wanted]] = ([], [])
    large: tuple[list[Wanted], list[Wanted]] = ([], [])
    for each in wanted:
        leaf = each[1]
        if not leaf.digests:
            empty.append(each)
        else:
            (packed if leaf.packed else large)[not leaf.offsets].append(each)
    return empty, packed, large


async def _read_empty(leaves: Sequence[LeafEntry]) -> list[Array]:
    return [np.empty(leaf.shape, parse_dtype(leaf.dtype)) for leaf in leaves]


def _runs(wanted: Sequence[Wanted], limit: int) -> Iterator[_Run]:
    """Yield located packed leaves as runs of at most about `limit` bytes."""
    places = [(leaf.files[0] if leaf.files else 0, leaf.offsets[0]) for _, leaf, _ in wanted]
    run: _Run | None = None
    for number in sorted(range(len(wanted)), key=places.__getitem__):
        each, (file, start) = wanted[number], places[number]
        end = start + _nbytes(each[1])
        near = run is not None and run.file == file and start - run.end <= _MOST_SKIPPED
        if run is not None and near and end - run.start <= limit:
            run.end = max(run.end, end)
            run.leaves.append((each, start))
            continue
        if run is not None:
            yield run
        run = _Run(file, start, end, [(each, start)])
    if run is not None:
        yield run


def _nbytes(leaf: LeafEntry) -> int:
    return math.prod(leaf.shape) * parse_dtype(leaf.dtype).itemsize


def _cut(run: _Run, memory: Array) -> list[Array]:
    """Return the leaves of a run, checked.

    Each in memory of its own: jax takes over what it is given, and a single scalar that lives on
    would keep the whole run alive.
    """
    raw = memory.data
    arrays = []
    for (_, leaf, _), place in run.leaves:
        start = place - run.start
        array: Array = np.ndarray(leaf.shape, parse_dtype(leaf.dtype), memory, start)
        _compare(leaf, 0, digest(raw[start : start + array.nbytes]))
        arrays.append(array.copy())
    return arrays


def _check_whole(wanted: Sequence[Wanted], arrays: Sequence[Array]) -> None:
    for (_, leaf, _), array in zip(wanted, arrays, strict=True):
        if leaf.digests:
            _check(leaf, 0, array)


def _granules(wanted: Sequence[Wanted], limit: int, memory: Buffers) -> Iterator[list[_ChunkRead]]:
    """Yield batches of chunk reads; buffers are made only when their batch is due."""
    batch: list[_ChunkRead] = []
    total = 0
    for number, leaf, target in wanted:
        for chunk in _leaf_chunks(number, leaf, target, memory):
            if batch and total + chunk.nbytes > limit:
                yield batch
                batch, total = [], 0
            batch.append(chunk)
            total += chunk.nbytes
    if batch:
        yield batch


def _leaf_chunks(
    number: int, leaf: LeafEntry, target: ArrayTarget, memory: Buffers
) -> Iterator[_ChunkRead]:
    shape = tuple(leaf.shape)
    dtype = parse_dtype(leaf.dtype)
    if target.kind == "jax" and target.sharding is not None:
        regions = [region for region, _ in addressable_regions(target.sharding, shape)]
    else:
        regions = [whole(shape)]
    buffers = [(region, memory.empty(region.shape, dtype)) for region in regions]
    places = sorted({place for region in regions for place in chunks_touching(region, leaf.chunks)})
    read = _LeafRead(number, leaf, target, buffers, len(places))
    grid = chunk_grid(shape, leaf.chunks)
    for place in places:
        region = chunk_region(place, leaf.chunks, shape)
        stored = StoredChunk(leaf, position_in_grid(place, grid), region)
        yield _ChunkRead(read, stored, region.size * dtype.itemsize)


def _direct_view(chunk: _ChunkRead) -> Array | None:
    """Return the place of the chunk in the one buffer that wants all of it, or None."""
    covered = chunk.stored.region
    touching = [
        (region, buffer)
        for region, buffer in chunk.leaf.regions
        if region.intersect(covered) is not None
    ]
    if len(touching) != 1:
        return None
    region, buffer = touching[0]
    if region.intersect(covered) != covered:
        return None
    inside = covered.within(region)
    return buffer[inside.slices] if inside.is_contiguous_in(region.shape) else None


def _chunk_buffers(granule: Sequence[_ChunkRead], memory: Array) -> list[Array]:
    """Return for every chunk the host memory it is read into, C-contiguous."""
    buffers, end = [], 0
    for chunk in granule:
        view = _direct_view(chunk)
        if view is None:
            dtype = parse_dtype(chunk.leaf.entry.dtype)
            view = memory[end : end + chunk.nbytes].view(dtype).reshape(chunk.stored.region.shape)
            end += aligned(chunk.nbytes, CHUNK_ALIGNMENT)
        buffers.append(view)
    return buffers


def _finish_granule(granule: Sequence[_ChunkRead], buffers: Sequence[Array]) -> None:
    """Check every chunk and bring it to the regions it was not read straight into."""
    for chunk, buffer in zip(granule, buffers, strict=True):
        _check(chunk.leaf.entry, chunk.stored.number, buffer)
        if _direct_view(chunk) is None:
            covered = chunk.stored.region
            for region, target in chunk.leaf.regions:
                part = region.intersect(covered)
                if part is not None:
                    target[part.within(region).slices] = buffer[part.within(covered).slices]


def _check(entry: LeafEntry, number: int, array: Array) -> None:
    _compare(entry, number, digest(array.reshape(-1).view(np.uint8).data))


def _compare(entry: LeafEntry, number: int, found: str) -> None:
    if found != entry.digests[number]:
        raise CorruptCheckpointError(
            f"chunk {number} of {len(entry.digests)} is not what was saved: its digest is {found}, "
            f"the manifest says {entry.digests[number]:.32}. The data was damaged or is missing; "
            "restore another step",
            leaf=entry.name,
        )


def _place_leaves(leaves: Sequence[_LeafRead]) -> list[Any]:
    return [place_regions(tuple(leaf.entry.shape), leaf.target, leaf.regions) for leaf in leaves]
