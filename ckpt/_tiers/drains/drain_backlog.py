"""The backlog of drains: the next step, steps to give up, and pauses between tries. Pure."""

from __future__ import annotations

from collections.abc import Collection

_LONGEST_PAUSE_SECONDS, _DOUBLINGS = 60.0, 6


class DrainBacklog:
    """The steps that wait to be drained, and the one that is being drained.

    The newest step is worth most: a run would go on from it. After failures, the steps that have
    failed least come next, so that a step that always fails does not block the others.

    Attributes:
        under_way: The step that is being drained, or None.
    """

    def __init__(self, most_waiting: int) -> None:
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
        under_way = set() if self.under_way is None else {self.under_way}
        return sorted(self._failures.keys() | under_way, reverse=True)

    @property
    def is_too_long(self) -> bool:
        """True if more steps wait than allowed."""
        return len(self._failures) > self._most

    def add(self, step: int) -> None:
        """Let a step wait, unless it does; a step under way is drained once more afterwards."""
        self._failures.setdefault(step, 0)

    @property
    def order(self) -> list[int]:
        """The steps that wait, in the order in which they are drained."""
        return sorted(self._failures, key=lambda step: (self._failures[step], -step))

    def begin(self, step: int) -> None:
        """Take a waiting step for a drain."""
        self._tries = self._failures.pop(step)
        self.under_way = step

    def fail(self) -> None:
        """Let the step under way wait again, behind steps that failed less."""
        self._tries += 1
        self.put_back()

    def put_back(self) -> None:
        """Let the step under way wait again, if there is one, without counting a failure."""
        if self.under_way is not None:
            self._failures[self.under_way] = self._tries
        self.under_way = None

    def end(self) -> None:
        """Forget the step under way; steps that failed before may succeed now."""
        self.under_way = None
        self._failures = dict.fromkeys(self._failures, 0)

    def give_up(self, pinned: Collection[int]) -> int | None:
        """Forget the oldest step that is not pinned or under way, and return it.

        None if not too many steps wait, or if there is no such step.
        """
        free = self._failures.keys() - {*pinned, self.under_way}
        if not self.is_too_long or not free:
            return None
        oldest = min(free)
        del self._failures[oldest]
        return oldest


def pause_after(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row, from 1 to 60."""
    return min(_LONGEST_PAUSE_SECONDS, 2.0 ** min(failures - 1, _DOUBLINGS))
