"""The reader of one item: stored chunks to host buffers to devices.

Each stored chunk that is needed is read once and checked against its digest, and its bytes go to
every region of every array that wants them. Finished arrays are copied to their devices, and their
buffers serve the next ones.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import numpy as np
from msgspec.structs import replace

from ckpt._engine.memory.arena import check_memory
from ckpt._engine.restore.context import SHARED_REQUESTS, RestoreContext
from ckpt._engine.restore.destinations import (
    DamagedLeaves,
    Destination,
    add_blanks,
    damage_of,
    damaged_chunks,
    deliver,
    direct_memory,
    map_files,
)
from ckpt._engine.restore.placement import loses_precision, place
from ckpt._engine.restore.step_files import BlockReader, ItemElsewhere
from ckpt._format.array_format import parse_dtype
from ckpt._format.manifest import ItemEntry
from ckpt._format.per_process import ProcessPart, own_path
from ckpt._format.regions import Region, whole
from ckpt._plan.chunk_reads import (
    COALESCED_BYTES,
    ChunkRead,
    ReadRequest,
    chunks_elsewhere,
    is_read_whole,
    plan_chunk_reads,
    plan_requests,
    request_bytes,
)
from ckpt._plan.slices import ArraySlice
from ckpt._plan.targets import ArrayRead, ArrayTarget
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import ArrayMemory
from ckpt.errors import CorruptCheckpointError, StorageError, located
from ckpt.handlers._base import ItemReader
from ckpt.storage._base import MapsFiles
from ckpt.storage._manifests import while_read

if TYPE_CHECKING:
    from ckpt._job.read_groups import Grouping

T = TypeVar("T")
Array = np.ndarray[Any, Any]


class _ReadState:
    """The state of one call of `read`.

    Attributes:
        destinations: The memory of each array, by number of the read.
        requests: The requests, by the group of processes that shares them; None for those that this
            process carries out alone.
        results: The finished arrays, by number of the read.
        damage: The damage found so far.
    """

    def __init__(self, entry: ItemEntry, reads: Sequence[ArrayRead], memory: ArrayMemory) -> None:
        leaves = list(entry.leaves)
        # Mappable arrays are mapped later; the rest get buffers.
        until_mapped: ArrayMemory = "buffers" if memory == "files" else memory
        self.destinations = [
            Destination(
                read, read.leaf is not None and is_read_whole(leaves[read.leaf]), until_mapped
            )
            for read in reads
        ]
        self.requests: dict[Grouping | None, list[ReadRequest]] = {}
        self.results: list[Any] = [None] * len(reads)
        self.damage = DamagedLeaves()

    def is_mapped(self, request: ReadRequest) -> bool:
        """Return True if arrays of a request are parts of their files."""
        return any(
            self.destinations[use.read].memory == "files"
            for chunk in request.chunks
            for use in chunk.uses
        )

    def count(self, request: ReadRequest) -> list[int]:
        """Count the chunks of a request as done; return the arrays that they complete."""
        complete: list[int] = []
        destinations = self.destinations
        for chunk in request.chunks:
            uses = chunk.uses
            # Fast path: most chunks belong to one array.
            for number in (uses[0].read,) if len(uses) == 1 else {use.read for use in uses}:
                destination = destinations[number]
                destination.left -= 1
                if not destination.left:
                    complete.append(number)
        return complete


class EngineItemReader:
    """The engine's `ItemReader` for one item."""

    def __init__(self, restore: RestoreContext, item: str, part: ProcessPart) -> None:
        self.item = item
        self.process = restore.process
        self.processes = restore.processes
        self._restore = restore
        self._part = part
        self._recorder = restore.recorder
        self._read_block: BlockReader = restore.files.read_block

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow pure function off the engine's loop."""
        return await run_in_thread(partial(function, *args))

    async def read_file(self, path: str) -> bytes:
        """Read a file of the item; see `ItemReader.read_file`."""
        from ckpt._engine.restore.item_files import read_item_file

        own = own_path(path, self._part.process, self._part.processes)
        return await read_item_file(self._restore, self.item, own)

    async def read(self, entry: ItemEntry, reads: Sequence[ArrayRead]) -> list[Any]:
        """Read arrays; see `ItemReader.read`.

        Raises:
            CorruptCheckpointError: A chunk is missing or was changed; names the leaf.
            InvalidArgumentError: The arrays are larger than the memory of this machine.
        """
        check_memory(reads, entry.leaves)
        if self._restore.may_read is not None:
            await self._restore.may_read()
        began_ns = time.perf_counter_ns()
        work = await self.in_thread(self._planned, entry, reads)
        total = sum(each.nbytes for requests in work.requests.values() for each in requests)
        self._recorder.report("plan", began_ns, time.perf_counter_ns(), total)
        self._restore.moved.append(total)
        # No chunk has to be read for these arrays.
        empty = [number for number, each in enumerate(work.destinations) if not each.left]
        await self._open(work.destinations[number] for number in empty)
        await self._place(empty, work)
        await self._read_requests(work.requests.pop(None), self._read_block, work)
        work.damage.raise_if_any()
        for grouping, requests in work.requests.items():
            assert grouping is not None
            await self._read_shared(grouping, requests, work)
        if self._restore.check is not None:
            with self._recorder.phase("place"):
                await self.in_thread(self._restore.check, entry.leaves, reads, work.results)
        return work.results

    def _planned(self, entry: ItemEntry, reads: Sequence[ArrayRead]) -> _ReadState:
        """Return the requests that read the arrays, and their destinations, still unfilled."""
        memory = self._restore.memory
        work = _ReadState(entry, reads, memory)
        chunks = plan_chunk_reads(entry.leaves, reads)
        for chunk in chunks:
            for number in {use.read for use in chunk.uses}:
                work.destinations[number].left += 1
        if memory == "files":
            map_files(work.destinations, chunks)
        add_blanks(work.destinations)
        limit = request_bytes(self._restore.engine.arena.capacity)
        limits: dict[Grouping | None, int] = {None: limit}
        groupings: dict[str, Grouping] = {}
        broadcast = self._restore.broadcast
        if broadcast is not None:
            is_common = self._part.processes == 1
            groupings = broadcast.groupings(entry.leaves, reads, is_common=is_common)
            for grouping in groupings.values():
                limits[grouping] = broadcast.request_bytes(grouping, SHARED_REQUESTS)
        files = [f"{self.item}/{path}" for path in entry.data_files]
        for readers, limit in limits.items():
            own = chunks
            if groupings:
                own = [chunk for chunk in chunks if groupings.get(chunk.leaf.name) == readers]
            work.requests[readers] = plan_requests(own, files, limit)
        return work

    async def _read_shared(
        self, grouping: Grouping, requests: Sequence[ReadRequest], work: _ReadState
    ) -> None:
        """Carry out requests together with the processes that need the same bytes."""

        async def take(read_block: BlockReader, numbers: range) -> None:
            await self._read_requests([requests[each] for each in numbers], read_block, work)
            work.damage.raise_if_any()

        assert self._restore.broadcast is not None
        shared = self._restore.broadcast.reads(
            self._restore.files.read_block,
            self._restore.engine.buffers,
            self._recorder,
        )
        await shared.read(grouping, requests, take)

    async def _read_requests(
        self, requests: Sequence[ReadRequest], read_block: BlockReader, work: _ReadState
    ) -> None:
        slots = self._restore.slots
        async with anyio.create_task_group() as tasks:
            for request in requests:
                await slots.acquire()
                try:
                    # Opened only when they are due: from now on they take memory.
                    await self._open(
                        work.destinations[use.read]
                        for chunk in request.chunks
                        for use in chunk.uses
                    )
                except BaseException:
                    slots.release()
                    raise
                tasks.start_soon(self._read_request, request, read_block, work)

    async def _open(self, destinations: Iterable[Destination]) -> None:
        buffers = self._restore.engine.buffers
        for padded in [each for each in destinations if each.open(buffers)]:
            await self.in_thread(padded.clear)

    async def _read_request(
        self, request: ReadRequest, read_block: BlockReader, work: _ReadState
    ) -> None:
        """Read the bytes of a request, check them, bring them to their places, free the slot."""
        engine, nbytes = self._restore.engine, request.source.nbytes
        if self._restore.memory == "files" and work.is_mapped(request):
            await self._map_request(request, work)
            return
        block = None
        try:
            with work.damage.noted():
                memory = direct_memory(request, work.destinations)
                in_place = memory is not None
                if memory is None and COALESCED_BYTES < nbytes <= engine.arena.capacity:
                    block = await engine.arena.allocate(nbytes)
                    memory = block.memory
                elif memory is None:
                    # A small request reserves no part of the arena and waits for no save. A larger
                    # one is a chunk that was written with a larger budget than this reader's; it
                    # still has to be whole in memory to be checked.
                    memory = engine.buffers.empty((nbytes,), np.dtype(np.uint8))
                with self._recorder.phase("read", request.nbytes):
                    async with self._or_elsewhere(request, work):
                        await self._fetch(request, read_block, memory, work, in_place=in_place)
                await self._place(work.count(request), work)
        finally:
            if block is not None:
                engine.arena.free(block)
            self._restore.slots.release()

    async def _map_request(self, request: ReadRequest, work: _ReadState) -> None:
        """Map the bytes of a request, check them, make arrays of them, free the slot."""
        storage, source = self._restore.storage, request.source
        assert isinstance(storage, MapsFiles)

        def take(mapped: memoryview) -> None:
            memory = np.frombuffer(mapped, np.uint8)
            deliver(request, memory, work.destinations, self._restore.engine.buffers, False)

        try:
            with work.damage.noted(), self._recorder.phase("read", request.nbytes):
                folder, nbytes = self._restore.folder, source.nbytes
                async with self._or_elsewhere(request, work):
                    try:
                        await storage.map_block(folder, source.path, source.start, nbytes, take)
                    except CorruptCheckpointError as error:
                        _locate(error, request)
                        raise
                await self._place(work.count(request), work)
        finally:
            self._restore.slots.release()

    async def _fetch(
        self,
        request: ReadRequest,
        read_block: BlockReader,
        memory: Array,
        work: _ReadState,
        *,
        in_place: bool,
    ) -> None:
        """Read the bytes of a request into memory, check them, bring them to their places.

        Raises:
            CorruptCheckpointError: The file does not exist.
            ExceptionGroup: One `CorruptCheckpointError` for every damaged chunk; the other chunks
                are at their places.
        """
        source, buffers = request.source, self._restore.engine.buffers

        def delivered(request: ReadRequest) -> None:
            deliver(request, memory, work.destinations, buffers, in_place)

        try:
            await read_block(source.path, source.start, memory.data, partial(delivered, request))
        except CorruptCheckpointError as error:
            await _read_singly(request, read_block, memory, error, delivered)

    @contextlib.asynccontextmanager
    async def _or_elsewhere(self, request: ReadRequest, work: _ReadState) -> AsyncIterator[None]:
        """Read chunks that the body finds damaged from other copies of the step, if there are any.

        Raises:
            Exception: The error of the body, reduced to the chunks that no other copy has intact.
        """
        copies = self._restore.copies
        try:
            yield
        except (CorruptCheckpointError, StorageError, ExceptionGroup) as error:
            left = None if copies is None else damaged_chunks(request, error)
            if copies is None or left is None:
                raise
            for copy in await copies.of_item(self.item):
                there, left = await self._read_from(copy, left, work)
                if there:
                    copies.note(copy.step, self.item, there, error)
            if left:
                raise damage_of(error, left) from error.__cause__

    async def _read_from(
        self, copy: ItemElsewhere, chunks: Sequence[ChunkRead], work: _ReadState
    ) -> tuple[list[str], list[ChunkRead]]:
        """Read chunks from another copy; return the leaves read there, and the chunks left over."""
        there, left = chunks_elsewhere(chunks, copy.leaves)
        engine, read_block = self._restore.engine, copy.step.files.read_block
        names: list[str] = []
        for request in plan_requests(there, copy.data_files, request_bytes(engine.arena.capacity)):
            memory = direct_memory(request, work.destinations)
            in_place = memory is not None
            if memory is None:
                # Not from the arena: this request may hold a block of it, and a second one could
                # deadlock.
                memory = engine.buffers.empty((request.source.nbytes,), np.dtype(np.uint8))
            bad: Sequence[ChunkRead] = ()
            try:
                await self._fetch(request, read_block, memory, work, in_place=in_place)
            except (CorruptCheckpointError, StorageError, ExceptionGroup) as error:
                found = damaged_chunks(request, error)
                if found is None:
                    raise
                bad = found
            left += bad
            names += [chunk.leaf.name for chunk in request.chunks if chunk not in bad]
        return names, left

    async def _place(self, numbers: Sequence[int], work: _ReadState) -> None:
        if not numbers:
            return
        complete = [work.destinations[number] for number in numbers]
        with self._recorder.phase("place"):
            if all(each.is_placed for each in complete):
                placed = place(complete)
            else:
                placed = await self.in_thread(place, complete)
        for each in complete:
            # The lent memory can be reused from now on.
            each.regions, each.blanks, each.packed_data = (), (), None
            if loses_precision(each.read):
                dtypes = each.read.stored, each.read.target.dtype.name
                counts = self._restore.casts.setdefault(dtypes, [0, 0])
                counts[0] += 1
                counts[1] += each.vanished
        for number, value in zip(numbers, placed, strict=True):
            work.results[number] = value


