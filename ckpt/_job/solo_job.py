"""The job of a process that has no others, and its root. It imports nothing of jobs of several.

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
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from msgspec import Struct

from ckpt._events import Observer
from ckpt._job.solo_save import SoloSave
from ckpt._steps.restores.restore_options import check_broadcast

if TYPE_CHECKING:
    from ckpt._engine.restore.step_files import Elsewhere
    from ckpt._format.manifest import JsonValue
    from ckpt._job.processes import MultihostJob, SeparateRoots, SharedRoot
    from ckpt._job.shared_reads import Broadcast
    from ckpt._runtime.futures import CallingThread
    from ckpt._runtime.loop import EngineLoop
    from ckpt._settings import BacklogPolicy
    from ckpt._steps.index import IndexedStep, StepIndex
    from ckpt._steps.opened import OpenedStep
    from ckpt._steps.removal.retention import Retention
    from ckpt._steps.removal.trash import StepTrash
    from ckpt.keep._questions import SavedStep

T = TypeVar("T")

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
