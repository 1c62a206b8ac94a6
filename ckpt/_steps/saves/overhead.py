"""Cost of saving for the training beside it, measured from outside; pure: times are arguments.

The manager does not see training steps. It sees the calls of `save` and `should_save`, which name a
step, and the saves that were under way between these calls.
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
        began: Time of the call.
        ended: Time of the commit; None while it is under way, and after a failure.
        blocked: Duration of the call.
        passed: Seconds between asks while it was under way; shared with others under way then.
        steps: Training steps in this time, shared likewise.
    """

    began: float
    ended: float | None = None
    blocked: float = 0.0
    passed: float = 0.0
    steps: float = 0.0


class OverheadEstimate:
    """Medians over the last few training steps and saves; None while there are none.

    All times are in seconds of one monotonic clock. Not thread-safe.
    """

    def __init__(self) -> None:
        self._asked: tuple[int, float] | None = None
        self._under_way: dict[Hashable, _Save] = {}
        # Saves that have ended since the last ask: they slowed down a part of the time until the
        # next ask.
        self._just_ended: list[_Save] = []
        self._saves: deque[_Save] = deque(maxlen=_SAVES)
        self._step_seconds: deque[float] = deque(maxlen=_STEPS)

    def asked(self, step: int, at: float) -> None:
        """Note that the manager was asked about a step; the first ask about a step counts."""
        before, self._asked = self._asked, (step, at)
        if before is None or step < before[0]:
            # The run went back: the time since the last ask was not spent on steps.
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
        """Note the call of a save; `key` is any value that identifies it."""
        self._under_way[key] = _Save(at)

    def end_save(self, key: Hashable, at: float, blocked: float | None) -> None:
        """Note the end of a save.

        Args:
            key: The key from `begin_save`; unknown keys are ignored.
            at: Time of the commit.
            blocked: Duration of the call; None for a failed save, which is not counted.
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

        This is the extra time of the steps beside the save, at least the duration of its call and
        at most that of the whole save. If no two asks came without a save in between, there is no
        step time to compare with, and only the call counts.
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
