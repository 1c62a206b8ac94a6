"""Keep policies that keep one step of every so many, or of every so many seconds.

Each divides all step numbers, or all time, into spans that do not depend on which steps exist. So
the step that it keeps of a span depends neither on other spans nor on deleted steps: asked again,
it keeps the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt._arguments import number_of_seconds, true_or_false, whole_number
from ckpt.keep._questions import SavedStep


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Keeps one of every `n` steps.

    Attributes:
        n: The distance between kept steps.
        exact: Keep the multiples of `n` only. With False, keep the first step from each multiple
            of `n` on, for programs that do not save exactly at the multiples.
        max_to_keep: Keep at most this many of them, the greatest; None for all.

    Raises:
        InvalidArgumentError: `n` or `max_to_keep` is not a whole number, 1 or greater, or `exact`
            is not a bool.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, keep=ckpt.keep.EverySteps(1000))
        ```
    """

    n: int
    exact: bool = True
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self)
        true_or_false("exact", self.exact, of="EverySteps")

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return the chosen ones of `steps`."""
        if self.exact:
            return _greatest((s.step for s in steps if s.step % self.n == 0), self.max_to_keep)
        first: dict[int, int] = {}
        for saved in steps:
            first.setdefault(saved.step // self.n, saved.step)
        return _greatest(first.values(), self.max_to_keep)


@dataclass(frozen=True, slots=True)
class ClosestToEvery:
    """Keeps, for every multiple of `n`, the step that is closest to it.

    Of two equally close steps the greater one is kept. Every step counts for one multiple only; one
    halfway between two multiples counts for the greater.

    Attributes:
        n: The distance between the multiples.
        max_to_keep: Keep at most this many of them, the greatest; None for all.

    Raises:
        InvalidArgumentError: `n` or `max_to_keep` is not a whole number, 1 or greater.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, keep=ckpt.keep.ClosestToEvery(1000))
        ```
    """

    n: int
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self)

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
class EverySeconds:
    """Keeps one step of every `seconds`: the first of each such span of Unix time.

    `EverySeconds(3600)` keeps the first step of every hour of the clock. The time of a step is the
    time at which its save began; of several steps with the same time, the greatest is kept.

    Raises:
        InvalidArgumentError: `seconds` is not a finite number above 0.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, keep=ckpt.keep.EverySeconds(3600))
        ```
    """

    seconds: float

    def __post_init__(self) -> None:
        number_of_seconds("seconds", self.seconds, of="EverySeconds")

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
class Newer:
    """Keeps the steps whose save began within the last `seconds`.

    After a longer pause, all older steps but the greatest are deleted at once. Combine it with
    `Latest` in `AnyOf` to keep more.

    Raises:
        InvalidArgumentError: `seconds` is not a finite number above 0.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, keep=ckpt.keep.Newer(86400))
        ```
    """

    seconds: float

    def __post_init__(self) -> None:
        number_of_seconds("seconds", self.seconds, of="Newer")

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return the recent steps among `steps`; steps from the future count as recent."""
        return frozenset(saved.step for saved in steps if not now - saved.time > self.seconds)


def _check_counts(policy: EverySteps | ClosestToEvery) -> None:
    for name in ("n", "max_to_keep"):
        given = getattr(policy, name)
        if name == "n" or given is not None:
            object.__setattr__(policy, name, whole_number(name, given, of=type(policy).__name__))


def _greatest(steps: Iterable[int], count: int | None) -> frozenset[int]:
    return frozenset(steps if count is None else sorted(steps)[-count:])
