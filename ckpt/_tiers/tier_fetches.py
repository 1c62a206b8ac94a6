"""`TierFetches`: copies steps back from farther places to the nearest tier on demand.

The agent copies, so that the copy takes no cores and no interpreter lock from the trainer.
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
from ckpt._tiers.agent.client import AgentClient
from ckpt._tiers.agent.messages import (
    AgentMessage,
    StepFetchProgress,
    StepFetchRequest,
    StepFetchResult,
    ToAgent,
)
from ckpt._tree.table import format_bytes
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StepDeletedError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
)

logger = logging.getLogger("ckpt")

# Name of the pin that protects a prefetched step from the preservation of its tier.
PREFETCHED = "prefetched"
# Time between two looks at the agent, and the time after which a silent agent counts as dead: a
# live one sends a message every few seconds.
_LOOK_SECONDS, _SILENT_SECONDS = 2.0, 60.0
# Tries to copy and pin a step that is deleted each time before it can be pinned.
_TRIES = 3
_FULL = (errno.ENOSPC, errno.EDQUOT)


class TierFetches:
    """Copies steps back to the nearest tier. Its coroutines run on the engine's loop."""

    def __init__(self, near: RootService, agent: AgentClient) -> None:
        self._near = near
        self._agent = agent
        self._guard = threading.Lock()
        # The unanswered request to the agent, and the time of its last message.
        self._asked: tuple[StepFetchRequest, Future[StepFetchResult]] | None = None
        self._heard_at = 0.0
        # Set on the engine's loop.
        self._turn: anyio.Lock | None = None

    async def fetch(self, step: int, places: Sequence[int]) -> None:
        """Bring a step to the nearest tier, whole and pinned.

        Args:
            step: The step.
            places: Numbers of the farther places that have it, the nearest first; empty if only the
                nearest tier has it.

        Raises:
            StepExistsError: Another save of the step is in its place.
            CheckpointError: No place could give a copy; this is the error of the first one.
        """
        self._turn = self._turn or anyio.Lock()
        async with self._turn:
            for turn in range(_TRIES):
                await self._copy(step, places)
                try:
                    await self._near.pin(step, PREFETCHED)
                    return
                except StepNotFoundError:
                    # The tier was tidied before the step was pinned.
                    if turn == _TRIES - 1:
                        raise

    async def _copy(self, step: int, places: Sequence[int]) -> None:
        first: CheckpointError | None = None
        for place in places:
            done = await self._answer(
                StepFetchRequest(place, step, self._near.root.names.name(step))
            )
            error = self._error_of(done)
            if error is None:
                logger.info(
                    "prefetched step %d to %s: %s in %.2f s",
                    step,
                    redact(self._near.storage.location),
                    format_bytes(done.nbytes),
                    done.seconds,
                )
                return
            first = first or error
            if done.outcome == "blocked" or done.errno in _FULL:
                break
        if first is not None:
            raise first

    async def _answer(self, fetch: StepFetchRequest) -> StepFetchResult:
        """Send a request to the agent; a killed agent is started and asked again.

        Raises:
            StorageError: The agent does not answer.
        """
        answer: Future[StepFetchResult] = Future()
        with self._guard:
            self._asked, self._heard_at = (fetch, answer), time.monotonic()
        try:
            await run_in_thread(self._agent.start)
            self._agent.tell(fetch)
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
                await run_in_thread(self._agent.start)
        finally:
            with self._guard:
                self._asked = None
        return answer.result()

    def _error_of(self, done: StepFetchResult) -> CheckpointError | None:
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

    def greeting(self) -> list[ToAgent]:
        """Return the messages that a new agent needs: the request that is being waited for."""
        with self._guard:
            return [] if self._asked is None else [self._asked[0]]

    def heard(self, message: AgentMessage) -> None:
        """Handle a message of the agent; called in a thread."""
        if not isinstance(message, StepFetchProgress | StepFetchResult):
            return
        with self._guard:
            self._heard_at = time.monotonic()
            asked = self._asked
            if (
                not isinstance(message, StepFetchResult)
                or asked is None
                or asked[0] != message.fetch
            ):
                return
            # A restarted agent may have been asked twice.
            self._asked = None
        asked[1].set_result(message)