class RegionReader:
    """Reads regions of the arrays of one item, as numpy arrays of their stored dtypes."""

    def __init__(self, restore: RestoreContext, item: str, reader: ItemReader | None) -> None:
        """Read through `reader`; None reads the item as it is stored."""
        self._restore = restore
        self._item = item
        self._entry = restore.manifest.items[item]
        self._reader = reader or EngineItemReader(restore, item, ProcessPart(self._entry))

    async def read(self, wanted: Sequence[tuple[int, Region]]) -> list[Array]:
        """Return regions, each of the leaf with this number.

        Raises:
            CorruptCheckpointError: A chunk is missing or was changed; names the leaf.
            StepDeletedError: The step was deleted or replaced meanwhile.
        """
        manifest = self._restore.manifest
        reads = [self._read_of(number, region) for number, region in wanted]
        async with while_read(self._restore.storage, self._restore.step_dir, manifest):
            with located(step=manifest.step, item=self._item):
                return await self._reader.read(self._entry, reads)

    def _read_of(self, number: int, region: Region) -> ArrayRead:
        leaf = self._entry.leaves[number]
        dtype = leaf.dtype or ""
        target = ArrayTarget("numpy", parse_dtype(dtype))
        if region.shape == tuple(leaf.shape):
            return ArrayRead(target, region.shape, dtype, number, leaf.name)
        piece = ArraySlice(number, region, whole(region.shape))
        return ArrayRead(target, region.shape, dtype, None, leaf.name, (piece,))


