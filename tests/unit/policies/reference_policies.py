"""What each policy promises, once more: slow, and so plain that it can be checked by reading.

Also strategies for steps, policies and compositions of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

import ckpt

# ---------------------------------------------------------------- what is kept


def kept(policy: Any, steps: Sequence[ckpt.keep.SavedStep], now: float) -> set[int]:
    """Return what a policy should keep: asked of every step by itself, against all others."""
    if isinstance(policy, ckpt.keep.Any):
        return {step for member in policy.policies for step in kept(member, steps, now)}
    chosen = {one.step for one in steps if is_chosen(policy, one, steps, now)}
    most = getattr(policy, "max_to_keep", None)
    if most is not None:
        chosen = {step for step in chosen if sum(other > step for other in chosen) < most}
    return chosen


def is_chosen(
    policy: Any, one: ckpt.keep.SavedStep, steps: Sequence[ckpt.keep.SavedStep], now: float
) -> bool:
    match policy:
        case ckpt.keep.All():
            return True
        case ckpt.keep.Latest(n):
            return is_among_the_last(n, one, steps)
        case ckpt.keep.Steps(wanted):
            return one.step in list(wanted)
        case ckpt.keep.EverySteps():
            return is_nth(policy, one, steps)
        case ckpt.keep.ClosestToEvery():
            return is_closest(policy, one, steps)
        case ckpt.keep.EverySeconds(seconds):
            rivals = [o for o in steps if span_of(o, seconds) == span_of(one, seconds)]
            return one == min(rivals, key=lambda o: (o.time, -o.step))
        case ckpt.keep.Newer(seconds):
            return now - one.time <= seconds
        case ckpt.keep.Best():
            return is_among_the_best(policy, one, steps)
        case ckpt.keep.Healthy(n, allow):
            healthy = [other for other in steps if is_healthy(other, allow)]
            return one in healthy and is_among_the_last(n, one, healthy)
        case _:
            return bool(policy(one.step))


def is_among_the_last(
    n: int, one: ckpt.keep.SavedStep, steps: Sequence[ckpt.keep.SavedStep]
) -> bool:
    newer = [other for other in steps if other.step > one.step]
    branch = [other for other in newer if not other.left_behind]
    return len(newer) < n or (len(branch) < n and not one.left_behind)


def is_nth(
    policy: ckpt.keep.EverySteps, one: ckpt.keep.SavedStep, steps: Sequence[ckpt.keep.SavedStep]
) -> bool:
    if policy.exact:
        return one.step in range(0, one.step + 1, policy.n)
    start = max(multiple for multiple in range(0, one.step + 1, policy.n))
    return not any(start <= other.step < one.step for other in steps)


def is_closest(
    policy: ckpt.keep.ClosestToEvery, one: ckpt.keep.SavedStep, steps: Sequence[ckpt.keep.SavedStep]
) -> bool:
    def multiple_of(saved: ckpt.keep.SavedStep) -> int:
        multiples = range(0, saved.step + policy.n + 1, policy.n)
        return min(multiples, key=lambda m: (abs(saved.step - m), -m))

    rivals = [o for o in steps if multiple_of(o) == multiple_of(one)]
    return one == min(rivals, key=lambda o: (abs(o.step - multiple_of(o)), -o.step))


def span_of(saved: ckpt.keep.SavedStep, seconds: float) -> int:
    return math.floor(Fraction(saved.time) / Fraction(seconds))


def is_among_the_best(
    policy: ckpt.keep.Best, one: ckpt.keep.SavedStep, steps: Sequence[ckpt.keep.SavedStep]
) -> bool:
    def value_of(saved: ckpt.keep.SavedStep) -> float | None:
        if saved.metrics is None:
            return None
        if isinstance(policy.metric, str):
            return saved.metrics.get(policy.metric)
        try:
            return policy.metric(saved.metrics)
        except KeyError:
            return None

    def is_better(a: ckpt.keep.SavedStep, b: ckpt.keep.SavedStep) -> bool:
        x, y = value_of(a), value_of(b)
        if x is None or y is None:
            return x is not None or (y is None and a.step > b.step)
        if math.isnan(x) or math.isnan(y):
            return not math.isnan(x) or (math.isnan(y) and a.step > b.step)
        if x == y:
            return a.step > b.step
        return x < y if policy.mode == "min" else x > y

    if value_of(one) is None and policy.keep_without_metrics:
        return True
    return sum(is_better(other, one) for other in steps) < policy.n


def is_healthy(saved: ckpt.keep.SavedStep, allow: Sequence[str]) -> bool:
    """Tell whether a step is known to be healthy; patterns allow whole paths of `LEAVES` here."""
    known = saved.nonfinite_leaves is not None and len(saved.nonfinite) == saved.nonfinite_leaves
    meant = all(name.split(":")[-1] in allow for name in saved.nonfinite)
    return known and meant and saved.unequal_leaves == 0


def is_unhealthy(saved: ckpt.keep.SavedStep, allow: Sequence[str]) -> bool:
    """Tell whether a step is known to be unhealthy."""
    is_known = saved.nonfinite_leaves is not None
    return saved.unequal_leaves > 0 or (is_known and not is_healthy(saved, allow))


# ---------------------------------------------------------------- what is saved


def is_saved(
    policy: Any, step: int, previous: Sequence[ckpt.keep.SavedStep], c: ckpt.save_when.SaveContext
) -> bool:
    """Tell whether a policy should want a step."""
    times = [saved.time for saved in previous][-1:] if c.last_time is None else [c.last_time]

    def is_due(seconds: float) -> bool:
        return all(not last <= c.now < last + seconds for last in times)

    match policy:
        case ckpt.save_when.EverySteps(n):
            return step in range(0, step + 1, n)
        case ckpt.save_when.Steps(wanted):
            return step in list(wanted)
        case ckpt.save_when.Continuously(seconds):
            return len(c.saving) == 0 and (seconds == 0 or is_due(seconds))
        case ckpt.save_when.EverySeconds(seconds):
            return is_due(seconds)
        case ckpt.save_when.First():
            return len(previous) + len(c.saving) == 0
        case ckpt.save_when.Preempted():
            return c.preempted
        case ckpt.save_when.Any(members):
            return any(is_saved(member, step, previous, c) for member in members)
        case ckpt.save_when.BoundedOverhead():
            if len(c.saving) > 0:
                return False
            if c.lost_seconds is None or c.step_seconds is None:
                return c.lost_seconds is None
            most = math.inf if policy.at_most_seconds is None else policy.at_most_seconds
            due = min(max(c.lost_seconds / policy.fraction, policy.at_least_seconds), most)
            due = max(due, (c.save_seconds or 0) + 2 * c.step_seconds)
            return all(c.now < last or c.now - last >= due for last in times)
        case _:
            return bool(policy(step, previous, c))


# ---------------------------------------------------------------- strategies

COUNTS = st.integers(1, 7)
SECONDS = st.integers(1, 40) | st.sampled_from([0.5, 7.25])
# Few values, so that there are ties.
NUMBERS = st.sampled_from([-1.0, 0.0, 0.5, 2.0, math.inf, -math.inf, math.nan])
BEHIND = st.sampled_from([False, False, False, True])
METRICS = st.none() | st.dictionaries(st.sampled_from(["loss", "accuracy"]), NUMBERS, max_size=2)


def is_odd(step: int) -> bool:
    return step % 2 == 1


def loss_and_more(metrics: Any) -> float:
    return float(metrics["loss"]) + metrics.get("accuracy", 0.0)


# Paths that are plain patterns, too; one is in an item.
LEAVES = ("mask", "w", "model:mask")
ALLOWED = st.lists(st.sampled_from(["mask", "w", "other"]), unique=True, max_size=2).map(tuple)


@st.composite
def with_health(draw: st.DrawFn, saved: ckpt.keep.SavedStep) -> ckpt.keep.SavedStep:
    """A step whose health is unknown, whole, or odd in some leaves; not all names are known."""
    if draw(st.booleans()):
        return replace(saved, unequal_leaves=draw(st.sampled_from([0, 0, 0, 1])))
    odd = tuple(draw(st.lists(st.sampled_from(LEAVES), unique=True, max_size=2)))
    unequal = draw(st.sampled_from([(), (), ("w",)]))
    are_named = draw(st.sampled_from([True, True, True, False]))
    return replace(
        saved,
        nonfinite_leaves=len(odd),
        unequal_leaves=len(unequal),
        nonfinite=odd if are_named else (),
        unequal=unequal if are_named else (),
    )


@st.composite
def saved_steps(draw: st.DrawFn, most: int = 25) -> list[ckpt.keep.SavedStep]:
    """Steps, ascending; their times ascend, too, or have nothing to do with them."""
    numbers = draw(st.lists(st.integers(0, 60), unique=True, max_size=most).map(sorted))
    times = draw(st.lists(st.integers(0, 200), min_size=len(numbers), max_size=len(numbers)))
    if draw(st.booleans()):
        times = sorted(times)
    return [
        draw(
            with_health(
                ckpt.keep.SavedStep(step, float(time), draw(METRICS), left_behind=draw(BEHIND))
            )
        )
        for step, time in zip(numbers, times, strict=True)
    ]


SIMPLE_PRESERVATION: list[st.SearchStrategy[Any]] = [
    st.just(ckpt.keep.All()),
    st.builds(ckpt.keep.Latest, COUNTS),
    st.builds(ckpt.keep.EverySteps, COUNTS, st.booleans(), st.none() | COUNTS),
    st.builds(ckpt.keep.ClosestToEvery, COUNTS, st.none() | COUNTS),
    st.builds(ckpt.keep.EverySeconds, SECONDS),
    st.builds(ckpt.keep.Newer, SECONDS),
    st.builds(
        ckpt.keep.Best,
        COUNTS,
        st.sampled_from(["loss", "accuracy", "nothing", loss_and_more]),
        st.sampled_from(["min", "max"]),
        st.booleans(),
    ),
    st.builds(ckpt.keep.Healthy, st.integers(1, 3), ALLOWED),
    st.builds(ckpt.keep.Steps, st.sets(st.integers(0, 60), max_size=5)),
    st.just(is_odd),
]
PRESERVATION: st.SearchStrategy[Any] = st.recursive(
    st.one_of(SIMPLE_PRESERVATION),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda m: ckpt.keep.Any(*m)),
    max_leaves=4,
)


def wants_tens(
    step: int, previous: Sequence[ckpt.keep.SavedStep], context: ckpt.save_when.SaveContext
) -> bool:
    return step % 10 == 0


SIMPLE_SAVING: list[st.SearchStrategy[Any]] = [
    st.builds(ckpt.save_when.EverySteps, COUNTS),
    st.builds(ckpt.save_when.Steps, st.sets(st.integers(0, 60), max_size=5)),
    st.builds(ckpt.save_when.Continuously, st.just(0) | SECONDS),
    st.builds(ckpt.save_when.EverySeconds, SECONDS),
    st.just(ckpt.save_when.First()),
    st.just(ckpt.save_when.Preempted()),
    st.builds(
        ckpt.save_when.BoundedOverhead,
        st.sampled_from([0.01, 0.25]),
        st.integers(0, 5),
        st.none() | st.integers(5, 20),
    ),
    st.just(wants_tens),
]
SAVING: st.SearchStrategy[Any] = st.recursive(
    st.one_of(SIMPLE_SAVING),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda m: ckpt.save_when.Any(*m)),
    max_leaves=4,
)


@st.composite
def contexts(draw: st.DrawFn) -> ckpt.save_when.SaveContext:
    times = st.integers(0, 200).map(float)
    saving = draw(st.lists(st.builds(ckpt.keep.SavedStep, st.integers(61, 70), times), max_size=2))
    return ckpt.save_when.SaveContext(
        now=draw(times),
        preempted=draw(st.booleans()),
        saving=tuple(saving),
        last_time=draw(st.none() | times),
        step_seconds=draw(st.none() | st.sampled_from([0.0, 0.5, 4.0])),
        lost_seconds=draw(st.none() | st.sampled_from([0.0, 0.125, 3.0])),
        save_seconds=draw(st.none() | st.integers(0, 30).map(float)),
    )
