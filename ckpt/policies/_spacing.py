"""Keep one step of every so many, or of every so much time.

Each policy here cuts all numbers, or all time, into spans that do not depend on what there is. So
what it keeps of one span depends on no other span, nor on what was deleted there: asked again, it
keeps the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt._arguments import check_bool, check_count, check_seconds
from ckpt.policies._context import SavedStep

__all__ = ["EveryNSeconds", "EveryNSteps", "EveryNStepsClosest", "LatestDuration"]


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Keeps one of every `n` steps.

    Attributes:
        n: How far apart, in steps.
        exact: Keep the multiples of `n`. Otherwise keep the first step of every span from a
            multiple of `n` to the next, for programs whose saves do not meet the multiples.
        max_to_keep: Keep only so many of them, the greatest; None for all.

    Raises:
        InvalidArgumentError: `n` or `max_to_keep` is not a whole number, 1 or greater, or `exact`
            is not a bool.
    """

    n: int
    exact: bool = True
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", check_count("EveryNSteps", self.n, name="n"))
        check_bool("EveryNSteps", self.exact, name="exact")
        if self.max_to_keep is not None:
            most = check_count("EveryNSteps", self.max_to_keep, name="max_to_keep")
            object.__setattr__(self, "max_to_keep", most)

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return the chosen ones of `steps`."""
        if self.exact:
            return _greatest((s.step for s in steps if s.step % self.n == 0), self.max_to_keep)
        first: dict[int, int] = {}
        for saved in steps:
            first.setdefault(saved.step // self.n, saved.step)
        return _greatest(first.values(), self.max_to_keep)


@dataclass(frozen=True, slots=True)
class EveryNStepsClosest:
    """Keeps, for every multiple of `n`, the step that is closest to it.

    Of two that are as close the greater one is kept. Every step counts for one multiple only, the
    one in the middle between two for the greater.

    Attributes:
        n: How far apart, in steps.
        max_to_keep: Keep only so many of them, the greatest; None for all.

    Raises:
        InvalidArgumentError: One of them is not a whole number, 1 or greater.
    """

    n: int
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", check_count("EveryNStepsClosest", self.n, name="n"))
        if self.max_to_keep is not None:
            most = check_count("EveryNStepsClosest", self.max_to_keep, name="max_to_keep")
            object.__setattr__(self, "max_to_keep", most)

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return the chosen ones of `steps`."""
        closest: dict[int, int] = {}
        for saved in steps:
            multiple = (2 * saved.step + self.n) // (2 * self.n) * self.n
            known = closest.get(multiple)
            if known is None or abs(saved.step - multiple) <= abs(known - multiple):
                closest[multiple] = saved.step
        return _greatest(closest.values(), self.max_to_keep)


@dataclass(frozen=True, slots=True)
class EveryNSeconds:
    """Keeps one step of every `seconds`: the first of each such span of Unix time.

    So `EveryNSeconds(3600)` keeps the first step of every full hour. The time of a step is that at
    which its save began; of several of the same time the greatest is kept.

    Raises:
        InvalidArgumentError: `seconds` is not a finite number above 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_seconds("EveryNSeconds", self.seconds)

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return the chosen ones of `steps`."""
        first: dict[float, SavedStep] = {}
        for saved in steps:
            span = saved.time // self.seconds
            known = first.get(span)
            if known is None or saved.time <= known.time:
                first[span] = saved
        return frozenset(saved.step for saved in first.values())


@dataclass(frozen=True, slots=True)
class LatestDuration:
    """Keeps the steps whose save began within the last `seconds`.

    After a pause that is longer, all older steps go at once, but for the greatest one. Put it into
    `AnyPreservation` with `LatestN` where more are to stay.

    Raises:
        InvalidArgumentError: `seconds` is not a finite number above 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_seconds("LatestDuration", self.seconds)

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return those of `steps` that are young enough; what is from the future is."""
        return frozenset(saved.step for saved in steps if not now - saved.time > self.seconds)


def _greatest(steps: Iterable[int], count: int | None) -> frozenset[int]:
    return frozenset(steps if count is None else sorted(steps)[-count:])
