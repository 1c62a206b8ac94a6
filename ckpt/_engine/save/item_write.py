"""The write of one item's leaves: batches are staged, encoded, written and hashed concurrently.

Stagers and lanes are tasks of the save's task group. A stager takes the next batch (biggest first),
waits for room in the arena, and copies; a free lane takes the next staged batch and writes it as
one data file. So copies from the device overlap writes to the store, and the capacity of the arena
bounds the memory of both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.from_thread
import numpy as np
from msgspec.structs import replace

from ckpt._engine.engine import SavedItem
from ckpt._engine.memory.arena import Block
from ckpt._engine.memory.staging import (
    NO_CONTENTS,
    BatchContents,
    MovedShard,
    Source,
    batch_contents,
    copies_on_host,
    copy_batch,
    movable_shards,
    move_chunks,
    moved_shards,
    snapshot,
    sources_of,
    wait_until_computed,
)
from ckpt._engine.plan_cache import ItemPlan
from ckpt._engine.save.save_request import SaveCall
from ckpt._engine.save.session import ENCODERS, LANES, STAGERS, SaveSession, reuse_files
from ckpt._events import timed
from ckpt._format.manifest_head import FileEntry, digest
from ckpt._plan.base_chunks import BaseChunks
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import ChunkNotes, ItemReport
from ckpt._plan.write_batches import FileSpan, WriteBatch
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import located

if TYPE_CHECKING:
    from ckpt._engine.chunk_extensions import NotesOfItem

Array = np.ndarray[Any, np.dtype[np.uint8]]

# Without history, check at least this many batches for unchanged data.
_LOOKS = LANES


class ItemWrite:
    """The write of one item's leaves, while it is under way. Used on the engine's loop."""

    # The events that the write of an item waits for, in their order. A batch passes the states
    # marked * on its own.
    #
    # state                 set by                                  waited for by
    # --------------------  --------------------------------------  --------------------------------
    # attempt_ready         pipeline, when the attempt may be       lanes, before their first batch
    #                       written to
    # room in the arena *   lanes, which free the block of a        stagers, before they copy
    #                       written batch
    # ready *               a stager that has copied the batch      the next free lane
    # call.caller_released  pipeline, when all items of the call    encoding, digests, and files for
    #                       are staged                              other readers, which leave the
    #                                                               cores to the copies until then
    # call.urgent           `SaveSession.allocate` without room,    the same: a batch that is never
    #                       or `digested`                           encoded never frees its block
    # placed                the lane that encodes the last batch,   `write_sidecars`
    #                       or finds the unchanged chunks
    # digested              the lane that hashes the last batch     `digested`
    # durable               the last task that writes               `settled`

    def __init__(
        self,
        session: SaveSession,
        call: SaveCall,
        item: str,
        plan: ItemPlan,
        known: SavedItem | None = None,
        expected: Set[int] = frozenset(),
        extensions: Mapping[str, NotesOfItem] | None = None,
    ) -> None:
        """Write the item called `item` as `plan` says.

        Args:
            session: The save.
            call: The call that the item came with.
            item: Name of the item.
            plan: Plan of the bytes to write.
            known: The item of the step before, if its files can be reused.
            expected: Numbers of the batches that are likely unchanged since that step.
            extensions: What extensions note of the item, by their names.
        """
        self.known: SavedItem | None = known
        self._session = session
        self._call = call
        self._item = item
        self._plan = plan
        batches = plan.save.batches
        # None for a batch whose chunks are all in files of the step before.
        self._batches: list[WriteBatch | None] = list(batches)
        self._kept: list[ItemReport] = [] if plan.kept is None else [plan.kept]
        self._files = plan.new_data_files()
        # By batch number; the contents of encoded batches are known before their file is hashed.
        self._contents = [NO_CONTENTS for _ in batches]
        self._spans: dict[int, list[FileSpan]] = {}
        # Staged batches with their blocks that wait for a lane; `ready` counts them.
        self._staged: deque[tuple[int, Block]] = deque()
        self._ready = anyio.Semaphore(0)
        # Turns of the lanes, one for every batch.
        self._turns = iter(range(len(batches)))
        self._running = 0
        self._expected = expected
        self._extensions = extensions or {}
        # Counted before any task starts, since the index must not be written too early.
        encoded = {number for number, batch in enumerate(batches) if batch.encoded}
        self._unplaced = len(encoded | expected)
        # Checks left of batches expected to be unchanged; the first success allows all of them.
        self._looks_left = _LOOKS if known is not None and known.is_first else len(batches)
        self._undigested = len(batches)
        self._placed, self._digested, self._durable = (anyio.Event() for _ in range(3))
        if not batches:
            self._digested.set()

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` in the save's task group; the item is durable when all such work has ended."""

        async def run() -> None:
            with located(item=self._item):
                await work()
            self._running -= 1
            if not self._running:
                self._durable.set()

        self._running += 1
        self._session.tasks.start_soon(run)

    async def stage(self, leaves: Sequence[Any]) -> None:
        """Start to write the leaves; return once the caller can no longer affect them."""
        session, batches = self._session, self._plan.save.batches
        is_encoded = self._plan.save.is_encoded
        if is_encoded:
            # Imported while the caller waits: later, the program may be ending.
            from ckpt._engine.save.encoding import encode_batch

            self._encode_batch = encode_batch
        for _ in range(min(ENCODERS if is_encoded else LANES, len(batches))):
            self.start(self._run_lane)
        with session.recorder.phase("snapshot"):
            if self._extensions:
                # Before any batch is staged, since its lane asks for records.
                await self._begin_notes(leaves)
            held, counted = await self._hold(leaves)
        at_once = {
            number: sources_of(batch, leaves)
            for number, batch in enumerate(batches)
            if number not in held
        }
        # Held arrays are staged after the caller has returned.
        if held:
            self._call.stagings += 1
            self.start(lambda: self._stage_held(held, counted))
        await self._stage_batches(at_once)

    async def _hold(self, leaves: Sequence[Any]) -> tuple[dict[int, list[Source]], int]:
        """Return the held sources of batches that can be staged later, and their counted bytes."""
        session, plan, mode = self._session, self._plan.save, self._session.engine.staging.mode
        movable = await run_in_thread(movable_shards, plan.batches, plan.leaves, leaves, mode)
        # Page-locked memory may not have room for all of them.
        room = session.count_elsewhere(sum(movable.values())) if movable else 0
        held = await run_in_thread(snapshot, plan.batches, plan.leaves, leaves, mode, movable, room)
        moved = moved_shards(held)
        counted = sum(shard.array.nbytes for shard in moved)
        session.uncount(room - counted)
        return held, counted

    async def _begin_notes(self, leaves: Sequence[Any]) -> None:
        """Let extensions begin, before the caller may donate the arrays."""
        plan, same = self._plan.save, set[int]()
        if self.known is not None:
            same.update(self.known.same(leaves))
            same.difference_update(chunk.leaf for batch in plan.batches for chunk in batch.chunks)
        for each in self._extensions.values():
            await run_in_thread(each.begin, plan.leaves, leaves, self._base, sorted(same))

    async def _stage_held(self, sources: dict[int, list[Source]], counted: int) -> None:
        await self._stage_batches(sources, held=True)
        self._session.uncount(counted)
        self._session.end_staging(self._call)

    async def _stage_batches(self, sources: dict[int, list[Source]], *, held: bool = False) -> None:
        """Stage batches in the order of the plan, several at a time.

        Args:
            sources: Sources of each batch's chunks, by number of the batch; emptied on the way, so
                that staged sources are not kept alive.
            held: True if a snapshot holds the sources, while the caller goes on.
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
            # A batch that needs more than the arena is staged alone; only its block must fit.
            nbytes = max(batch.block_bytes, min(nbytes, session.engine.arena.capacity))
            async with slots:
                block = await session.allocate(nbytes, self._call, held=held)
                _, began_ns, ended_ns = await run_in_thread(
                    timed, _stage_batch, batch, plan.leaves, sources.pop(number), block
                )
                # The temporary copies are gone.
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
            if session.engine.writes_later:
                await _first_of(self._call.caller_released, self._call.urgent)
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
        """Reuse files of the step before that hold unchanged chunks of a staged batch.

        The other chunks of the batch move together in its block.

        Returns:
            The contents of the chunks that are left; None if the batch was not checked.
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
        await _first_of(self._call.caller_released, self._call.urgent)
        staged = memory[batch.staged_at : batch.staged_at + batch.nbytes]
        (contents, wanted), began_ns, ended_ns = await run_in_thread(
            timed,
            _same_chunks,
            batch,
            leaves,
            staged,
            known.chunks,
            list(self._kept),
            self._extensions,
        )
        session.recorder.report("digest", began_ns, ended_ns, batch.nbytes, batch=number)
        kept = None
        if wanted.files:
            self._looks_left = len(self._batches)
            kept = await reuse_files(session, self._item, known, wanted)
        if kept is not None:
            self._batches[number], contents, taken = await run_in_thread(
                _take_out, batch, contents, kept, staged, self._extensions
            )
            self._kept.append(taken)
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
        """Encode a staged batch in its block; return the bytes of its file, a part of the block."""
        session, plan = self._session, self._plan.save
        # While the caller waits for the copies, they get the cores.
        await _first_of(self._call.caller_released, self._call.urgent)
        recorder = session.recorder

        def tell(began_ns: int, ended_ns: int, nbytes: int) -> None:
            # Reported on the loop, where observers are always called.
            anyio.from_thread.run_sync(
                partial(recorder.report, "encode", began_ns, ended_ns, nbytes, batch=number)
            )

        told = tell if recorder.observers else None
        async with session.encoders:
            encode = self._encode_batch
            encode = partial(encode, batch, plan.leaves, memory, self._extensions, told=told)
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
        # Not while the caller waits, unless the write has ended: hashing needs a core, writing does
        # not.
        await _first_of(self._call.caller_released, written)
        (found, entry), began_ns, ended_ns = await run_in_thread(
            timed, _file_contents, batch, plan.leaves, memory, known, self._extensions
        )
        session.recorder.report("digest", began_ns, ended_ns, memory.nbytes, lane, number)
        session.files[path] = entry
        if found is not None:
            self._contents[number] = found
        self._count_digested()

    async def write_sidecars(self) -> None:
        """Write the files for other readers of an item with a single writer."""
        session = self._session
        async with anyio.create_task_group() as writers:
            writers.start_soon(self.write_early_sidecars)
            if self._expected or self._plan.save.is_encoded:
                await self._placed.wait()
            await _first_of(self._call.caller_released, self._call.urgent)
            files = await session.compute(self._placed_sidecars)
            for path, data in files.items():
                writers.start_soon(session.write, path, data)

    def _placed_sidecars(self) -> dict[str, bytes]:
        report = self._report(with_digests=False)
        return self._plan.sidecars.of_places([report], self._session.created_ns)

    async def write_early_sidecars(self) -> None:
        """Write the files for other readers that depend on the structure alone."""
        await _first_of(self._call.caller_released, self._call.urgent)
        files = await self._session.compute(self._plan.sidecars.of_structure)
        await for_each(lambda path: self._session.write(path, *files[path]), files)

    async def digested(self) -> None:
        """Wait until `report` can be made, which may be before the last batches are written."""
        self._call.urgent.set()
        await self._digested.wait()

    @property
    def _base(self) -> ItemReport | None:
        return None if self.known is None else self.known.chunks.report

    def report(self) -> ItemReport:
        """Return the chunks of the item that this process has: those that it reuses or writes."""
        report = self._report(with_digests=True)
        if not self._extensions:
            return report
        process = self._session.processes.process
        notes = {
            name: each.finish(report, self._base, process)
            for name, each in self._extensions.items()
        }
        return replace(report, notes=notes)

    def _report(self, *, with_digests: bool) -> ItemReport:
        left = {n: batch for n, batch in enumerate(self._batches) if batch is not None}
        contents = [self._contents[number] for number in left]
        written = ItemReport.of(
            list(left.values()),
            [self._files[number] for number in left],
            [each.digests for each in contents] if with_digests else None,
            {at: self._spans[n] for at, n in enumerate(left) if n in self._spans},
            _joined_records(contents, self._extensions) if with_digests else None,
        )
        return ItemReport.joined([*self._kept, written]) if self._kept else written

    async def settled(self) -> None:
        """Wait until all that this process writes of the item is durable."""
        if self._running:
            await self._durable.wait()


