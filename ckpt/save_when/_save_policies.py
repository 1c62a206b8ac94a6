"""Save policies, and the circumstances in which they decide."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpt._arguments import invalid, number_of_seconds, set_of_steps, shown, whole_number
from ckpt.errors import InvalidArgumentError
from ckpt.keep._questions import SavedStep, ask, name_of, truth_of, why_not_a_policy

# These cannot be handled, or come from faults of the program: going on after those is a loop.
_NO_NOTICES = {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
}


@dataclass(frozen=True, slots=True)
class SaveContext:
    """The circumstances in which a save policy decides.

    Measured times are medians of the last few values, and None until there is one.

    Attributes:
        now: The time, in Unix seconds.
        preempted: True if the run ends at this step, and its final save has not been made; see
            `reached_preemption`.
        saving: Saves under way, in the order in which they began.
        last_time: Time at which the newest save of this manager, committed or under way, began, in
            Unix seconds; None if there is none.
        step_seconds: Time from one training step to the next while nothing is being saved; known
            if `save` or `should_save` is called at every step.
        lost_seconds: Training time that one save costs: the call of `save`, and how much it slows
            down the steps beside it.
        save_seconds: Time from the call of `save` to the commit.
    """

    now: float
    preempted: bool = False
    saving: tuple[SavedStep, ...] = ()
    last_time: float | None = None
    step_seconds: float | None = None
    lost_seconds: float | None = None
    save_seconds: float | None = None


class SavePolicy(Protocol):
    """Decides whether a step is saved. Must be pure: a function of its arguments alone."""

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return why `step` should not be saved, or None if it should.

        Args:
            step: The step in question.
            previous: The committed steps, ascending. Each is read from storage when it is first
                accessed: a policy that is asked at every training step should use `previous[-1]`
                at most.
            context: The circumstances: the time, saves under way, the cost of saves.
        """


SavePolicyLike = SavePolicy | Callable[[int, Sequence[SavedStep], SaveContext], bool]


def check_save_policy(policy: object) -> None:
    """Check that `policy` can decide about saves.

    Raises:
        InvalidArgumentError: `policy` is neither an object with the method `refusal` nor a
            function; or it is a class, is async, or is a keep policy.

    Example:
        ```python
        ckpt.save_when.check_save_policy(lambda step, previous, context: step % 100 == 0)
        ```
    """
    hint = why_not_a_policy(
        policy, "refusal", other=("keep", "this is a keep policy: pass it as keep=")
    )
    if hint is not None:
        raise InvalidArgumentError(
            f"save policy {shown(policy)}: expected one of ckpt.save_when, such as "
            "EverySteps(100), an object with refusal(step, previous, context), or a function of "
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
        context = ckpt.save_when.SaveContext(now=time.time())
        assert ckpt.save_when.refusal_of(ckpt.save_when.EverySteps(100), 200, [], context) is None
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
        # Closed, since Python would warn later that it was never awaited.
        answer.close()
    expected = "True or False" if refusal is None else "a string that says why not, or None"
    raise InvalidArgumentError(
        f"save policy {name_of(policy)}: returned {shown(answer)} for step {step}; expected "
        f"{expected}"
    )


def seconds_since_last(previous: Sequence[SavedStep], context: SaveContext) -> float | None:
    """Return how long ago the last save began, in seconds; None if unknown.

    It is None if there was no save, or if the clock was set back. Policies save then: after the
    clock was set back by a day, an interval of seconds would take a day to pass.
    """
    last = context.last_time
    if last is None:
        last = previous[-1].time if previous else None
    return None if last is None or context.now < last else context.now - last


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Saves every `n`th step: the multiples of `n`, step 0 included.

    Raises:
        InvalidArgumentError: `n` is not a whole number, 1 or greater.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, save_when=ckpt.save_when.EverySteps(100))
        ```
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole_number("n", self.n, of="EverySteps"))

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None for multiples of `n`, else the reason not to save."""
        if step % self.n == 0:
            return None
        return f"step {step} is not a multiple of {self.n} (EverySteps)"


@dataclass(frozen=True, slots=True, init=False)
class Steps:
    """Saves these steps.

    Raises:
        InvalidArgumentError: A step is not a whole number, 0 or greater.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, save_when=ckpt.save_when.Steps([10, 1000]))
        ```
    """

    steps: frozenset[int]

    def __init__(self, steps: Iterable[int]) -> None:
        object.__setattr__(self, "steps", set_of_steps("steps", steps, of="Steps"))

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None for the chosen steps, else the reason not to save."""
        if step in self.steps:
            return None
        return f"step {step} is not one of the {len(self.steps)} steps (Steps)"


