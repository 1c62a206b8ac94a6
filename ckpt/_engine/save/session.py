"""The session of a save: what its items share, such as the attempt, staging memory, write lanes."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Set
from typing import TypeVar, TypeVarTuple

import anyio
from anyio.abc import TaskGroup
from msgspec import Struct, field

from ckpt._commit import CommitHooks
from ckpt._engine.last_save import LastSave, SavedItem
from ckpt._engine.memory.arena import Arena, Block
from ckpt._engine.plan_cache import PlanCache
from ckpt._engine.save.joint.multihost import JointSave
from ckpt._engine.save.merged_items import ItemParts, WrittenTree
from ckpt._engine.save.request import SaveCall
from ckpt._engine.signs.kernels import Kernels
from ckpt._events import EventRecorder
from ckpt._format.digests import digest
from ckpt._format.manifest_head import FileEntry
from ckpt._plan.format_rules import Formatted
from ckpt._plan.unchanged.frozen_leaves import FrozenLeaves
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import Staging, VitalSignsMode
from ckpt.storage._base import Attempt, Storage

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

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
        # The lane that has been free for longest is next, so that a picture shows all in use.
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


class SaveSession(Struct):
    """What the items of one save share.

    Attributes:
        storage: Where the step goes.
        staging: How arrays are staged.
        arena: The staging memory of the engine.
        hooks: The commit to move along.
        recorder: Takes the timed phases.
        plans: Plans of earlier saves.
        tasks: Task group of the save; what it runs is durable when it has ended.
        vital_signs: Where the vital signs of arrays are taken.
        kernels: What takes them on devices.
        frozen: The leaves that are said not to change.
        created_ns: Unix time in nanoseconds at which the save began.
        processes: The other processes of the job that save the same step.
        save: Id of the attempt that the primary has begun, once `attempt_ready` is set.
        attempt: The attempt; it may be written to once `attempt_ready` is set.
        parts: The items so far, if each may arrive in several parts; else None.
        begun: Set when the attempt is there, which may be before it may be written to.
        shares: Whether the step may have files in common with those before and after it.
        last: The step before, in the same root, if this process has saved or restored it.
        damaged: As of `Engine`, also what is found while this save goes on.
        writes_later: As of `Engine`.
        sharing: Files of that step that are being put into this one; set when that is over.
        saved: By item what this process has written, for the save after this one.
        files: Size and digest of every file of the step that this process has written.
        sizes: Size of every file of the step, by whichever process, once its manifest is written.
        trees: Items whose leaves are divided among the processes of the job.
        formatted: What the formats came to, for every item that was planned.
        blocks: The staging memory in use.
        elsewhere: Bytes of other memory that count as staging memory.
        lanes: The write lanes, shared by all items.
        computing: Lets one thread at a time compute in Python; see `compute`.
        planning: Held while an item is planned: the plan cache is used by one at a time.
        stagers: Bounds the copying while the caller waits.
        held_stagers: Bounds the copying after the caller has returned.
        encoders: Bounds how many batches are encoded at once.
    """

    storage: Storage
    staging: Staging
    arena: Arena
    hooks: CommitHooks
    recorder: EventRecorder
    plans: PlanCache
    tasks: TaskGroup
    vital_signs: VitalSignsMode
    kernels: Kernels
    frozen: FrozenLeaves
    created_ns: int
    processes: JointSave
    save: str = ""
    parts: dict[str, ItemParts] | None = None
    attempt_ready: anyio.Event = field(default_factory=anyio.Event)
    attempt: Attempt | None = None
    begun: anyio.Event = field(default_factory=anyio.Event)
    shares: bool = False
    last: LastSave | None = None
    damaged: Set[str] = frozenset()
    writes_later: bool = False
    sharing: dict[str, anyio.Event] = field(default_factory=dict)
    saved: dict[str, SavedItem] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    trees: dict[str, WrittenTree] = field(default_factory=dict)
    formatted: list[Formatted] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    elsewhere: int = 0
    lanes: Lanes = field(default_factory=lambda: Lanes(LANES))
    computing: anyio.Lock = field(default_factory=anyio.Lock)
    planning: anyio.Lock = field(default_factory=anyio.Lock)
    stagers: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(STAGERS))
    held_stagers: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(STAGERS))
    encoders: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(ENCODERS))

    async def compute(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function that computes in Python for long in a thread, one at a time.

        Several would be no faster: they would only take the interpreter lock from each other, and
        from the caller's event loop.
        """
        async with self.computing:
            return await run_in_thread(function, *args)

    def begin_staging(self, call: SaveCall) -> None:
        """Note that staging goes on after the handlers' calls have returned."""
        call.stagings += 1

    def end_staging(self, call: SaveCall) -> None:
        """Note that this has ended, or that the handlers' calls have returned."""
        call.stagings -= 1
        if not call.stagings:
            self.hooks.watch.note(staged=self.hooks.watch.elapsed)
            call.on_staged()

    async def opened(self) -> Attempt:
        """Return the attempt, once it may be written to."""
        await self.attempt_ready.wait()
        assert self.attempt is not None
        return self.attempt

    async def allocate(self, nbytes: int, call: SaveCall, *, held: bool = False) -> Block:
        """Take staging memory; it is given back when the save ends, at the latest."""
        if not self.arena.has_room(nbytes):
            call.pressed.set()
        block = await self.arena.allocate(nbytes, held=held)
        self.blocks.append(block)
        return block

    async def write(self, path: str, data: bytes, entry: FileEntry | None = None) -> None:
        """Write a small file of the step and note its size and digest; durable on return."""
        attempt = await self.opened()
        self.files[path] = entry or FileEntry(size=len(data), digest=digest(data))
        await self.storage.write(attempt, path, data)

    def free(self, block: Block) -> None:
        """Give staging memory back."""
        self.blocks.remove(block)
        self.arena.free(block)

    def shrink(self, block: Block, nbytes: int) -> Block:
        """Give the end of a block back, and return what is left of it."""
        kept = self.arena.shrink(block, nbytes)
        self.blocks[next(n for n, each in enumerate(self.blocks) if each is block)] = kept
        return kept

    def count_elsewhere(self, most: int) -> int:
        """Count up to so many bytes of other memory, at the latest until the save ends."""
        counted = self.arena.count_elsewhere(most)
        self.elsewhere += counted
        return counted

    def uncount(self, nbytes: int) -> None:
        """Count so many bytes of other memory no more."""
        self.elsewhere -= nbytes
        self.arena.uncount(nbytes)

    def free_all(self) -> None:
        """Give back what is left; no input or output may be under way."""
        while self.blocks:
            self.arena.free(self.blocks.pop())
        self.uncount(self.elsewhere)
