"""Times and costs of the saves of a run, its interruptions, and the best interval between saves.

Costs of saving for a run, its interruptions, and the best interval between saves. Pure. The input
is from manifests only: the number of each step, the times at which its save began and was
committed, and how long it blocked. Everything else is estimated from these:

- *Usual time of a step*: the median over neighbouring saves of the time from one to the next,
  divided by the steps between them. Deleted steps in between do not matter, since step numbers
  stay.
- *Interruption*: the time from one save to the next is more than `FACTOR` times the usual time of
  those steps, and differs from it by more than `SPREADS` times the usual deviation. A shorter
  interruption cannot be told from slow steps; a pause, such as a long evaluation, looks like one.
- *Lost seconds*: the part of that time beyond the usual. It consists of the work that was done
  again and the time until the run was back. The share of each is unknown, so *lost steps* is a
  bound: as many as fit, but no more than lie between both saves, since the run goes on from the
  first one.
- *Mean time between failures* (M): the time of the run without the lost seconds, over the number of
  interruptions, unless it is given.
- *Cost of a save* (C): the median time that a save blocked.
- *Interval*: that of Young, sqrt(2 C M) (J. W. Young, "A first order approximation to the optimum
  checkpoint interval", Communications of the ACM 17(9), 1974), and that of Daly, which is closer if
  C is not much smaller than M (J. T. Daly, "A higher order estimate of the optimum checkpoint
  interval for restart dumps", Future Generation Computer Systems 22(3), 2006, equation 37).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime

from msgspec import Struct

from ckpt._inspection.json_values import time_of
from ckpt._inspection.locations import RunRoot
from ckpt._steps.opened import OpenedStep, open_step
from ckpt.errors import CheckpointError

# Fewer steps show no trend.
_LEAST_FOR_TREND = 6


class StepTimes(Struct, frozen=True):
    """The times of one save, in seconds; None if unknown.

    Attributes:
        step: Its number; None for a one-shot checkpoint.
        created: Time at which its attempt began (UTC), after waiting for earlier saves.
        committed: Time of its commit (UTC).
        stored_bytes: Bytes of its files, including the manifest; None if another library wrote it.
        blocked: Time from the call of `save` until it could return.
        waited: Time of waiting for earlier saves.
        staged: Time from the call until everything was in host memory.
        written: Time from the call until all data was durable.
        rate: Stored bytes per second from the call until all data was durable, without the waiting.
    """

    step: int | None
    created: datetime | None
    committed: datetime | None
    stored_bytes: int | None
    blocked: float | None
    waited: float | None
    staged: float | None
    written: float | None
    rate: float | None


class TimesSummary(Struct, frozen=True):
    """One time of `StepTimes` over the steps of a run.

    Attributes:
        name: Name of the attribute of `StepTimes`.
        median: Its median.
        worst: The greatest value; for a rate, the least.
        worst_step: The step with the worst value.
        change: Relative change of the median from the earlier to the later half of the steps: 0.1
            for 10% more. None for few steps.
    """

    name: str
    median: float
    worst: float
    worst_step: int | None
    change: float | None


class SaveStatisticsReport(Struct, frozen=True):
    """The times of the steps of a root, or of one checkpoint.

    Attributes:
        path: Path of the root or checkpoint.
        steps: Times of its steps, ascending.
        summary: Summaries over the steps.
        unreadable: Steps that cannot be read.
    """

    path: str
    steps: list[StepTimes]
    summary: list[TimesSummary]
    unreadable: list[int]


NAMES = ("blocked", "waited", "staged", "written", "rate")


async def times_of_root(root: RunRoot, last: int | None = None) -> SaveStatisticsReport:
    """Return the times of the steps of a root.

    Args:
        root: The root.
        last: Number of the latest steps to read; None for all.

    Raises:
        StorageError: The root cannot be read.
    """
    found = list((await root.index.refresh()).values())
    times, unreadable = [], []
    for each in found if last is None else found[-last:]:
        try:
            opened = await open_step(root.storage, each.step_dir, each.step)
        except CheckpointError:
            unreadable.append(each.step)
            continue
        # Otherwise the step was deleted meanwhile.
        if opened is not None:
            times.append(times_of(opened))
    return SaveStatisticsReport(root.location, times, summaries(times), unreadable)


def times_of(opened: OpenedStep) -> StepTimes:
    """Return the times of one save."""
    manifest, size = opened.manifest, opened.stored_bytes
    taken = manifest.statistics
    blocked, waited, staged, written = (
        taken.get(name) for name in ("blocked", "waited", "staged", "written")
    )
    busy = None if written is None else written - (waited or 0.0)
    return StepTimes(
        step=manifest.step,
        created=time_of(manifest.created_ns),
        committed=time_of(manifest.committed_ns),
        stored_bytes=size,
        blocked=blocked,
        waited=waited,
        staged=staged,
        written=written,
        rate=size / busy if size is not None and busy and busy > 0 else None,
    )


def summaries(steps: Sequence[StepTimes]) -> list[TimesSummary]:
    """Return summaries of the times that at least one step has."""
    found = []
    for name in NAMES:
        known = [(value, each.step) for each in steps if (value := getattr(each, name)) is not None]
        if not known:
            continue
        values = [value for value, _ in known]
        pick: Callable[..., tuple[float, int | None]] = min if name == "rate" else max
        worst, step = pick(known, key=lambda pair: pair[0])
        found.append(TimesSummary(name, statistics.median(values), worst, step, _change(values)))
    return found


def _change(values: Sequence[float]) -> float | None:
    if len(values) < _LEAST_FOR_TREND:
        return None
    half = len(values) // 2
    earlier, later = (statistics.median(part) for part in (values[:half], values[-half:]))
    return later / earlier - 1 if earlier else None


FACTOR = 1.5
SPREADS = 6.0
# The standard deviation of normally distributed values, over their median deviation.
_DEVIATION = 1.4826
_LEAST_SAVES = 3


class SavePoint(Struct, frozen=True):
    """One save of a run.

    Attributes:
        step: Its number.
        began: Time at which it began, in seconds.
        committed: Time of its commit, in seconds.
        blocked: Seconds for which it blocked, if known.
        written: Seconds from the call until all data was durable, if known.
    """

    step: int
    began: float
    committed: float
    blocked: float | None = None
    written: float | None = None


class Interruption(Struct, frozen=True):
    """A gap between two saves that indicates an interruption of the run; an estimate.

    Attributes:
        after_step: The save before it.
        before_step: The save after it.
        seconds: Time between both saves.
        lost_seconds: Part of that time beyond the usual time of the steps between both.
        most_lost_steps: Upper bound of the steps that were computed again.
    """

    after_step: int
    before_step: int
    seconds: float
    lost_seconds: float
    most_lost_steps: int


class Suggestion(Struct, frozen=True):
    """A suggested interval between saves.

    Attributes:
        young_seconds: The interval of Young.
        daly_seconds: The interval of Daly.
        seconds: The suggested interval: that of Daly, but no shorter than the time until a save is
            durable.
        steps: Number of steps in that interval; None if the usual time of a step is unknown.
        loss_now: Expected share of time spent on saving and failures at the current interval, to
            first order: C / interval + interval / (2 M).
        loss_then: The same share at the suggested interval.
    """

    young_seconds: float
    daly_seconds: float
    seconds: float
    steps: int | None
    loss_now: float | None
    loss_then: float


class SaveCosts(Struct, frozen=True):
    """The costs of saving for a run.

    Attributes:
        saves: Number of known saves.
        first_step: The first of them.
        last_step: The last of them.
        seconds: Time from the beginning of the first save to the commit of the last.
        blocked_seconds: Sum of the times for which saves blocked.
        blocked_share: That sum as a share of `seconds`.
        save_seconds: Median time for which a save blocked (C); None if unknown for all saves.
        step_seconds: Usual time of a step.
        interval_seconds: Median time from save to save, without interruptions.
        interruptions: The interruptions of the run.
        lost_seconds: Sum of their lost seconds.
        mtbf_seconds: Mean time between failures; None if none was seen or given.
        mtbf_given: True if the mean time between failures was given.
        suggestion: Suggested interval between saves; None if C or M is unknown.
    """

    saves: int
    first_step: int | None
    last_step: int | None
    seconds: float
    blocked_seconds: float
    blocked_share: float
    save_seconds: float | None
    step_seconds: float | None
    interval_seconds: float | None
    interruptions: list[Interruption]
    lost_seconds: float
    mtbf_seconds: float | None
    mtbf_given: bool
    suggestion: Suggestion | None


def save_costs(saves: Sequence[SavePoint], mtbf: float | None = None) -> SaveCosts:
    """Return the costs of saving for a run.

    Args:
        saves: Its saves, in any order.
        mtbf: The mean time between failures in seconds; None to estimate it.
    """
    saves = sorted(saves, key=lambda each: each.step)
    gaps = [
        (before, after, after.began - before.began)
        for before, after in itertools.pairwise(saves)
        # Otherwise the older step was saved again later: the run went back.
        if after.began > before.began and after.step > before.step
    ]
    usual, spread = _usual([gap / (after.step - before.step) for before, after, gap in gaps])
    interruptions = (
        [] if usual is None or len(saves) < _LEAST_SAVES else _interruptions(gaps, usual, spread)
    )
    broken = {each.after_step for each in interruptions}
    whole = [gap for before, _, gap in gaps if before.step not in broken]
    blocked = [each.blocked for each in saves if each.blocked is not None]
    written = [each.written for each in saves if each.written is not None]
    ended = max((each.committed for each in saves), default=0.0)
    seconds = max(ended - min((each.began for each in saves), default=0.0), 0.0)
    lost = sum(each.lost_seconds for each in interruptions)
    interval = statistics.median(whole) if whole else None
    seen = (seconds - lost) / len(interruptions) if interruptions else None
    between = seen if mtbf is None else mtbf
    cost = statistics.median(blocked) if blocked else None
    durable = statistics.median(written) if written else 0.0
    return SaveCosts(
        saves=len(saves),
        first_step=saves[0].step if saves else None,
        last_step=saves[-1].step if saves else None,
        seconds=seconds,
        blocked_seconds=sum(blocked),
        blocked_share=min(sum(blocked) / seconds, 1.0) if seconds else 0.0,
        save_seconds=cost,
        step_seconds=usual,
        interval_seconds=interval,
        interruptions=interruptions,
        lost_seconds=lost,
        mtbf_seconds=between,
        mtbf_given=mtbf is not None,
        suggestion=_suggestion(cost, between, durable, usual, interval),
    )


def young(cost: float, mtbf: float) -> float:
    """Return the interval between saves that loses least time, to first order."""
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Return the time of work between saves that loses least time, to higher order."""
    if cost >= 2 * mtbf:
        return mtbf
    ratio = math.sqrt(cost / (2 * mtbf))
    return young(cost, mtbf) * (1 + ratio / 3 + ratio * ratio / 9) - cost


