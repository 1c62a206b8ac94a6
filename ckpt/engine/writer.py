"""One item on its way out: plan, stage, and hand granules to the write lanes.

Stagers and lanes are tasks of the save's task group. A stager takes the next granule (biggest
first), waits for room in the arena, and copies; a free lane takes the next staged granule and
writes it. So copies from the device overlap writes to the store, and the arena's capacity bounds
the memory of both.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio
import jax
import numpy as np
import tensorstore as ts
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpt.commit import CommitHooks
from ckpt.engine.arena import Arena, Block
from ckpt.engine.lanes import ChunkDigests, Lane, merge_lanes, unstaged_values
from ckpt.engine.staging import copy_granule, view_granule, wait_until_computed
from ckpt.errors import InvalidArgumentError, located
from ckpt.events import Recorder
from ckpt.handlers.base import Deferred
from ckpt.layout.leaves import LeafSpec
from ckpt.layout.plan import Granule, SavePlan, plan_save
from ckpt.layout.records import LeafRecords, record_leaves
from ckpt.manifest import FileEntry
from ckpt.settings import Staging
from ckpt.storage.base import Attempt, Storage

__all__ = ["EngineItemWriter", "PlanCache", "SaveSession"]

T = TypeVar("T")
Array = np.ndarray[Any, Any]

# Measured on 2 cores: 4 lanes write 1.2 times as fast as one, 8 no faster than 4. Two copying
# threads saturate the memory of a small machine.
LANES = 4
STAGERS = 2


@dataclass(slots=True)
class PlanCache:
    """The last plan of every item: a tree of the same structure is planned once."""

    plans: dict[str, tuple[tuple[str, ...], list[LeafSpec], SavePlan]] = field(default_factory=dict)

    def plan(
        self, item: str, names: Sequence[str], specs: Sequence[LeafSpec], budget: int
    ) -> SavePlan:
        """Return the plan of leaves `specs` under `names`, made anew only if they changed."""
        known = self.plans.get(item)
        if known is not None and known[0] == tuple(names) and known[1] == list(specs):
            return known[2]
        plan = plan_save(names, specs, budget)
        self.plans[item] = (tuple(names), list(specs), plan)
        return plan


@dataclass(slots=True)
class SaveSession:
    """What the items of one save share.

    Attributes:
        storage: Where the step goes.
        staging: How arrays are staged.
        arena: The staging memory of the engine.
        context: TensorStore context of the save.
        hooks: The commit to move along.
        recorder: Takes the timed phases.
        plans: Plans of earlier saves.
        tasks: Task group of the save.
        attempt: The attempt, once `attempt_ready` is set.
        files: Size and digest of every file written so far.
    """

    storage: Storage
    staging: Staging
    arena: Arena
    context: ts.Context
    hooks: CommitHooks
    recorder: Recorder
    plans: PlanCache
    tasks: TaskGroup
    attempt_ready: anyio.Event = field(default_factory=anyio.Event)
    attempt: Attempt | None = None
    files: dict[str, FileEntry] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)

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

    async def record_files(self, path: str) -> None:
        """Note size and digest of the files below `path` that are new."""
        attempt = await self.opened()
        found = await self.storage.digests(attempt, path, set(self.files))
        self.files.update(found)

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
    granule: Granule
    arrays: list[Array]
    block: Block | None


@dataclass(slots=True)
class _ItemWrite:
    """The write of one item's leaves, while it is under way."""

    plan: SavePlan
    leaves: Sequence[Any]
    lanes: list[Lane]
    values: list[tuple[str, bytes]]
    digests: ChunkDigests = field(default_factory=dict)
    running: int = 0
    done: anyio.Event = field(default_factory=anyio.Event)


