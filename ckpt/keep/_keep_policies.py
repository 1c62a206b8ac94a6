"""Keep policies: which committed steps are kept.

Keep policies that keep one step of every so many, or of every so many seconds. Each divides all
step numbers, or all time, into spans that do not depend on which steps exist. So the step that it
keeps of a span depends neither on other spans nor on deleted steps: asked again, it keeps the same
steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from ckpt._arguments import (
    as_int,
    number_of_seconds,
    set_of_steps,
    shown,
    true_or_false,
    whole_number,
)
from ckpt.errors import InvalidArgumentError
from ckpt.keep._questions import SavedStep, ask, name_of, truth_of, why_not_a_policy


class KeepPolicy(Protocol):
    """Chooses which committed steps are kept. Must be pure: a function of its arguments alone."""

    def keep(self, steps: Sequence[SavedStep], now: float) -> Collection[int]:
        """Return the steps to keep.

        The others are deleted, and the policy is asked again after the next commit. It should then
        keep the same steps as before, unless newer ones take their place.

        Args:
            steps: The committed steps, ascending.
            now: Unix seconds.
        """


KeepPolicyLike = KeepPolicy | Callable[[int], bool]
# A policy for each item: the keys are names of items, or patterns of names.
KeepByItem = Mapping[str, KeepPolicyLike]
KeepRules = KeepPolicyLike | KeepByItem
KeepLike = KeepPolicyLike | int | Mapping[str, KeepPolicyLike | int]

# Names of items, in which a star stands for any characters.
_ITEMS = re.compile(r"^[A-Za-z0-9_*][A-Za-z0-9_.*-]{0,99}\Z")


def as_keep_rules(given: KeepLike) -> KeepRules:
    """Return what a caller wants to be kept as checked policies; a number `n` is `Latest(n)`."""
    rules = (
        {pattern: _of_number(each) for pattern, each in given.items()}
        if isinstance(given, Mapping)
        else _of_number(given)
    )
    check_keep_policy(rules)
    return rules


def _of_number(given: KeepPolicyLike | int) -> KeepPolicyLike:
    if as_int(given) is None:
        return cast("KeepPolicyLike", given)
    return Latest(whole_number("keep", given))


def check_keep_policy(policy: object) -> None:
    """Check that `policy` can decide which steps are kept.

    Args:
        policy: A policy, or a mapping of item names and patterns to policies.

    Raises:
        InvalidArgumentError: `policy` is neither an object with the method `keep` nor a function;
            or it is a class, is async, or is a save policy. Or it is a mapping that is empty, or
            has a key that is no name of an item, or a value that is no policy.

    Example:
        ```python
        ckpt.keep.check_keep_policy(ckpt.keep.Latest(3))
        ```
    """
    if not isinstance(policy, Mapping):
        _check_one(policy)
        return
    if not policy:
        raise InvalidArgumentError(
            "keep={}: expected at least one item, such as {'*': Latest(3)}; leave it out "
            "to keep everything"
        )
    for pattern, each in policy.items():
        if not isinstance(pattern, str) or not _ITEMS.match(pattern):
            raise InvalidArgumentError(
                f"keep={{{shown(pattern)}: ...}}: expected the name of an item, such as "
                "'params', a pattern such as 'ema_*', or '*' for all other items"
            )
        _check_one(each, f" of the items {pattern!r}")


def _check_one(policy: object, what: str = "") -> None:
    hint = why_not_a_policy(
        policy, "keep", other=("refusal", "this is a save policy: pass it as save_when=")
    )
    if hint is not None:
        raise InvalidArgumentError(
            f"keep policy{what} {shown(policy)}: expected one of ckpt.keep, such as "
            "Latest(3), an object with keep(steps, now), or a function of a step that returns "
            f"True for steps to keep; {hint}"
        )


def steps_kept(policy: KeepPolicyLike, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
    """Return the steps among `steps` that a policy keeps.

    Args:
        policy: A policy, or a function that returns True for steps to keep.
        steps: The committed steps, ascending.
        now: Unix seconds.

    Raises:
        InvalidArgumentError: The policy raised an error, or returned something else than some of
            the steps. Nothing may be deleted then: a policy that returns positions or a list of
            bools means other steps than the numbers that happen to match.

    Example:
        ```python
        steps = [ckpt.keep.SavedStep(step, time=60.0 * step) for step in range(5)]
        assert ckpt.keep.steps_kept(ckpt.keep.Latest(2), steps, now=300.0) == {3, 4}
        ```
    """
    # A tuple, since a policy may change a list that is passed to it.
    steps = tuple(steps)
    keep = getattr(policy, "keep", None)
    if keep is None:
        return frozenset(saved.step for saved in steps if _is_kept(policy, saved.step))
    answer: object = ask(policy, keep, steps, now)
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes):
        raise _wrong_answer(policy, answer)
    known = {saved.step for saved in steps}
    kept = set()
    for each in answer:
        number = as_int(each)
        if number not in known:
            raise _wrong_answer(policy, each)
        kept.add(number)
    return frozenset(kept)


def _is_kept(policy: object, step: int) -> bool:
    assert callable(policy)
    answer: object = ask(policy, policy, step)
    kept = truth_of(answer)
    if kept is None:
        raise InvalidArgumentError(
            f"keep policy {name_of(policy)}: returned {shown(answer)} for step "
            f"{step}; expected True or False. Nothing was deleted"
        )
    return kept


def _wrong_answer(policy: object, answer: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"keep policy {name_of(policy)}: returned {shown(answer)}; expected those of "
        "the given steps that are to be kept, as whole numbers. Nothing was deleted"
    )


@dataclass(frozen=True, slots=True)
class All:
    """Keeps every step.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, keep=ckpt.keep.All())
        ```
    """

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return all of `steps`."""
        return frozenset(saved.step for saved in steps)


def last_of(steps: Sequence[SavedStep], n: int) -> frozenset[int]:
    """Return the last `n` of `steps`, and the last `n` of the steps that were not left behind."""
    branch = [saved for saved in steps if not saved.left_behind]
    return frozenset(saved.step for saved in (*steps[-n:], *branch[-n:]))


@dataclass(frozen=True, slots=True)
class Latest:
    """Keeps the `n` greatest steps.

    If the run went back, it also keeps the `n` greatest steps that the run did not leave behind.

    Raises:
        InvalidArgumentError: `n` is not a whole number, 1 or greater.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, keep=ckpt.keep.Latest(3))
        ```
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole_number("n", self.n, of="Latest"))

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return the last `n` of `steps`, and the last `n` that were not left behind."""
        return last_of(steps, self.n)


@dataclass(frozen=True, slots=True, init=False)
class Steps:
    """Keeps the given steps.

    Raises:
        InvalidArgumentError: A step is not a whole number, 0 or greater.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, keep=ckpt.keep.Steps([0, 1000]))
        ```
    """

    steps: frozenset[int]

    def __init__(self, steps: Iterable[int]) -> None:
        object.__setattr__(self, "steps", set_of_steps("steps", steps, of="Steps"))

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return the chosen ones of `steps`."""
        return frozenset(saved.step for saved in steps if saved.step in self.steps)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Any:
    """Keeps every step that any of several policies keeps.

    Raises:
        InvalidArgumentError: No policy was given, or one is neither a policy nor a function.

    Example:
        ```python
        policy = ckpt.keep.Any(
            ckpt.keep.Latest(3), ckpt.keep.EverySteps(1000)
        )
        mgr = ckpt.CheckpointManager(root, keep=policy)
        ```
    """

    policies: tuple[KeepPolicyLike, ...]

    def __init__(self, *policies: KeepPolicyLike) -> None:
        if not policies:
            raise InvalidArgumentError("Any(): expected one policy or more")
        for policy in policies:
            _check_one(policy)
        object.__setattr__(self, "policies", policies)

    def __repr__(self) -> str:
        return f"Any({', '.join(map(repr, self.policies))})"

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return the steps among `steps` that any policy keeps."""
        return frozenset().union(*(steps_kept(policy, steps, now) for policy in self.policies))


def members_of(policy: object) -> list[KeepPolicyLike]:
    """Return the policies that an `Any` or a mapping is made of, at any depth; else the policy."""
    if not isinstance(policy, Mapping | Any):
        return [cast("KeepPolicyLike", policy)]
    several = policy.values() if isinstance(policy, Mapping) else policy.policies
    return [each for member in several for each in members_of(member)]


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