def expected_loss(interval: float, cost: float, mtbf: float) -> float:
    """Return the share of time spent on saves and failures, to first order."""
    return cost / interval + interval / (2 * mtbf)


def _usual(seconds: Sequence[float]) -> tuple[float | None, float]:
    """Return the usual time of a step and its usual deviation."""
    if not seconds:
        return None, 0.0
    usual = statistics.median(seconds)
    return usual, _DEVIATION * statistics.median(abs(each - usual) for each in seconds)


def _interruptions(
    gaps: Sequence[tuple[SavePoint, SavePoint, float]], usual: float, spread: float
) -> list[Interruption]:
    found = []
    for before, after, gap in gaps:
        steps = after.step - before.step
        lost = gap - steps * usual
        if gap > FACTOR * steps * usual and lost > SPREADS * spread * steps:
            most = min(math.floor(lost / usual + 1e-9), steps)
            found.append(Interruption(before.step, after.step, gap, lost, most))
    return found


def _suggestion(
    cost: float | None,
    mtbf: float | None,
    durable: float,
    step_seconds: float | None,
    interval: float | None,
) -> Suggestion | None:
    if not cost or not mtbf:
        return None
    found = daly(cost, mtbf)
    # Only one save writes at a time, so a shorter interval would only make saves wait.
    seconds = max(found, durable)
    return Suggestion(
        young_seconds=young(cost, mtbf),
        daly_seconds=found,
        seconds=seconds,
        steps=max(round(seconds / step_seconds), 1) if step_seconds else None,
        loss_now=expected_loss(interval, cost, mtbf) if interval else None,
        loss_then=expected_loss(seconds, cost, mtbf),
    )
