"""The write of one item's leaves: batches are staged, encoded, written and hashed side by side.

Stagers and lanes are tasks of the save's task group. A stager takes the next batch (biggest first),
waits for room in the arena, and copies; a free lane takes the next staged batch and writes it as
one data file. So copies from the device overlap writes to the store, and the capacity of the arena
bounds the memory of both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
from msgspec.structs import replace

from ckpt._engine.last_save import SavedItem
from ckpt._engine.memory.arena import Block
from ckpt._engine.memory.contents import NO_CONTENTS, BatchContents, KnownSigns, batch_contents
from ckpt._engine.memory.staging import (
    MovedShard,
    Source,
    copies_on_host,
    copy_batch,
    movable_shards,
    move_chunks,
    moved_shards,
    snapshot,
    sources_of,
    wait_until_computed,
)
from ckpt._engine.plan_cache import ForOthers, ItemPlan, index_over
from ckpt._engine.save.encoding import encode_batch
from ckpt._engine.save.merged_items import database_files
from ckpt._engine.save.request import SaveCall
from ckpt._engine.save.session import ENCODERS, LANES, STAGERS, SaveSession
from ckpt._engine.save.shared_files import take_over
from ckpt._engine.signs.device_pass import DevicePass, begin_pass
from ckpt._events import timed
from ckpt._format.digests import digest
from ckpt._format.manifest_head import FileEntry
from ckpt._format.ocdbt import DatabaseIndex
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import ItemReport, report_chunks
from ckpt._plan.unchanged.kept_chunks import MOST_SMALL, EarlierChunks, joined
from ckpt._plan.write_batches import FileSpan, WriteBatch, with_chunks
from ckpt._runtime.threads import run_in_thread
from ckpt._vitals.signs import no_signs
from ckpt.errors import located

Array = np.ndarray[Any, np.dtype[np.uint8]]

# So many batches are looked at, at least, where no earlier save says what stays the same.
_LOOKS = LANES


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
    # placed              the lane that encodes the last batch,   `write_index`
    #                     or finds what is the same in it
    # digested            the lane that hashes the last batch     `digested`
    # durable             the last task that writes               `settled`

    def __init__(
        self,
        session: SaveSession,
        call: SaveCall,
        item: str,
        plan: ItemPlan,
        known: SavedItem | None = None,
        expected: Set[int] = frozenset(),
    ) -> None:
        """Write the item called `item` as `plan` says.

        Args:
            session: The save.
            call: The call that the item came with.
            item: Its name.
            plan: What is to be written.
            known: The item as the step before has it, if its files can be taken over.
            expected: Numbers of the batches that are likely the same as there.
        """
        self.known: SavedItem | None = known
        self._session = session
        self._call = call
        self._item = item
        self._plan = plan
        batches = plan.save.batches
        # None where all of a batch is in files of the step before.
        self._batches: list[WriteBatch | None] = list(batches)
        self._kept: list[ItemReport] = [] if plan.kept is None else [plan.kept]
        self._files = plan.new_data_files()
        # By batch; those of encoded ones are known before their file is hashed.
        self._contents = [NO_CONTENTS for _ in batches]
        self._spans: dict[int, list[FileSpan]] = {}
        # Batches with their blocks that wait for a lane, as many as `ready` counts.
        self._staged: deque[tuple[int, Block]] = deque()
        self._ready = anyio.Semaphore(0)
        # Handed out to lanes, one for every batch.
        self._turns = iter(range(len(batches)))
        self._running = 0
        self._expected = expected
        # None where no vital signs are taken.
        self._signs: DevicePass | None = None
        # Leaves that devices need not look at again.
        self._unseen: list[int] = []
        # Before anything is started, since the index must not be written too early.
        encoded = {number for number, batch in enumerate(batches) if batch.encoded}
        self._unplaced = len(encoded | expected)
        # Looks at what is expected to be the same, until one finds that it is.
        self._looks_left = _LOOKS if known is not None and known.is_first else len(batches)
        self._small_left = MOST_SMALL
        if known is not None and plan.kept is not None:
            self._small_left -= known.small_files(plan.kept)
        self._undigested = len(batches)
        self._placed, self._digested, self._durable = (anyio.Event() for _ in range(3))
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
        is_encoded = self._plan.save.is_encoded
        for _ in range(min(ENCODERS if is_encoded else LANES, len(batches))):
            self.start(self._run_lane)
        with session.recorder.phase("snapshot"):
            # Before a batch is staged, whose lane asks for what they find.
            await self._begin_signs(leaves)
            held, counted = await self._hold(leaves)
        at_once = {
            number: sources_of(batch, leaves)
            for number, batch in enumerate(batches)
            if number not in held
        }
        # Arrays that are held are staged after the caller has returned.
        if held:
            session.begin_staging(self._call)
            self.start(lambda: self._stage_held(held, counted))
        await self._stage_batches(at_once)

    async def _hold(self, leaves: Sequence[Any]) -> tuple[dict[int, list[Source]], int]:
        """Return what holds batches that can be staged later, and the bytes counted for it."""
        session, plan, mode = self._session, self._plan.save, self._session.staging.mode
        movable = await run_in_thread(movable_shards, plan.batches, plan.leaves, leaves, mode)
        # Not all may find room there.
        room = session.count_elsewhere(sum(movable.values())) if movable else 0
        held = await run_in_thread(snapshot, plan.batches, plan.leaves, leaves, mode, movable, room)
        moved = moved_shards(held)
        counted = sum(shard.array.nbytes for shard in moved)
        session.uncount(room - counted)
        return held, counted

    async def _begin_signs(self, leaves: Sequence[Any]) -> None:
        """Have devices take the vital signs of their arrays, before the caller may donate these."""
        session, plan = self._session, self._plan.save
        if session.vital_signs is False:
            return
        if self.known is not None:
            written = {chunk.leaf for batch in plan.batches for chunk in batch.chunks}
            same = self.known.compared.intersection(self.known.same(leaves))
            self._unseen = sorted(same - written)
        self._signs = await run_in_thread(
            begin_pass, session.vital_signs, plan.leaves, leaves, self._unseen, session.kernels
        )

    async def _stage_held(self, sources: dict[int, list[Source]], counted: int) -> None:
        await self._stage_batches(sources, held=True)
        self._session.uncount(counted)
        self._session.end_staging(self._call)

    async def _stage_batches(self, sources: dict[int, list[Source]], *, held: bool = False) -> None:
        """Stage batches in the order of the plan, several at a time.

        Args:
            sources: By number of the batch what its chunks are copied from; emptied, so that what
                has been staged is not kept alive.
            held: Whether a snapshot holds that, while the caller goes on.
        """
        async with anyio.create_task_group() as stagers:
            numbers = iter(sorted(sources))
            for _ in range(min(STAGERS, len(sources))):
                stagers.start_soon(self._run_stager, numbers, sources, held)

    async def _run_stager(
        self, numbers: Iterator[int], sources: dict[int, list[Source]], held: bool
    ) -> None:
        session, plan = self._session, self._plan.save
        slots = session.held_stagers if held else session.stagers
        for number in numbers:
            batch = plan.batches[number]
            moved = isinstance(sources[number][0], MovedShard)
            copies = copies_on_host(batch, plan.leaves, moved=moved) - 1
            nbytes = batch.block_bytes + copies * batch.nbytes
            # One that needs more is staged alone; what it must have is the block.
            nbytes = max(batch.block_bytes, min(nbytes, session.arena.capacity))
            async with slots:
                block = await session.allocate(nbytes, self._call, held=held)
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
            staged = plan.batches[number].nbytes
            contents = None
            if number in self._expected:
                contents = await self._leave_out_same(number, block.memory)
            batch = self._batches[number]
            if batch is None:
                self._end_batch(block, staged)
                self._count_digested()
                continue
            memory = block.memory[: batch.nbytes]
            if batch.encoded:
                memory = await self._encode(number, batch, block.memory)
            path = f"{self._item}/{self._files[number]}"
            if session.writes_later:
                await _first_of(self._call.returned, self._call.pressed)
            async with session.lanes.taken() as lane, anyio.create_task_group() as tasks:
                written = anyio.Event()
                tasks.start_soon(self._take_digests, number, path, memory, lane, written, contents)
                leaf = plan.leaves[batch.chunks[0].leaf].name
                phase = session.recorder.phase("write", memory.nbytes, lane, number)
                with located(leaf=leaf), phase:
                    await session.storage.write_block(attempt, path, memory.data)
                written.set()
            self._end_batch(block, staged)

    def _end_batch(self, block: Block, nbytes: int) -> None:
        self._session.hooks.advance(written=nbytes)
        self._session.processes.advance(nbytes)
        self._session.free(block)

    async def _leave_out_same(self, number: int, memory: Array) -> BatchContents | None:
        """Take files of the step before over that hold chunks of a staged batch with their bytes.

        What is left of the batch moves together in its block.

        Returns:
            What the chunks hold that are left; None if the batch was not looked at.
        """
        session, known, leaves = self._session, self.known, self._plan.save.leaves
        batch = self._batches[number]
        assert known is not None
        assert batch is not None
        if not self._looks_left:
            if not batch.encoded:
                self._count_placed()
            return None
        self._looks_left -= 1
        # Not while the caller waits: hashing needs a core.
        await _first_of(self._call.returned, self._call.pressed)
        staged = memory[batch.staged_at : batch.staged_at + batch.nbytes]
        (contents, wanted), began_ns, ended_ns = await run_in_thread(
            timed,
            _same_chunks,
            batch,
            leaves,
            staged,
            known.chunks,
            self._small_left,
            self._signs,
        )
        session.recorder.report("digest", began_ns, ended_ns, batch.nbytes, batch=number)
        kept = None
        if wanted.files:
            self._looks_left = len(self._batches)
            kept = await take_over(session, self._item, known, wanted)
        if kept is not None:
            self._batches[number], contents, taken = await run_in_thread(
                _without, batch, contents, kept, staged
            )
            self._kept.append(taken)
            self._small_left -= known.small_files(taken)
        if self._batches[number] is None or not batch.encoded:
            self._count_placed()
        return contents

    def _count_placed(self) -> None:
        self._unplaced -= 1
        if not self._unplaced:
            self._placed.set()

    def _count_digested(self) -> None:
        self._undigested -= 1
        if not self._undigested:
            self._digested.set()

    async def _encode(self, number: int, batch: WriteBatch, memory: Array) -> Array:
        """Encode a staged batch in its block; return the bytes of its file, which are there."""
        session, plan = self._session, self._plan.save
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
            encode = partial(
                encode_batch,
                batch,
                plan.leaves,
                memory,
                self._signs,
                told=told,
            )
            found = await run_in_thread(encode)
        self._spans[number], self._contents[number] = found.spans, found.contents
        self._count_placed()
        return memory[: found.nbytes]

    async def _take_digests(
        self,
        number: int,
        path: str,
        memory: Array,
        lane: int,
        written: anyio.Event,
        known: BatchContents | None,
    ) -> None:
        session, plan, batch = self._session, self._plan.save, self._batches[number]
        assert batch is not None
        # Not while the caller waits: hashing needs a core, and writing does not.
        await _first_of(self._call.returned, written)
        (found, entry), began_ns, ended_ns = await run_in_thread(
            timed, _file_contents, batch, plan.leaves, memory, known, self._signs
        )
        session.recorder.report("digest", began_ns, ended_ns, memory.nbytes, lane, number)
        session.files[path] = entry
        if found is not None:
            self._contents[number] = found
        self._count_digested()

    async def write_index(self) -> None:
        """Write what covers the batches of an only writer: the database's index and the view."""
        async with anyio.create_task_group() as writers:
            writers.start_soon(self.write_view)
            others = await self._for_others()
            index: DatabaseIndex | None
            if self._expected or self._plan.save.is_encoded:
                await self._placed.wait()
                report = partial(self._report, with_digests=False)
                places = await self._session.compute(report)
                index = await self._session.compute(index_over, self._plan.save.leaves, places)
                data_files = list(places.files)
            else:
                # Nothing that this save finds out is in it: it may be that of an earlier one.
                index = await self._session.compute(lambda: others.index())
                kept = () if self._plan.kept is None else self._plan.kept.files
                data_files = [*kept, *self._files]
            if index is not None:
                files = await self._session.compute(
                    database_files, index, data_files, self._session.created_ns
                )
                for path, data in files.items():
                    writers.start_soon(self._session.write, f"{self._item}/{path}", data)

    async def write_view(self) -> None:
        """Write the files for Orbax that do not depend on values."""
        others = await self._for_others()
        view = await self._session.compute(others.view)
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

    @property
    def compared(self) -> frozenset[int]:
        """Numbers of the leaves whose replicas were compared; see `SavedItem`."""
        found = frozenset() if self._signs is None else self._signs.looked_at
        return found.union(self._unseen)

    def report(self) -> ItemReport:
        """Return what this process has of the item: what it takes over, and what it writes.

        A warning names devices of this process that should hold the same values and do not.
        """
        report = self._report(with_digests=True)
        if self._signs is None:
            return report
        self._signs.warn_of_unequal(self._item)
        copies = self._signs.copies(self._session.processes.group.index)
        if self.known is not None and self._unseen:
            earlier = self.known.chunks.report.copies
            copies = np.concatenate([copies, earlier[np.isin(earlier["leaf"], self._unseen)]])
        return replace(report, copies=copies)

    def _report(self, *, with_digests: bool) -> ItemReport:
        left = {n: batch for n, batch in enumerate(self._batches) if batch is not None}
        contents = [self._contents[number] for number in left]
        signs = np.concatenate([no_signs(0), *(each.signs for each in contents)])
        written = report_chunks(
            list(left.values()),
            [self._files[number] for number in left],
            [each.digests for each in contents] if with_digests else None,
            {at: self._spans[n] for at, n in enumerate(left) if n in self._spans},
            signs if with_digests else None,
        )
        return joined([*self._kept, written]) if self._kept else written

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