class EngineItemWriter:
    """The engine's `ItemWriter` for one item of one save."""

    def __init__(self, session: SaveSession, item: str) -> None:
        """Write the item called `item`."""
        self._session = session
        self._item = item

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow pure function off the engine's loop."""
        return await anyio.to_thread.run_sync(partial(function, *args))

    async def stage(
        self, names: Sequence[str], specs: Sequence[LeafSpec], leaves: Sequence[Any]
    ) -> Awaitable[LeafRecords]:
        """Stage leaves; see `ItemWriter.stage`."""
        session = self._session
        with session.recorder.phase("plan"):
            budget = session.arena.capacity
            plan = await self.in_thread(session.plans.plan, self._item, names, specs, budget)
        session.hooks.advance(total=plan.nbytes)
        await self.in_thread(wait_until_computed, leaves)

        values = await self.in_thread(unstaged_values, plan.leaves, leaves)
        write = await self._start_lanes(plan, leaves, values)
        # Staging never waits for a lane, only for room in the arena.
        send, receive = anyio.create_memory_object_stream[_Staged](math.inf)
        with receive:
            for lane in write.lanes:
                session.tasks.start_soon(self._run_lane, write, lane, receive.clone())
        with send:
            granules = iter(plan.granules)
            async with anyio.create_task_group() as stagers:
                for _ in range(min(STAGERS, len(plan.granules))):
                    stagers.start_soon(self._run_stager, write, granules, send)
        # What outlives this call must not keep the caller's arrays alive.
        kept = [leaf if not _is_array(leaf) else None for leaf in leaves]
        write.leaves = kept
        return Deferred(partial(self._finish, write, kept))

    def _refuse_too_large(self, granule: Granule, plan: SavePlan) -> None:
        """Raise if a granule could never be staged; the biggest comes first."""
        capacity = self._session.arena.capacity
        if granule.nbytes > capacity:
            leaf = plan.leaves[granule.chunks[0].leaf]
            raise InvalidArgumentError(
                f"the staging budget of {capacity} bytes is too small for one chunk of "
                f"{granule.nbytes} bytes: shards of {leaf.spec.dtype}{list(leaf.spec.shape)} "
                "cannot be cut into smaller equal parts. Give "
                f"Staging(budget_bytes={4 * granule.nbytes}) or more",
                leaf=leaf.name,
            )

    async def _start_lanes(
        self, plan: SavePlan, leaves: Sequence[Any], values: list[tuple[str, bytes]]
    ) -> _ItemWrite:
        # Scalars are written by the first lane, also where there is no array.
        count = max(min(LANES, len(plan.granules)), 1)
        attempt = await self._session.opened()
        lanes = []
        for number in range(count):
            path = self._item if count == 1 else f"{self._item}/lane_0_{number}"
            url = await self._session.storage.database(attempt, path)
            lanes.append(Lane(number, path, url, self._session.context))
        return _ItemWrite(plan, leaves, lanes, values, running=count)

    async def _run_stager(
        self,
        write: _ItemWrite,
        granules: Iterator[Granule],
        send: MemoryObjectSendStream[_Staged],
    ) -> None:
        session = self._session
        for granule in granules:
            if self._by_view(granule, write):
                arrays = await self.in_thread(view_granule, granule, write.leaves)
                staged = _Staged(granule, arrays, None)
            else:
                self._refuse_too_large(granule, write.plan)
                # TensorStore copies the values of packed leaves; the block pays for that copy too.
                copies = 2 if granule.packed else 1
                block = await session.allocate(copies * granule.nbytes)
                with session.recorder.phase("stage", granule.nbytes):
                    arrays = await self.in_thread(
                        copy_granule, granule, write.plan.leaves, write.leaves, block.memory
                    )
                staged = _Staged(granule, arrays, block)
            session.hooks.advance(staged=sum(chunk.nbytes for chunk in granule.chunks))
            await send.send(staged)

    def _by_view(self, granule: Granule, write: _ItemWrite) -> bool:
        """Whether the granule's chunks can stay where they are until they are written."""
        if self._session.staging.copies or granule.packed:
            return False
        # Bools are always copied: any byte but 0 is true in memory, and 0 or 1 is stored.
        return all(
            isinstance(leaf, jax.Array) and leaf.dtype != np.bool_ and _on_cpu(leaf)
            for leaf in (write.leaves[chunk.leaf] for chunk in granule.chunks)
        )

    async def _run_lane(
        self, write: _ItemWrite, lane: Lane, receive: MemoryObjectReceiveStream[_Staged]
    ) -> None:
        session = self._session
        with receive, located(item=self._item):
            if lane.number == 0 and (write.values or not write.plan.granules):
                await lane.write_values(write.values)
            async for staged in receive:
                granule = staged.granule
                with session.recorder.phase("write", granule.nbytes, lane.number):
                    digests = await lane.write(granule, write.plan.leaves, staged.arrays)
                write.digests.update(digests)
                block, staged.block = staged.block, None
                staged.arrays.clear()
                if block is not None:
                    session.free(block)
                session.hooks.advance(written=sum(chunk.nbytes for chunk in granule.chunks))
                # Data files never change once written, and are still in the page cache now.
                await session.record_files(f"{lane.path}/d")
        write.running -= 1
        if not write.running:
            write.done.set()

    async def _finish(self, write: _ItemWrite, leaves: Sequence[Any]) -> LeafRecords:
        await write.done.wait()
        with located(item=self._item):
            return await self._record(write, leaves)

    async def _record(self, write: _ItemWrite, leaves: Sequence[Any]) -> LeafRecords:
        session = self._session
        attempt = await session.opened()
        if len(write.lanes) > 1:
            url = await session.storage.database(attempt, self._item)
            with session.recorder.phase("merge"):
                await merge_lanes(url, session.context, write.lanes)
        await session.record_files(self._item)
        return await self.in_thread(record_leaves, write.plan, leaves, write.digests)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _on_cpu(leaf: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in leaf.devices())
