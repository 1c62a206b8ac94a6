"""Reads that the processes of a job share: each byte is read once, then all exchange.

What the members of a group need of the data files of an item is cut into batches. For each batch
every member reads its share into host memory; once all processes have said that theirs is read,
they exchange, and every one takes the chunks that it needs out of what it was given, as if it had
read them. Digests are compared then, so that what went over the devices is checked, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import jax
import numpy as np

from ckpt._engine.memory.buffers import Buffers
from ckpt._engine.restore.chunk_sources import BlockReader, DataFiles
from ckpt._engine.restore.device_exchange import DeviceExchange
from ckpt._engine.restore.read_units import Unit, extents_of, leaves_of
from ckpt._events import EventRecorder
from ckpt._format.dtypes import parse_dtype
from ckpt._format.manifest import JsonValue, LeafEntry
from ckpt._plan.chunking import BATCH_BYTES
from ckpt._plan.multihost.read_groups import (
    BatchRead,
    Grouping,
    ReadBatch,
    fill,
    groupings_of,
    shares_key,
)
from ckpt._plan.targets import ArrayRead
from ckpt._runtime.futures import CallingThread
from ckpt.coordination._operation import Operation
from ckpt.coordination._peers import Peers
from ckpt.errors import CoordinationError, CorruptCheckpointError

__all__ = ["Broadcast", "SharedReads"]

Array = np.ndarray[Any, Any]

# Read at once: as much as makes use of a request, few enough to bound what is under way.
_PART_BYTES = 16 << 20
_CONCURRENT_PARTS = 4
# Rounds, so that reading and exchanging overlap; in shorter ones all would mostly wait for all.
_FEWEST_ROUNDS = 4
_LEAST_BATCH_BYTES = 32 << 20
# Copied on the loop, since handing it to a thread takes as long.
_SMALL_BYTES = 256 << 10


@dataclass(slots=True)
class Broadcast:
    """What the restore of one step by all processes shares.

    Attributes:
        peers: The processes.
        operation: The restore.
        nbytes: How many bytes of host memory each process may use for it, beyond the arrays.
        caller: Runs programs on the thread that restores.
        turns: How many times reads were shared so far; the same on all processes.
    """

    peers: Peers
    operation: Operation
    nbytes: int
    caller: CallingThread
    turns: int = 0

    def capacity(self, grouping: Grouping) -> int:
        """Return the bytes of a batch: there are two shares of the next ones beside it."""
        return self.nbytes * grouping.members // (grouping.members + 2)

    def groupings(
        self, leaves: Sequence[LeafEntry], reads: Sequence[ArrayRead]
    ) -> dict[str, Grouping]:
        """Return the names of the leaves that are shared, each with its grouping.

        Leaves whose chunks do not fit into a batch are not, nor those that lie in no data file.
        """
        return {
            leaves[number].name: grouping
            for number, grouping in groupings_of(reads, self.peers.count).items()
            if leaves[number].offsets and _largest(leaves[number]) <= self.capacity(grouping)
        }

    async def finish(self) -> None:
        """Say that nothing more is shared; one who waits for this process is told so at once.

        Raises:
            CoordinationError: Another process has more to share.
        """
        every = await self.peers.gathered(self.operation, None, _turn_name(self.turns))
        for process, each in enumerate(every):
            if each is not None:
                raise _different(self.peers.index, process, "it would share more of them")

    def unit_bytes(self, grouping: Grouping, concurrent: int) -> int:
        """Return about how many bytes are worked on at once, `concurrent` times."""
        share = self.peers.budget_bytes // concurrent
        return max(min(BATCH_BYTES, share, self.capacity(grouping) // 2), 1)


class SharedReads:
    """Reads from the data files of one item together with the other processes."""

    def __init__(
        self,
        broadcast: Broadcast,
        files: DataFiles,
        read_block: BlockReader,
        buffers: Buffers,
        recorder: EventRecorder,
    ) -> None:
        """Read with `read_block` what is this process's share of the data files of an item."""
        self._broadcast = broadcast
        self._files = files
        self._read_block = read_block
        self._buffers = buffers
        self._recorder = recorder

    async def read(
        self,
        grouping: Grouping,
        units: Sequence[Unit],
        take: Callable[[BlockReader, range], Awaitable[None]],
    ) -> None:
        """Read units together with the other processes, which all call this for the same ones.

        Args:
            grouping: Who needs the same.
            units: What has to be in memory at once, each.
            take: Awaited for every batch, with what reads the files from memory instead, and the
                numbers of the units that are there.

        Raises:
            CorruptCheckpointError: Something is missing; names the leaf.
            CoordinationError: The processes do not restore the same, or cannot exchange.
        """
        shared, peers = self._broadcast, self._broadcast.peers
        turn, shared.turns = shared.turns, shared.turns + 1
        batches = await anyio.to_thread.run_sync(self._batches, units, shared.capacity(grouping))
        rounds, nbytes = await self._agree(grouping, batches, turn)
        exchange = DeviceExchange(
            grouping, peers.index, nbytes, self._buffers, shared.caller, peers.seconds
        )
        await exchange.prepare()
        rank = grouping.group_of(peers.index).index(peers.index)
        lot = _ReadGroup(
            exchange, rank, batches + [ReadBatch(range(0), ())] * (rounds - len(batches)), units
        )
        async with anyio.create_task_group() as tasks:
            coming = self._begun(tasks, lot, 0)
            for number, batch in enumerate(lot.batches):
                given = await self._all_ready(f"share-{turn}-{number}", coming, exchange)
                if number + 1 < rounds:
                    coming = self._begun(tasks, lot, number + 1)
                with self._recorder.phase("exchange", batch.nbytes):
                    # Shielded: all others are about to do it.
                    with anyio.CancelScope(shield=True):
                        block = partial(_copy, batch, await exchange.exchange(given))
                del given
                if batch.units:
                    await take(block, batch.units)
                # The memory is not kept for the time of the next exchange.
                del block

    def _batches(self, units: Sequence[Unit], capacity: int) -> list[ReadBatch]:
        extents = [extents_of(unit, self._files) for unit in units]
        total = sum(extent.end - extent.start for each in extents for extent in each)
        # The next share is read while a batch is exchanged, so one batch alone would take longer.
        return fill(extents, min(capacity, max(total // _FEWEST_ROUNDS, _LEAST_BATCH_BYTES)))

    async def _agree(
        self, grouping: Grouping, batches: Sequence[ReadBatch], turn: int
    ) -> tuple[int, int]:
        """Return how many batches there are, and of how many bytes the largest is, in any group."""
        peers = self._broadcast.peers
        largest = max((batch.nbytes for batch in batches), default=0)
        mine: list[JsonValue] = [grouping.key, shares_key(batches), len(batches), largest]
        every = await peers.gathered(self._broadcast.operation, mine, _turn_name(turn))
        alike = [each is not None and each[0] == mine[0] for each in every]
        if not all(alike):
            raise _different(peers.index, alike.index(False), "what they share of them differs")
        for process in grouping.group_of(peers.index):
            if every[process][:3] != mine[:3]:
                raise _different(peers.index, process, "their devices hold the same parts of them")
        return max(each[2] for each in every), max(each[3] for each in every)

    def _begun(self, tasks: Any, lot: _ReadGroup, number: int) -> _PendingShare:
        coming = _PendingShare(anyio.Event())

        async def read() -> None:
            try:
                coming.share = await self._read_share(lot, lot.batches[number])
            except Exception as error:
                # Raised where it is told to the others.
                coming.error = error
            coming.is_there.set()

        tasks.start_soon(read)
        return coming

    async def _all_ready(
        self, name: str, coming: _PendingShare, exchange: DeviceExchange
    ) -> jax.Array:
        """Return the share of this process on its devices, once all processes have theirs."""
        peers = self._broadcast.peers
        ready = peers.part(self._broadcast.operation, name)
        given: jax.Array | None = None

        async def bring() -> None:
            nonlocal given
            await coming.wait()
            given = await exchange.put(coming.taken())

        try:
            await peers.together(ready, bring)
        except BaseException:
            if ready.is_decided and given is not None:
                # The others have heard that all are ready, and would wait for this process.
                with anyio.CancelScope(shield=True), contextlib.suppress(CoordinationError):
                    await exchange.exchange(given)
            raise
        assert given is not None
        return given

    async def _read_share(self, lot: _ReadGroup, batch: ReadBatch) -> Array:
        share = lot.exchange.share()
        start = lot.rank * len(share)
        parts = list(_cut(batch.parts(start, start + len(share))))
        slots = anyio.Semaphore(_CONCURRENT_PARTS)

        async def read(part: BatchRead) -> None:
            async with slots:
                target = share[part.at : part.at + part.nbytes].data
                try:
                    await self._read_block(part.path, part.start, target)
                except CorruptCheckpointError as error:
                    raise await self._located(error, part, lot, batch) from error.__cause__
                # There may be minutes until the whole share is there.
                self._broadcast.peers.advance(part.nbytes)

        with self._recorder.phase("fetch", sum(part.nbytes for part in parts)):
            async with anyio.create_task_group() as tasks:
                for part in parts:
                    tasks.start_soon(read, part)
        return share

    async def _located(
        self, error: CorruptCheckpointError, part: BatchRead, lot: _ReadGroup, batch: ReadBatch
    ) -> CorruptCheckpointError:
        """Return the error of the first leaf of which something is missing in a part."""
        end = part.start + part.nbytes
        units = [lot.units[number] for number in batch.units]
        for leaf, extent in (each for unit in units for each in leaves_of(unit, self._files)):
            if extent.path == part.path and extent.start < end and part.start < extent.end:
                memory = bytearray(extent.end - extent.start)
                try:
                    await self._read_block(extent.path, extent.start, memoryview(memory))
                except CorruptCheckpointError as single:
                    single.locate(leaf=leaf)
                    return single
        return error


def _turn_name(turn: int) -> str:
    return f"shares-{turn}"


def _different(process: int, other: int, how: str) -> CoordinationError:
    return CoordinationError(
        f"process {process} restores other arrays than process {other}, or restores them to other "
        f"shardings ({how}). With broadcast_bytes= all processes must restore the same arrays in "
        "the same order: give them the same like="
    )


@dataclass(frozen=True, slots=True)
class _ReadGroup:
    """What is read by one grouping.

    Attributes:
        exchange: What exchanges it.
        rank: Which share of every batch is this process's.
        batches: As many as there are in any group.
        units: What the batches are made of.
    """

    exchange: DeviceExchange
    rank: int
    batches: Sequence[ReadBatch]
    units: Sequence[Unit]


@dataclass(slots=True)
class _PendingShare:
    """A share that is being read."""

    is_there: anyio.Event
    share: Array | None = None
    error: Exception | None = None

    async def wait(self) -> None:
        """Wait until the share has been read, or raise why it cannot be."""
        await self.is_there.wait()
        if self.error is not None:
            raise self.error

    def taken(self) -> Array:
        """Return the share, and keep it no longer."""
        share, self.share = self.share, None
        assert share is not None
        return share


def _cut(parts: Iterator[BatchRead]) -> Iterator[BatchRead]:
    for part in parts:
        for done in range(0, part.nbytes, _PART_BYTES):
            nbytes = min(_PART_BYTES, part.nbytes - done)
            yield BatchRead(part.path, part.start + done, nbytes, part.at + done)


async def _copy(
    batch: ReadBatch, memory: Array, path: str, offset: int, target: memoryview
) -> None:
    """Fill `target` from a batch, as it would be from a file."""
    at = batch.place(path, offset, len(target))
    source = memory[at : at + len(target)]
    into = np.frombuffer(target, np.uint8)
    if len(target) <= _SMALL_BYTES:
        into[...] = source
    else:
        await anyio.to_thread.run_sync(np.copyto, into, source)


def _largest(leaf: LeafEntry) -> int:
    """Return the bytes of the largest stored chunk of a leaf."""
    if leaf.codec is not None:
        return max(leaf.lengths, default=0)
    return math.prod(leaf.chunks) * parse_dtype(leaf.dtype).itemsize