async def _read_singly(
    request: ReadRequest,
    read_block: BlockReader,
    memory: Array,
    first: CorruptCheckpointError,
    delivered: Callable[[ReadRequest], None],
) -> None:
    """Read the chunks of a request one by one, to find those that are damaged.

    Args:
        request: The request.
        read_block: Function that reads bytes of files.
        memory: Memory of the whole request.
        first: The error of reading the request in one call.
        delivered: Function that checks the chunks in memory, and brings them to their places.

    Raises:
        CorruptCheckpointError: The file does not exist.
        ExceptionGroup: One `CorruptCheckpointError` for every damaged chunk.
    """
    chunks, source = request.chunks, request.source
    if len(chunks) == 1 or isinstance(first.__cause__, FileNotFoundError | NotADirectoryError):
        _locate(first, request)
        raise first
    damage = DamagedLeaves()
    there: list[ChunkRead] = []
    for chunk in chunks:
        with damage.noted(), located(leaf=chunk.leaf.name):
            part = memory[chunk.start - source.start : chunk.end - source.start]
            await read_block(source.path, chunk.start, part.data, _nothing)
            there.append(chunk)
    with damage.noted():
        await run_in_thread(partial(delivered, replace(request, chunks=tuple(there))))
    damage.raise_if_any()


def _locate(error: CorruptCheckpointError, request: ReadRequest) -> None:
    """Name the first leaf of a request that could not be read, and add the number of its chunks."""
    chunks = request.chunks
    error.locate(leaf=chunks[0].leaf.name)
    if len(chunks) > 1:
        error.add_note(f"{len(chunks)} chunks are in it")


def _nothing() -> None:
    pass
