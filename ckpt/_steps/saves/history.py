"""What decisions about saves are made of: what was saved when, and who is asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from ckpt._format.manifest import Manifest
from ckpt._steps.saves.backlog import BacklogSlot
from ckpt._steps.saves.overhead import OverheadEstimate
from ckpt._steps.saves.preemption import Preemption
from ckpt.errors import CheckpointError
from ckpt.policies import SaveContext, SavedStep

__all__ = ["Root", "SaveHistory"]

logger = logging.getLogger("ckpt")


class Root(Protocol):
    """What decides about the saves of a root, on the engine's loop."""

    async def open(self) -> None:
        """Make the root ready for writing."""

    @property
    def has_policy(self) -> bool:
        """Whether `refusal` may be anything but None."""

    async def refusal(self, step: int, context: SaveContext) -> str | None:
        """Return why `step` is not to be saved, or None if it is."""

    async def newest_time(self) -> float | None:
        """Return when the save of the greatest committed step began, in Unix seconds."""

    async def other_entries(self, step: int) -> list[str]:
        """Return the entries of `step` under other names than the one it is written to."""

    async def preserve(self, saved: int) -> float | None:
        """Delete what is not kept any more, now that `saved` is committed; never raises.

        Returns:
            How many seconds that took; None if it was not done.
        """


class SaveHistory:
    """The saves of one manager in time. Used on the engine's loop.

    Attributes:
        newest: The step that was acknowledged last, or None.
    """

    def __init__(self, now_ns: Callable[[], int], preemption: Preemption) -> None:
        """Tell the time by `now_ns`, in Unix nanoseconds, and the end by `preemption`."""
        self.newest: int | None = None
        self._now_ns = now_ns
        self._preemption = preemption
        self._pace = OverheadEstimate()
        self._saving: dict[BacklogSlot, SavedStep] = {}
        self._first_time: float | None = None
        self._last_time: float | None = None
        # The save at preemption, unless it has failed.
        self._final: BacklogSlot | None = None

    def context(self, step: int) -> SaveContext:
        """Return the moment in which it is asked whether `step` is to be saved."""
        self._pace.asked(step, time.perf_counter())
        now = self._now_ns() / 1e9
        if self._first_time is None:
            self._first_time = now
        saving = tuple(self._saving.values())
        times = [each.time for each in saving]
        return SaveContext(
            now=now,
            preempted=self._preemption.reached(step),
            saving=saving,
            last_time=times[-1] if times else self._last_time,
            step_seconds=self._pace.step_seconds,
            lost_seconds=self._pace.lost_seconds,
            save_seconds=self._pace.save_seconds,
        )

    def is_final(self, context: SaveContext) -> bool:
        """Tell whether a save would be the final one of a preempted run, which is always made."""
        return context.preempted and self._final is None

    async def kept_by(self, context: SaveContext, root: Root) -> float:
        """Return how much training a final save keeps, in seconds."""
        try:
            newest = await root.newest_time() if context.last_time is None else None
        except CheckpointError as error:
            # It is for a report only.
            logger.debug("the newest step could not be looked at: %s", error)
            newest = None
        return self.since_last(context, newest)

    def since_last(self, context: SaveContext, newest_time: float | None) -> float:
        """Return how long ago the save before this one began, or the run itself, in seconds.

        Args:
            context: The moment of this one.
            newest_time: When the greatest committed step was saved, by whatever manager.
        """
        last = newest_time if context.last_time is None else context.last_time
        last = self._first_time if last is None else last
        return 0.0 if last is None else max(context.now - last, 0.0)

    def begin(self, place: BacklogSlot, step: int, context: SaveContext) -> None:
        """A save has got its place."""
        self._saving[place] = SavedStep(step, context.now)
        self._pace.begin_save(place, time.perf_counter())
        if self.is_final(context):
            self._final = place

    def end(self, place: BacklogSlot, blocked: float | None) -> None:
        """It has ended; `blocked` is how long its call took, None if it was not committed."""
        del self._saving[place]
        self._pace.end_save(place, time.perf_counter(), blocked)
        if place is self._final and blocked is None:
            self._final = None

    def committed(self, manifest: Manifest) -> None:
        """A step was committed, and nobody was told yet."""
        self.newest = manifest.step
        # One in parts may have begun before others that have ended already.
        self._last_time = max(manifest.created_ns / 1e9, self._last_time or 0.0)
