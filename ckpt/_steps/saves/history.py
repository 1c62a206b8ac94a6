"""`SaveHistory`: the start and end of each save, as the input of save policies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ckpt._arguments import check_step
from ckpt._format.history import Parent
from ckpt._format.manifest import Manifest
from ckpt._steps.restores.restored_state import RestoredState
from ckpt._steps.root import Root
from ckpt._steps.saves.backlog import SaveRun
from ckpt._steps.saves.overhead import OverheadEstimate
from ckpt._steps.saves.preemption import Preemption
from ckpt.errors import CheckpointError
from ckpt.keep._questions import SavedStep
from ckpt.save_when._save_policies import SaveContext

logger = logging.getLogger("ckpt")


class SaveHistory:
    """The saves of one manager over time. Used on the engine's loop.

    Attributes:
        parent: The checkpoint that the run began from, which its steps name; None for a run that
            began from scratch.
        restored: The step that was restored last, where the run went on or went back to.
        state: The state that this restore returned, if it was the whole step.
    """

    def __init__(self, now_ns: Callable[[], int], preemption: Preemption) -> None:
        """Make an empty history; `now_ns` returns Unix nanoseconds."""
        self.parent: Parent | None = None
        self.restored: int | None = None
        self.state: RestoredState | None = None
        self._now_ns = now_ns
        self._preemption = preemption
        self._pace = OverheadEstimate()
        self._saving: dict[SaveRun, SavedStep] = {}
        self._first_time: float | None = None
        self._last_time: float | None = None
        # The save at preemption, unless it has failed.
        self._final: SaveRun | None = None

    def begin_from(
        self, parent: Parent | None, restored: int | None, state: RestoredState | None
    ) -> None:
        """Record the checkpoint that the run began from, and its own step that was restored."""
        self.parent = parent or self.parent
        self.restored, self.state = restored, state

    def context(self, step: int) -> SaveContext:
        """Return the context in which a policy decides about saving `step`."""
        self._pace.asked(step, time.perf_counter())
        now = self._now_ns() / 1e9
        if self._first_time is None:
            self._first_time = now
        saving = tuple(self._saving.values())
        times = [each.time for each in saving]
        return SaveContext(
            now=now,
            preempted=self._preemption.reached(step) and self._final is None,
            saving=saving,
            last_time=times[-1] if times else self._last_time,
            step_seconds=self._pace.step_seconds,
            lost_seconds=self._pace.lost_seconds,
            save_seconds=self._pace.save_seconds,
        )

    async def kept_by(self, context: SaveContext, root: Root) -> float:
        """Return the training time that a final save keeps, in seconds."""
        try:
            newest = await root.index.latest() if context.last_time is None else None
        except CheckpointError as error:
            # The value is for a report only.
            logger.debug("the newest step could not be looked at: %s", error)
            newest = None
        # Counted from the start of the save before this one, by any manager, or else of the run.
        last = context.last_time if newest is None else newest.created_ns / 1e9
        last = self._first_time if last is None else last
        return 0.0 if last is None else max(context.now - last, 0.0)

    def begin(self, save: SaveRun, context: SaveContext) -> None:
        """Note that a save has joined the backlog."""
        if self._last_time is not None and self._last_time > context.now:
            # The clock was set back. Count intervals from this save: counted from the time before,
            # every step would be saved until the clock reaches that time again.
            self._last_time = None
        self._saving[save] = SavedStep(check_step(save.step), context.now)
        self._pace.begin_save(save, time.perf_counter())
        if context.preempted:
            self._final = save

    def end(self, save: SaveRun, blocked: float | None) -> None:
        """Note that a save has ended; `blocked` are the seconds of its call, None if it failed."""
        del self._saving[save]
        self._pace.end_save(save, time.perf_counter(), blocked)
        if save is self._final and blocked is None:
            self._final = None

    def committed(self, manifest: Manifest) -> None:
        # A save in parts may have begun before other saves that have already ended.
        self._last_time = max(manifest.created_ns / 1e9, self._last_time or 0.0)
