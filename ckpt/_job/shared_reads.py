"""Shared reads: each byte is read by one process of a job and exchanged with the others.

The requests of a group of processes are cut into batches. For each batch every member reads its
share into host memory. Once all processes have announced that their shares are read, they exchange
the shares, and each carries out its requests from memory as if it had read the files. Digests are
compared at that point, which checks the exchange as well.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import anyio
import jax
import numpy as np
from msgspec import Struct

from ckpt._engine.memory.arena import Buffers
from ckpt._engine.restore.step_files import BlockReader
from ckpt._events import EventRecorder
from ckpt._format.array_format import parse_dtype
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.manifest import JsonValue
from ckpt._job.agreement.operation import Operation, gathered, together
from ckpt._job.agreement.peers import Peers
from ckpt._job.read_groups import (
    BatchRead,
    DeviceExchange,
    Grouping,
    ReadBatch,
    fill,
    grouping_of_all,
    groupings_of,
    shares_key,
)
from ckpt._plan.chunk_reads import ReadRequest
from ckpt._plan.targets import ArrayRead
from ckpt._plan.write_batches import BATCH_BYTES
from ckpt._runtime.futures import CallingThread, for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CoordinationError, CorruptCheckpointError

Array = np.ndarray[Any, Any]
# Fills memory with bytes of a file of the step, from an offset on.
FileReader = Callable[[str, int, memoryview], Awaitable[None]]

# Largest copy that is done on the loop, since handing it to a thread takes as long.
_SMALL_BYTES = 256 << 10
# Size in which a share is read: large enough for an efficient request, small enough to bound the
# memory.
_PART_BYTES = 16 << 20
_CONCURRENT_PARTS = 4
# Several rounds let reading and exchanging overlap; short rounds would be mostly waiting.
_FEWEST_ROUNDS = 4
_LEAST_BATCH_BYTES = 32 << 20


class Broadcast(Struct):
    """The state that the processes share for the reads of one restore.

    Attributes:
        peers: The processes.
        operation: The coordinated operation of the restore.
        nbytes: Bytes of host memory that each process may use for the exchange, beyond the arrays.
        caller: Runner of programs on the thread that restores.
        turns: Number of shared reads so far; the same on all processes.
    """

    peers: Peers
    operation: Operation
    nbytes: int
    caller: CallingThread
    turns: int = 0

    def capacity(self, grouping: Grouping) -> int:
        """Return the largest size of a batch; memory also has to hold two shares of later ones."""
        return self.nbytes * grouping.members // (grouping.members + 2)

    def groupings(
        self, leaves: Sequence[LeafEntry], reads: Sequence[ArrayRead], *, is_common: bool
    ) -> dict[str, Grouping]:
        """Return the grouping of every shared leaf, by name.

        Leaves whose chunks do not fit into a batch are not shared.

        Args:
            leaves: The stored leaves.
            reads: The arrays.
            is_common: True if all processes read the same leaves; False if each reads the leaves
                that it saved.
        """
        count = self.peers.count
        own = grouping_of_all(jax.devices(), count) if is_common else None
        return {
            leaves[number].name: grouping
            for number, grouping in groupings_of(reads, count, own).items()
            if _largest(leaves[number]) <= self.capacity(grouping)
        }

    async def finish(self) -> None:
        """Announce that this process shares no more reads, so that no other waits for it.

        Raises:
            CoordinationError: Another process has more reads to share.
        """
        every = await gathered(self.operation, None, _turn_name(self.turns))
        for process, each in enumerate(every):
            if each is not None:
                raise _different(self.peers.index, process, "it would share more of them")

    def reads(
        self, read_file: FileReader, buffers: Buffers, recorder: EventRecorder
    ) -> SharedReads:
        """Return the reads from the data files of one item."""
        return SharedReads(self, read_file, buffers, recorder)

    def request_bytes(self, grouping: Grouping, concurrent: int) -> int:
        """Return the largest size of a coalesced request if `concurrent` are in progress."""
        share = self.peers.budget_bytes // concurrent
        return max(min(BATCH_BYTES, share, self.capacity(grouping) // 2), 1)


class SharedReads:
    """Reads from the data files of one item together with the other processes."""

    def __init__(
        self,
        broadcast: Broadcast,
        read_file: FileReader,
        buffers: Buffers,
        recorder: EventRecorder,
    ) -> None:
        self._broadcast = broadcast
        self._read_file = read_file
        self._buffers = buffers
        self._recorder = recorder

    async def read(
        self,
        grouping: Grouping,
        requests: Sequence[ReadRequest],
        take: Callable[[BlockReader, range], Awaitable[None]],
    ) -> None:
        """Read together with the other processes, which all call this for the same requests.

        Args:
            grouping: The groups of processes that need the same bytes.
            requests: The requests.
            take: Awaited for every batch, with a function that reads the files from memory instead,
                and the numbers of the requests that can be carried out with it.

        Raises:
            CorruptCheckpointError: Bytes are missing; names the leaf.
            CoordinationError: The processes do not restore the same arrays, or cannot exchange
                bytes.
        """
        shared, peers = self._broadcast, self._broadcast.peers
        turn, shared.turns = shared.turns, shared.turns + 1
        batches = await run_in_thread(_batches, requests, shared.capacity(grouping))
        rounds, nbytes = await self._agree(grouping, batches, turn)
        exchange = DeviceExchange(
            grouping, peers.index, nbytes, self._buffers, shared.caller, peers.seconds
        )
        await exchange.prepare()
        rank = grouping.group_of(peers.index).index(peers.index)
        batches += [ReadBatch(range(0), ())] * (rounds - len(batches))
        group = _ReadGroup(exchange, rank, batches, requests)
        async with anyio.create_task_group() as tasks:
            coming = self._start_share(tasks, group, 0)
            for number, batch in enumerate(batches):
                given = await self._all_ready(f"share-{turn}-{number}", coming, exchange)
                if number + 1 < rounds:
                    coming = self._start_share(tasks, group, number + 1)
                with self._recorder.phase("exchange", batch.nbytes):
                    # Shielded, since all other processes are about to exchange.
                    with anyio.CancelScope(shield=True):
                        block = partial(_copy, batch, await exchange.exchange(given))
                del given
                if batch.requests:
                    await take(block, batch.requests)
                # The block of this batch must be free during the next exchange.
                del block

    async def _agree(
        self, grouping: Grouping, batches: Sequence[ReadBatch], turn: int
    ) -> tuple[int, int]:
        """Return the most batches of any group, and the most bytes of any batch."""
        peers = self._broadcast.peers
        largest = max((batch.nbytes for batch in batches), default=0)
        mine: list[JsonValue] = [grouping.key, shares_key(batches), len(batches), largest]
        every = await gathered(self._broadcast.operation, mine, _turn_name(turn))
        alike = [each is not None and each[0] == mine[0] for each in every]
        if not all(alike):
            raise _different(peers.index, alike.index(False), "what they share of them differs")
        for process in grouping.group_of(peers.index):
            if every[process][:3] != mine[:3]:
                raise _different(peers.index, process, "their devices hold the same parts of them")
        return max(each[2] for each in every), max(each[3] for each in every)

    def _start_share(self, tasks: Any, group: _ReadGroup, number: int) -> _PendingShare:
        coming = _PendingShare(anyio.Event())

        async def read() -> None:
            try:
                coming.share = await self._read_share(group, group.batches[number])
            except Exception as error:
                # Raised in `_all_ready`, which notifies the others.
                coming.error = error
            coming.is_there.set()

        tasks.start_soon(read)
        return coming

    async def _all_ready(
        self, name: str, coming: _PendingShare, exchange: DeviceExchange
    ) -> jax.Array:
        """Return the share of this process on its devices, once all processes have theirs."""
        ready = self._broadcast.operation.part(name)
        given: jax.Array | None = None
        try:
            async with together(ready):
                await coming.wait()
                given = await exchange.put(coming.taken())
        except BaseException:
            if ready.is_decided and given is not None:
                # The others know that all are ready, and would wait for this process.
                with anyio.CancelScope(shield=True), contextlib.suppress(CoordinationError):
                    await exchange.exchange(given)
            raise
        assert given is not None
        return given

    async def _read_share(self, group: _ReadGroup, batch: ReadBatch) -> Array:
        share = group.exchange.share()
        start = group.rank * len(share)
        parts = list(_cut_reads(batch.parts(start, start + len(share))))

        async def read(part: BatchRead) -> None:
            target = share[part.at : part.at + part.nbytes].data
            try:
                await self._read_file(part.path, part.start, target)
            except CorruptCheckpointError as error:
                raise await self._located(error, part, group, batch) from error.__cause__
            # A whole share may take minutes; each part shows the others that this process makes
            # progress.
            self._broadcast.peers.advance(part.nbytes)

        with self._recorder.phase("fetch", sum(part.nbytes for part in parts)):
            await for_each(read, parts, _CONCURRENT_PARTS)
        return share

    async def _located(
        self, error: CorruptCheckpointError, part: BatchRead, group: _ReadGroup, batch: ReadBatch
    ) -> CorruptCheckpointError:
        """Return the error of the first leaf that lacks bytes in a part."""
        end = part.start + part.nbytes
        requests = [group.requests[number] for number in batch.requests]
        for chunk in (
            chunk for each in requests for chunk in each.chunks if each.source.path == part.path
        ):
            if chunk.start < end and part.start < chunk.end:
                memory = bytearray(chunk.end - chunk.start)
                try:
                    await self._read_file(part.path, chunk.start, memoryview(memory))
                except CorruptCheckpointError as single:
                    single.locate(leaf=chunk.leaf.name)
                    return single
        return error


def _batches(requests: Sequence[ReadRequest], capacity: int) -> list[ReadBatch]:
    ranges = [each.source for each in requests]
    total = sum(each.nbytes for each in ranges)
    # The next share is read while a batch is exchanged, so a single batch would take longer.
    return fill(ranges, min(capacity, max(total // _FEWEST_ROUNDS, _LEAST_BATCH_BYTES)))


def _turn_name(turn: int) -> str:
    return f"shares-{turn}"


def _different(process: int, other: int, how: str) -> CoordinationError:
    return CoordinationError(
        f"process {process} restores other arrays than process {other}, or restores them to other "
        f"shardings ({how}). With broadcast_bytes= all processes must restore the same arrays in "
        "the same order: give them the same like="
    )


class _ReadGroup(Struct, frozen=True):
    """The shared read of one group.

    Attributes:
        exchange: The exchange of the shares.
        rank: Number of this process's share in every batch.
        batches: The batches; padded with empty ones to the number of the group with the most.
        requests: The requests whose bytes the batches hold.
    """

    exchange: DeviceExchange
    rank: int
    batches: Sequence[ReadBatch]
    requests: Sequence[ReadRequest]


class _PendingShare(Struct):
    """A share that is being read, or has been read."""

    is_there: anyio.Event
    share: Array | None = None
    error: Exception | None = None

    async def wait(self) -> None:
        """Wait until the share has been read; raise the error of the read if it failed."""
        await self.is_there.wait()
        if self.error is not None:
            raise self.error

    def taken(self) -> Array:
        """Return the share and drop the reference to it."""
        share, self.share = self.share, None
        assert share is not None
        return share


def _cut_reads(parts: Iterator[BatchRead]) -> Iterator[BatchRead]:
    for part in parts:
        for done in range(0, part.nbytes, _PART_BYTES):
            nbytes = min(_PART_BYTES, part.nbytes - done)
            yield BatchRead(part.path, part.start + done, nbytes, part.at + done)


async def _copy(
    batch: ReadBatch,
    memory: Array,
    path: str,
    offset: int,
    target: memoryview,
    then: Callable[[], None],
) -> None:
    """Fill `target` from a batch instead of a file, and call `then`."""
    at = batch.place(path, offset, len(target))
    source = memory[at : at + len(target)]
    into = np.frombuffer(target, np.uint8)
    if len(target) <= _SMALL_BYTES:
        into[...] = source
    else:
        await run_in_thread(np.copyto, into, source)
    # A separate call: a thread may keep its last arguments alive, and must not keep a batch.
    await run_in_thread(then)


def _largest(leaf: LeafEntry) -> int:
    """Return the bytes of the largest stored chunk of a leaf."""
    if leaf.codec is not None:
        return max(leaf.lengths, default=0)
    return math.prod(leaf.chunks) * parse_dtype(leaf.dtype).itemsize
