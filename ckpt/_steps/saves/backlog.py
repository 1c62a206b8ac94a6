"""`Backlog`: the queue of saves; it decides which save may stage, write, wait or be given up.

A `SaveRun` is one save in it, from its call to its end.

The queue is bounded: one save writes, and at most one more waits with its snapshot taken, so that a
save blocks its caller for the copy and not for the commit before it. Saves are published in the
order of their calls. Used on the engine's loop only.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from enum import IntEnum, auto
from typing import Any

import anyio

from ckpt._commit import Commit, CommitHooks
from ckpt._engine.save.save_request import SaveRequest
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._settings import BacklogPolicy
from ckpt._steps.saves.commits import OpenCommits
from ckpt.errors import CommitCancelledError, DeadlineExceededError

# One save writes and one waits. With more slots, a program that saves faster than its disk writes
# would only block later, with more memory in use.
_SLOTS = 2


class SaveStage(IntEnum):
    """How far a save has come; later stages are greater.

    While it is staged and written, the attempt is opened. It is written to once all earlier saves
    have left the backlog.
    """

    # The call has not yet looked for errors of earlier saves, which it would raise.
    CALLED = auto()
    # It waits until earlier calls are decided, then for policy and backlog.
    HEEDED = auto()
    # Policy and backlog agree; it waits for room to stage.
    QUEUED = auto()
    # It has room to stage; the call waits for the snapshot.
    STAGING = auto()
    # The call has returned. Held arrays are still brought to host memory.
    HELD = auto()
    # Everything is in host memory, and the next save may stage.
    WRITING = auto()
    # The step has its name; older steps are being deleted.
    PUBLISHED = auto()
    DONE = auto()
    # It was refused or superseded, or the step is there already.
    SKIPPED = auto()
    # It failed or was cancelled.
    FAILED = auto()


_ENDS = {SaveStage.SKIPPED, SaveStage.FAILED}
# The stages that may follow each one; the others are ends.
NEXT_STAGES: dict[SaveStage, set[SaveStage]] = {
    SaveStage.CALLED: {SaveStage.HEEDED, SaveStage.FAILED},
    SaveStage.HEEDED: {SaveStage.QUEUED, *_ENDS},
    SaveStage.QUEUED: {SaveStage.STAGING, *_ENDS},
    SaveStage.STAGING: {SaveStage.HELD, SaveStage.WRITING, *_ENDS},
    SaveStage.HELD: {SaveStage.WRITING, *_ENDS},
    SaveStage.WRITING: {SaveStage.PUBLISHED, *_ENDS},
    SaveStage.PUBLISHED: {SaveStage.DONE},
}


class SaveRun:
    """One save, from its call to its end. Used on the engine's loop once it was submitted.

    Attributes:
        step: The step, or None for a one-shot checkpoint.
        step_dir: Its directory.
        stage: The present stage.
        commit: The commit that the caller gets.
        hooks: The engine's side of the commit.
        returned: Done once the caller may change or donate its arguments; holds the error that the
            call itself must raise.
        waits_for_end: True if the call returns only when the save has ended.
        give_up: Asks the save to end.
        kept_seconds: For a save at preemption, the time since the save before it, or the run,
            began; such a save is never superseded.
        superseded_by: Step of the newer save for which this one was given up, or None.
    """

    def __init__(self, request: SaveRequest, check_caller: Callable[[], None]) -> None:
        """Make a save that was called just now; see `Commit` for `check_caller`."""
        jobs: list[Job[None]] = []
        self.step: int | None = request.step
        self.step_dir: str = request.step_dir
        self.stage: SaveStage = SaveStage.CALLED
        self.commit: Commit = Commit(
            request.step, lambda: jobs[0].cancel(), check_caller, request.items
        )
        self.hooks: CommitHooks = CommitHooks(self.commit)
        self.returned: Future[None] = Future()
        self.waits_for_end = False
        self.give_up: Callable[[], None] = lambda: None
        self.kept_seconds: float | None = None
        self.superseded_by: int | None = None
        self._jobs = jobs

    def submit(
        self,
        loop: EngineLoop,
        commits: OpenCommits,
        where: str,
        work: Callable[..., Awaitable[None]],
        *args: Any,
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Begin the save on the engine's loop; `commits` reports its error.

        Returns:
            The commit, the job behind it, and `returned`.
        """
        commits.adopt(self.hooks, where)
        try:
            self._jobs.append(loop.submit(work, *args))
        except BaseException:
            commits.drop(self.hooks)
            raise
        return self.commit, self._jobs[0], self.returned

    def enter(self, stage: SaveStage) -> None:
        """Go on to the next stage."""
        if stage not in NEXT_STAGES.get(self.stage, ()):
            raise AssertionError(f"a save that is {self.stage.name} cannot become {stage.name}")
        self.stage = stage

    def snapshot_taken(self) -> None:
        """Note that the caller may change or donate its arguments."""
        if self.stage is SaveStage.STAGING:
            self.enter(SaveStage.HELD)
        if not self.waits_for_end:
            self.returned.set_result(None)

    def let_return(self) -> None:
        """Let the call return without an error, if it still waits."""
        if not self.returned.done():
            self.returned.set_result(None)

    def fail(
        self, error: BaseException, request: SaveRequest, commits: OpenCommits, newest: int | None
    ) -> None:
        """Give the error to the call that waits for its snapshot, else to the commit."""
        self.enter(SaveStage.FAILED)
        if not isinstance(error, Exception):
            error = CommitCancelledError(
                "the save was cancelled; nothing of it is left", step=request.step
            )
        elif isinstance(error, DeadlineExceededError):
            # The frames of the error explain nothing, and would keep the staged data alive as long
            # as the commit.
            error.__traceback__ = error.__context__ = None
        commits.fail(self.hooks, error, returned=self.returned.done(), newest=newest)
        if not self.returned.done():
            self.returned.set_exception(error)
        # A commit that waits for its error to be fetched must not keep the arrays alive.
        request.items.clear()

    def skip(self, reason: str, request: SaveRequest, commits: OpenCommits) -> None:
        """End the save without a step."""
        self.enter(SaveStage.SKIPPED)
        commits.drop(self.hooks)
        request.items.clear()
        self.hooks.skip(reason)
        self.let_return()


