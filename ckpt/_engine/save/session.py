"""The session of a save: state that its items share: the attempt, staging memory, write lanes."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import anyio
from anyio.abc import TaskGroup
from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._commit import CommitHooks
from ckpt._engine.engine import BaseStep, Engine, RestoredItem, SavedItem
from ckpt._engine.memory.arena import Block
from ckpt._engine.plan_cache import PlanCache
from ckpt._engine.save.merged_items import ItemParts, WrittenTree
from ckpt._engine.save.save_request import SaveCall
from ckpt._events import EventRecorder
from ckpt._format.manifest_head import FileEntry, digest
from ckpt._plan.item_reports import ItemReport
from ckpt._plan.save_plan import Formatted, SavePlan
from ckpt._runtime.threads import run_in_thread
from ckpt.storage._base import Attempt, Storage

if TYPE_CHECKING:
    from ckpt._engine.chunk_extensions import NotesOfSave
    from ckpt._job.solo import JobSave

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Measured on 2 cores: direct writes of two lanes keep a disk of 2 GB/s busy; four lanes do if each
# write takes longer. Two copying threads saturate the memory of a small machine.
LANES = 4
STAGERS = 2
# Each encoder keeps one core busy and holds a batch in memory.
ENCODERS = max(LANES, min(os.cpu_count() or 1, 16))


class Lanes:
    """The write lanes of one save; their number limits the writes under way."""

    def __init__(self, count: int) -> None:
        """Number the lanes from 0 to `count` - 1."""
        # The lane that has been free for longest is next, so that a trace shows all lanes in use.
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
    """State that the items of one save share.

    Attributes:
        engine: The engine.
        storage: Storage of the root.
        hooks: Hooks of the commit, which report its progress.
        recorder: Recorder of the timed phases.
        plans: Plans of earlier saves.
        tasks: Task group of the save; all that its tasks write is durable when it has ended.
        extensions: What extensions note of the save, by their names.
        created_ns: Unix time in nanoseconds at which the save began.
        processes: The part of this process in the save of its job.
        save: Id of the attempt that the primary has begun, once `attempt_ready` is set.
        attempt_ready: Set when the attempt may be written to.
        attempt: The attempt; it may be written to once `attempt_ready` is set.
        parts: The items so far, if each may arrive in several parts; else None.
        begun: Set when the attempt exists, which may be before it may be written to.
        shares: True if the step may share files with the steps before and after it.
        last: The step before, in the same root, if this process has saved or restored it.
        sharing: Files of the step before that are being shared, each with an event that is set at
            the end.
        saved: Items as this process has written them, by name, for the next save.
        files: Size and digest of every file of the step that this process has written.
        sizes: Size of every file of the step, by any process, once its manifest is written.
        trees: Items whose leaves are divided among the processes of the job.
        formatted: The effect of the format rules on every item that was planned.
        blocks: The staging memory in use.
        elsewhere: Bytes of other memory that count as staging memory.
        lanes: The write lanes, shared by all items.
        computing: Lock that lets one thread at a time compute in Python; see `compute`.
        planning: Lock held while an item is planned, since only one task may use the plan cache.
        stagers: Limit of concurrent copies while the caller waits.
        held_stagers: Limit of concurrent copies after the caller has returned.
        encoders: Limit of batches that are encoded at once.
    """

    engine: Engine
    storage: Storage
    hooks: CommitHooks
    recorder: EventRecorder
    plans: PlanCache
    tasks: TaskGroup
    extensions: Mapping[str, NotesOfSave]
    created_ns: int
    processes: JobSave
    save: str = ""
    parts: dict[str, ItemParts] | None = None
    attempt_ready: anyio.Event = field(default_factory=anyio.Event)
    attempt: Attempt | None = None
    begun: anyio.Event = field(default_factory=anyio.Event)
    shares: bool = False
    last: BaseStep | None = None
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

        Several at a time would be no faster: they would only take the interpreter lock from each
        other, and from the caller's event loop.
        """
        async with self.computing:
            return await run_in_thread(function, *args)

    def end_staging(self, call: SaveCall) -> None:
        """Note that one staging has ended, or that the handlers' calls have returned."""
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
        """Allocate staging memory; it is freed when the save ends, at the latest."""
        if not self.engine.arena.has_room(nbytes):
            call.urgent.set()
        block = await self.engine.arena.allocate(nbytes, held=held)
        self.blocks.append(block)
        return block

    async def write(self, path: str, data: bytes, entry: FileEntry | None = None) -> None:
        """Write a small file of the step and note its size and digest; durable on return."""
        attempt = await self.opened()
        self.files[path] = entry or FileEntry(size=len(data), digest=digest(data))
        await self.storage.write(attempt, path, data)

    def free(self, block: Block) -> None:
        self.blocks.remove(block)
        self.engine.arena.free(block)

    def shrink(self, block: Block, nbytes: int) -> Block:
        """Free the end of a block, and return the rest of it."""
        kept = self.engine.arena.shrink(block, nbytes)
        self.blocks[next(n for n, each in enumerate(self.blocks) if each is block)] = kept
        return kept

    def count_elsewhere(self, most: int) -> int:
        """Count up to `most` bytes of other memory as used, until the save ends at the latest."""
        counted = self.engine.arena.count_elsewhere(most)
        self.elsewhere += counted
        return counted

    def uncount(self, nbytes: int) -> None:
        """Stop counting `nbytes` of other memory."""
        self.elsewhere -= nbytes
        self.engine.arena.uncount(nbytes)

    def free_all(self) -> None:
        """Free all staging memory that is left; no input or output may be under way."""
        while self.blocks:
            self.engine.arena.free(self.blocks.pop())
        self.uncount(self.elsewhere)


