"""`PrefetchQueue`: copies requested steps from farther places to the nearest tier."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from ckpt._conversion.copies.step_copy import ByteCounter, StepCopier
from ckpt._conversion.copies.step_location import StepLocation
from ckpt._conversion.copies.steps import CopyRules, copy_step
from ckpt._tiers.agent.messages import (
    FromAgent,
    StepFetchProgress,
    StepFetchRequest,
    StepFetchResult,
    TransferLeg,
    place_of_json,
)
from ckpt.errors import CheckpointError, StorageError
from ckpt.storage._resolve import open_root

_WORD_SECONDS = 5.0


class PrefetchQueue:
    """Copies steps to the nearest tier, one at a time. Used on the agent's loop."""

    def __init__(
        self, legs: Sequence[TransferLeg], tasks: TaskGroup, tell: Callable[[FromAgent], None]
    ) -> None:
        """Copy from the targets of `legs`, in tasks of `tasks`."""
        self._legs = legs
        self._tasks = tasks
        self._tell = tell
        self._turn = anyio.Lock()
        self._asked: set[StepFetchRequest] = set()

    def start(self, fetch: StepFetchRequest) -> None:
        """Copy a step and report the outcome; a step that is under way is not copied twice."""
        if fetch not in self._asked:
            self._asked.add(fetch)
            self._tasks.start_soon(self._run, fetch)

    async def _run(self, fetch: StepFetchRequest) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._say)
            async with self._turn:
                try:
                    done = await self._copy(fetch)
                except CheckpointError as error:
                    number = error.errno if isinstance(error, StorageError) else None
                    done = StepFetchResult(fetch, "refused", problem=error.message, errno=number)
            tasks.cancel_scope.cancel()
        self._asked.discard(fetch)
        self._tell(done)

    async def _say(self) -> None:
        """Send signs of progress to the trainer until cancelled."""
        while True:
            self._tell(StepFetchProgress())
            await anyio.sleep(_WORD_SECONDS)

    async def _copy(self, fetch: StepFetchRequest) -> StepFetchResult:
        """Copy a step, unless every byte of it is there; a damaged step is replaced."""
        began = time.monotonic()
        source = open_root(place_of_json(self._legs[fetch.place - 1].target))
        target = open_root(place_of_json(self._legs[0].source))
        await target.prepare()
        with contextlib.closing(StepCopier(ByteCounter())) as copier:
            copied = await copy_step(
                copier,
                StepLocation(source, fetch.step_dir),
                fetch.step,
                StepLocation(target, fetch.step_dir),
                # Only an existing step is compared with jax, whose import takes a moment.
                CopyRules(verify=True),
            )
        seconds = time.monotonic() - began
        return StepFetchResult(fetch, copied.outcome, copied.nbytes, seconds, copied.reason or "")
