"""`OpenSave`: a step that is saved over several calls, up to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import anyio
from msgspec.structs import replace

from ckpt._arguments import check_step
from ckpt._commit import Commit, CommitHooks
from ckpt._engine.save.pipeline import save_step
from ckpt._engine.save.save_request import SaveCall, SaveCalls, SaveRequest
from ckpt._events import EventRecorder
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._steps.saves.overwrite import clear_name, remove_others, with_plain_metrics
from ckpt._steps.saves.queue import SaveQueue
from ckpt._steps.saves.save_arguments import make_request
from ckpt.errors import CheckpointError, ClosedError, CommitCancelledError, InvalidArgumentError

if TYPE_CHECKING:
    from ckpt._job.solo_save import SoloSave


class OpenSave:
    """One partial save, for both of its faces. Its methods may be called from any thread."""

    def __init__(self, saves: SaveQueue, request: SaveRequest, processes: SoloSave) -> None:
        """Make a save that has not begun; `saves` reports its error if no caller does."""
        self.request = request
        self._processes = processes
        self.commit: Commit = Commit(request.step, self.cancel, saves.loop.check_caller)
        self.loop: EngineLoop = saves.loop
        # Done once parts may come; holds the error if they may not.
        self.opened: Future[None] = Future()
        self._saves = saves
        self._guard = threading.Lock()
        self.job: Job[None] | None = None
        # Set on the engine's loop.
        self._calls: SaveCalls | None = None
        # Parts whose snapshots callers wait for.
        self._waiting: set[Future[None]] = set()
        self._unnamed: bool | None = None
        # The number of parts. A part that was checked is not counted yet: it may come too late.
        self._count = 0
        # How its owner ended it (`_ended`), or why it was ended for the owner (`_reason`).
        self._ended: str | None = None
        self._reason: str | None = None

    def __repr__(self) -> str:
        state = self._ended or ("open" if self.job is not None else "not begun")
        return f"<PartialSave step={self.request.step} {state}>"

    @property
    def is_ended(self) -> bool:
        """True if its owner has finalized or discarded it."""
        return self._ended is not None

    @property
    def ended(self) -> Future[None]:
        """Done when the whole save has ended, including its cleanup."""
        if self.job is None:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self.job.future

    def open(self) -> Future[None]:
        """Begin the save unless it has begun; return `opened`."""
        with self._guard:
            self._check_open()
            if self.job is None:
                with self._saves.opening(check_step(self.request.step), self.give_up):
                    self.job = self.loop.submit(self.run)
        return self.opened

    def check_part(self, state: Any, items: Mapping[str, Any] | None) -> SaveRequest:
        """Return the request of a part.

        Raises:
            InvalidArgumentError: An argument is invalid. Nothing was changed.
            ClosedError: The save has ended.
        """
        step = self.request.step
        part = make_request("", step, state, items, None, None, if_exists="error")
        with self._guard:
            self._check_open()
            if self._unnamed not in (None, part.unnamed):
                raise InvalidArgumentError(
                    "the parts before have "
                    + ("no name: give this one as a tree, too" if self._unnamed else "names: ")
                    + ("" if self._unnamed else "give this one as items={name: object}, too"),
                    step=step,
                )
            self._unnamed = part.unnamed
        return part

    def add(self, part: SaveRequest) -> Future[None]:
        """Save a part; the future is done once the caller may change what it passed.

        Raises:
            ClosedError: The save has ended.
        """
        safe: Future[None] = Future()
        # Under the guard, so that no part comes after the end.
        with self._guard:
            self._check_open()
            self.loop.submit(self._add, part, safe, time.perf_counter())
            self._count += 1
        return safe

    async def _add(self, part: SaveRequest, safe: Future[None], began: float) -> None:
        def on_snapshot() -> None:
            self._waiting.discard(safe)
            safe.set_result(None)

        self._waiting.add(safe)
        if self._calls is None or self.commit.done():
            # The save ended before the part arrived.
            self._refuse_waiting()
            return
        call = SaveCall(part.items, part.unnamed, on_snapshot, began=began)
        self._calls.add(call)

    def _refuse_waiting(self) -> None:
        while self._waiting:
            self._waiting.pop().set_exception(self.failure() or self._closed_error())

    def finish(self) -> InvalidArgumentError | None:
        """Publish the step once all parts are durable, and end `commit`.

        Returns:
            The error of a save without any part, which is discarded; None otherwise.

        Raises:
            ClosedError: The save has ended.
        """
        with self._guard:
            self._check_open()
            is_empty = not self._count
            self._ended = "discarded" if is_empty else "finalized"
            self._saves.closed(self.give_up)
        if is_empty:
            self.cancel()
            return InvalidArgumentError(
                "a partial save without any part: call save() before it is finalized, or "
                "discard() it",
                step=self.request.step,
            )
        try:
            self.loop.submit(self._finish)
        except BaseException:
            # The manager was closed, and its `close` has passed over a finalized save.
            self.cancel()
            raise
        return None

    async def _finish(self) -> None:
        if self._calls is not None:
            self._calls.finish()

    def discard(self) -> None:
        """Give the save up, unless it has failed or was given up already.

        Raises:
            ClosedError: The save was finalized.
        """
        with self._guard:
            if self._ended == "finalized" and self.failure() is None:
                raise self._closed_error()
            self._ended = "discarded"
        self.cancel()

    def cancel(self) -> None:
        if self.job is not None and not self.loop.is_forked:
            self.job.cancel()

    def give_up(self, reason: str) -> None:
        """Discard the save and give its owner the reason, unless the owner has ended it.

        Takes no lock, so that the garbage collector may call it anywhere.
        """
        if self._ended is None and self.job is not None:
            self._reason = reason
            self.cancel()

    def failure(self) -> BaseException | None:
        """Return the error of the save if it has failed, or None."""
        return self.commit.exception(0) if self.commit.done() else None

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._closed_error()
        failure = self.failure()
        if failure is not None:
            raise failure

    def _closed_error(self) -> ClosedError:
        return ClosedError(
            f"this partial save was {self._ended or 'discarded'} already; start another one",
            step=self.request.step,
        )

    async def run(self) -> None:
        """Run the save to its end, on the engine's loop."""
        saves, root = self._saves, self._saves.root
        request = replace(self.request, parent=saves.history.parent)
        step = check_step(request.step)
        began_ns = time.perf_counter_ns()
        recorder = EventRecorder("save", request.step, saves.engine.observers)
        hooks = CommitHooks(self.commit)
        self._calls = SaveCalls()
        saves.commits.adopt(hooks, root.storage.location)
        try:
            failure = saves.commits.take_before(step)
            if failure is not None:
                raise failure
            await root.open()
            engine = saves.engine
            request, others, _ = await clear_name(root, saves.history, request)
            await root.begin()
            self.opened.set_result(None)
            manifest = await save_step(
                engine,
                root.storage,
                await with_plain_metrics(request),
                hooks,
                self._calls,
                self._processes,
            )
            await remove_others(root.storage, others)
        except BaseException as error:
            if isinstance(error, CheckpointError):
                error.locate(step=step)
            recorder.end_badly(began_ns, error)
            self._end_badly(error, hooks)
            if not isinstance(error, Exception):
                raise
            return
        finally:
            saves.closed(self.give_up)
        cleaned_up = anyio.Event()
        saves.cleaning_up.append(cleaned_up)
        await saves.finish(
            cleaned_up, request, manifest, hooks, recorder, began_ns, self._processes
        )

    def _end_badly(self, error: BaseException, hooks: CommitHooks) -> None:
        if not isinstance(error, Exception):
            what = "nothing of the partial save is left"
            kind = CommitCancelledError if self._reason is None else ClosedError
            error = kind(f"{self._reason or 'it was cancelled'}; {what}", step=self.request.step)
        returned, newest = self.opened.done(), self._saves.newest
        self._saves.commits.fail(hooks, error, returned=returned, newest=newest)
        if not self.opened.done():
            # If the owner ended the save first, a waiting caller gets the error of a closed save.
            self.opened.set_exception(error if self._ended is None else self._closed_error())
        self._refuse_waiting()
        if self._calls is not None:
            self._calls.drop()
