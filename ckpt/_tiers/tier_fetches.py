"""`TierFetches`: steps of farther places, copied back to the nearest tier on demand.

The keeper copies, so that nothing of it takes the cores or the interpreter lock of the trainer.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import anyio

from ckpt._redaction import redact
from ckpt._runtime.futures import settled
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.service import RootService
from ckpt._tiers.keeper.client import KeeperClient
from ckpt._tiers.keeper.messages import Fetch, Fetched, Fetching, ToKeeper, Told
from ckpt._tree.table import size_text
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StepDeletedError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
)

logger = logging.getLogger("ckpt")

# The pin that keeps a prefetched step from the preservation of its tier.
PREFETCHED = "prefetched"
# Between two looks whether the keeper lives; one that lives says a word every few seconds.
_LOOK_SECONDS, _SILENT_SECONDS = 2.0, 60.0
# A step that is deleted each time, before it could be pinned.
_TRIES = 3
_FULL = (errno.ENOSPC, errno.EDQUOT)


class TierFetches:
    """Copies steps back to the nearest tier. Its coroutines run on the engine's loop."""

    def __init__(self, near: RootService, keeper: KeeperClient) -> None:
        """Copy steps to `near`, by the keeper."""
        self._near = near
        self._keeper = keeper
        self._guard = threading.Lock()
        # What the keeper was asked for and has not answered, and when it last said something.
        self._asked: tuple[Fetch, Future[Fetched]] | None = None
        self._heard_at = 0.0
        # Made on the engine's loop.
        self._turn: anyio.Lock | None = None

    async def fetch(self, step: int, places: Sequence[int]) -> None:
        """Have a step at the nearest tier, whole and pinned.

        Args:
            step: The step.
            places: Numbers of the farther places that have it, the nearest first; none where only
                the nearest tier does.

        Raises:
            StepExistsError: Another save of the step is in its place.
            CheckpointError: It could not be copied from any place; the error of the first.
        """
        self._turn = self._turn or anyio.Lock()
        async with self._turn:
            for turn in range(_TRIES):
                await self._copy(step, places)
                try:
                    await self._near.pin(step, PREFETCHED)
                    return
                except StepNotFoundError:
                    # The tier was tidied just now.
                    if turn == _TRIES - 1:
                        raise

    async def _copy(self, step: int, places: Sequence[int]) -> None:
        first: CheckpointError | None = None
        for place in places:
            done = await self._answer(Fetch(place, step, self._near.root.names.name(step)))
            error = self._error_of(done)
            if error is None:
                logger.info(
                    "prefetched step %d to %s: %s in %.2f s",
                    step,
                    redact(self._near.storage.location),
                    size_text(done.nbytes),
                    done.seconds,
                )
                return
            first = first or error
            if done.outcome == "blocked" or done.errno in _FULL:
                break
        if first is not None:
            raise first

    async def _answer(self, fetch: Fetch) -> Fetched:
        """Ask the keeper; one that was killed is started and asked again.

        Raises:
            StorageError: It says nothing any more.
        """
        answer: Future[Fetched] = Future()
        with self._guard:
            self._asked, self._heard_at = (fetch, answer), time.monotonic()
        try:
            await run_in_thread(self._keeper.start)
            self._keeper.tell(fetch)
            while not answer.done():
                with anyio.move_on_after(_LOOK_SECONDS):
                    await settled(answer)
                    break
                if time.monotonic() - self._heard_at > _SILENT_SECONDS:
                    raise StorageError(
                        "the process that copies steps behind this one does not answer. Prefetch "
                        "it again, or restore it from where it is",
                        step=fetch.step,
                    )
                await run_in_thread(self._keeper.start)
        finally:
            with self._guard:
                self._asked = None
        return answer.result()

    def _error_of(self, done: Fetched) -> CheckpointError | None:
        step = done.fetch.step
        if done.outcome in ("copied", "there"):
            return None
        if done.outcome == "blocked":
            where = redact(f"{self._near.storage.location}/{done.fetch.step_dir}")
            return StepExistsError(
                f"{where} is another save of this step, or damaged beyond recognition: remove it "
                f"first (ckpt rm). {done.problem}",
                step=step,
            )
        if done.outcome == "damaged":
            return CorruptCheckpointError(done.problem, step=step)
        if done.outcome == "deleted":
            return StepDeletedError(done.problem, step=step)
        advice = ""
        if done.errno in _FULL:
            advice = ". Make room there: unpin what was prefetched before, or keep fewer steps"
        return StorageError(f"{done.problem}{advice}", errno=done.errno, step=step)

    def greeting(self) -> list[ToKeeper]:
        """Return what a new keeper has to know: what is being waited for."""
        with self._guard:
            return [] if self._asked is None else [self._asked[0]]

    def heard(self, message: Told) -> None:
        """Take what the keeper says; called in a thread."""
        if not isinstance(message, Fetching | Fetched):
            return
        with self._guard:
            self._heard_at = time.monotonic()
            asked = self._asked
            if not isinstance(message, Fetched) or asked is None or asked[0] != message.fetch:
                return
            # A keeper that was started again may have been asked twice.
            self._asked = None
        asked[1].set_result(message)
