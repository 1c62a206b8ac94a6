"""Times that the saves of a run took."""

from __future__ import annotations

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
