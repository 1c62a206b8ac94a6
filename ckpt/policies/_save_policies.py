"""Save policies: which steps are saved."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpt._arguments import number_of_seconds, set_of_steps, shown, whole_number
from ckpt.errors import InvalidArgumentError
from ckpt.policies._answers import ask, name_of, truth_of, why_not_a_policy
from ckpt.policies._context import SaveContext, SavedStep


class SavePolicy(Protocol):
    """Decides whether a step is saved. Must be pure: a function of its arguments alone."""

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return why `step` should not be saved, or None if it should.

        Args:
            step: The step in question.
            previous: The committed steps, ascending. Each is read from storage when it is first
                accessed: a policy that is asked at every training step should use `previous[-1]`
                at most.
            context: The circumstances: the time, saves under way, what saves cost.
        """


SavePolicyLike = SavePolicy | Callable[[int, Sequence[SavedStep], SaveContext], bool]


def check_save_policy(policy: object) -> None:
    """Check that `policy` can decide about saves.

    Raises:
        InvalidArgumentError: It is neither an object with the method `refusal` nor a function; or
            it is a class, is async, or is a preservation policy.

    Example:
        ```python
        ckpt.policies.check_save_policy(lambda step, previous, context: step % 100 == 0)
        ```
    """
    hint = why_not_a_policy(
        policy,
        "refusal",
        several="AnySave",
        other=("keep", "this is a preservation policy: pass it as preservation="),
    )
    if hint is not None:
        raise InvalidArgumentError(
            f"save policy {shown(policy)}: expected one of ckpt.policies, such as "
            "FixedInterval(100), an object with refusal(step, previous, context), or a function of "
            f"these three that returns True for steps to save; {hint}"
        )


def refusal_of(
    policy: SavePolicyLike, step: int, previous: Sequence[SavedStep], context: SaveContext
) -> str | None:
    """Return why a policy turns `step` down, or None if it wants it saved.

    Args:
        policy: A policy, or a function that returns True for steps to save.
        step: The step in question.
        previous: The committed steps, ascending.
        context: The circumstances.

    Raises:
        InvalidArgumentError: The policy raised an error, or returned something of another type.

    Example:
        ```python
        context = ckpt.policies.SaveContext(now=time.time())
        assert ckpt.policies.refusal_of(ckpt.policies.FixedInterval(100), 200, [], context) is None
        ```
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
        # Otherwise Python warns later that it was never awaited.
        answer.close()
    expected = "True or False" if refusal is None else "a string that says why not, or None"
    raise InvalidArgumentError(
        f"save policy {name_of(policy)}: returned {shown(answer)} for step {step}; expected "
        f"{expected}"
    )


def seconds_since_last(previous: Sequence[SavedStep], context: SaveContext) -> float | None:
    """Return how long ago the last save began; None if there was none, or the clock was set back.

    Policies save where this is None: after the clock was set back by a day, an interval of seconds
    would take a day to pass.
    """
    last = context.last_time
    if last is None:
        last = previous[-1].time if previous else None
    return None if last is None or context.now < last else context.now - last


@dataclass(frozen=True, slots=True)
class FixedInterval:
    """Saves every `n`th step: the multiples of `n`, step 0 included.

    Raises:
        InvalidArgumentError: `n` is not a whole number, 1 or greater.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, save_policy=ckpt.policies.FixedInterval(100))
        ```
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole_number("n", self.n, of="FixedInterval"))

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None for multiples of `n`, else the reason not to save."""
        if step % self.n == 0:
            return None
        return f"step {step} is not a multiple of {self.n} (FixedInterval)"


@dataclass(frozen=True, slots=True, init=False)
class SpecificSteps:
    """Saves these steps.

    Raises:
        InvalidArgumentError: One of them is not a whole number, 0 or greater.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, save_policy=ckpt.policies.SpecificSteps([10, 1000]))
        ```
    """

    steps: frozenset[int]

    def __init__(self, steps: Iterable[int]) -> None:
        object.__setattr__(self, "steps", set_of_steps("steps", steps, of="SpecificSteps"))

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None for the chosen steps, else the reason not to save."""
        if step in self.steps:
            return None
        return f"step {step} is not one of the {len(self.steps)} steps (SpecificSteps)"


@dataclass(frozen=True, slots=True)
class Continuous:
    """Saves whenever no save is under way.

    Attributes:
        minimum_interval_seconds: The shortest time between the beginnings of two saves.

    Raises:
        InvalidArgumentError: `minimum_interval_seconds` is not a finite number, 0 or more.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, save_policy=ckpt.policies.Continuous())
        ```
    """

    minimum_interval_seconds: float = 0

    def __post_init__(self) -> None:
        interval = self.minimum_interval_seconds
        number_of_seconds("minimum_interval_seconds", interval, of="Continuous", zero=True)

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if no save is under way and the last one began long enough ago."""
        if context.saving:
            return f"step {context.saving[0].step} is still being saved (Continuous)"
        if not self.minimum_interval_seconds:
            return None
        return _too_soon(self.minimum_interval_seconds, "Continuous", previous, context)


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Saves when at least `seconds` have passed since the last save began, ended or not.

    Raises:
        InvalidArgumentError: `seconds` is not a finite number above 0.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, save_policy=ckpt.policies.EverySeconds(600))
        ```
    """

    seconds: float

    def __post_init__(self) -> None:
        number_of_seconds("seconds", self.seconds, of="EverySeconds")

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if the last save began long enough ago, else the reason not to save."""
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
    """Saves the first step of a fresh run: when no step is committed or being saved.

    Example:
        ```python
        policy = ckpt.policies.AnySave(ckpt.policies.EverySeconds(600), ckpt.policies.Initial())
        mgr = ckpt.CheckpointManager(root, save_policy=policy)
        ```
    """

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None for the first step, else the reason not to save."""
        if context.saving:
            return f"step {context.saving[0].step} is being saved already (Initial)"
        return "there is a committed step already (Initial)" if previous else None


@dataclass(frozen=True, slots=True)
class OnPreemption:
    """Saves the step at which a preempted run ends; see the manager's `reached_preemption`.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(
            root, save_policy=ckpt.policies.OnPreemption(), preemption_signals=(signal.SIGTERM,)
        )
        ```
    """

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if the run is preempted, else the reason not to save."""
        return None if context.preempted else "the run is not preempted (OnPreemption)"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class AnySave:
    """Saves a step if any of several policies wants it. They are asked in order, until one does.

    Put policies that look at committed steps last.

    Raises:
        InvalidArgumentError: No policy was given, or one is neither a policy nor a function.

    Example:
        ```python
        policy = ckpt.policies.AnySave(
            ckpt.policies.FixedInterval(1000), ckpt.policies.OnPreemption()
        )
        mgr = ckpt.CheckpointManager(root, save_policy=policy)
        ```
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
