"""`TierFetches`: copies steps back from farther places to the nearest tier on demand.

The agent copies, so that the copy takes no cores and no interpreter lock from the trainer.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence

import anyio

from ckpt._redaction import redact
from ckpt._steps.service import RootService
from ckpt._tiers.agent.client import AgentClient
from ckpt._tiers.agent.messages import CallResult, StepFetchRequest
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
# Tries to copy and pin a step that is deleted each time before it can be pinned.
_TRIES = 3
_FULL = (errno.ENOSPC, errno.EDQUOT)


class TierFetches:
    """Copies steps back to the nearest tier. Its coroutines run on the engine's loop."""

    def __init__(self, near: RootService, agent: AgentClient) -> None:
        self._near = near
        self._agent = agent
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
            wanted = StepFetchRequest(place, step, self._near.root.names.name(step))
            done = await self._agent.call(wanted, again=True)
            error = self._error_of(wanted, done)
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

    def _error_of(self, wanted: StepFetchRequest, done: CallResult) -> CheckpointError | None:
        step = wanted.step
        if done.outcome in ("copied", "there"):
            return None
        if done.outcome == "blocked":
            where = redact(f"{self._near.storage.location}/{wanted.step_dir}")
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
