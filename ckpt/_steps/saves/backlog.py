"""`Backlog`: the queue of saves; it decides which save may stage, write, wait or be given up.

A `SaveRun` is one save in it, from its call to its end.

The queue is bounded: one save writes, and at most one more waits with its snapshot taken, so that a
save blocks its caller for the copy and not for the commit before it. Saves are published in the
order of their calls. Used on the engine's loop only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import anyio

from ckpt._commit import Commit, CommitHooks
from ckpt._engine.save.save_request import SaveRequest
from ckpt._events import EventRecorder, Observer
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._settings import BacklogPolicy
from ckpt._steps.saves.commits import OpenCommits
from ckpt.errors import CheckpointError, CommitCancelledError, DeadlineExceededError

# One save writes and one waits. With more slots, a program that saves faster than its disk writes
# would only block later, with more memory in use.
_SLOTS = 2


class SaveRun:
    """One save, from its call to its end. Used on the engine's loop once it was submitted.

    Attributes:
        request: The request, as the caller made it.
        step: The step, or None for a one-shot checkpoint.
        step_dir: Its directory.
        commit: The commit that the caller gets; its `stage` is that of the save.
        hooks: The engine's side of the commit.
        jobs: The job behind the commit, once it was submitted.
        cancel: Asks the save to stop, if it has begun.
        returned: Done once the caller may change or donate its arguments; holds the error that the
            call itself must raise.
        recorder: Records the end of the save.
        began_ns: Its start on the engine's loop, by `time.perf_counter_ns`.
        is_heeded: True once the call has looked for errors of earlier saves, which it would raise.
        is_staged: True once everything is in host memory, so that the next save may stage.
        waits_for_end: True if the call returns only when the save has ended.
        give_up: Asks the save to end.
        kept_seconds: For a save at preemption, the time since the save before it, or the run,
            began; such a save is never superseded.
        superseded_by: Step of the newer save for which this one was given up, or None.
        cleaned_up: Set when the deletions after the commit have ended; None before it is published.
    """

    hooks: CommitHooks
    recorder: EventRecorder
    began_ns: int

    def __init__(self, request: SaveRequest, loop: EngineLoop, commits: OpenCommits) -> None:
        """Make a save that was called just now; `commits` reports its error."""
        self.request = request
        self.step: int | None = request.step
        self.step_dir: str = request.step_dir
        self.jobs: list[Job[None]] = []
        # The commit may outlive this object, and does not keep it.
        self.cancel: Callable[[], None] = partial(_cancel, loop, self.jobs)
        self.commit: Commit = Commit(request.step, self.cancel, loop.check_caller, request.items)
        self.returned: Future[None] = Future()
        self.is_heeded = False
        self.is_staged = False
        self.waits_for_end = False
        self.give_up: Callable[[], None] = lambda: None
        self.kept_seconds: float | None = None
        self.superseded_by: int | None = None
        self.cleaned_up: anyio.Event | None = None
        self.loop: EngineLoop = loop
        self._commits = commits

    def submit(
        self, where: str, work: Callable[..., Awaitable[None]], *args: Any
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Begin the save on the engine's loop; `where` is its place, for messages.

        Returns:
            The commit, the job behind it, and `returned`.
        """
        self.hooks = CommitHooks(self.commit)
        self._commits.adopt(self.hooks, where)
        try:
            self.jobs.append(self.loop.submit(work, *args))
        except BaseException:
            self._commits.drop(self.hooks)
            raise
        return self.commit, self.jobs[0], self.returned

    @contextlib.asynccontextmanager
    async def ending(
        self,
        observers: tuple[Observer, ...],
        newest: Callable[[], int | None] = lambda: None,
        why_skipped: Callable[[BaseException], Awaitable[str | None]] | None = None,
    ) -> AsyncIterator[None]:
        """Run the body, which publishes the step; if it raises, end the save.

        The save has ended after the body if its commit is done.

        Args:
            observers: Hear how it ends.
            newest: Returns the newest durable step, for the message of a failed save.
            why_skipped: Returns why an error ends the save as skipped; None if it is a failure.
        """
        self.recorder = EventRecorder("save", self.step, observers)
        self.began_ns = time.perf_counter_ns()
        try:
            yield
        except BaseException as error:
            if isinstance(error, CheckpointError) and self.step is not None:
                error.locate(step=self.step)
            reason = None if why_skipped is None else await why_skipped(error)
            if reason is not None:
                self.skip(reason)
                return
            self.recorder.end_badly(self.began_ns, error)
            self.fail(error, newest())
            if not isinstance(error, Exception):
                raise

    def snapshot_taken(self) -> None:
        """Note that the caller may change or donate its arguments."""
        if not self.waits_for_end:
            self.returned.set_result(None)

    def let_return(self) -> None:
        """Let the call return without an error, if it still waits."""
        if not self.returned.done():
            self.returned.set_result(None)

    def fail(self, error: BaseException, newest: int | None) -> None:
        """Give the error to the call that waits for its snapshot, else to the commit."""
        if not isinstance(error, Exception):
            error = self._cancelled()
        elif isinstance(error, DeadlineExceededError):
            # The frames of the error explain nothing, and would keep the staged data alive as long
            # as the commit.
            error.__traceback__ = error.__context__ = None
        self._commits.fail(self.hooks, error, returned=self.returned.done(), newest=newest)
        self.fail_call(error)
        # A commit that waits for its error to be fetched must not keep the arrays alive.
        self.request.items.clear()

    def fail_call(self, error: Exception) -> None:
        """Give the error to the call, if it still waits."""
        if not self.returned.done():
            self.returned.set_exception(error)

    def _cancelled(self) -> CheckpointError:
        return CommitCancelledError("the save was cancelled; nothing of it is left", step=self.step)

    def skip(self, reason: str) -> None:
        """End the save without a step."""
        self.recorder.end(self.began_ns, "skipped", reason=reason)
        self._commits.drop(self.hooks)
        self.request.items.clear()
        self.hooks.skip(reason)
        self.let_return()


def _cancel(loop: EngineLoop, jobs: list[Job[None]]) -> None:
    if jobs and not loop.is_forked:
        jobs[0].cancel()


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

    def staged(self, save: SaveRun) -> None:
        """Note that the save needs no more staging memory; the next one may stage."""
        save.is_staged = True
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
        return len(before) < _SLOTS and all(each.is_staged for each in before)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
