"""What saving costs the training beside it, measured from outside; pure: times are arguments.

The manager sees no training step. It sees when it is asked about one, by `save` or `should_save`,
and which saves were under way in between.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable

from msgspec import Struct

_SAVES = 5
_STEPS = 50


class _Save(Struct):
    """A save, and the time and the steps that passed while it was under way.

    Attributes:
        began: When it was called.
        ended: When it was committed, or failed; None while it is under way.
        blocked: How long its call took.
        passed: Seconds between asks while it was under way; shared with others under way then.
        steps: Training steps in this time, shared likewise.
    """

    began: float
    ended: float | None = None
    blocked: float = 0.0
    passed: float = 0.0
    steps: float = 0.0


class OverheadEstimate:
    """Medians over the last few training steps and saves; None until there is one.

    All times are in seconds of one monotonic clock. Not thread-safe.
    """

    def __init__(self) -> None:
        self._asked: tuple[int, float] | None = None
        self._under_way: dict[Hashable, _Save] = {}
        # Those that have ended since the last ask: they slowed down some of the time until the
        # next one.
        self._just_ended: list[_Save] = []
        self._saves: deque[_Save] = deque(maxlen=_SAVES)
        self._step_seconds: deque[float] = deque(maxlen=_STEPS)

    def asked(self, step: int, at: float) -> None:
        """The manager was asked about a training step; of several times the first counts."""
        before, self._asked = self._asked, (step, at)
        if before is None or step < before[0]:
            # The run went back: the time since was not spent on steps.
            self._just_ended.clear()
            return
        if step == before[0]:
            self._asked = before
            return
        steps, passed = step - before[0], at - before[1]
        beside = [*self._just_ended, *self._under_way.values()]
        self._just_ended.clear()
        if not beside:
            self._step_seconds.append(passed / steps)
        for save in beside:
            save.passed += passed / len(beside)
            save.steps += steps / len(beside)

    def begin_save(self, key: Hashable, at: float) -> None:
        """A save was called; `key` is any value of its own."""
        self._under_way[key] = _Save(at)

    def end_save(self, key: Hashable, at: float, blocked: float | None) -> None:
        """A save has ended.

        Args:
            key: As it began; unknown ones are passed over.
            at: When it was committed.
            blocked: How long its call took; None if it failed, which would say nothing.
        """
        save = self._under_way.pop(key, None)
        if save is None:
            return
        self._just_ended.append(save)
        if blocked is not None:
            save.ended, save.blocked = at, blocked
            self._saves.append(save)

    @property
    def step_seconds(self) -> float | None:
        """Time of one training step while nothing is saved."""
        return statistics.median(self._step_seconds) if self._step_seconds else None

    @property
    def save_seconds(self) -> float | None:
        """Time from the call of a save to its commit."""
        return statistics.median(map(_duration, self._saves)) if self._saves else None

    @property
    def lost_seconds(self) -> float | None:
        """Training time that one save takes.

        That is what the steps beside it took longer than steps do otherwise. It is at least
        its call took, and no more than the whole save. Where no two asks came without a save in
        between there is nothing to compare with, and the call is all that is counted.
        """
        if not self._saves:
            return None
        step_seconds = self.step_seconds
        return statistics.median(_lost(save, step_seconds) for save in self._saves)


def _duration(save: _Save) -> float:
    assert save.ended is not None
    return max(save.ended - save.began, save.blocked)


def _lost(save: _Save, step_seconds: float | None) -> float:
    if step_seconds is None:
        return save.blocked
    slower = save.passed - save.steps * step_seconds
    return min(max(slower, save.blocked), _duration(save))