@dataclass(frozen=True, slots=True)
class Continuously:
    """Saves whenever no save is under way.

    Attributes:
        minimum_interval_seconds: The shortest time between the beginnings of two saves.

    Raises:
        InvalidArgumentError: `minimum_interval_seconds` is not a finite number, 0 or more.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, save_when=ckpt.save_when.Continuously())
        ```
    """

    minimum_interval_seconds: float = 0

    def __post_init__(self) -> None:
        interval = self.minimum_interval_seconds
        number_of_seconds("minimum_interval_seconds", interval, of="Continuously", zero=True)

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if no save is under way and the last one began long enough ago."""
        if context.saving:
            return f"step {context.saving[0].step} is still being saved (Continuously)"
        if not self.minimum_interval_seconds:
            return None
        return _too_soon(self.minimum_interval_seconds, "Continuously", previous, context)


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Saves when at least `seconds` have passed since the last save began, ended or not.

    Raises:
        InvalidArgumentError: `seconds` is not a finite number above 0.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, save_when=ckpt.save_when.EverySeconds(600))
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
class BoundedOverhead:
    """Saves as often as it can while training loses at most `fraction` of the time to saving.

    The first save is made at once, to measure its cost. After that, a save is due once the loss it
    causes is `fraction` of the time since the last save began. Measuring continues, so the interval
    adapts when a disk gets slower or a model larger. Saves never queue: none begins while another
    is under way, nor sooner than a save usually takes plus two steps, so that there are steps
    without a save to compare with.

    Call `save` or `should_save` at every step. Otherwise only the time spent in `save` itself can
    be measured and bounded.

    The rule is that of CheckFreq (Mohan, Phanishayee, Chidambaram: "CheckFreq: Frequent,
    Fine-Grained DNN Checkpointing", FAST '21), with time in place of iterations.

    Attributes:
        fraction: The share of the time that may be lost, above 0 and below 1.
        at_least_seconds: The shortest interval between the beginnings of two saves.
        at_most_seconds: The longest such interval, even if more than `fraction` is lost; None for
            no limit.

    Raises:
        InvalidArgumentError: An argument is out of its range, or `at_least_seconds` is greater than
            `at_most_seconds`.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, save_when=ckpt.save_when.BoundedOverhead(0.02))
        ```
    """

    fraction: float = 0.03
    at_least_seconds: float = 0
    at_most_seconds: float | None = None

    def __post_init__(self) -> None:
        fraction: object = self.fraction
        if not isinstance(fraction, float) or not 0 < fraction < 1:
            what = "a number above 0 and below 1, such as 0.03 for 3%"
            raise invalid("fraction", fraction, what, of="BoundedOverhead")
        least, most = self.at_least_seconds, self.at_most_seconds
        number_of_seconds("at_least_seconds", least, of="BoundedOverhead", zero=True)
        if most is not None:
            number_of_seconds("at_most_seconds", most, of="BoundedOverhead")
            if least > most:
                what = f"a value no greater than at_most_seconds={shown(most)}"
                raise invalid("at_least_seconds", least, what, of="BoundedOverhead")

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if the last save has ended and is paid for, else the reason not to save."""
        if context.saving:
            return f"step {context.saving[0].step} is still being saved (BoundedOverhead)"
        if context.lost_seconds is None:
            return None
        if context.step_seconds is None:
            return "no step without a save has been measured yet (BoundedOverhead)"
        elapsed = seconds_since_last(previous, context)
        pause = (context.save_seconds or 0.0) + 2 * context.step_seconds
        due = max(self._wanted(context.lost_seconds), pause)
        if elapsed is None or elapsed >= due:
            return None
        return (
            f"the last save began {elapsed:.1f} s ago; the next one is due after {due:.1f} s, as "
            f"one costs {context.lost_seconds:.3g} s and {self.fraction:.3g} of the time may be "
            "lost (BoundedOverhead)"
        )

    def _wanted(self, lost_seconds: float) -> float:
        wanted = max(lost_seconds / self.fraction, self.at_least_seconds)
        return wanted if self.at_most_seconds is None else min(wanted, self.at_most_seconds)


@dataclass(frozen=True, slots=True)
class First:
    """Saves the first step of a fresh run: when no step is committed or being saved.

    Example:
        ```python
        policy = ckpt.save_when.Any(ckpt.save_when.EverySeconds(600), ckpt.save_when.First())
        mgr = ckpt.CheckpointManager(root, save_when=policy)
        ```
    """

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None for the first step, else the reason not to save."""
        if context.saving:
            return f"step {context.saving[0].step} is being saved already (First)"
        return "there is a committed step already (First)" if previous else None


@dataclass(frozen=True, slots=True)
class Preempted:
    """Saves the step at which a preempted run ends; see the manager's `reached_preemption`.

    Attributes:
        signals: Signals that announce the end of the run. The manager handles them from its first
            use in the main thread until it is closed. A manager without this policy handles none.

    Raises:
        InvalidArgumentError: An element is no signal, or a signal that cannot be handled.

    Example:
        ```python
        policy = ckpt.save_when.Any(ckpt.save_when.EverySteps(1000), ckpt.save_when.Preempted())
        mgr = ckpt.CheckpointManager(root, save_when=policy)
        ```
    """

    signals: Iterable[int] = (signal.SIGTERM,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "signals", _checked_signals(self.signals))

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if the run is preempted, else the reason not to save."""
        return None if context.preempted else "the run is not preempted (Preempted)"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Any:
    """Saves a step if any of several policies wants it; they are asked in order until one does.

    Put policies that look at committed steps last.

    Raises:
        InvalidArgumentError: No policy was given, or one is neither a policy nor a function.

    Example:
        ```python
        policy = ckpt.save_when.Any(
            ckpt.save_when.EverySteps(1000), ckpt.save_when.Preempted()
        )
        mgr = ckpt.CheckpointManager(root, save_when=policy)
        ```
    """

    policies: tuple[SavePolicyLike, ...]

    def __init__(self, *policies: SavePolicyLike) -> None:
        if not policies:
            raise InvalidArgumentError("Any(): expected one policy or more")
        for policy in policies:
            check_save_policy(policy)
        object.__setattr__(self, "policies", policies)

    def __repr__(self) -> str:
        return f"Any({', '.join(map(repr, self.policies))})"

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if any policy wants the step, else the reasons of all."""
        reasons = []
        for policy in self.policies:
            reason = refusal_of(policy, step, previous, context)
            if reason is None:
                return None
            reasons.append(reason)
        return "; ".join(reasons)


def signals_of(policy: object) -> tuple[int, ...]:
    """Return the signals that a policy, or a member of it, wants to be handled."""
    if isinstance(policy, Preempted):
        return tuple(policy.signals)
    members = policy.policies if isinstance(policy, Any) else ()
    return tuple(dict.fromkeys(number for each in members for number in signals_of(each)))


def _checked_signals(signals: object) -> tuple[int, ...]:
    expected = "signals, such as (signal.SIGTERM,)"
    if isinstance(signals, str | bytes) or not isinstance(signals, Iterable):
        raise invalid("signals", signals, expected, of="Preempted")
    found = tuple(signals)
    for number in found:
        if type(number) not in (int, signal.Signals) or number not in signal.valid_signals():
            raise invalid("signals", number, expected, of="Preempted")
        if number in _NO_NOTICES:
            raise InvalidArgumentError(
                f"Preempted(signals): {signal_name(number)} cannot announce the end of a run; "
                f"expected {expected}"
            )
    # Each signal has one handler.
    return tuple(dict.fromkeys(found))


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have none."""
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")
