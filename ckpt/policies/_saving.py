"""When to save."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpt._arguments import (
    ask,
    check_count,
    check_seconds,
    check_steps,
    name_of,
    shown,
    truth_of,
    why_no_policy,
)
from ckpt.errors import InvalidArgumentError
from ckpt.policies._context import SaveContext, SavedStep

__all__ = [
    "AnySave",
    "Continuous",
    "EverySeconds",
    "FixedInterval",
    "Initial",
    "OnPreemption",
    "SavePolicy",
    "SavePolicyLike",
    "SpecificSteps",
    "check_save_policy",
    "refusal_of",
    "seconds_since_last",
]


class SavePolicy(Protocol):
    """Decides whether a step is saved. Pure: it looks at what it is told, and at nothing else."""

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return why `step` is not to be saved, or None if it is.

        Args:
            step: The step in question.
            previous: The committed steps, ascending. Their times and metrics are read from storage
                when they are looked at: a policy that is asked about every training step should
                look at `previous[-1]` only, or at nothing.
            context: The moment.
        """


SavePolicyLike = SavePolicy | Callable[[int, Sequence[SavedStep], SaveContext], bool]


def check_save_policy(policy: object) -> None:
    """Raise unless `policy` can decide about saves.

    Raises:
        InvalidArgumentError: It is neither an object with the method `refusal` nor a function; or
            it is a class, is async, or decides about something else.
    """
    hint = why_no_policy(
        policy,
        "refusal",
        several="AnySave",
        other=("keep", "this one decides what is kept: preservation=..."),
    )
    if hint is not None:
        raise InvalidArgumentError(
            f"save policy {shown(policy, 120)}: expected one of ckpt.policies, such as "
            "FixedInterval(100), an object with refusal(step, previous, context), or a function of "
            f"these three that returns True for steps to save; {hint}"
        )


def refusal_of(
    policy: SavePolicyLike, step: int, previous: Sequence[SavedStep], context: SaveContext
) -> str | None:
    """Return why a policy does not want `step` saved, or None if it does.

    Args:
        policy: A policy, or a function that returns True for steps to save.
        step: The step in question.
        previous: The committed steps, ascending.
        context: The moment.

    Raises:
        InvalidArgumentError: The policy raised something, or answered what is no answer.
    """
    refusal = getattr(policy, "refusal", None)
    answer: object = ask(policy, refusal or policy, step, previous, context)  # type: ignore[arg-type]
    if refusal is None:
        wanted = truth_of(answer)
        if wanted is not None:
            return None if wanted else f"{name_of(policy)} returned False for step {step}"
    elif answer is None:
        return None
    elif isinstance(answer, str):
        return answer or f"{name_of(policy)} does not want step {step}"
    if inspect.iscoroutine(answer):
        # Python would warn about it later, and somewhere else.
        answer.close()
    expected = "True or False" if refusal is None else "a sentence that says why not, or None"
    raise InvalidArgumentError(
        f"save policy {name_of(policy)}: returned {shown(answer, 120)} for step {step}; expected "
        f"{expected}"
    )


def seconds_since_last(previous: Sequence[SavedStep], context: SaveContext) -> float | None:
    """Return how long ago the last save began; None if there was none, or time went backwards.

    Who waits for some time to pass saves where this is None: with a clock that was set back, that
    time would not pass for long.
    """
    last = context.last_time
    if last is None:
        last = previous[-1].time if previous else None
    return None if last is None or context.now < last else context.now - last


@dataclass(frozen=True, slots=True)
class FixedInterval:
    """Saves every step that `n` divides, so also step 0.

    Raises:
        InvalidArgumentError: `n` is not a whole number, 1 or greater.
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", check_count("FixedInterval", self.n))

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None for multiples of `n`, else a sentence."""
        if step % self.n == 0:
            return None
        return f"step {step} is not a multiple of {self.n} (FixedInterval)"


@dataclass(frozen=True, slots=True, init=False)
class SpecificSteps:
    """Saves these steps.

    Raises:
        InvalidArgumentError: One of them is not a whole number, 0 or greater.
    """

    steps: frozenset[int]

    def __init__(self, steps: Iterable[int]) -> None:
        object.__setattr__(self, "steps", check_steps("SpecificSteps", steps))

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None for the chosen steps, else a sentence."""
        if step in self.steps:
            return None
        return f"step {step} is none of the {len(self.steps)} chosen ones (SpecificSteps)"


@dataclass(frozen=True, slots=True)
class Continuous:
    """Saves whenever no save is under way.

    Attributes:
        minimum_interval_seconds: How long after the last save began the next one may begin.

    Raises:
        InvalidArgumentError: That is not a finite number, 0 or greater.
    """

    minimum_interval_seconds: float = 0

    def __post_init__(self) -> None:
        check_seconds(
            "Continuous",
            self.minimum_interval_seconds,
            name="minimum_interval_seconds",
            zero=True,
        )

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if no save is under way and the last one began long enough ago."""
        if context.saving:
            return f"step {context.saving[0].step} is still being saved (Continuous)"
        if not self.minimum_interval_seconds:
            return None
        return _too_soon(self.minimum_interval_seconds, "Continuous", previous, context)


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Saves when the last save began `seconds` ago or longer, whether or not it has ended.

    Raises:
        InvalidArgumentError: `seconds` is not a finite number above 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_seconds("EverySeconds", self.seconds)

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if the last save began long enough ago, else a sentence."""
        return _too_soon(self.seconds, "EverySeconds", previous, context)


def _too_soon(
    seconds: float, policy: str, previous: Sequence[SavedStep], context: SaveContext
) -> str | None:
    elapsed = seconds_since_last(previous, context)
    if elapsed is None or elapsed >= seconds:
        return None
    return f"the last save began {elapsed:.1f} s ago, less than {seconds:g} s ({policy})"


@dataclass(frozen=True, slots=True)
class Initial:
    """Saves as soon as possible on a fresh run: if no step is committed, and none being saved."""

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if there is no step yet, else a sentence."""
        if context.saving:
            return f"step {context.saving[0].step} is being saved already (Initial)"
        return "there is a committed step already (Initial)" if previous else None


@dataclass(frozen=True, slots=True)
class OnPreemption:
    """Saves the step at which the run is to end; see `reached_preemption` of the manager."""

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if the run is preempted, else a sentence."""
        return None if context.preempted else "the run is not preempted (OnPreemption)"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class AnySave:
    """Saves what any of several policies wants; they are asked in order, until one does.

    Put those that look at the committed steps last.

    Raises:
        InvalidArgumentError: There is none, or one of them is neither a policy nor a function.
    """

    policies: tuple[SavePolicyLike, ...]

    def __init__(self, *policies: SavePolicyLike) -> None:
        if not policies:
            raise InvalidArgumentError("AnySave(): expected one policy or more")
        for policy in policies:
            check_save_policy(policy)
        object.__setattr__(self, "policies", policies)

    def __repr__(self) -> str:
        return f"AnySave({', '.join(map(repr, self.policies))})"

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if any policy wants the step, else the reasons of all."""
        reasons = []
        for policy in self.policies:
            reason = refusal_of(policy, step, previous, context)
            if reason is None:
                return None
            reasons.append(reason)
        return "; ".join(reasons)
