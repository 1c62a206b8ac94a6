"""What the items of one save share: the attempt, the staging memory, the write lanes."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskGroup

from ckpt._commit import CommitHooks
from ckpt._engine.memory.arena import Arena, Block
from ckpt._engine.plan_cache import PlanCache
from ckpt._engine.save.item_parts import ItemParts
from ckpt._engine.save.multihost import MultihostSave
from ckpt._engine.save.sharded_items import TreeWrite
from ckpt._events import EventRecorder
from ckpt._format.digests import digest
from ckpt._format.manifest import FileEntry
from ckpt._plan.format_rules import Formatted
from ckpt._settings import Staging
from ckpt.storage._base import Attempt, Storage

__all__ = ["ENCODERS", "LANES", "STAGERS", "Lanes", "SaveCall", "SaveSession"]

# Measured on 2 cores: direct writes of two lanes keep a disk of 2 GB/s busy, and four do where each
# write takes longer. Two copying threads saturate the memory of a small machine.
LANES = 4
STAGERS = 2
# Each keeps one core busy and holds a batch in memory.
ENCODERS = max(LANES, min(os.cpu_count() or 1, 16))


class Lanes:
    """The write lanes of one save: as many writes as there are lanes may be under way."""

    def __init__(self, count: int) -> None:
        """Number the lanes from 0 to `count` - 1."""
        # The one that has been free for longest is next, so that a picture shows all in use.
        self._free = deque(range(count))
        self._slots = anyio.Semaphore(count)

    @contextlib.asynccontextmanager
    async def taken(self) -> AsyncIterator[int]:
        """Wait for a lane and hold it for the body."""
        async with self._slots:
            lane = self._free.popleft()
            try:
                yield lane
            finally:
                self._free.append(lane)


def _do_nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class SaveCall:
    """What one call saves, and how far that is; an ordinary save is a single one.

    Attributes:
        items: The objects by item name. Emptied when staging begins.
        unnamed: Whether the caller gave one object without a name.
        on_safe: Called once the caller may change or donate everything it passed.
        on_staged: Called once no more staging memory is needed.
        began: When the call was made, by `time.perf_counter`.
        returned: Set when the caller does not wait for it any more.
        pressed: Set when memory is waited for, or an item to be durable: nothing is put off then.
    """

    items: dict[str, Any]
    unnamed: bool
    on_safe: Callable[[], None]
    on_staged: Callable[[], None] = _do_nothing
    began: float = field(default_factory=time.perf_counter)
    returned: anyio.Event = field(default_factory=anyio.Event)
    pressed: anyio.Event = field(default_factory=anyio.Event)
    # What still stages: the handlers' calls, as one, and what goes on behind the caller's back.
    stagings: int = 1


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
        joint: The other processes of the job that save the same step.
        save: Id of the attempt that the primary has begun, once `attempt_ready` is set.
        attempt: The attempt; it may be written to once `attempt_ready` is set.
        parts: The items so far, where each may arrive in several parts; else None.
        files: Size and digest of every file of the step that this process has written.
        trees: Items whose leaves are shared out over the processes of the job.
        formatted: What the formats came to, for every item that was planned.
        lanes: The write lanes, shared by all items.
        planning: Held while an item is planned, since the plans are for one at a time.
        stagers: Bounds the copying while the caller waits; `held_stagers` that behind its back.
        encoders: Bounds how many batches are encoded at once.
    """

    storage: Storage
    staging: Staging
    arena: Arena
    hooks: CommitHooks
    recorder: EventRecorder
    plans: PlanCache
    tasks: TaskGroup
    created_ns: int
    joint: MultihostSave
    save: str = ""
    parts: dict[str, ItemParts] | None = None
    attempt_ready: anyio.Event = field(default_factory=anyio.Event)
    attempt: Attempt | None = None
    files: dict[str, FileEntry] = field(default_factory=dict)
    trees: dict[str, TreeWrite] = field(default_factory=dict)
    formatted: list[Formatted] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    lanes: Lanes = field(default_factory=lambda: Lanes(LANES))
    planning: anyio.Lock = field(default_factory=anyio.Lock)
    stagers: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(STAGERS))
    held_stagers: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(STAGERS))
    encoders: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(ENCODERS))

    def begin_staging(self, call: SaveCall) -> None:
        """Say that something goes on staging after the handlers' calls have returned."""
        call.stagings += 1

    def end_staging(self, call: SaveCall) -> None:
        """Say that it has ended, or that the handlers' calls have."""
        call.stagings -= 1
        if not call.stagings:
            self.hooks.watch.note(staged=self.hooks.watch.elapsed)
            call.on_staged()

    async def opened(self) -> Attempt:
        """Return the attempt, waiting until it is there."""
        await self.attempt_ready.wait()
        assert self.attempt is not None
        return self.attempt

    async def allocate(self, nbytes: int, call: SaveCall) -> Block:
        """Take staging memory that is given back when the save ends, at the latest."""
        if not self.arena.has_room(nbytes):
            call.pressed.set()
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
