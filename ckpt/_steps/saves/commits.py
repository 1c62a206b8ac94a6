"""The saves under way: one save and its stages, back-to-back saves, and who hears of their errors.

`Backlog`: the queue of saves; it decides which save may stage, write, wait or be given up. A
`SaveRun` is one save in it, from its call to its end.

The queue is bounded: one save writes, and at most one more waits with its snapshot taken, so that a
save blocks its caller for the copy and not for the commit before it. Saves are published in the
order of their calls. Used on the engine's loop only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

import anyio

from ckpt._commit import Commit, CommitHooks
from ckpt._engine.save.save_request import SaveRequest
from ckpt._events import EventRecorder, Observer
from ckpt._redaction import redact
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._runtime.threads import fail_exit
from ckpt._settings import BacklogPolicy
from ckpt._steps.opened import shortened
from ckpt.errors import CheckpointError, CommitCancelledError, DeadlineExceededError

logger = logging.getLogger("ckpt")

OnFailure = Literal["raise", "log"]

# Time at exit for input and output under way to end, and for removing what was written: one removal
# waits for the writes of other programs to a slow disk.
_GIVING_UP_SECONDS = 5.0


class OpenCommits:
    """The commits of saves under way, and of failed ones that nobody has checked.

    A failure is logged as soon as it happens, and raised once: by a call that waits for the commit,
    else by the next save, else when the manager closes, else when the interpreter exits.
    """

    def __init__(self, on_failure: OnFailure = "raise") -> None:
        """Begin with no commits; with "log", only the commits themselves raise their errors."""
        self._on_failure = on_failure
        # The saves, each with its place.
        self._saves: dict[CommitHooks, str] = {}
        # True if a save has failed since `are_in_doubt` was called, even if its error was checked.
        self._has_failed = False
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._saves)

    def __del__(self) -> None:
        # The last chance to report errors: the manager is gone. Nothing else is touched,
        # because at interpreter exit the modules may be gone already.
        if getattr(self, "_saves", None) and os.getpid() == self._pid and self._tell_unseen():
            fail_exit()

    def are_in_doubt(self, new: CommitHooks) -> bool:
        """Return True if a save has failed since the save before `new`, or may still fail."""
        has_failed, self._has_failed = self._has_failed, False
        return has_failed or any(hooks is not new for hooks in list(self._saves))

    def under_way(self, where: str | None = None) -> list[Commit]:
        """Return the commits of saves under way, to one place if `where` is given."""
        return [
            hooks.commit
            for hooks, place in list(self._saves.items())
            if not hooks.commit.done() and where in (None, place)
        ]

    def adopt(self, hooks: CommitHooks, where: str) -> None:
        """Count a save among those under way, and report its error; `where` is for messages."""
        self._forget_seen()
        self._saves[hooks] = where

    def drop(self, hooks: CommitHooks) -> None:
        """Forget a save: it has succeeded, or its error has another owner."""
        self._saves.pop(hooks, None)

    def fail(
        self, hooks: CommitHooks, error: Exception, *, returned: bool, newest: int | None = None
    ) -> None:
        """End a save with an error, which is logged unless a call raises it.

        Args:
            hooks: The save.
            error: The error; a `CommitCancelledError` is what the owner of the save asked for.
            returned: True if the call of the save has returned.
            newest: The newest durable step of the root.
        """
        owed = returned and not isinstance(error, CommitCancelledError)
        if owed:
            where = self._saves[hooks]
            logger.error("%s", _line(hooks.commit.step, where, error, newest))
        raises = self._on_failure == "raise" and not hooks.is_excused
        self._has_failed = self._has_failed or owed
        hooks.fail(error, owed=owed and raises)
        if hooks.is_seen:
            self.drop(hooks)

    def take(self) -> BaseException | None:
        """Return the failures that nobody has checked, as one error, and forget them."""
        return _first_error([error for error, _ in self._take()])

    def take_before(self, step: int) -> BaseException | None:
        """Do the same for a call that raises the error instead of saving `step`."""
        error = self.take()
        why = (
            "this is the error of an earlier save, whose commit nobody has checked. Nothing of "
            f"step {step} was begun: the same call again saves it"
        )
        if isinstance(error, CheckpointError):
            error.message = f"{error.message}; {why}"
        elif error is not None:
            error.add_note(why)
        return error

    def excuse(self, new: CommitHooks) -> None:
        """Count the failures of saves before `new` as checked: a call has raised them."""
        self.take()
        for hooks in self._saves:
            hooks.is_excused = hooks.is_excused or hooks is not new

    async def failure_after(self, wait: Callable[[], Awaitable[object]]) -> BaseException | None:
        """Wait; return the failures of the saves that were open before, as one error.

        Every call that waits gets the error, even if several wait.
        """
        waited = [hooks for hooks in list(self._saves) if not hooks.is_seen]
        with contextlib.ExitStack() as stack:
            for hooks in waited:
                stack.enter_context(hooks.awaited())
            await wait()
        errors = [error for hooks in waited if (error := hooks.owed_error()) is not None]
        self._forget_seen()
        return _first_error(errors)

    def _take(self) -> list[tuple[BaseException, str]]:
        errors = []
        for hooks, where in list(self._saves.items()):
            # An error that is being awaited stays: its waiter may still be cancelled.
            error = hooks.unseen_error()
            if error is not None:
                errors.append((error, where))
        self._forget_seen()
        return errors

    def _forget_seen(self) -> None:
        for hooks in list(self._saves):
            if hooks.commit.done() and hooks.is_seen:
                self.drop(hooks)

    def _cancel_all(self) -> list[tuple[Commit, str]]:
        """Ask every save under way to stop; return the commits and their places."""
        return [
            (hooks.commit, where)
            for hooks, where in list(self._saves.items())
            if hooks.commit.cancel()
        ]

    def _tell_unseen(self) -> bool:
        """Write unchecked errors to standard error; return True if there were any."""
        errors = self._take()
        for error, where in errors:
            sys.stderr.write(
                f"ckpt: a save to {redact(where)} failed, and was never awaited: {error}\n"
            )
        return bool(errors)

    def finish_at_exit(self, close: Callable[[float], bool], seconds: float) -> None:
        """At interpreter exit: finish saves under way, and report errors that were not checked.

        A save that does not end in time is given up, and the exit status is that of a failure.

        Args:
            close: Waits for so many seconds until all saves have ended; returns True if they have.
            seconds: Time to wait.
        """
        given_up = []
        if not close(seconds):
            given_up = self._cancel_all()
            close(_GIVING_UP_SECONDS)
        for commit, where in given_up:
            outcome = "may be there" if commit.stage == "publishing" else "was given up"
            step = "" if commit.step is None else f"of step {commit.step} "
            sys.stderr.write(
                f"ckpt: the save {step}to {redact(where)} had not ended {seconds} s after the "
                f"program had; it {outcome}\n"
            )
        if self._tell_unseen() or given_up:
            fail_exit()


def _line(step: int | None, where: str, error: Exception, newest: int | None) -> str:
    kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    if step is None:
        return redact(f"{where} was NOT saved: {kind}{error}")
    # The line names the step first; do not repeat it.
    reason = f"{kind}{error}".removeprefix(f"step {step}: ").removeprefix(f"step {step}, ")
    if newest == step:
        failed = f"the save of step {step} of {where} failed: {reason}"
        return redact(f"{failed}; a step {step} is there, and is durable")
    durable = "no step is durable yet" if newest is None else f"the newest durable step is {newest}"
    return redact(f"step {step} of {where} was NOT saved: {reason}; {durable}")


def _first_error(errors: list[BaseException]) -> BaseException | None:
    """Return the first error, with a note about the other steps that failed."""
    if not errors:
        return None
    first = next((each for each in errors if isinstance(each, CheckpointError)), errors[0])
    if len(errors) > 1:
        numbers = [getattr(each, "step", None) for each in errors if each is not first]
        steps = sorted(each for each in numbers if each is not None)
        note = f"also failed: step{'s' * (len(steps) > 1)} {shortened(steps)}; the log says why"
        # The error may be raised by several calls: add the note once.
        if note not in getattr(first, "__notes__", ()):
            first.add_note(note)
    return first


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

    @contextlib.contextmanager
    def reporting(self, where: str) -> Iterator[None]:
        """Run the body, which reports a published step; if it raises, the save fails after all.

        Without that, the commit would never be done, and those who wait for it would hang.
        """
        self._commits.drop(self.hooks)
        try:
            yield
        except Exception as error:
            if not self.commit.done():
                error.add_note("the step was published before this, and is durable")
                self._commits.adopt(self.hooks, where)
                self.recorder.end_badly(self.began_ns, error)
                self.fail(error, self.step)
            raise

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
