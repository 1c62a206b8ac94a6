"""Intervals of time and their arithmetic. Pure.

An interval `(began, ended)` contains the instants from `began` up to, but not including, `ended`.
It is empty if it ends no later than it began. The functions take intervals in any order,
overlapping or not, and return them *merged*: ascending, not empty, not touching each other.

The timeline: the phases of saves and restores, and the caller's own work, in time. Pure. The phase
`end` is the whole of an operation, and is only used to tell one save of a step from the next. The
phase `preempted` is not work: it is the time that would have been lost.

A save has three instants. It *begins* when its first phase begins, or the caller's own `"blocked"`
span around the call of `save()`. `save()` *returns*, and the caller goes on, at the end of that
span, or without one at the end of the `blocked` phase. The save is *published* at the end of its
`publish` phase. Until it returns it blocks the caller; from then until it is published it runs in
the background.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt._events import Event

Interval = tuple[int, int]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of `intervals`."""
    merged: list[Interval] = []
    for began, ended in sorted(intervals):
        if ended <= began:
            continue
        if merged and began <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], ended))
        else:
            merged.append((began, ended))
    return merged


def intersect(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Return the intersection of the union of `left` with the union of `right`."""
    ours, theirs = merge(left), merge(right)
    common: list[Interval] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        began = max(ours[i][0], theirs[j][0])
        ended = min(ours[i][1], theirs[j][1])
        if began < ended:
            common.append((began, ended))
        # The interval that ends first overlaps nothing further on the other side.
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return common


def measure(intervals: Iterable[Interval]) -> int:
    """Return the length of the union of `intervals`."""
    return sum(ended - began for began, ended in merge(intervals))


def pack(intervals: Iterable[Interval]) -> list[int]:
    """Return for each interval the first row, counted from 0, that is free when it begins.

    Intervals are placed in the order in which they begin, the longer of two first, so an interval
    inside another one gets a row below it. An empty interval takes a place like any other.
    """
    numbered = list(enumerate(intervals))
    numbered.sort(key=lambda each: (each[1][0], -each[1][1]))
    rows = [0] * len(numbered)
    free_from: list[int] = []
    for number, (began, ended) in numbered:
        row = next((i for i, free in enumerate(free_from) if free <= began), len(free_from))
        if row == len(free_from):
            free_from.append(began)
        free_from[row] = max(began, ended)
        rows[number] = row
    return rows


BLOCKED = "blocked"
END = "end"
PREEMPTED = "preempted"
# The phases with which a save may begin.
_FIRST = ("wait", BLOCKED, "plan")


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the caller's own work.

    Attributes:
        name: Name of the work, such as `"train step"`. `"blocked"` is special: the time that a call
            of `save()` took.
        began_ns: Monotonic clock (`time.perf_counter_ns`) at the start.
        ended_ns: The same clock at the end.
        thread: Name of the thread that it ran in.
        args: Plain values that belong to it, such as the number of the step.
    """

    name: str
    began_ns: int
    ended_ns: int
    thread: str = ""
    args: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """The instants of one save, on the clock of its events.

    Attributes:
        step: The step, or None for a one-shot checkpoint.
        began_ns: Time of the call of `save()`.
        returned_ns: Time at which the caller went on.
        published_ns: Time at which the save was durable; None if there is no `publish` phase.

    Example:
        ```python
        for save in trace.timeline().saves():
            began, returned = save.blocked
            print(save.step, (returned - began) / 1e9)
        ```
    """

    step: int | None
    began_ns: int
    returned_ns: int
    published_ns: int | None

    @property
    def blocked(self) -> Interval:
        """The time for which the caller waited."""
        return self.began_ns, self.returned_ns

    @property
    def background(self) -> Interval:
        """The time from the return of `save()` until it was published; empty if it was not."""
        ended = self.returned_ns if self.published_ns is None else self.published_ns
        return self.returned_ns, ended


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events of one or more operations, together with the spans of the caller.

    Attributes:
        events: Phases of saves and restores, in any order.
        spans: The caller's own work, in any order.

    Example:
        ```python
        timeline = trace.timeline(100)
        print(timeline.overlap_ratio, timeline.staging_overlap_ratio)
        ```
    """

    events: tuple[Event, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that events are about, ascending."""
        return tuple(sorted({event.step for event in self.events if event.step is not None}))

    def only(self, step: int | None = None, operation: str | None = None) -> Timeline:
        """Return the part of the timeline about one step, one kind of operation, or both.

        Args:
            step: The step; None for all.
            operation: `"save"`, `"restore"`, `"verify"`, `"delete"` or `"drain"`; None for all.

        Returns:
            The events, and the spans that were running between the first and the last of them.

        Example:
            ```python
            timeline = trace.timeline()
            print(timeline.only(100, "save").events)
            ```
        """
        if step is None and operation is None:
            return self
        events = tuple(
            event
            for event in self.events
            if step in (None, event.step) and operation in (None, event.operation)
        )
        if not events:
            return Timeline()
        # The time that was nearly lost is before the save, so spans of it did not overlap the save.
        near = [event for event in events if event.phase != PREEMPTED] or events
        began = min(event.began_ns for event in near)
        ended = max(event.ended_ns for event in near)
        touching = (span for span in self.spans if span.began_ns <= ended)
        return Timeline(events, tuple(span for span in touching if span.ended_ns >= began))

    def saves(self) -> tuple[SaveTimes, ...]:
        """Return the saves in the order of their first phases.

        Events name only their step. A step that is planned again after it was published, or after
        its save has ended, is another save. A skipped save does not count.

        Example:
            ```python
            for save in trace.timeline().saves():
                print(save.step, save.published_ns)
            ```
        """
        runs: dict[int | None, list[list[Event]]] = {}
        for event in sorted(self.events, key=_place):
            if event.operation == "save" and event.phase != PREEMPTED:
                of_step = runs.setdefault(event.step, [[]])
                if event.phase in _FIRST and _is_over(of_step[-1]):
                    of_step.append([])
                of_step[-1].append(event)
        blocked = [span for span in self.spans if span.name == BLOCKED]
        worked = (
            [event for event in run if event.phase != END]
            for of_step in runs.values()
            for run in of_step
        )
        found = [_times(run, blocked) for run in worked if run]
        return tuple(sorted(found, key=lambda save: save.began_ns))

    def overlapped(self) -> list[Interval]:
        """Return the intervals in which a save was in the background and the caller worked, merged.

        All spans count except those named `"blocked"`, so use spans for useful work only.

        Example:
            ```python
            both = trace.timeline().overlapped()
            print(sum(ended - began for began, ended in both) / 1e9)
            ```
        """
        working = [(s.began_ns, s.ended_ns) for s in self.spans if s.name != BLOCKED]
        return intersect((save.background for save in self.saves()), working)

    @property
    def overlap_ratio(self) -> float | None:
        """The share of the saves' background time during which the caller was at work.

        The background time of a save lasts from the return of `save()` until it is published. The
        part of it counts in which at least one span of the caller, other than `"blocked"`, was
        running. 1.0 means that training never paused for the save after `save()` had returned; the
        time of `save()` itself is not part of it. If several saves share some time, it counts once.
        None if no save has background time.
        """
        return _share(self.overlapped(), [save.background for save in self.saves()])

    @property
    def staging_overlap_ratio(self) -> float | None:
        """The share of the staging time in which data was written, too.

        Staging time is the time in which at least one `stage` phase was running. The part of it
        counts in which at least one `write` phase was running, too. 0.0 means that nothing was
        written before everything was copied. None if nothing was staged.
        """
        staging, writing = (
            [(e.began_ns, e.ended_ns) for e in self.events if e.phase == phase]
            for phase in ("stage", "write")
        )
        return _share(intersect(staging, writing), staging)


def _place(event: Event) -> int:
    """Return the sort key of an event: a whole operation comes after its parts."""
    return event.ended_ns if event.phase == END else event.began_ns


def _is_over(run: Sequence[Event]) -> bool:
    # A later `end` is of another save of this step, which was refused while this one goes on.
    return any(
        event.phase == "publish" or (event.phase == END and event.began_ns <= run[0].began_ns)
        for event in run
    )


def _times(run: Sequence[Event], blocked: Sequence[Span]) -> SaveTimes:
    began = min(event.began_ns for event in run)
    # Events are reported when phases end, so a save that was cut off has fewer.
    returned = _last(run, BLOCKED) or _last(run, "stage", "snapshot") or _last(run, "plan") or began
    # A save that waits overlaps the one before it, but its first phase is within its own call only.
    calls = [span for span in blocked if span.began_ns <= began < span.ended_ns]
    if calls:
        began = min(span.began_ns for span in calls)
        returned = max(span.ended_ns for span in calls)
    return SaveTimes(run[0].step, began, returned, _last(run, "publish"))


def _last(run: Sequence[Event], *phases: str) -> int | None:
    """Return the end of the last of these phases; None if there are none."""
    return max((event.ended_ns for event in run if event.phase in phases), default=None)


def _share(part: Iterable[Interval], whole: Iterable[Interval]) -> float | None:
    merged = merge(whole)
    return measure(part) / measure(merged) if merged else None
