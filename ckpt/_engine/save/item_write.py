"""The write of one item's leaves: batches are staged, encoded, written and hashed side by side.

Stagers and lanes are tasks of the save's task group. A stager takes the next batch (biggest first),
waits for room in the arena, and copies; a free lane takes the next staged batch and writes it as
one data file. So copies from the device overlap writes to the store, and the capacity of the arena
bounds the memory of both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import numpy as np

from ckpt._engine.memory.arena import Block
from ckpt._engine.memory.staging import (
    Source,
    batch_digests,
    copies_on_host,
    copy_batch,
    snapshot,
    sources_of,
    wait_until_computed,
)
from ckpt._engine.plan_cache import ForOthers, ItemPlan, index_over
from ckpt._engine.save.encoding import encode_batch
from ckpt._engine.save.merged_items import database_files
from ckpt._engine.save.request import SaveCall
from ckpt._engine.save.session import ENCODERS, LANES, STAGERS, SaveSession
from ckpt._events import timed
from ckpt._format.digests import digest
from ckpt._format.manifest_head import FileEntry
from ckpt._format.ocdbt import DatabaseIndex
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import ItemReport, report_chunks
from ckpt._plan.write_batches import FileSpan, WriteBatch
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import located

Array = np.ndarray[Any, np.dtype[np.uint8]]


class ItemWrite:
    """The write of one item's leaves, while it is under way. Used on the engine's loop."""

    # What is waited for on the way of one item, in its order. A batch passes the states marked *
    # on its own.
    #
    # state               set by                                  waited for by
    # ------------------  --------------------------------------  ----------------------------------
    # attempt_ready       pipeline, when the attempt may be       lanes, before their first batch
    #                     written to
    # room in the arena * lanes, which free the block of a        stagers, before they copy
    #                     written batch
    # ready *             a stager that has copied the batch      the next free lane
    # call.returned       pipeline, when all items of the call    encoding, digests, and files for
    #                     are staged                              other readers, which leave the
    #                                                             cores to the copies until then
    # call.pressed        `SaveSession.allocate` without room,    the same: a batch that is never
    #                     or `digested`                           encoded never frees its block
    # encoded             the lane that encodes the last batch    `write_index`
    # digested            the lane that hashes the last batch     `digested`
    # durable             the last task that writes               `settled`

    def __init__(self, session: SaveSession, call: SaveCall, item: str, plan: ItemPlan) -> None:
        """Write the item called `item` as `plan` says."""
        self._session = session
        self._call = call
        self._item = item
        self._plan = plan
        batches = plan.save.batches
        self._files = plan.new_data_files()
        # By batch; those of encoded ones are known before their file is hashed.
        self._digests: list[list[str]] = [[] for _ in batches]
        self._spans: dict[int, list[FileSpan]] = {}
        # Batches with their blocks that wait for a lane, as many as `ready` counts.
        self._staged: deque[tuple[int, Block]] = deque()
        self._ready = anyio.Semaphore(0)
        # Handed out to lanes, one for every batch.
        self._turns = iter(range(len(batches)))
        self._running = 0
        self._unencoded = sum(batch.encoded for batch in batches)
        self._undigested = len(batches)
        self._encoded, self._digested, self._durable = (anyio.Event() for _ in range(3))
        if not batches:
            self._digested.set()

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` in the save's task group; the item is durable when all of it has ended."""

        async def run() -> None:
            with located(item=self._item):
                await work()
            self._running -= 1
            if not self._running:
                self._durable.set()

        self._running += 1
        self._session.tasks.start_soon(run)

    async def stage(self, leaves: Sequence[Any]) -> None:
        """Start to write the leaves; return once they are safe from whatever the caller does."""
        session, batches = self._session, self._plan.save.batches
        for _ in range(min(ENCODERS if self._unencoded else LANES, len(batches))):
            self.start(self._run_lane)
        with session.recorder.phase("snapshot"):
            held = await run_in_thread(snapshot, batches, leaves, session.staging.mode)
        at_once = {
            number: sources_of(batch, leaves)
            for number, batch in enumerate(batches)
            if number not in held
        }
        # Arrays that are held are staged after the caller has returned.
        if held:
            session.begin_staging(self._call)
            self.start(lambda: self._stage_held(held))
        await self._stage_batches(at_once, session.stagers)

    async def _stage_held(self, sources: dict[int, list[Source]]) -> None:
        await self._stage_batches(sources, self._session.held_stagers)
        self._session.end_staging(self._call)

    async def _stage_batches(
        self, sources: dict[int, list[Source]], slots: anyio.Semaphore
    ) -> None:
        """Stage batches in the order of the plan, several at a time.

        Args:
            sources: By number of the batch what its chunks are copied from; emptied, so that what
                has been staged is not kept alive.
            slots: Bounds how many batches, of all items, are copied at once.
        """
        async with anyio.create_task_group() as stagers:
            numbers = iter(sorted(sources))
            for _ in range(min(STAGERS, len(sources))):
                stagers.start_soon(self._run_stager, numbers, sources, slots)

    async def _run_stager(
        self, numbers: Iterator[int], sources: dict[int, list[Source]], slots: anyio.Semaphore
    ) -> None:
        session, plan = self._session, self._plan.save
        for number in numbers:
            batch = plan.batches[number]
            copies = copies_on_host(batch, plan.leaves) - 1
            nbytes = batch.block_bytes + copies * batch.nbytes
            # One that needs more is staged alone; what it must have is the block.
            nbytes = max(batch.block_bytes, min(nbytes, session.arena.capacity))
            async with slots:
                block = await session.allocate(nbytes, self._call)
                _, began_ns, ended_ns = await run_in_thread(
                    timed, _stage_batch, batch, plan.leaves, sources.pop(number), block
                )
                # The copies on the way are gone.
                block = session.shrink(block, batch.block_bytes)
            session.recorder.report("stage", began_ns, ended_ns, batch.nbytes, batch=number)
            session.hooks.advance(staged=batch.nbytes)
            # Staging never waits for a lane, only for room in the arena.
            self._staged.append((number, block))
            self._ready.release()

    async def _run_lane(self) -> None:
        session, plan = self._session, self._plan.save
        attempt = await session.opened()
        for _ in self._turns:
            await self._ready.acquire()
            number, block = self._staged.popleft()
            batch = plan.batches[number]
            memory = block.memory[: batch.nbytes]
            if batch.encoded:
                memory = await self._encode(number, block.memory)
            path = f"{self._item}/{self._files[number]}"
            async with session.lanes.taken() as lane, anyio.create_task_group() as tasks:
                written = anyio.Event()
                tasks.start_soon(self._take_digests, number, path, memory, lane, written)
                leaf = plan.leaves[batch.chunks[0].leaf].name
                phase = session.recorder.phase("write", memory.nbytes, lane, number)
                with located(leaf=leaf), phase:
                    await session.storage.write_block(attempt, path, memory.data)
                written.set()
            session.hooks.advance(written=batch.nbytes)
            session.processes.advance(batch.nbytes)
            session.free(block)

    async def _encode(self, number: int, memory: Array) -> Array:
        """Encode a staged batch in its block; return the bytes of its file, which are there."""
        session, plan = self._session, self._plan.save
        batch = plan.batches[number]
        # The cores are for the copies while the caller waits for them.
        await _first_of(self._call.returned, self._call.pressed)
        recorder = session.recorder

        def tell(began_ns: int, ended_ns: int, nbytes: int) -> None:
            # On the loop, as observers are always called.
            anyio.from_thread.run_sync(
                partial(recorder.report, "encode", began_ns, ended_ns, nbytes, batch=number)
            )

        told = tell if recorder.observers else None
        async with session.encoders:
            found = await run_in_thread(encode_batch, batch, plan.leaves, memory, told)
        self._spans[number], self._digests[number] = found.spans, found.digests
        self._unencoded -= 1
        if not self._unencoded:
            self._encoded.set()
        return memory[: found.nbytes]

    async def _take_digests(
        self, number: int, path: str, memory: Array, lane: int, written: anyio.Event
    ) -> None:
        session, plan = self._session, self._plan.save
        # Not while the caller waits: hashing needs a core, and writing does not.
        await _first_of(self._call.returned, written)
        (found, entry), began_ns, ended_ns = await run_in_thread(
            timed, _file_digests, plan.batches[number], plan.leaves, memory
        )
        session.recorder.report("digest", began_ns, ended_ns, memory.nbytes, lane, number)
        session.files[path] = entry
        self._digests[number] = found or self._digests[number]
        self._undigested -= 1
        if not self._undigested:
            self._digested.set()

    async def write_index(self) -> None:
        """Write what covers the batches of an only writer: the database's index and the view."""
        async with anyio.create_task_group() as writers:
            writers.start_soon(self.write_view)
            others = await self._for_others()
            index: DatabaseIndex | None
            if self._unencoded:
                await self._encoded.wait()
                index = await run_in_thread(index_over, self._plan.save, self._spans)
            else:
                index = await run_in_thread(lambda: others.index())
            if index is not None:
                files = await run_in_thread(
                    database_files, index, self._files, self._session.created_ns
                )
                for path, data in files.items():
                    writers.start_soon(self._session.write, f"{self._item}/{path}", data)

    async def write_view(self) -> None:
        """Write the files for Orbax that do not depend on values."""
        others = await self._for_others()
        view = await run_in_thread(others.view)
        async with anyio.create_task_group() as writers:
            for path, (data, entry) in view.items():
                writers.start_soon(self._session.write, f"{self._item}/{path}", data, entry)

    async def _for_others(self) -> ForOthers:
        """Return what other readers need, once the caller does not wait any more."""
        others = self._plan.others
        assert others is not None
        await _first_of(self._call.returned, self._call.pressed)
        return others

    async def digested(self) -> None:
        """Wait until `report` can be made, which is while the last batches are being written."""
        self._call.pressed.set()
        await self._digested.wait()

    def report(self) -> ItemReport:
        """Return what this process writes of the item."""
        return report_chunks(self._plan.save.batches, self._files, self._digests, self._spans)

    async def settled(self) -> None:
        """Wait until everything that this process writes of the item is durable."""
        if self._running:
            await self._durable.wait()


async def _first_of(*events: anyio.Event) -> None:
    """Wait until one of `events` is set."""
    if any(event.is_set() for event in events):
        return

    async def wait(event: anyio.Event) -> None:
        await event.wait()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for event in events:
            tasks.start_soon(wait, event)


def _stage_batch(
    batch: WriteBatch, plans: Sequence[LeafPlan], sources: Sequence[Source], block: Block
) -> None:
    """Copy a batch into its block, once its arrays have been computed."""
    wait_until_computed(sources)
    memory = block.memory[batch.staged_at : batch.staged_at + batch.nbytes]
    copy_batch(batch, plans, sources, memory)


def _file_digests(
    batch: WriteBatch, plans: Sequence[LeafPlan], memory: Array
) -> tuple[list[str], FileEntry]:
    """Return the digests of the chunks of a batch, none if encoded, and the entry of its file."""
    if batch.encoded:
        return [], FileEntry(size=memory.nbytes, digest=digest(memory.data))
    found = batch_digests(batch, plans, memory)
    is_one_chunk = batch.chunks[0].nbytes == batch.nbytes
    whole = found[0] if is_one_chunk else digest(memory.data)
    return found, FileEntry(size=batch.nbytes, digest=whole)
