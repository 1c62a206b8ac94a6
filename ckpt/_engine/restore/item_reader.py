"""One item on its way in: stored chunks to host buffers to devices.

Every stored chunk that is needed is read once, its digest is checked, and its bytes go to each
region of each array that wants them. A chunk that is one run of memory in the only region that
wants it is read straight into place; others pass through the arena. On CPU devices a finished
buffer becomes the jax array itself, without another copy. Packed leaves lie side by side, so runs
of them are read at once.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio
import numpy as np

from ckpt._engine.memory.arena import Arena
from ckpt._engine.memory.buffers import Buffers
from ckpt._engine.memory.limits import check_memory
from ckpt._engine.restore.checks import DamagedLeaves, check_chunk
from ckpt._engine.restore.chunk_sources import (
    BlockReader,
    ChunkSource,
    DataFiles,
    ItemDatabase,
)
from ckpt._engine.restore.destinations import Destination, direct_view, distribute
from ckpt._engine.restore.item_files import read_item_file
from ckpt._engine.restore.packed_runs import (
    PackedRead,
    Run,
    cut_run,
    parts_of,
)
from ckpt._engine.restore.placement import cannot_be_weak, place_whole
from ckpt._engine.restore.read_units import (
    Granule,
    Unit,
    chunk_nbytes,
    lots_of,
    sorted_out,
    stored_chunk,
    unit_nbytes,
)
from ckpt._engine.restore.shared_reads import Broadcast, SharedReads
from ckpt._events import EventRecorder
from ckpt._format.dtypes import parse_dtype
from ckpt._format.manifest import FileEntry, ItemEntry, LeafEntry
from ckpt._plan.chunk_reads import ChunkRead, plan_chunk_reads
from ckpt._plan.chunking import BATCH_BYTES
from ckpt._plan.multihost.per_process import ProcessPart, own_path
from ckpt._plan.multihost.read_groups import Grouping
from ckpt._plan.targets import ArrayRead
from ckpt._plan.write_batches import CHUNK_ALIGNMENT, aligned
from ckpt.errors import CorruptCheckpointError, located
from ckpt.storage._base import Storage

__all__ = ["CONCURRENT_BATCHES", "EngineItemReader"]

logger = logging.getLogger("ckpt")

T = TypeVar("T")
Array = np.ndarray[Any, Any]

# Granules in flight, of all items: enough to keep two cores and a disk queue busy.
CONCURRENT_BATCHES = 4


class _ReadState:
    """What one call of `read` has under way."""

    def __init__(self, count: int, slots: anyio.Semaphore) -> None:
        """Expect `count` results; every granule under way takes one of `slots`."""
        self.results: list[Any] = [None] * count
        self.slots = slots
        self.destinations: dict[int, Destination] = {}
        self.damage = DamagedLeaves()

    def add(self, reads: Sequence[tuple[int, ArrayRead]], chunks: Sequence[ChunkRead]) -> None:
        """Expect arrays that are read by way of these chunks."""
        for number, read in reads:
            self.destinations[number] = Destination(number, read)
        for chunk in chunks:
            for number in {use.read for use in chunk.uses}:
                self.destinations[number].left += 1

    def count(self, chunk: ChunkRead) -> Iterator[Destination]:
        """Say that a chunk is in place; yield the arrays that are complete with it."""
        for number in {use.read for use in chunk.uses}:
            destination = self.destinations[number]
            destination.left -= 1
            if not destination.left:
                yield destination


class EngineItemReader:
    """The engine's `ItemReader` for one item."""

    def __init__(
        self,
        storage: Storage,
        entry: str,
        item: str,
        arena: Arena,
        buffers: Buffers,
        recorder: EventRecorder,
        manifest_files: Mapping[str, FileEntry],
        slots: anyio.Semaphore,
        part: ProcessPart,
        process: int,
        processes: int,
        broadcast: Broadcast | None = None,
    ) -> None:
        """Read the item called `item` of an entry; `slots` are shared by all items.

        `part` is the part of it that is read, in process `process` of `processes`; `broadcast`
        says how they share what they read, if they do.
        """
        self.item = item
        self.process = process
        self.processes = processes
        self._part = part
        self._storage = storage
        self._entry = entry
        self._arena = arena
        self._buffers = buffers
        self._recorder = recorder
        self._files = manifest_files
        self._slots = slots
        self._broadcast = broadcast

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow pure function off the engine's loop."""
        return await anyio.to_thread.run_sync(partial(function, *args))

    async def read_file(self, path: str) -> bytes:
        """Read a file of the item; see `ItemReader.read_file`."""
        own = own_path(path, self._part.process, self._part.processes)
        return await read_item_file(
            self._storage, self._entry, self.item, own, self._files, self._recorder
        )

    async def read(self, entry: ItemEntry, reads: Sequence[ArrayRead]) -> list[Any]:
        """Read arrays; see `ItemReader.read`.

        Raises:
            CorruptCheckpointError: A chunk is missing or was changed; names the leaf.
            InvalidArgumentError: The arrays are larger than the memory of this machine.
        """
        check_memory(reads, entry.leaves)
        _tell_of_types(reads)
        began_ns = time.perf_counter_ns()
        files = DataFiles(self._read_block, entry, self._buffers)
        database = ItemDatabase(self._storage.database_spec(self._entry, self.item), self.item)
        work = _ReadState(len(reads), self._slots)
        packed, others = sorted_out(entry.leaves, reads)
        in_files = [each for each in packed if each.leaf.offsets]
        in_database = [each for each in packed if not each.leaf.offsets]
        chunks = await self.in_thread(plan_chunk_reads, entry.leaves, others)
        if in_database or any(not chunk.leaf.offsets for chunk in chunks):
            await self._refuse_links()
        work.add(others, chunks)
        groupings: Mapping[str, Grouping] = {}
        limit = min(BATCH_BYTES, self._arena.capacity // CONCURRENT_BATCHES)
        limits: dict[Grouping | None, int] = {None: limit}
        if self._broadcast is not None:
            groupings = await self.in_thread(self._broadcast.groupings, entry.leaves, reads)
            for grouping in groupings.values():
                limits[grouping] = self._broadcast.unit_bytes(grouping, CONCURRENT_BATCHES)
        lots = await self.in_thread(lots_of, in_files, chunks, groupings, limits)
        total = sum(map(unit_nbytes, itertools.chain.from_iterable(lots.values())))
        self._recorder.planned(began_ns, total)
        async with anyio.create_task_group() as tasks:
            if in_database:
                tasks.start_soon(self._read_packed, database.read_values, in_database, work)
            await self._place_without_chunks(work)
            await self._read_units(lots.pop(None), files, database, work)
        work.damage.told()
        for shared, units in lots.items():
            assert shared is not None
            await self._read_shared(shared, units, entry, files, work)
        return work.results

    async def _read_shared(
        self,
        grouping: Grouping,
        units: Sequence[Unit],
        entry: ItemEntry,
        files: DataFiles,
        work: _ReadState,
    ) -> None:
        """Read units together with the processes that need the same."""
        assert self._broadcast is not None

        async def take(block: BlockReader, numbers: range) -> None:
            source = DataFiles(block, entry, self._buffers)
            batch = [units[number] for number in numbers]
            await self._read_units(batch, source, source, work)
            work.damage.told()

        shared = SharedReads(
            self._broadcast, files, self._read_block, self._buffers, self._recorder
        )
        await shared.read(grouping, units, take)

    async def _read_units(
        self, units: Sequence[Unit], files: DataFiles, database: ChunkSource, work: _ReadState
    ) -> None:
        async with anyio.create_task_group() as tasks:
            for unit in units:
                await work.slots.acquire()
                if isinstance(unit, Run):
                    tasks.start_soon(self._read_run, files, unit, work)
                    continue
                try:
                    await self._open(unit, work)
                except BaseException:
                    work.slots.release()
                    raise
                source = files if unit[0].leaf.offsets else database
                tasks.start_soon(self._read_granule, source, unit, work)

    async def _refuse_links(self) -> None:
        """Refuse a database among whose files are links: TensorStore would follow them."""
        for path, size in (await self._storage.files(self._entry)).items():
            if size is None and f"{path}/".startswith(f"{self.item}/"):
                raise CorruptCheckpointError(
                    f"{self._storage.location}/{self._entry}/{path} is a symbolic link, or no "
                    "regular file; nothing is read through it"
                )

    async def _read_block(self, path: str, offset: int, target: memoryview) -> None:
        await self._storage.read_block(self._entry, f"{self.item}/{path}", offset, target)

    async def _read_packed(
        self,
        read_values: Callable[[Sequence[LeafEntry]], Awaitable[list[Array]]],
        wanted: Sequence[PackedRead],
        work: _ReadState,
    ) -> None:
        """Read packed leaves that only the database knows the places of."""
        with work.damage.noted():
            with self._recorder.phase("read"):
                arrays = await read_values([each.leaf for each in wanted])
                await self.in_thread(_check_whole, wanted, arrays)
            await self._place_whole(wanted, arrays, work)

    async def _read_run(self, files: DataFiles, run: Run, work: _ReadState) -> None:
        nbytes = run.end - run.start
        try:
            with work.damage.noted():
                memory = self._buffers.empty((nbytes,), np.dtype(np.uint8))
                with self._recorder.phase("read", nbytes):
                    try:
                        await files.read_run(run.file, run.start, memory)
                    except CorruptCheckpointError as error:
                        # Most of them may be there: which are not, only the single ones tell.
                        await _read_singly(files, run, memory, error)
                    arrays = await self.in_thread(cut_run, run, memory)
                await self._place_whole(run.leaves, arrays, work)
        finally:
            work.slots.release()

    async def _place_whole(
        self, wanted: Sequence[PackedRead], arrays: Sequence[Array], work: _ReadState
    ) -> None:
        reads = [each.read for each in wanted]
        with self._recorder.phase("place"):
            placed = await self.in_thread(place_whole, arrays, reads)
        for each, value in zip(wanted, placed, strict=True):
            work.results[each.number] = value

    async def _open(self, granule: Sequence[ChunkRead], work: _ReadState) -> None:
        """Make the buffers of the arrays that begin with this granule; not before they are due."""
        for chunk in granule:
            for use in chunk.uses:
                destination = work.destinations[use.read]
                if destination.open(self._buffers):
                    await self.in_thread(destination.clear)

    async def _read_granule(self, source: ChunkSource, granule: Granule, work: _ReadState) -> None:
        nbytes = unit_nbytes(granule)
        views = [direct_view(chunk, work.destinations) for chunk in granule]
        scratch_bytes = sum(
            aligned(chunk_nbytes(chunk), CHUNK_ALIGNMENT)
            for chunk, view in zip(granule, views, strict=True)
            if view is None
        )
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
            with work.damage.noted():
                with self._recorder.phase("read", nbytes):
                    buffers = _chunk_buffers(granule, views, memory)
                    await source.read(list(map(stored_chunk, granule)), buffers)
                    await self.in_thread(
                        _finish_granule, granule, views, buffers, work.destinations
                    )
                finished = [destination for chunk in granule for destination in work.count(chunk)]
                await self._place(finished, work)
        finally:
            if block is not None:
                self._arena.free(block)
            work.slots.release()

    async def _place_without_chunks(self, work: _ReadState) -> None:
        """Place the arrays for which nothing has to be read."""
        empty = [each for each in work.destinations.values() if not each.left]
        for destination in empty:
            if destination.open(self._buffers):
                await self.in_thread(destination.clear)
        await self._place(empty, work)

    async def _place(self, finished: Sequence[Destination], work: _ReadState) -> None:
        if not finished:
            return
        with self._recorder.phase("place"):
            placed = await self.in_thread(_place_all, finished)
        for destination, value in zip(finished, placed, strict=True):
            work.results[destination.number] = value


def _tell_of_types(reads: Sequence[ArrayRead]) -> None:
    changed = [read.path for read in reads if cannot_be_weak(read.target)]
    if changed:
        logger.warning(
            "%d arrays over several processes (%s, ...) were weakly typed; they come back with the "
            "same dtype, not weakly. Give them a dtype where they are made",
            len(changed),
            changed[0],
        )


async def _read_singly(
    files: DataFiles, run: Run, memory: Array, first: CorruptCheckpointError
) -> None:
    """Read the leaves of a run one by one; what is damaged is told together, by leaf.

    Args:
        files: The files.
        run: The run.
        memory: What it is read into.
        first: Why it could not be read at once.
    """
    if isinstance(first.__cause__, FileNotFoundError | NotADirectoryError):
        # There is nothing of any of them.
        first.locate(leaf=run.leaves[0].leaf.name)
        if len(run.leaves) > 1:
            first.add_note(f"{len(run.leaves)} leaves lie in it")
        raise first
    damage = DamagedLeaves()
    for leaf, part in parts_of(run):
        with damage.noted(), located(leaf=leaf.name):
            await files.read_run(run.file, leaf.offsets[0], memory[part])
    damage.told()


def _chunk_buffers(
    granule: Sequence[ChunkRead], views: Sequence[Array | None], memory: Array
) -> list[Array]:
    """Return for every chunk the host memory it is read into, C-contiguous."""
    buffers, end = [], 0
    for chunk, view in zip(granule, views, strict=True):
        if view is None:
            nbytes = chunk_nbytes(chunk)
            dtype = parse_dtype(chunk.leaf.dtype)
            view = memory[end : end + nbytes].view(dtype).reshape(chunk.covered.shape)
            end += aligned(nbytes, CHUNK_ALIGNMENT)
        buffers.append(view)
    return buffers


def _finish_granule(
    granule: Sequence[ChunkRead],
    views: Sequence[Array | None],
    buffers: Sequence[Array],
    destinations: dict[int, Destination],
) -> None:
    """Check every chunk and bring it to the regions it was not read straight into."""
    damage = DamagedLeaves()
    for chunk, view, buffer in zip(granule, views, buffers, strict=True):
        with damage.noted():
            check_chunk(chunk.leaf, chunk.number, buffer)
        if view is None:
            distribute(chunk, buffer, destinations)
    damage.told()


def _check_whole(wanted: Sequence[PackedRead], arrays: Sequence[Array]) -> None:
    damage = DamagedLeaves()
    for each, array in zip(wanted, arrays, strict=True):
        with damage.noted():
            check_chunk(each.leaf, 0, array)
    damage.told()


def _place_all(finished: Sequence[Destination]) -> list[Any]:
    return [destination.place() for destination in finished]
