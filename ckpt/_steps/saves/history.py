"""When saves began and ended: the input of save policies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ckpt._format.history import Parent
from ckpt._format.manifest import Manifest
from ckpt._steps.root import Root
from ckpt._steps.saves.backlog import BacklogSlot
from ckpt._steps.saves.overhead import OverheadEstimate
from ckpt._steps.saves.preemption import Preemption
from ckpt.errors import CheckpointError
from ckpt.policies._context import SaveContext, SavedStep

logger = logging.getLogger("ckpt")


class SaveHistory:
    """The saves of one manager in time. Used on the engine's loop.

    Attributes:
        parent: The checkpoint that the run has begun from, which its steps name; None for one that
            began from scratch.
        restored: The step that was restored last, where the run went on or went back to.
    """

    def __init__(self, now_ns: Callable[[], int], preemption: Preemption) -> None:
        """Tell the time by `now_ns`, in Unix nanoseconds, and the end by `preemption`."""
        self.parent: Parent | None = None
        self.restored: int | None = None
        self._now_ns = now_ns
        self._preemption = preemption
        self._pace = OverheadEstimate()
        self._saving: dict[BacklogSlot, SavedStep] = {}
        self._first_time: float | None = None
        self._last_time: float | None = None
        # The save at preemption, unless it has failed.
        self._final: BacklogSlot | None = None

    def begin_from(self, parent: Parent | None, restored: int | None) -> None:
        """Say what the run has begun from, and which of its own steps was restored."""
        self.parent = parent or self.parent
        self.restored = restored

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
            newest_time: When the latest committed step was saved, by whatever manager.
        """
        last = newest_time if context.last_time is None else context.last_time
        last = self._first_time if last is None else last
        return 0.0 if last is None else max(context.now - last, 0.0)

    def begin(self, slot: BacklogSlot, context: SaveContext) -> None:
        """A save has got its slot."""
        if self._last_time is not None and self._last_time > context.now:
            # The clock was set back. Intervals are counted from this save: from the time before,
            # every step would be saved until that time comes again.
            self._last_time = None
        self._saving[slot] = SavedStep(slot.step, context.now)
        self._pace.begin_save(slot, time.perf_counter())
        if self.is_final(context):
            self._final = slot

    def end(self, slot: BacklogSlot, blocked: float | None) -> None:
        """It has ended; `blocked` is how long its call took, None if it was not committed."""
        del self._saving[slot]
        self._pace.end_save(slot, time.perf_counter(), blocked)
        if slot is self._final and blocked is None:
            self._final = None

    def committed(self, manifest: Manifest) -> None:
        """A step was committed."""
        # One in parts may have begun before others that have ended already.
        self._last_time = max(manifest.created_ns / 1e9, self._last_time or 0.0)
