"""A process that is alone: at its root, and in a save.

The job of a process that has no others, and its root. It imports nothing of jobs of several.
`ProcessJob` is what a manager or a one-shot call knows of its processes, and `Processes` the same
at one root. What differs between one process and several is in their methods: the rest never asks.

                  OneProcess    SharedRoot                   SeparateRoots
                  one process   several, one root            several, a root each
    open          here          on the primary               on each
    begin         here          on the primary               on each
    steps         all           all                          those that every process has
    decided       here          on the primary               on each, from what all have
    judged        all           all                          those that every process has
    restoring     finds         the primary finds            all find what they have in common
    on_step       here          on the primary               on each, if all have the step
    everywhere    here          on the primary               on each, all or none
    delete        here          on the primary               on each that has the step
    tidy          here          on the primary               never: not all have the same steps
    save          SoloSave      MultihostSave: one manifest  MultihostSave: a manifest each

The save of a process that has no others, with the methods of `MultihostSave`. `JobSave` is the part
that a process takes in a save, and `ItemShare` its part of one item. What differs between one
process and several is in their methods, so that the flow of a save never asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import anyio
from msgspec import Struct

from ckpt._engine.save.merged_items import entry_of
from ckpt._engine.save.publication import give_name, write_manifest
from ckpt._events import Observer
from ckpt._plan.save_plan import WHOLE
from ckpt._steps.restore_options import check_broadcast

if TYPE_CHECKING:
    from ckpt._engine.restore.step_files import Elsewhere
    from ckpt._engine.save.item_write import ItemWrite
    from ckpt._engine.save.merged_items import WrittenTree
    from ckpt._engine.save.save_request import SaveRequest
    from ckpt._engine.save.session import SaveSession
    from ckpt._format.manifest import ItemEntry, JsonValue, Manifest
    from ckpt._job.multihost_save import MultihostSave
    from ckpt._job.processes import MultihostJob, SeparateRoots, SharedRoot
    from ckpt._job.publication import DiskItem, ProcessItem, SharedItem
    from ckpt._job.shared_reads import Broadcast
    from ckpt._runtime.futures import CallingThread
    from ckpt._runtime.loop import EngineLoop
    from ckpt._settings import BacklogPolicy
    from ckpt._steps.index import IndexedStep, StepIndex
    from ckpt._steps.opened import OpenedStep
    from ckpt._steps.removal.deletion_plan import StepTrash
    from ckpt._steps.removal.retention import Retention
    from ckpt.keep._questions import SavedStep
    from ckpt.storage._base import Attempt, Storage

T = TypeVar("T")
# Returns the failure of an earlier save that is to be raised, or None; each failure only once.
Take = Callable[[], BaseException | None]
# Returns the reason to refuse a save, or None.
Ask = Callable[[], Awaitable[str | None]]
# Begin an attempt; join the attempt with the given id.
Begin = Callable[[], Awaitable["Attempt"]]
Join = Callable[[str], Awaitable["Attempt"]]
# The request of a save as it is to be saved; the step directories that it replaces under other
# names; and True if the call waits for the end of the save, which may be skipped as equal.
Cleared = tuple["SaveRequest", list[str], bool]
Clear = Callable[["SaveRequest"], Awaitable[Cleared]]
# Writes a file of an item, whose path is given.
Write = Callable[[str], Awaitable[None]]


class StartedSave(Struct, frozen=True):
    """A save that has begun.

    Attributes:
        attempt: The attempt that this process writes to.
        save: Id of the attempt that the primary has begun; the same on all processes.
        created_ns: Start time of that attempt, in Unix nanoseconds.
    """

    attempt: Attempt
    save: str
    created_ns: int


class SoloSave(Struct, frozen=True):
    """The save of a process that has no others: it shares nothing and waits for no process.

    Attributes:
        budget_bytes: The staging budget.
        process: Number of this process.
        count: Number of processes.
        publishes: True: this process begins the attempt, and publishes it.
    """

    budget_bytes: int
    process: int = 0
    count: int = 1
    publishes: bool = True

    def taking_part(self, *, may_refuse: bool = False) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def busy(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def advance(self, nbytes: int) -> None:
        """Do nothing, since no process waits."""

    async def heed(self, take: Take, *, in_doubt: bool) -> None:
        """Raise the failure of an earlier save, if `take` returns one."""
        failure = take()
        if failure is not None:
            raise failure

    async def refusal(self, ask: Ask) -> str | None:
        """Return the reason to refuse the save, or None."""
        return await ask()

    async def cleared(self, storage: Storage, request: SaveRequest, clear: Clear) -> Cleared:
        """Make way for the save in its root, by `clear`."""
        return await clear(request)

    async def begin(self, begin: Begin, join: Join, created_ns: int) -> StartedSave:
        attempt = await begin()
        return StartedSave(attempt, attempt.id, created_ns)

    def item(self, name: str, *, per_process: bool) -> SoloItem:
        """Return the part that this process takes in one item: all of it."""
        return SoloItem()

    async def publish(
        self, session: SaveSession, request: SaveRequest, entries: Mapping[str, ItemEntry]
    ) -> Manifest:
        """Write the manifest, and publish the step."""
        with session.recorder.phase("record"), session.hooks.watch.taking("merged"):
            manifest = await write_manifest(session, request, entries)
        with session.recorder.phase("publish"), anyio.CancelScope(shield=True):
            await give_name(session, request, manifest)
        return manifest

    async def if_publishing(self, act: Callable[[], Awaitable[None]]) -> None:
        """Call `act`: this process publishes the save."""
        await act()

    async def discard(self, storage: Storage, attempt: Attempt) -> None:
        """Remove an attempt that is not published."""
        await storage.discard(attempt)

    async def settle(self, error: BaseException) -> BaseException:
        return error

    def was_heard(self, error: BaseException) -> bool:
        """Return False: no other process has raised the error of an earlier save."""
        return False

    def is_raised_later(self, error: BaseException) -> bool:
        """Return False: the call raises the error of its save if it has not returned."""
        return False


class SoloItem:
    """One item of a save, all of which this process writes.

    Attributes:
        division: The plan has all of it.
    """

    division = WHOLE

    async def write_file(self, path: str, write: Write) -> None:
        """Write a file of the item, by `write`."""
        await write(path)

    async def stage(
        self, session: SaveSession, write: ItemWrite, written: WrittenTree, leaves: Sequence[Any]
    ) -> None:
        """Stage the leaves of the tree, and start what else is written of it."""
        write.start(write.write_sidecars)
        await write.stage(leaves)

    def filled(self, entry: ItemEntry, written: WrittenTree) -> ItemEntry:
        """Return the entry with the leaves of the item, which are all written."""
        assert written.report is not None
        return entry_of(entry, written.tree, [written.report])


if TYPE_CHECKING:
    JobSave: TypeAlias = SoloSave | MultihostSave
    ItemShare: TypeAlias = SoloItem | SharedItem | DiskItem | ProcessItem


Act = Callable[[], Awaitable["JsonValue"]]
Do = Callable[[], Awaitable[None]]
# By step, the reason against it; an empty text for no reason.
Reasons = dict[int, str]
# Reads the steps of a disk in the form that policies take.
See = Callable[[Mapping[int, "IndexedStep"]], Awaitable[list["SavedStep"]]]
# Returns the reason against a step; an empty text for no reason.
Judge = Callable[["SavedStep"], str]


class FoundStep(Struct, frozen=True):
    """The step that all processes restore.

    Attributes:
        opened: The step, as this process has opened it.
        elsewhere: Finds copies of the step in other places; None if there are none to be read.
        broadcast: The exchange of read bytes; None if each process reads what it needs.
    """

    opened: OpenedStep
    elsewhere: Elsewhere | None = None
    broadcast: Broadcast | None = None


class SoloJob(Struct, frozen=True):
    """The job of a process that has no others.

    Attributes:
        budget_bytes: The staging budget.
    """

    budget_bytes: int

    def at(self, index: StepIndex, backlog: BacklogPolicy) -> OneProcess:
        """Return the process at the root of `index`."""
        return OneProcess(index, self.budget_bytes)

    def one_shot(self, step_dir: str) -> SoloSave:
        """Return the part that this process takes in a save without a manager."""
        return SoloSave(self.budget_bytes)


class OneProcess(Struct, frozen=True):
    """A single process at its root.

    Attributes:
        steps: The steps that count.
        budget_bytes: The staging budget.
        process: Number of this process in its job.
        count: Number of processes.
        observers: Observers of the phases of a restore, beside the engine's.
    """

    steps: StepIndex
    budget_bytes: int
    process: int = 0
    count: int = 1
    observers: tuple[Observer, ...] = ()

    async def open(self, act: Do) -> None:
        await act()

    begin = open
    tidy = open

    async def decided(self, kind: str, what: str, act: Act) -> JsonValue:
        return await act()

    async def judged(self, see: See, judge: Judge) -> Reasons:
        """Return the reasons of `judge` against the steps that `see` reads."""
        return judgements(await see(await self.steps.refresh()), judge)

    def found_here(self, found: list[T]) -> list[T]:
        """Return all of it: what this process alone has found is all that is known."""
        return found

    @contextlib.asynccontextmanager
    async def restoring(
        self,
        step: int | None,
        opened: OpenedStep | None,
        broadcast_bytes: int | None,
        caller: CallingThread,
        elsewhere: Elsewhere | None,
    ) -> AsyncIterator[FoundStep]:
        """Find `step`, or the latest one, for the body to restore; `opened` is the known step."""
        check_broadcast(broadcast_bytes)
        yield FoundStep(opened or await self.steps.found(step), elsewhere)

    async def on_primary(self, kind: str, step: int, what: str, act: Act) -> JsonValue:
        return await act()

    on_step = on_primary
    everywhere = on_primary

    async def delete(self, kind: str, step: int, what: str, act: Act, idle: Do) -> JsonValue:
        """Call `act`, which waits until no save is under way."""
        return await act()

    async def undelete(self, step: int, trash: StepTrash) -> None:
        await restore_from_trash(step, trash)

    async def deletion_plan(self, saved: int, retention: Retention) -> None:
        """Return None: the retention makes the plan itself."""

    def save(self, kind: str, what: str) -> SoloSave:
        """Return the part that this process takes in a save."""
        return SoloSave(self.budget_bytes)

    def save_in_parts(self, step: int) -> SoloSave:
        """Return the save of a step over several calls."""
        return SoloSave(self.budget_bytes)

    def withdraw(self, loop: EngineLoop, kind: str, what: str, error: Exception) -> None:
        """Do nothing: no process waits for a save that cannot begin."""


def judgements(steps: Sequence[SavedStep], judge: Judge) -> Reasons:
    return {each.step: judge(each) for each in steps}


async def restore_from_trash(step: int, trash: StepTrash) -> None:
    """Take back the save of this step that was deleted last."""
    found = await trash.saves_of(step)
    if not found:
        raise await trash.missing(step)
    await trash.undelete(step, found[-1])


if TYPE_CHECKING:
    ProcessJob: TypeAlias = SoloJob | MultihostJob
    Processes: TypeAlias = OneProcess | SharedRoot | SeparateRoots
