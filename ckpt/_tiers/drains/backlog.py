"""The backlog of drains: which step is next, which is given up, how long to wait. Pure."""

from __future__ import annotations

from collections.abc import Collection

_LONGEST_PAUSE_SECONDS, _DOUBLINGS = 60.0, 6


class DrainBacklog:
    """The steps that wait to be drained, and the one that is.

    The newest is worth most: it is what a run would go on from. Of steps that were tried and
    failed, those are next that have failed least, so that one that always fails keeps no other.

    Attributes:
        under_way: The step that is being drained, or None.
    """

    def __init__(self, most_waiting: int) -> None:
        """Let that many steps wait."""
        self._most = most_waiting
        self._failures: dict[int, int] = {}
        self._tries = 0
        self.under_way: int | None = None

    def __contains__(self, step: int) -> bool:
        return step in self._failures or step == self.under_way

    @property
    def waiting(self) -> list[int]:
        """The steps that wait, the newest first."""
        return sorted(self._failures, reverse=True)

    @property
    def left(self) -> list[int]:
        """The steps that wait or are under way, the newest first."""
        under_way = [] if self.under_way is None else [self.under_way]
        return sorted([*self._failures, *under_way], reverse=True)

    @property
    def is_too_long(self) -> bool:
        """Whether more steps wait than may."""
        return len(self._failures) > self._most

    def add(self, step: int) -> None:
        """Let a step wait; one that waits or is under way stays as it is."""
        if step not in self:
            self._failures[step] = 0

    @property
    def order(self) -> list[int]:
        """The steps that wait, the one that is next first."""
        return sorted(self._failures, key=lambda step: (self._failures[step], -step))

    def begin(self, step: int) -> None:
        """Take a step that waits for a drain."""
        self._tries = self._failures.pop(step)
        self.under_way = step

    def fail(self) -> None:
        """Let the step that was under way wait again, behind those that failed less."""
        self._tries += 1
        self.put_back()

    def put_back(self) -> None:
        """Let the step that was under way wait again, if one was; that is no failure."""
        if self.under_way is not None:
            self._failures[self.under_way] = self._tries
        self.under_way = None

    def end(self) -> None:
        """Forget the step that was under way; what failed before may succeed now."""
        self.under_way = None
        self._failures = dict.fromkeys(self._failures, 0)

    def give_up(self, pinned: Collection[int]) -> int | None:
        """Forget the oldest step that is not pinned; return it.

        None if no more steps wait than may, or all of them are pinned.
        """
        free = self._failures.keys() - set(pinned)
        if not self.is_too_long or not free:
            return None
        oldest = min(free)
        del self._failures[oldest]
        return oldest


def pause_after(failures: int) -> float:
    """Return how many seconds to wait after so many failures in a row, from 1 to 60."""
    return min(_LONGEST_PAUSE_SECONDS, 2.0 ** min(failures - 1, _DOUBLINGS))
