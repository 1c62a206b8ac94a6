"""One item on its way out: plan, stage, and hand granules to the write lanes.

Stagers and lanes are tasks of the save's task group. A stager takes the next granule (biggest
first), waits for room in the arena, and copies; a free lane takes the next staged granule and
writes it as one data file. So copies from the device overlap writes to the store, and the arena's
capacity bounds the memory of both.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio
import jax
import numpy as np
from anyio.abc import TaskGroup

from ckpt.commit import CommitHooks
from ckpt.engine.arena import Arena, Block
from ckpt.engine.plans import ItemPlan, PlanCache, new_data_file
from ckpt.engine.staging import (
    Source,
    copies_on_host,
    copy_granule,
    granule_digests,
    snapshot,
    sources_of,
    wait_until_computed,
)
from ckpt.errors import located
from ckpt.events import Recorder
from ckpt.handlers.base import Deferred
from ckpt.layout.plan import Granule, LeafPlan
from ckpt.layout.records import LeafRecords, record_leaves
from ckpt.layout.structure import Structure
from ckpt.manifest import FileEntry, digest
from ckpt.settings import Staging
from ckpt.storage.base import Attempt, Storage

__all__ = ["EngineItemWriter", "SaveSession"]

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[np.uint8]]

# Measured on 2 cores: direct writes of two lanes keep a disk of 2 GB/s busy, and four do where each
# write takes longer. Two copying threads saturate the memory of a small machine.
LANES = 4
STAGERS = 2


@dataclass(slots=True)
class SaveSession:
    """What the items of one save share.

    Attributes:
        storage: Where the step goes.
        staging: How arrays are staged.
        arena: The staging memory of the engine.
        hooks: The commit to move along.
        recorder: Takes the timed phases.
        plans: Plans of earlier saves.
        tasks: Task group of the save; what it runs is durable when it has ended.
        created_ns: Unix time in nanoseconds at which the save began.
        on_staged: Called once no more staging memory is needed.
        attempt: The attempt; it may be written to once `attempt_ready` is set.
        returned: Set when the caller of the save does not wait for it any more.
        files: Size and digest of every file of the step.
    """

    storage: Storage
    staging: Staging
    arena: Arena
    hooks: CommitHooks
    recorder: Recorder
    plans: PlanCache
    tasks: TaskGroup
    created_ns: int
    on_staged: Callable[[], None]
    attempt_ready: anyio.Event = field(default_factory=anyio.Event)
    attempt: Attempt | None = None
    returned: anyio.Event = field(default_factory=anyio.Event)
    files: dict[str, FileEntry] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    # What still stages: the handlers' calls, as one, and what goes on behind the caller's back.
    _stagings: int = 1

    def begin_staging(self) -> None:
        """Say that something goes on staging after the handlers' calls have returned."""
        self._stagings += 1

    def end_staging(self) -> None:
        """Say that it has ended, or that the handlers' calls have."""
        self._stagings -= 1
        if not self._stagings:
            self.on_staged()

    async def opened(self) -> Attempt:
        """Return the attempt, waiting until it is there."""
        await self.attempt_ready.wait()
        assert self.attempt is not None
        return self.attempt

    async def allocate(self, nbytes: int) -> Block:
        """Take staging memory that is given back when the save ends, at the latest."""
        block = await self.arena.allocate(nbytes)
        self.blocks.append(block)
        return block

    async def write(self, path: str, data: bytes, entry: FileEntry | None = None) -> None:
        """Write a small file of the step and note size and digest; durable on return."""
        attempt = await self.opened()
        self.files[path] = entry or FileEntry(size=len(data), digest=digest(data))
        await self.storage.write(attempt, path, data)

    def free(self, block: Block) -> None:
        """Give staging memory back."""
        self.blocks.remove(block)
        self.arena.free(block)

    def free_all(self) -> None:
        """Give back what is left; no input or output may be under way."""
        while self.blocks:
            self.arena.free(self.blocks.pop())


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
        staged: Granules that wait for a lane, as many as `ready` counts.
        turns: Handed out to lanes, one for every granule.
        running: Tasks that still write; `durable` is set when there are none.
    """

    plan: ItemPlan
    files: list[str]
    digests: list[list[str]]
    left: int
    turns: Iterator[int]
    staged: deque[_Staged] = field(default_factory=deque)
    ready: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(0))
    running: int = 0
    hashed: anyio.Event = field(default_factory=anyio.Event)
    durable: anyio.Event = field(default_factory=anyio.Event)


class EngineItemWriter:
    """The engine's `ItemWriter` for one item of one save."""

    def __init__(self, session: SaveSession, item: str) -> None:
        """Write the item called `item`."""
        self._session = session
        self._item = item

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow pure function off the engine's loop."""
        return await anyio.to_thread.run_sync(partial(function, *args))

    async def stage(self, structure: Structure) -> Awaitable[LeafRecords]:
        """Stage leaves; see `ItemWriter.stage`."""
        session = self._session
        leaves = structure.leaves
        with session.recorder.phase("plan"):
            budget = session.arena.capacity
            plan = await self.in_thread(session.plans.plan, self._item, structure, budget)
        session.hooks.advance(total=sum(granule.nbytes for granule in plan.save.granules))
        granules = plan.save.granules
        count = len(granules)
        blank: list[list[str]] = [[] for _ in granules]
        write = _ItemWrite(plan, plan.new_data_files(), blank, count, iter(range(count)))
        if not granules:
            write.hashed.set()
        self._start(write, self._write_index, write)
        for lane in range(min(LANES, count)):
            self._start(write, self._run_lane, write, lane)
        with session.recorder.phase("snapshot"):
            held = await self.in_thread(snapshot, granules, leaves, session.staging.mode)
        at_once = {
            number: sources_of(granule, leaves)
            for number, granule in enumerate(granules)
            if number not in held
        }
        # What is held is staged behind the caller's back.
        if held:
            session.begin_staging()
            self._start(write, self._stage_held, write, held)
        await self._stage_all(write, at_once)
        # What outlives this call must not keep the caller's arrays alive.
        kept = [None if _is_array(leaf) else leaf for leaf in leaves]
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
            if plan.index is not None:
                tree_file, name = new_data_file(), uuid.uuid4().bytes
                database = await self.in_thread(
                    plan.index.encode, write.files, tree_file, name, session.created_ns
                )
                writers.start_soon(session.write, f"{self._item}/{tree_file}", database.tree)
                writers.start_soon(session.write, f"{self._item}/manifest.ocdbt", database.manifest)

    async def _stage_held(self, write: _ItemWrite, sources: dict[int, list[Source]]) -> None:
        await self._stage_all(write, sources)
        self._session.end_staging()

    async def _stage_all(self, write: _ItemWrite, sources: dict[int, list[Source]]) -> None:
        """Stage granules in the order of the plan, several at a time.

        Args:
            write: The item.
            sources: By the number of each granule what its chunks are copied from; emptied, so
                that what has been staged is not kept alive.
        """
        async with anyio.create_task_group() as stagers:
            numbers = iter(sorted(sources))
            for _ in range(min(STAGERS, len(sources))):
                stagers.start_soon(self._run_stager, write, numbers, sources)

    async def _run_stager(
        self,
        write: _ItemWrite,
        numbers: Iterator[int],
        sources: dict[int, list[Source]],
    ) -> None:
        session, plan = self._session, write.plan.save
        for number in numbers:
            granule = plan.granules[number]
            block = await session.allocate(copies_on_host(granule, plan.leaves) * granule.nbytes)
            with session.recorder.phase("stage", granule.nbytes, granule=number):
                await self.in_thread(_stage, granule, plan.leaves, sources.pop(number), block)
            session.hooks.advance(staged=granule.nbytes)
            # Staging never waits for a lane, only for room in the arena.
            write.staged.append(_Staged(number, block))
            write.ready.release()

    async def _run_lane(self, write: _ItemWrite, lane: int) -> None:
        session = self._session
        await session.opened()
        for _ in write.turns:
            await write.ready.acquire()
            staged = write.staged.popleft()
            await self._write_granule(write, lane, staged.number, staged.block)
            session.free(staged.block)

    async def _write_granule(self, write: _ItemWrite, lane: int, number: int, block: Block) -> None:
        session, plan = self._session, write.plan.save
        attempt = await session.opened()
        granule = plan.granules[number]
        memory = block.memory[: granule.nbytes]
        path = f"{self._item}/{write.files[number]}"
        leaf = plan.leaves[granule.chunks[0].leaf].name
        written = anyio.Event()

        async def take_digests() -> None:
            # Not while the caller waits: writing needs no core, this does.
            await _first_of(session.returned, written)
            with session.recorder.phase("digest", granule.nbytes, lane, number):
                found, entry = await self.in_thread(_digests, granule, plan.leaves, memory)
            session.files[path] = entry
            write.digests[number] = found
            write.left -= 1
            if not write.left:
                write.hashed.set()

        phase = session.recorder.phase("write", granule.nbytes, lane, number)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take_digests)
            with located(leaf=leaf), phase:
                await session.storage.write_block(attempt, path, memory.data)
            written.set()
        session.hooks.advance(written=granule.nbytes)

    async def _finish(self, write: _ItemWrite, leaves: Sequence[Any]) -> LeafRecords:
        # The entries are made while the last granules are still being written.
        await write.hashed.wait()
        with located(item=self._item):
            records = await self.in_thread(
                record_leaves, write.plan.save, leaves, write.digests, write.files
            )
        await write.durable.wait()
        return records


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
    copy_granule(granule, plans, sources, block.memory[: granule.nbytes])


def _digests(
    granule: Granule, plans: Sequence[LeafPlan], memory: Array
) -> tuple[list[str], FileEntry]:
    """Return the digests of the chunks of a granule, and the entry of its file."""
    found = granule_digests(granule, plans, memory)
    first = granule.chunks[0]
    is_whole = first.nbytes == granule.nbytes
    return found, FileEntry(
        size=granule.nbytes, digest=found[0] if is_whole else digest(memory.data)
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)