# Most time that a caller of save() waits for work that lets it return sooner.
_PATIENCE_SECONDS = 0.05


async def base_item(session: SaveSession, item: str, plan: SavePlan) -> SavedItem | None:
    """Return the item of the step before, if its tree had the same plan; else None.

    `plan` is the plan for all of its chunks.
    """
    known = None if session.last is None else session.last.items.get(item)
    if isinstance(known, RestoredItem):
        return await run_in_thread(known.as_saved, plan)
    return known if known is not None and known.plan is plan else None


async def reuse_files(
    session: SaveSession, item: str, known: SavedItem, wanted: ItemReport
) -> ItemReport | None:
    """Put files of the step before into the attempt.

    Args:
        session: The save.
        item: Name of the item.
        known: The item of the step before.
        wanted: The chunks of it to reuse, as a report; covers all chunks needed from their files.

    Returns:
        The part of `wanted` that is in the attempt now; None for nothing. The rest is to be
        written.
    """
    assert session.last is not None
    damaged = session.engine.damaged
    paths = {full: path for path in wanted.files if (full := f"{item}/{path}") not in damaged}
    # The attempt is begun while the tree is planned. In a job another process begins it, and a
    # process that comes late must not delay the callers in all others.
    with anyio.move_on_after(_PATIENCE_SECONDS):
        await session.begun.wait()
    if session.attempt is None:
        return None
    # Two batches may want the same file.
    awaited = [session.sharing[full] for full in paths if full in session.sharing]
    missing = {
        full: known.files[path].size
        for full, path in paths.items()
        if full not in session.files and full not in session.sharing
    }
    if missing:
        is_over = anyio.Event()
        session.sharing.update(dict.fromkeys(missing, is_over))
        try:
            shared = await session.storage.share(session.attempt, session.last.step_dir, missing)
            for full in shared:
                session.files[full] = replace(known.files[paths[full]], shared=True)
        finally:
            for full in missing:
                del session.sharing[full]
            is_over.set()
    for each in awaited:
        await each.wait()
    found = {path for full, path in paths.items() if full in session.files}
    return wanted.in_files(found) if found else None
