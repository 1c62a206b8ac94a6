"""One item on its way out: plan, stage, and hand batches to the write lanes.

Stagers and lanes are tasks of the save's task group. A stager takes the next batch (biggest
first), waits for room in the arena, and copies; a free lane takes the next staged batch and
writes it as one data file. So copies from the device overlap writes to the store, and the arena's
capacity bounds the memory of both.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio
import jax
import numpy as np

from ckpt._engine.memory.staging import (
    Source,
    copies_on_host,
    snapshot,
    sources_of,
)
from ckpt._engine.plan_cache import ItemPlan, new_data_file
from ckpt._engine.save.encoding import encode_batch
from ckpt._engine.save.item_files import write_item_file
from ckpt._engine.save.item_parts import ItemParts
from ckpt._engine.save.item_write import (
    ItemWrite,
    Staged,
    file_digests,
    first_of,
    stage_batch,
)
from ckpt._engine.save.session import (
    ENCODERS,
    LANES,
    STAGERS,
    SaveCall,
    SaveSession,
)
from ckpt._engine.save.sharded_items import TreeWrite, own_digests
from ckpt._plan.leaf_entries import LeafEntries, record_leaves
from ckpt._plan.merged_parts import PartPlan
from ckpt._plan.multihost.per_process import own_path
from ckpt._tree.flatten import Structure
from ckpt._tree.leaf_specs import ARRAY_KINDS
from ckpt.errors import InvalidArgumentError, located
from ckpt.handlers._base import Deferred, FileData

__all__ = ["EngineItemWriter"]

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[np.uint8]]


class EngineItemWriter:
    """The engine's `ItemWriter` for one item of one save."""

    def __init__(
        self,
        session: SaveSession,
        call: SaveCall,
        item: str,
        parts: ItemParts | None = None,
        *,
        per_process: bool = False,
    ) -> None:
        """Write the item called `item`, or the part of it that comes with `call`.

        Args:
            session: The save.
            call: What came with it.
            item: Name of the item.
            parts: The parts of it so far, where it may have several.
            per_process: Whether every process of the job stores an item of its own.
        """
        self._session = session
        team = session.joint.team
        self.process = team.index
        self.processes = team.count
        self._per_process = per_process
        self._team = None if session.joint.is_alone or per_process else team
        # Otherwise all of the item that is here is for this process to write.
        self._is_shared = self._team is not None and not session.joint.own_disks
        self._call = call
        self._item = item
        self._parts = parts
        # Number of the part; 0 also of an item that is no tree.
        self.part = 0

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow pure function off the engine's loop."""
        return await anyio.to_thread.run_sync(partial(function, *args))

    async def write_file(self, path: str, data: FileData) -> None:
        """Write a file of the item; see `ItemWriter.write_file`."""
        if self._is_shared and not self._session.joint.leads:
            # All have the same, and the primary writes it.
            return
        if self._per_process:
            path = own_path(path, self.process, self.processes)
        await write_item_file(self._session, self._item, path, data)

    async def stage(
        self, structure: Structure, *, formatted: bool = True
    ) -> Awaitable[LeafEntries]:
        """Stage leaves; see `ItemWriter.stage`."""
        session, parts = self._session, self._parts
        if self._call.returned.is_set():
            # What it would take a snapshot of is the caller's again, and so is the memory for it.
            raise InvalidArgumentError(
                "leaves are staged in Handler.stage, not in the commit that it returns"
            )
        began_ns = time.perf_counter_ns()
        joint = session.joint
        async with session.planning:
            # Before anything is staged that has no place in the tree.
            if parts is not None:
                self.part = await self.in_thread(parts.add, structure.nodes)
            plan = await self.in_thread(
                session.plans.plan,
                self._item,
                structure,
                joint.budget_bytes,
                formatted,
                parts is None,
                self._team,
                session.storage.largest_file_bytes,
                session.storage.usual_file_bytes,
            )
        leaves: Sequence[Any] = structure.leaves
        if plan.keys:
            leaves = await self.in_thread(_with_key_data, leaves, plan.keys)
        total = sum(batch.nbytes for batch in plan.save.batches)
        session.recorder.planned(began_ns, total)
        session.hooks.advance(total=total)
        batches = plan.save.batches
        count = len(batches)
        blank: list[list[str]] = [[] for _ in batches]
        encoded = sum(batch.encoded for batch in batches)
        write = ItemWrite(plan, plan.new_data_files(), blank, count, encoded, iter(range(count)))
        if not batches:
            write.hashed.set()
        if parts is not None:
            self._start(write, self._keep_plan, write, parts)
        elif joint.is_alone:
            self._start(write, self._write_index, write)
        elif self._is_shared and joint.leads:
            # What lies over the chunks of all processes is written when all have told of them.
            self._start(write, self._write_view, plan)
        if plan.formatted is not None:
            session.formatted.append(plan.formatted)
        for _ in range(min(ENCODERS if encoded else LANES, count)):
            self._start(write, self._run_lane, write)
        with session.recorder.phase("snapshot"):
            held = await self.in_thread(snapshot, batches, leaves, session.staging.mode)
        at_once = {
            number: sources_of(batch, leaves)
            for number, batch in enumerate(batches)
            if number not in held
        }
        # What is held is staged behind the caller's back.
        if held:
            session.begin_staging(self._call)
            self._start(write, self._stage_held, write, held)
        await self._stage_all(write, at_once, session.stagers)
        own = await self.in_thread(own_digests, plan, leaves) if self._team is not None else {}
        # What outlives this call must not keep the caller's arrays alive.
        kept = [
            None if leaf_plan.spec.kind in ARRAY_KINDS else leaf
            for leaf_plan, leaf in zip(plan.save.leaves, leaves, strict=True)
        ]
        del leaves
        if self._team is not None:
            session.trees[self._item] = TreeWrite(plan, kept, own)
        return Deferred(partial(self._finish, write, kept))

    def _start(
        self, write: ItemWrite, work: Callable[..., Awaitable[None]], *arguments: Any
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

    async def _write_index(self, write: ItemWrite) -> None:
        """Write what does not depend on values: the database's index and the Orbax view."""
        session, plan = self._session, write.plan
        async with anyio.create_task_group() as writers:
            writers.start_soon(self._write_view, plan)
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

    async def _write_view(self, plan: ItemPlan) -> None:
        async with anyio.create_task_group() as writers:
            for path, (data, entry) in plan.view.items():
                writers.start_soon(self._session.write, f"{self._item}/{path}", data, entry)

    async def _keep_plan(self, write: ItemWrite, parts: ItemParts) -> None:
        """Keep what the index over all parts of the item needs of this one."""
        if write.unplaced:
            await write.placed.wait()
        parts.plans[self.part] = PartPlan(write.plan.save, write.places, write.files)

    async def _stage_held(self, write: ItemWrite, sources: dict[int, list[Source]]) -> None:
        await self._stage_all(write, sources, self._session.held_stagers)
        self._session.end_staging(self._call)

    async def _stage_all(
        self, write: ItemWrite, sources: dict[int, list[Source]], slots: anyio.Semaphore
    ) -> None:
        """Stage batches in the order of the plan, several at a time.

        Args:
            write: The item.
            sources: By the number of each batch what its chunks are copied from; emptied, so
                that what has been staged is not kept alive.
            slots: Bounds how many batches, of all items, are copied at once.
        """
        async with anyio.create_task_group() as stagers:
            numbers = iter(sorted(sources))
            for _ in range(min(STAGERS, len(sources))):
                stagers.start_soon(self._run_stager, write, numbers, sources, slots)

    async def _run_stager(
        self,
        write: ItemWrite,
        numbers: Iterator[int],
        sources: dict[int, list[Source]],
        slots: anyio.Semaphore,
    ) -> None:
        session, plan = self._session, write.plan.save
        for number in numbers:
            batch = plan.batches[number]
            copies = copies_on_host(batch, plan.leaves) - 1
            nbytes = batch.block_bytes + copies * batch.nbytes
            async with slots:
                block = await session.allocate(nbytes, self._call)
                with session.recorder.phase("stage", batch.nbytes, batch=number):
                    await self.in_thread(
                        stage_batch, batch, plan.leaves, sources.pop(number), block
                    )
            session.hooks.advance(staged=batch.nbytes)
            # Staging never waits for a lane, only for room in the arena.
            write.staged.append(Staged(number, block))
            write.ready.release()

    async def _run_lane(self, write: ItemWrite) -> None:
        session = self._session
        await session.opened()
        for _ in write.turns:
            await write.ready.acquire()
            staged = write.staged.popleft()
            memory = await self._encoded(write, staged)
            async with session.lanes.taken() as lane:
                await self._write_batch(write, lane, staged.number, memory)
            session.free(staged.block)

    async def _encoded(self, write: ItemWrite, staged: Staged) -> Array:
        """Return the bytes of a batch's file; they lie in its block."""
        session, plan = self._session, write.plan.save
        batch, memory = plan.batches[staged.number], staged.block.memory
        if not batch.encoded:
            return memory[: batch.nbytes]
        # The cores are for the copies while the caller waits for them.
        await first_of(self._call.returned, self._call.pressed)
        async with session.encoders:
            with session.recorder.phase("encode", batch.nbytes, batch=staged.number):
                done = await self.in_thread(encode_batch, batch, plan.leaves, memory)
        write.note_encoded(staged.number, done)
        return memory[: done.nbytes]

    async def _write_batch(self, write: ItemWrite, lane: int, number: int, memory: Array) -> None:
        session, plan = self._session, write.plan.save
        attempt = await session.opened()
        batch = plan.batches[number]
        path = f"{self._item}/{write.files[number]}"
        leaf = plan.leaves[batch.chunks[0].leaf].name
        written = anyio.Event()

        async def take_digests() -> None:
            # Not while the caller waits: writing needs no core, this does.
            await first_of(self._call.returned, written)
            with session.recorder.phase("digest", memory.nbytes, lane, number):
                found, entry = await self.in_thread(file_digests, batch, plan.leaves, memory)
            session.files[path] = entry
            # Those of encoded chunks were taken before they were encoded.
            write.note_digests(number, found or write.digests[number])

        phase = session.recorder.phase("write", memory.nbytes, lane, number)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take_digests)
            with located(leaf=leaf), phase:
                await session.storage.write_block(attempt, path, memory.data)
            written.set()
        session.hooks.advance(written=batch.nbytes)
        session.joint.advance(batch.nbytes)

    async def _finish(self, write: ItemWrite, leaves: Sequence[Any]) -> LeafEntries:
        # The entries are made while the last batches are still being written.
        self._call.pressed.set()
        await write.hashed.wait()
        if self._team is not None:
            await write.settled()
            tree = self._session.trees[self._item]
            await self.in_thread(tree.finish, write.digests, write.files, write.places)
        if self._is_shared:
            # The primary makes the entries, once it has been told of the chunks of all processes.
            return LeafEntries([], [], [], 0)
        with located(item=self._item):
            records = await self.in_thread(
                record_leaves, write.plan.save, leaves, write.digests, write.files, write.places
            )
        await write.settled()
        return records


def _with_key_data(leaves: Sequence[Any], keys: Iterable[int]) -> Sequence[Any]:
    """Return the leaves with the data of PRNG keys in their places."""
    found = list(leaves)
    for number in keys:
        found[number] = jax.random.key_data(found[number])
    return found
