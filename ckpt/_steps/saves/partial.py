"""`OpenSave`: a step that is saved over several calls, up to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckpt._arguments import check_step
from ckpt._engine.save.pipeline import save_step
from ckpt._engine.save.save_request import SaveCall, SaveCalls, SaveRequest
from ckpt._steps.saves.commits import SaveRun
from ckpt._steps.saves.queue import SaveQueue
from ckpt._steps.saves.save_arguments import (
    clear_name,
    make_request,
    remove_others,
    with_plain_metrics,
)
from ckpt.errors import CheckpointError, ClosedError, CommitCancelledError, InvalidArgumentError

if TYPE_CHECKING:
    from ckpt._job.solo import SoloSave


class OpenSave(SaveRun):
    """One partial save, for both of its faces. Its methods may be called from any thread.

    It is in no backlog: it goes on beside other saves. Once `returned` is done, parts may come.
    """

    def __init__(self, saves: SaveQueue, request: SaveRequest, processes: SoloSave) -> None:
        """Make a save that has not begun; `saves` reports its error if no caller does."""
        super().__init__(request, saves.loop, saves.commits)
        self._processes = processes
        self._saves = saves
        self._guard = threading.Lock()
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
        state = self._ended or ("open" if self.jobs else "not begun")
        return f"<PartialSave step={self.request.step} {state}>"

    @property
    def is_ended(self) -> bool:
        """True if its owner has finalized or discarded it."""
        return self._ended is not None

    @property
    def ended(self) -> Future[None]:
        """Done when the whole save has ended, including its cleanup."""
        if self.jobs:
            return self.jobs[0].future
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def open(self) -> Future[None]:
        """Begin the save unless it has begun; return `returned`."""
        saves = self._saves
        with self._guard:
            self._check_open()
            if not self.jobs:
                with saves.opening(check_step(self.step), self.abandon):
                    self.submit(saves.root.storage.location, self.run)
        return self.returned

    def check_part(self, state: Any, items: Mapping[str, Any] | None) -> SaveRequest:
        """Return the request of a part.

        Raises:
            InvalidArgumentError: An argument is invalid. Nothing was changed.
            ClosedError: The save has ended.
        """
        part = make_request("", self.step, state, items, None, None, if_exists="error")
        with self._guard:
            self._check_open()
            if self._unnamed not in (None, part.unnamed):
                raise InvalidArgumentError(
                    "the parts before have "
                    + ("no name: give this one as a tree, too" if self._unnamed else "names: ")
                    + ("" if self._unnamed else "give this one as items={name: object}, too"),
                    step=self.step,
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
            self._saves.closed(self.abandon)
        if is_empty:
            self.cancel()
            return InvalidArgumentError(
                "a partial save without any part: call save() before it is finalized, or "
                "discard() it",
                step=self.step,
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

    def abandon(self, reason: str) -> None:
        """Discard the save and give its owner the reason, unless the owner has ended it.

        Takes no lock, so that the garbage collector may call it anywhere.
        """
        if self._ended is None and self.jobs:
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
            step=self.step,
        )

    async def run(self) -> None:
        """Run the save to its end, on the engine's loop."""
        saves, root, processes = self._saves, self._saves.root, self._processes
        request = replace(self.request, parent=saves.origin.parent)
        step = check_step(request.step)
        calls = self._calls = SaveCalls()
        try:
            async with self.ending(saves.engine.observers, lambda: saves.newest):
                await processes.heed(lambda: saves.commits.take_before(step), in_doubt=False)
                await root.open()
                request, others, _ = await clear_name(root, saves.origin, request)
                await root.begin()
                self.returned.set_result(None)
                request = await with_plain_metrics(request)
                where = saves.engine, root.storage
                manifest = await save_step(*where, request, self.hooks, calls, processes)
                await remove_others(root.storage, others)
        finally:
            saves.closed(self.abandon)
        if not self.commit.done():
            saves.published(self)
            await saves.finish(self, manifest, processes)

    def fail_call(self, error: Exception) -> None:
        """Give the error to the calls that wait for the beginning, or for their parts."""
        # If the owner ended the save first, a waiting caller gets the error of a closed save.
        super().fail_call(error if self._ended is None else self._closed_error())
        self._refuse_waiting()
        if self._calls is not None:
            self._calls.drop()

    def _cancelled(self) -> CheckpointError:
        what = "nothing of the partial save is left"
        kind = CommitCancelledError if self._reason is None else ClosedError
        return kind(f"{self._reason or 'it was cancelled'}; {what}", step=self.step)
