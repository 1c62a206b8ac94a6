"""`Backlog`: the queue of back-to-back saves: which may stage, which writes, what a full one does.

A bounded queue: one save writes, and at most one more waits for that with its snapshot taken, so
that a save blocks its caller for the copy and not for the commit before it. Saves are published in
the order of their calls. Used on the engine's loop only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import anyio
from msgspec import Struct

BacklogPolicy = Literal["wait", "skip", "supersede"]

# One that writes and one that waits: with more, a program that saves faster than its disk writes
# would only run later into the same wall, with more memory in use.
_SLOTS = 2


class BacklogSlot(Struct, eq=False):
    """The slot of one save in the queue.

    Attributes:
        step_dir: What is being saved.
        step: Its step.
        give_up: Asks the save to end.
        kept_seconds: Of a save at preemption: how long ago the save before it, or the run, began.
            Such a save is never superseded.
        state: `queued` until there is room, `staging` until it needs no more staging memory, then
            `staged`. Set by `Backlog`, which wakes all that wait.
        superseded_by: The step for which this save was given up, or None.
    """

    step_dir: str
    step: int
    give_up: Callable[[], None]
    kept_seconds: float | None = None
    state: Literal["queued", "staging", "staged"] = "queued"
    superseded_by: int | None = None


class Backlog:
    """The saves of one root that are under way, in the order of their calls."""

    def __init__(self, policy: BacklogPolicy) -> None:
        """Queue saves by `policy`."""
        self._policy = policy
        self._queue: list[BacklogSlot] = []
        # Set, and replaced, whenever a slot changes: all that wait look again.
        self._changed = anyio.Event()
        # Held from the decision about a save until it has joined.
        self.deciding = anyio.Lock()

    @property
    def under_way(self) -> list[BacklogSlot]:
        """Those that were admitted, in order; the first of them writes."""
        return [slot for slot in self._queue if slot.state != "queued"]

    @property
    def is_empty(self) -> bool:
        """Whether no save is under way."""
        return not self._queue

    @property
    def steps(self) -> list[int]:
        """The steps of all saves that have joined, and have not left."""
        return [slot.step for slot in self._queue]

    def refusal(self) -> str | None:
        """Return why a save that is called now is not made, or None if it is."""
        if self._policy != "skip" or not self._queue:
            return None
        return f"step {self._queue[0].step} is still being saved (backlog='skip')"

    def join(self, slot: BacklogSlot) -> None:
        """Put a slot at the end of the queue; it must `leave`, however its save ends."""
        if self._policy == "supersede":
            for other in self._queue[1:]:
                # The first writes already, and goes on: so the queue never starves.
                if other.superseded_by is None and other.kept_seconds is None:
                    other.superseded_by = slot.step
                    other.give_up()
        self._queue.append(slot)

    async def admitted(self, slot: BacklogSlot) -> None:
        """Wait until the save may stage: there is room for it, and no save before it still stages.

        Cancellation leaves the slot as it is.
        """
        await self._until(lambda: self._may_stage(slot))
        slot.state = "staging"

    def staged(self, slot: BacklogSlot) -> None:
        """The save needs no more staging memory; the next one may take its snapshot. Idempotent."""
        slot.state = "staged"
        self._wake()

    async def first(self, slot: BacklogSlot) -> None:
        """Wait until the save may write: those before it have left."""
        await self._until(lambda: self._queue[0] is slot)

    def leave(self, slot: BacklogSlot) -> None:
        """The save has ended."""
        self._queue.remove(slot)
        self._wake()

    async def idle(self) -> None:
        """Wait until every save that has joined by now has left."""
        joined = list(self._queue)
        await self._until(lambda: not any(slot in self._queue for slot in joined))

    def _may_stage(self, slot: BacklogSlot) -> bool:
        before = self._queue[: self._queue.index(slot)]
        return len(before) < _SLOTS and all(each.state == "staged" for each in before)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