async def _first_of(*events: anyio.Event) -> None:
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
    chunks: BaseChunks,
    kept: Sequence[ItemReport],
    extensions: Mapping[str, NotesOfItem],
) -> tuple[BatchContents, ItemReport]:
    """Return the contents of a batch, and the earlier chunks that can replace its own."""
    contents = batch_contents(batch, plans, staged, extensions)
    return contents, chunks.of_digests(batch, contents.digests, kept)


def _joined_records(
    contents: Sequence[BatchContents], extensions: Mapping[str, NotesOfItem]
) -> dict[str, ChunkNotes]:
    """Return the notes of extensions on the chunks of all batches."""
    return {
        name: replace(
            each.none,
            records=np.concatenate([each.none.records, *(part.records[name] for part in contents)]),
        )
        for name, each in extensions.items()
    }


def _take_out(
    batch: WriteBatch,
    contents: BatchContents,
    kept: ItemReport,
    staged: Array,
    extensions: Mapping[str, NotesOfItem],
) -> tuple[WriteBatch | None, BatchContents, ItemReport]:
    """Take chunks out of a staged batch; the bytes of the others move together.

    Returns:
        The rest of the batch, its contents, and the reused chunks with the records made now.
    """
    numbers = {(chunk.leaf, chunk.number): at for at, chunk in enumerate(batch.chunks)}
    pairs = zip(kept.rows["leaf"].tolist(), kept.rows["number"].tolist(), strict=True)
    taken = [numbers.pop(pair) for pair in pairs]
    left = batch.with_chunks(set(numbers))
    others = list(numbers.values())
    if left is not None:
        move_chunks([batch.chunks[at] for at in others], left, staged)
    if extensions:
        found = contents.of_chunks(taken)
        kept = replace(kept, notes=_joined_records([found], extensions))
    return left, contents.of_chunks(others), kept


def _file_contents(
    batch: WriteBatch,
    plans: Sequence[LeafPlan],
    memory: Array,
    known: BatchContents | None,
    extensions: Mapping[str, NotesOfItem],
) -> tuple[BatchContents | None, FileEntry]:
    """Return the contents of a batch, None if it is encoded, and the entry of its file.

    Args:
        batch: The batch.
        plans: The plans of all leaves of the item.
        memory: The bytes of the file.
        known: The contents, if they were found before.
        extensions: What extensions note of the item.
    """
    if batch.encoded:
        return None, FileEntry(size=memory.nbytes, digest=digest(memory.data))
    found = known or batch_contents(batch, plans, memory, extensions)
    is_one_chunk = batch.chunks[0].nbytes == batch.nbytes
    whole = found.digests[0] if is_one_chunk else digest(memory.data)
    return found, FileEntry(size=batch.nbytes, digest=whole)