def _same_chunks(
    batch: WriteBatch,
    plans: Sequence[LeafPlan],
    staged: Array,
    chunks: EarlierChunks,
    most_small: int,
    signs: KnownSigns | None,
) -> tuple[BatchContents, ItemReport]:
    """Return what a batch holds, and what can be taken over instead of chunks of it."""
    contents = batch_contents(batch, plans, staged, signs)
    return contents, chunks.of_digests(batch, contents.digests, most_small)


def _without(
    batch: WriteBatch, contents: BatchContents, kept: ItemReport, staged: Array
) -> tuple[WriteBatch | None, BatchContents, ItemReport]:
    """Take chunks out of a staged batch; the bytes of the others move together.

    Returns:
        What is left of the batch, what that holds, and the chunks with what was found of them.
    """
    numbers = {(chunk.leaf, chunk.number): at for at, chunk in enumerate(batch.chunks)}
    pairs = zip(kept.rows["leaf"].tolist(), kept.rows["number"].tolist(), strict=True)
    taken = [numbers.pop(pair) for pair in pairs]
    left = with_chunks(batch, set(numbers))
    others = list(numbers.values())
    if left is not None:
        move_chunks([batch.chunks[at] for at in others], left, staged)
    signs = contents.signs
    if len(signs):
        kept, signs = replace(kept, signs=signs[taken]), signs[others]
    return left, BatchContents([contents.digests[at] for at in others], signs), kept


def _file_contents(
    batch: WriteBatch,
    plans: Sequence[LeafPlan],
    memory: Array,
    known: BatchContents | None,
    signs: KnownSigns | None,
) -> tuple[BatchContents | None, FileEntry]:
    """Return what a batch holds, None if it is encoded, and the entry of its file.

    Args:
        batch: The batch.
        plans: The plans of all leaves of the item.
        memory: The bytes of the file.
        known: What it holds, if that was found before.
        signs: The vital signs that are known; None if none are to be taken.
    """
    if batch.encoded:
        return None, FileEntry(size=memory.nbytes, digest=digest(memory.data))
    found = known or batch_contents(batch, plans, memory, signs)
    is_one_chunk = batch.chunks[0].nbytes == batch.nbytes
    whole = found.digests[0] if is_one_chunk else digest(memory.data)
    return found, FileEntry(size=batch.nbytes, digest=whole)