class Backlog:
    """The saves of one root that are under way, in the order of their calls."""

    def __init__(self, policy: BacklogPolicy) -> None:
        self._policy = policy
        # The saves that have joined and have not left.
        self._queue: list[SaveRun] = []
        # Set and replaced whenever a save changes, so that every waiter checks its condition again.
        self._changed = anyio.Event()
        # The saves that are not decided yet, in the order of their calls.
        self._undecided: list[SaveRun] = []

    def called(self, save: SaveRun) -> None:
        """Note that `save` was called; `decided` must follow, however the save ends."""
        self._undecided.append(save)

    @contextlib.asynccontextmanager
    async def deciding(self, save: SaveRun) -> AsyncIterator[None]:
        """Run the body, which decides about `save`, after all earlier calls are decided.

        All processes of a job thus queue their saves in the same order: otherwise two processes
        could write in different orders, and wait for each other.
        """
        await self._until(lambda: self._undecided[0] is save)
        yield
        self.decided(save)

    def decided(self, save: SaveRun) -> None:
        """Note that `save` has joined, or will not join. Idempotent."""
        if save in self._undecided:
            self._undecided.remove(save)
            self._wake()

    @property
    def is_empty(self) -> bool:
        return not self._queue

    @property
    def steps(self) -> list[int]:
        """The steps of all saves that have joined and have not left."""
        return [each.step for each in self._queue if each.step is not None]

    def refusal(self) -> str | None:
        """Return why a save that is called now is refused, or None if it is accepted."""
        if self._policy != "skip" or not self._queue:
            return None
        return f"step {self._queue[0].step} is still being saved (backlog='skip')"

    def join(self, save: SaveRun) -> None:
        """Append a save to the queue; `leave` must follow, however it ends."""
        save.enter(SaveStage.QUEUED)
        if self._policy == "supersede":
            for other in self._queue[1:]:
                # The first save writes already and goes on, so that the queue never starves.
                if other.superseded_by is None and other.kept_seconds is None:
                    other.superseded_by = save.step
                    other.give_up()
        self._queue.append(save)

    async def admitted(self, save: SaveRun) -> None:
        """Wait until the save may stage: there is room, and no earlier save is still staging.

        Cancellation leaves the save as it is.
        """
        await self._until(lambda: self._may_stage(save))
        save.enter(SaveStage.STAGING)

    def staged(self, save: SaveRun) -> None:
        """Note that the save needs no more staging memory; the next one may stage."""
        save.enter(SaveStage.WRITING)
        self._wake()

    async def first(self, save: SaveRun) -> None:
        """Wait until the save may write: all earlier saves have left."""
        await self._until(lambda: self._queue[0] is save)

    def leave(self, save: SaveRun) -> bool:
        """Take the save out of the queue; return False if it had not joined."""
        if save not in self._queue:
            return False
        self._queue.remove(save)
        self._wake()
        return True

    async def idle(self) -> None:
        """Wait until every save that has joined so far has left."""
        joined = list(self._queue)
        await self._until(lambda: not any(save in self._queue for save in joined))

    def before(self, save: SaveRun) -> list[SaveRun]:
        """Return the saves that joined before `save` and have not left."""
        return self._queue[: self._queue.index(save)]

    def _may_stage(self, save: SaveRun) -> bool:
        before = self.before(save)
        return len(before) < _SLOTS and all(each.stage >= SaveStage.WRITING for each in before)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
