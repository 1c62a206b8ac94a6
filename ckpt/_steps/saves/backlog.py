"""Back-to-back saves: who stages, who writes, and what a save does while another is under way.

A bounded queue: one save writes, and at most one more waits for that with its snapshot taken, so
that a save blocks its caller for the copy and not for the commit before it. Saves are published in
the order of their calls. Used on the engine's loop only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import anyio

__all__ = ["Backlog", "BacklogPolicy", "BacklogSlot"]

BacklogPolicy = Literal["wait", "skip", "supersede"]

# One that writes and one that waits: with more, a program that saves faster than its disk writes
# would only run later into the same wall, with more memory in use.
_PLACES = 2


@dataclass(slots=True, eq=False)
class BacklogSlot:
    """The place of one save in the queue.

    Attributes:
        entry: What is being saved.
        step: Its step.
        give_up: Asks the save to end.
        may_write: Set when it is this save's turn to write.
        left: Set when the save has ended.
        may_be_superseded: Whether a newer save may take its place.
        superseded_by: The step for which this save was given up, or None.
    """

    entry: str
    step: int | None
    give_up: Callable[[], None]
    may_be_superseded: bool = True
    may_write: anyio.Event = field(default_factory=anyio.Event)
    left: anyio.Event = field(default_factory=anyio.Event)
    superseded_by: int | None = None
    _admitted: bool = False
    _staging: bool = False


class Backlog:
    """The saves of one root that are under way, in the order of their calls."""

    def __init__(self, policy: BacklogPolicy) -> None:
        """Queue saves by `policy`."""
        self._policy = policy
        self._queue: list[BacklogSlot] = []
        self._changed = anyio.Event()
        # Held from the decision about a save until it has joined.
        self.deciding = anyio.Lock()

    @property
    def under_way(self) -> list[BacklogSlot]:
        """Those that were admitted, in order; the first of them writes."""
        return [place for place in self._queue if place._admitted]

    @property
    def is_empty(self) -> bool:
        """Whether no save is under way."""
        return not self._queue

    def refusal(self) -> str | None:
        """Return why a save that is called now is not made, or None if it is."""
        if self._policy != "skip" or not self._queue:
            return None
        return f"step {self._queue[0].step} is still being saved (backlog='skip')"

    def join(
        self,
        entry: str,
        step: int | None,
        give_up: Callable[[], None],
        *,
        may_be_superseded: bool = True,
    ) -> BacklogSlot:
        """Take the last place of the queue; whoever joins must `leave`, however the save ends."""
        if self._policy == "supersede":
            for place in self._queue[1:]:
                # The first writes already, and goes on: so the queue never starves.
                if place.superseded_by is None and place.may_be_superseded:
                    place.superseded_by = step
                    place.give_up()
        place = BacklogSlot(entry, step, give_up, may_be_superseded)
        self._queue.append(place)
        return place

    async def admitted(self, place: BacklogSlot) -> None:
        """Wait until the save may stage: there is room for it, and nobody before it still stages.

        Cancellation leaves the place as it is.
        """
        while not self._may_stage(place):
            await self._changed.wait()
        place._admitted = place._staging = True
        self._advance()

    def staged(self, place: BacklogSlot) -> None:
        """The save needs no more staging memory; the next one may take its snapshot. Idempotent."""
        place._staging = False
        self._advance()

    def leave(self, place: BacklogSlot) -> None:
        """The save has ended. Idempotent."""
        if place in self._queue:
            self._queue.remove(place)
            place.left.set()
        self._advance()

    async def idle(self) -> None:
        """Wait until every save that has joined by now has left."""
        for place in list(self._queue):
            await place.left.wait()

    def _may_stage(self, place: BacklogSlot) -> bool:
        before = self._queue[: self._queue.index(place)]
        return len(before) < _PLACES and all(p._admitted and not p._staging for p in before)

    def _advance(self) -> None:
        if self._queue and self._queue[0]._admitted:
            self._queue[0].may_write.set()
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
