"""Policies: which steps a manager saves, and which it keeps."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Protocol, TypeAlias


@dataclasses.dataclass
class PolicyCheckpointInfo:
    """A step, as policies see it.

    Attributes:
        step: The step.
        time: Time of its save (UTC).
        metrics: Its metrics; None if it has none.
    """

    step: int
    time: datetime.datetime
    metrics: Any = None


@dataclasses.dataclass(kw_only=True)
class DecisionContext:
    """What a `SaveDecisionPolicy` is told beside the steps.

    Attributes:
        is_saving_in_progress: True while another save is under way.
        reached_preemption: True once the job is to end soon.
        multiprocessing_options: Those of the manager.
    """

    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: Any = None


@dataclasses.dataclass(kw_only=True)
class PreservationContext:
    """What a `PreservationPolicy` is told beside the steps: nothing so far."""


Step: TypeAlias = PolicyCheckpointInfo
Steps: TypeAlias = Sequence[PolicyCheckpointInfo]


class SaveDecisionPolicy(Protocol):
    """Decides if a step is saved."""

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        """Return True to save the step."""


class PreservationPolicy(Protocol):
    """Decides which steps are kept."""

    def should_preserve(self, checkpoints: Steps, *, context: Any) -> Sequence[bool]:
        """Return True for each step to keep, in their order."""


@dataclasses.dataclass
class FixedIntervalPolicy(SaveDecisionPolicy):
    """Saves the multiples of `interval`."""

    interval: int

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return step.step % self.interval == 0


@dataclasses.dataclass
class SpecificStepsPolicy(SaveDecisionPolicy):
    """Saves the given steps."""

    steps: Container[int]

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return step.step in self.steps


@dataclasses.dataclass(kw_only=True)
class ContinuousCheckpointingPolicy(SaveDecisionPolicy):
    """Saves whenever no other save is under way, and so many seconds after the one before."""

    minimum_interval_secs: int | None = None

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        return (step.time - previous_steps[-1].time).total_seconds() >= self.minimum_interval_secs


class PreemptionCheckpointingPolicy(SaveDecisionPolicy):
    """Saves once the job is to end soon."""

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return context.reached_preemption


class InitialSavePolicy(SaveDecisionPolicy):
    """Saves the first step of an empty root."""

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return not previous_steps


@dataclasses.dataclass
class AnySavePolicy(SaveDecisionPolicy):
    """Saves what one of several policies saves."""

    policies: Sequence[SaveDecisionPolicy]

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return any(
            policy.should_save(step, previous_steps, context=context) for policy in self.policies
        )


@dataclasses.dataclass
class _Decided(SaveDecisionPolicy):
    decides: Callable[[int, int | None], bool]

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return self.decides(step.step, previous_steps[-1].step if previous_steps else None)


@dataclasses.dataclass
class PreserveAll(PreservationPolicy):
    """Keeps all steps."""

    def should_preserve(self, checkpoints: Steps, *, context: Any) -> Sequence[bool]:
        return [True] * len(checkpoints)


@dataclasses.dataclass
class LatestN(PreservationPolicy):
    """Keeps the latest `n` steps; None keeps all."""

    n: int | None = None

    def should_preserve(self, checkpoints: Steps, *, context: Any) -> Sequence[bool]:
        first = 0 if self.n is None else len(checkpoints) - self.n
        return [number >= first for number in range(len(checkpoints))]


@dataclasses.dataclass
class EveryNSeconds(PreservationPolicy):
    """Keeps steps that are at least so many seconds apart."""

    interval_secs: int

    def should_preserve(self, checkpoints: Steps, *, context: Any) -> Sequence[bool]:
        times = [info.time.timestamp() for info in checkpoints]
        return _spaced(times, self.interval_secs)


@dataclasses.dataclass
class EveryNSteps(PreservationPolicy):
    """Keeps multiples of a number, or steps that are at least so far apart.

    Attributes:
        interval_steps: The number.
        exact_interval: True for the multiples.
        max_to_keep: Number of steps to keep at most, the latest of them.
    """

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def should_preserve(self, checkpoints: Steps, *, context: Any) -> Sequence[bool]:
        steps = [info.step for info in checkpoints]
        if self.exact_interval:
            kept = [step % _above_0(self.interval_steps) == 0 for step in steps]
        else:
            kept = _spaced(steps, _above_0(self.interval_steps))
        return _latest_of(kept, self.max_to_keep)


@dataclasses.dataclass
class EveryNStepsClosest(PreservationPolicy):
    """Keeps the step that is closest to each multiple of a number, and the latest.

    Attributes:
        interval_steps: The number.
        max_to_keep: Number of steps to keep at most, the latest of them.
    """

    interval_steps: int
    max_to_keep: int | None = None

    def should_preserve(self, checkpoints: Steps, *, context: Any) -> Sequence[bool]:
        every = _above_0(self.interval_steps)
        closest: dict[int, tuple[int, int]] = {}
        for number, info in enumerate(checkpoints):
            multiple = round(info.step / every)
            distance = abs(info.step - multiple * every)
            if multiple not in closest or distance <= closest[multiple][0]:
                closest[multiple] = distance, number
        chosen = {number for _, number in closest.values()} | {len(checkpoints) - 1}
        kept = [number in chosen for number in range(len(checkpoints))]
        return _latest_of(kept, self.max_to_keep)


@dataclasses.dataclass
class CustomSteps(PreservationPolicy):
    """Keeps the given steps."""

    steps: Iterable[int]

    def __post_init__(self) -> None:
        self.steps = frozenset(self.steps)

    def should_preserve(self, checkpoints: Steps, *, context: Any) -> Sequence[bool]:
        return [info.step in self.steps for info in checkpoints]


@dataclasses.dataclass
class LatestDuration(PreservationPolicy):
    """Keeps the steps of the last hours or days, and every step after the first of them."""

    duration: datetime.timedelta

    def should_preserve(self, checkpoints: Steps, *, context: Any) -> Sequence[bool]:
        oldest = datetime.datetime.now(tz=datetime.UTC) - self.duration
        kept: list[bool] = []
        for info in checkpoints:
            kept.append(info.time >= oldest or kept[-1:] == [True])
        return kept


@dataclasses.dataclass(kw_only=True)
class BestN(PreservationPolicy):
    """Keeps the best steps.

    Attributes:
        get_metric_fn: Function of the metrics of a step.
        reverse: True if the smallest value is the best.
        n: Number of steps to keep; None keeps all.
        keep_checkpoints_without_metrics: True to keep those as well.
    """

    get_metric_fn: Callable[[Any], float]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True

    def should_preserve(self, checkpoints: Steps, *, context: Any) -> Sequence[bool]:
        if self.n is None or len(checkpoints) <= self.n:
            return [True] * len(checkpoints)
        ranked = ranked_steps(checkpoints, self.get_metric_fn, reverse=self.reverse)
        kept = {info.step for info in ranked[len(ranked) - min(self.n, len(ranked)) :]}
        if self.n and self.keep_checkpoints_without_metrics:
            kept |= {info.step for info in checkpoints if info.metrics is None}
        return [info.step in kept for info in checkpoints]


@dataclasses.dataclass
class AnyPreservationPolicy(PreservationPolicy):
    """Keeps what one of several policies keeps."""

    policies: Sequence[PreservationPolicy]

    def should_preserve(self, checkpoints: Steps, *, context: Any) -> Sequence[bool]:
        kept = [policy.should_preserve(checkpoints, context=context) for policy in self.policies]
        return [any(each) for each in zip(*kept, strict=True)]


def ranked_steps(
    checkpoints: Iterable[PolicyCheckpointInfo], metric: Callable[[Any], float], *, reverse: bool
) -> list[PolicyCheckpointInfo]:
    """Return the steps that have metrics, the best last."""
    known = [info for info in checkpoints if info.metrics is not None]
    return sorted(known, key=lambda info: metric(info.metrics), reverse=reverse)


def save_policy_of(options: Any) -> SaveDecisionPolicy:
    """Return the policy that options of a manager stand for."""
    if options.save_decision_policy is not None:
        found: SaveDecisionPolicy = options.save_decision_policy
        return found
    if options.should_save_fn is not None:
        return AnySavePolicy([_Decided(options.should_save_fn), PreemptionCheckpointingPolicy()])
    policies: list[SaveDecisionPolicy] = []
    if options.save_interval_steps:
        policies.append(FixedIntervalPolicy(options.save_interval_steps))
    policies.append(SpecificStepsPolicy(options.save_on_steps))
    return AnySavePolicy([*policies, PreemptionCheckpointingPolicy(), InitialSavePolicy()])


def preservation_policy_of(options: Any) -> PreservationPolicy:
    """Return the policy that options of a manager stand for."""
    if options.preservation_policy is not None:
        found: PreservationPolicy = options.preservation_policy
        return found
    policies: list[PreservationPolicy] = []
    if options.keep_period is not None:
        policies.append(EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        policies.append(EveryNSeconds(int(options.keep_time_interval.total_seconds())))
    if options.best_fn is None:
        policies.append(LatestN(options.max_to_keep))
    else:
        policies.append(
            BestN(
                get_metric_fn=options.best_fn,
                reverse=options.best_mode == "min",
                n=options.max_to_keep,
                keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
            )
        )
    return AnyPreservationPolicy(policies)


def _above_0(interval: int) -> int:
    if interval <= 0:
        raise ValueError(f"interval_steps must be above 0, and is {interval}")
    return interval


def _spaced(values: Sequence[float], distance: float) -> list[bool]:
    """Return True for the first value, and for each that is so far from the last such one."""
    kept: list[bool] = []
    last: float | None = None
    for value in values:
        kept.append(last is None or value - last >= distance)
        last = value if kept[-1] else last
    return kept


def _latest_of(kept: list[bool], most: int | None) -> list[bool]:
    left = len(kept) if most is None else most
    for number in reversed(range(len(kept))):
        if kept[number]:
            kept[number] = left > 0
            left -= 1
    return kept
