"""One item on its way out: plan, stage, and hand granules to the write lanes.

Stagers and lanes are tasks of the save's task group. A stager takes the next granule (biggest
first), waits for room in the arena, and copies; a free lane takes the next staged granule and
writes it as one data file. So copies from the device overlap writes to the store, and the arena's
capacity bounds the memory of both.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio
import jax
import numpy as np

from ckpt.digests import digest
from ckpt.engine.arena import Block
from ckpt.engine.encoding import Encoded, encode_granule
from ckpt.engine.files import write_item_file
from ckpt.engine.parts import ItemParts
from ckpt.engine.plans import ItemPlan, new_data_file
from ckpt.engine.session import ENCODERS, LANES, STAGERS, Batch, SaveSession
from ckpt.engine.staging import (
    Source,
    copies_on_host,
    copy_granule,
    granule_digests,
    snapshot,
    sources_of,
    wait_until_computed,
)
from ckpt.errors import InvalidArgumentError, located
from ckpt.handlers.base import Deferred, FileData
from ckpt.layout.leaves import ARRAY_KINDS
from ckpt.layout.merging import PartPlan
from ckpt.layout.plan import Granule, LeafPlan, Place
from ckpt.layout.records import LeafRecords, record_leaves
from ckpt.layout.structure import Structure
from ckpt.manifest import FileEntry

__all__ = ["EngineItemWriter"]

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True, eq=False)
class _Staged:
    number: int
    block: Block


@dataclass(slots=True)
class _ItemWrite:
    """The write of one item, while it is under way.

    Attributes:
        plan: The plan.
        files: Path of every granule's data file, relative to the item.
        digests: Digest of every chunk, by granule; complete when `hashed` is set.
        left: Granules whose digests are still to come.
        unplaced: Granules that are still to be encoded; `placed` is set when there are none.
        places: Where the chunks of the others lie, by granule.
        staged: Granules that wait for a lane, as many as `ready` counts.
        turns: Handed out to lanes, one for every granule.
        running: Tasks that still write; `durable` is set when there are none.
    """

    plan: ItemPlan
    files: list[str]
    digests: list[list[str]]
    left: int
    unplaced: int
    turns: Iterator[int]
    places: dict[int, list[Place]] = field(default_factory=dict)
    staged: deque[_Staged] = field(default_factory=deque)
    ready: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(0))
    running: int = 0
    hashed: anyio.Event = field(default_factory=anyio.Event)
    placed: anyio.Event = field(default_factory=anyio.Event)
    durable: anyio.Event = field(default_factory=anyio.Event)

    def note_digests(self, number: int, digests: list[str]) -> None:
        """Take the digests of a granule."""
        self.digests[number] = digests
        self.left -= 1
        if not self.left:
            self.hashed.set()

    def note_encoded(self, number: int, encoded: Encoded) -> None:
        """Take the places and digests of an encoded granule."""
        self.places[number] = encoded.places
        self.digests[number] = encoded.digests
        self.unplaced -= 1
        if not self.unplaced:
            self.placed.set()


class EngineItemWriter:
    """The engine's `ItemWriter` for one item of one save."""

    def __init__(
        self, session: SaveSession, batch: Batch, item: str, parts: ItemParts | None = None
    ) -> None:
        """Write the item called `item`, or the part of it that comes with `batch`.

        Args:
            session: The save.
            batch: What came with it.
            item: Name of the item.
            parts: The parts of it so far, where it may have several.
        """
        self._session = session
        self._batch = batch
        self._item = item
        self._parts = parts
        # Number of the part; 0 also of an item that is no tree.
        self.part = 0

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow pure function off the engine's loop."""
        return await anyio.to_thread.run_sync(partial(function, *args))

    async def write_file(self, path: str, data: FileData) -> None:
        """Write a file of the item; see `ItemWriter.write_file`."""
        await write_item_file(self._session, self._item, path, data)

    async def stage(
        self, structure: Structure, *, formatted: bool = True
    ) -> Awaitable[LeafRecords]:
        """Stage leaves; see `ItemWriter.stage`."""
        session, parts = self._session, self._parts
        if self._batch.returned.is_set():
            # What it would take a snapshot of is the caller's again, and so is the memory for it.
            raise InvalidArgumentError(
                "leaves are staged in Handler.stage, not in the commit that it returns"
            )
        began_ns = time.perf_counter_ns()
        budget = session.arena.capacity
        async with session.planning:
            # Before anything is staged that has no place in the tree.
            if parts is not None:
                self.part = await self.in_thread(parts.add, structure.nodes)
            plan = await self.in_thread(
                session.plans.plan, self._item, structure, budget, formatted, parts is None
            )
        leaves: Sequence[Any] = structure.leaves
        if plan.keys:
            leaves = await self.in_thread(_with_key_data, leaves, plan.keys)
        total = sum(granule.nbytes for granule in plan.save.granules)
        session.recorder.planned(began_ns, total)
        session.hooks.advance(total=total)
        granules = plan.save.granules
        count = len(granules)
        blank: list[list[str]] = [[] for _ in granules]
        encoded = sum(granule.encoded for granule in granules)
        write = _ItemWrite(plan, plan.new_data_files(), blank, count, encoded, iter(range(count)))
        if not granules:
            write.hashed.set()
        if parts is None:
            self._start(write, self._write_index, write)
        else:
            self._start(write, self._keep_plan, write, parts)
        if plan.formatted is not None:
            session.formatted.append(plan.formatted)
        for _ in range(min(ENCODERS if encoded else LANES, count)):
            self._start(write, self._run_lane, write)
        with session.recorder.phase("snapshot"):
            held = await self.in_thread(snapshot, granules, leaves, session.staging.mode)
        at_once = {
            number: sources_of(granule, leaves)
            for number, granule in enumerate(granules)
            if number not in held
        }
        # What is held is staged behind the caller's back.
        if held:
            session.begin_staging(self._batch)
            self._start(write, self._stage_held, write, held)
        await self._stage_all(write, at_once, session.stagers)
        # What outlives this call must not keep the caller's arrays alive.
        kept = [
            None if leaf_plan.spec.kind in ARRAY_KINDS else leaf
            for leaf_plan, leaf in zip(plan.save.leaves, leaves, strict=True)
        ]
        del leaves
        return Deferred(partial(self._finish, write, kept))

    def _start(
        self, write: _ItemWrite, work: Callable[..., Awaitable[None]], *arguments: Any
    ) -> None:
        """Run `work` in the save's task group; the item is durable when all of it has ended."""

        async def run() -> None:
            with located(item=self._item):
                await work(*arguments)
            write.running -= 1
            if not write.running:
                write.durable.set()

        write.running += 1
        self._session.tasks.start_soon(run)

    async def _write_index(self, write: _ItemWrite) -> None:
        """Write what does not depend on values: the database's index and the Orbax view."""
        session, plan = self._session, write.plan
        async with anyio.create_task_group() as writers:
            for path, (data, entry) in plan.view.items():
                writers.start_soon(session.write, f"{self._item}/{path}", data, entry)
            index = plan.index
            if write.unplaced:
                await write.placed.wait()
                index = await self.in_thread(plan.index_over, write.places)
            if index is not None:
                tree_file, name = new_data_file(), uuid.uuid4().bytes
                database = await self.in_thread(
                    index.encode, write.files, tree_file, name, session.created_ns
                )
                writers.start_soon(session.write, f"{self._item}/{tree_file}", database.tree)
                writers.start_soon(session.write, f"{self._item}/manifest.ocdbt", database.manifest)

    async def _keep_plan(self, write: _ItemWrite, parts: ItemParts) -> None:
        """Keep what the index over all parts of the item needs of this one."""
        if write.unplaced:
            await write.placed.wait()
        parts.plans[self.part] = PartPlan(write.plan.save, write.places, write.files)

    async def _stage_held(self, write: _ItemWrite, sources: dict[int, list[Source]]) -> None:
        await self._stage_all(write, sources, self._session.held_stagers)
        self._session.end_staging(self._batch)

    async def _stage_all(
        self, write: _ItemWrite, sources: dict[int, list[Source]], slots: anyio.Semaphore
    ) -> None:
        """Stage granules in the order of the plan, several at a time.

        Args:
            write: The item.
            sources: By the number of each granule what its chunks are copied from; emptied, so
                that what has been staged is not kept alive.
            slots: Bounds how many granules, of all items, are copied at once.
        """
        async with anyio.create_task_group() as stagers:
            numbers = iter(sorted(sources))
            for _ in range(min(STAGERS, len(sources))):
                stagers.start_soon(self._run_stager, write, numbers, sources, slots)

    async def _run_stager(
        self,
        write: _ItemWrite,
        numbers: Iterator[int],
        sources: dict[int, list[Source]],
        slots: anyio.Semaphore,
    ) -> None:
        session, plan = self._session, write.plan.save
        for number in numbers:
            granule = plan.granules[number]
            copies = copies_on_host(granule, plan.leaves) - 1
            nbytes = granule.block_bytes + copies * granule.nbytes
            async with slots:
                block = await session.allocate(nbytes, self._batch)
                with session.recorder.phase("stage", granule.nbytes, granule=number):
                    await self.in_thread(_stage, granule, plan.leaves, sources.pop(number), block)
            session.hooks.advance(staged=granule.nbytes)
            # Staging never waits for a lane, only for room in the arena.
            write.staged.append(_Staged(number, block))
            write.ready.release()

    async def _run_lane(self, write: _ItemWrite) -> None:
        session = self._session
        await session.opened()
        for _ in write.turns:
            await write.ready.acquire()
            staged = write.staged.popleft()
            memory = await self._encoded(write, staged)
            async with session.lanes.taken() as lane:
                await self._write_granule(write, lane, staged.number, memory)
            session.free(staged.block)

    async def _encoded(self, write: _ItemWrite, staged: _Staged) -> Array:
        """Return the bytes of a granule's file; they lie in its block."""
        session, plan = self._session, write.plan.save
        granule, memory = plan.granules[staged.number], staged.block.memory
        if not granule.encoded:
            return memory[: granule.nbytes]
        # The cores are for the copies while the caller waits for them.
        await _first_of(self._batch.returned, self._batch.pressed)
        async with session.encoders:
            with session.recorder.phase("encode", granule.nbytes, granule=staged.number):
                done = await self.in_thread(encode_granule, granule, plan.leaves, memory)
        write.note_encoded(staged.number, done)
        return memory[: done.nbytes]

    async def _write_granule(
        self, write: _ItemWrite, lane: int, number: int, memory: Array
    ) -> None:
        session, plan = self._session, write.plan.save
        attempt = await session.opened()
        granule = plan.granules[number]
        path = f"{self._item}/{write.files[number]}"
        leaf = plan.leaves[granule.chunks[0].leaf].name
        written = anyio.Event()

        async def take_digests() -> None:
            # Not while the caller waits: writing needs no core, this does.
            await _first_of(self._batch.returned, written)
            with session.recorder.phase("digest", memory.nbytes, lane, number):
                found, entry = await self.in_thread(_digests, granule, plan.leaves, memory)
            session.files[path] = entry
            # Those of encoded chunks were taken before they were encoded.
            write.note_digests(number, found or write.digests[number])

        phase = session.recorder.phase("write", memory.nbytes, lane, number)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take_digests)
            with located(leaf=leaf), phase:
                await session.storage.write_block(attempt, path, memory.data)
            written.set()
        session.hooks.advance(written=granule.nbytes)

    async def _finish(self, write: _ItemWrite, leaves: Sequence[Any]) -> LeafRecords:
        # The entries are made while the last granules are still being written.
        self._batch.pressed.set()
        await write.hashed.wait()
        with located(item=self._item):
            records = await self.in_thread(
                record_leaves, write.plan.save, leaves, write.digests, write.files, write.places
            )
        await write.durable.wait()
        return records


def _with_key_data(leaves: Sequence[Any], keys: Iterable[int]) -> Sequence[Any]:
    """Return the leaves with the data of PRNG keys in their places."""
    found = list(leaves)
    for number in keys:
        found[number] = jax.random.key_data(found[number])
    return found


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


def _stage(
    granule: Granule, plans: Sequence[LeafPlan], sources: Sequence[Source], block: Block
) -> None:
    wait_until_computed(sources)
    memory = block.memory[granule.lead : granule.lead + granule.nbytes]
    copy_granule(granule, plans, sources, memory)


def _digests(
    granule: Granule, plans: Sequence[LeafPlan], memory: Array
) -> tuple[list[str], FileEntry]:
    """Return the digests of the chunks of a granule, none of encoded ones, and its file's entry."""
    if granule.encoded:
        return [], FileEntry(size=memory.nbytes, digest=digest(memory.data))
    found = granule_digests(granule, plans, memory)
    first = granule.chunks[0]
    is_whole = first.nbytes == granule.nbytes
    return found, FileEntry(
        size=granule.nbytes, digest=found[0] if is_whole else digest(memory.data)
    )
