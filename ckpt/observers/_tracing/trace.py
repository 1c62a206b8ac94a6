"""`Trace`: an observer that keeps events and spans, and writes them for Perfetto.

Tracks: the phases and spans of a timeline in rows in which no two overlap. Pure. A track is a row
of a picture, or a thread of a trace file. The writes of every lane have a track, and so has every
other kind of phase, and every thread of the caller. If phases of one kind overlap, as copies by
several threads do, or the lanes of two items, further tracks hold the rest.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckpt._arguments import whole_number
from ckpt._events import Event
from ckpt.errors import InvalidArgumentError, StorageError
from ckpt.observers._tracing.timeline import (
    BLOCKED,
    END,
    PREEMPTED,
    Interval,
    Span,
    Timeline,
    measure,
    pack,
)

logger = logging.getLogger("ckpt")
PathLike = str | os.PathLike[str]


def write_file(path: PathLike, data: bytes) -> None:
    """Write `data` to `path`, and replace an existing file.

    Raises:
        StorageError: The file system failed.
    """
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise StorageError(
            f"cannot write {os.fspath(path)}: {error.strerror or error}. Give the path of a file "
            "in a directory that exists, that you may write to, on a disk that is not full",
            errno=error.errno,
        ) from error


SPANS = "spans"
# The label of the track of whole operations.
WHOLE = "whole"
Value = str | int | float | bool | None

# The known phases in the order of a save, then of a restore. Others follow.
_ORDER = (
    *(END, "wait", "plan", "snapshot", "stage", "encode", "digest", "write", "merge"),
    *("record", "publish", "preserve"),
    *("match", "fetch", "exchange", "read", "place"),
)
# Fields of an event that an entry shows in other ways than as an argument.
_SAID = {"operation", "phase", "began_ns", "ended_ns", "nbytes"}


class TrackEntry(Struct, frozen=True):
    """One phase or span, as it is drawn.

    Attributes:
        name: The phase, or the name of the span.
        role: Kind of the entry: a known phase, `"span"`, `"blocked"` or `"other"`.
        nbytes: Bytes that it moved, or 0.
        args: All other values that are known about it.
    """

    name: str
    role: str
    began_ns: int
    ended_ns: int
    nbytes: int
    args: dict[str, Value]

    @property
    def interval(self) -> Interval:
        return self.began_ns, self.ended_ns


class Track(Struct, frozen=True):
    """Entries of one kind, ascending, that do not overlap.

    Attributes:
        group: The operation, or `"spans"`.
        label: The name shown beside the track.
        entries: The entries; at least one.
    """

    group: str
    label: str
    entries: tuple[TrackEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that its entries moved."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def busy_ns(self) -> int:
        """Time in which at least one of its entries was running."""
        return measure(entry.interval for entry in self.entries)


def rate(nbytes: int, duration_ns: int) -> float | None:
    """Return gigabytes (10^9) per second, or None if no bytes were moved or no time passed."""
    return nbytes / duration_ns if nbytes and duration_ns > 0 else None


def tracks(timeline: Timeline) -> list[Track]:
    """Return the tracks of a timeline: the caller's spans first, then phase by phase.

    The phase `preempted` is not on a track: it is time that would have been lost, not work.
    """
    return [*_span_tracks(timeline.spans), *_event_tracks(timeline.events)]


def _span_tracks(spans: Sequence[Span]) -> list[Track]:
    threads: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.began_ns):
        threads.setdefault(span.thread, []).append(span)
    found: list[Track] = []
    for thread, own in threads.items():
        names = {span.name for span in own} - {BLOCKED}
        label = names.pop() if len(names) == 1 else "spans"
        if len(threads) > 1:
            label = f"{label} ({thread})"
        entries = [
            TrackEntry(
                span.name,
                "blocked" if span.name == BLOCKED else "span",
                span.began_ns,
                span.ended_ns,
                0,
                dict(span.args),
            )
            for span in own
        ]
        found.extend(_packed(SPANS, label, entries))
    return found


def _event_tracks(events: Sequence[Event]) -> list[Track]:
    kinds: dict[tuple[str, str, int | None], list[TrackEntry]] = {}
    for event in sorted(events, key=lambda event: event.began_ns):
        if event.phase == PREEMPTED:
            continue
        lane = event.lane if event.phase == "write" else None
        kinds.setdefault((event.operation, event.phase, lane), []).append(_entry(event))
    operations = list(dict.fromkeys(operation for operation, _, _ in kinds))

    def place(kind: tuple[str, str, int | None]) -> tuple[int, int, int]:
        operation, phase, lane = kind
        known = _ORDER.index(phase) if phase in _ORDER else len(_ORDER)
        # Sorting is stable, so unknown phases stay in the order in which they began.
        return operations.index(operation), known, lane or 0

    found: list[Track] = []
    for kind in sorted(kinds, key=place):
        operation, phase, lane = kind
        label = {"stage": "staging", END: WHOLE}.get(phase, phase)
        label = label if lane is None else f"lane {lane}"
        found.extend(_packed(operation, label, kinds[kind]))
    return found


def _entry(event: Event) -> TrackEntry:
    role = event.phase if event.phase in _ORDER else "other"
    # Every field counts, since events gain fields. Fields that are None are left out.
    args = {
        each.name: getattr(event, each.name) for each in fields(event) if each.name not in _SAID
    }
    shown = {name: plain(value) for name, value in args.items() if value is not None}
    # The bytes of a plan were not moved yet.
    moved = 0 if event.phase == "plan" else event.nbytes
    return TrackEntry(event.phase, role, event.began_ns, event.ended_ns, moved, shown)


def plain(value: object) -> Value:
    """Return `value` if JSON can represent it, otherwise its text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)


def _packed(group: str, label: str, entries: Sequence[TrackEntry]) -> Iterable[Track]:
    """Yield the tracks that `entries`, ascending by their beginning, need."""
    rows: dict[int, list[TrackEntry]] = {}
    for entry, row in zip(entries, pack(entry.interval for entry in entries), strict=True):
        rows.setdefault(row, []).append(entry)
    for row in sorted(rows):
        name = label if row == 0 else f"{label} ({row + 1})"
        yield Track(group, name, tuple(rows[row]))


_NAMED_STEPS = 10


class Trace:
    """Collects the timed phases of saves and restores, and spans of your own.

    Pass it as an observer, and wrap your train step in `span`.

    All methods may be called from any thread. Give every manager a trace of its own, since events
    name a step, but not a manager.

    Args:
        limit: Most events to keep, and most spans. Beyond it the oldest are dropped: `dropped`
            counts them, and a warning is logged once.

    Raises:
        InvalidArgumentError: `limit` is not a whole number above 0.

    Example:
        ```python
        trace = ckpt.observers.Trace()
        with ckpt.sync.CheckpointManager(root, observers=[trace]) as mgr:
            with trace.span("train step", step=step):
                state = train_step(state)
            with trace.span("blocked"):
                mgr.save(step, state)
        trace.save_chrome("trace.json")
        ```
    """

    def __init__(self, limit: int = 100_000) -> None:
        limit = self._limit = whole_number("limit", limit, of="Trace")
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=limit)
        self._spans: deque[Span] = deque(maxlen=limit)
        self._dropped = 0

    def __call__(self, event: Event) -> None:
        """Keep one event; called by the library."""
        self._keep(self._events, event)

    @property
    def dropped(self) -> int:
        """Number of events and spans that were dropped since the trace was made or cleared."""
        return self._dropped

    @contextmanager
    def span(self, name: str, /, **args: object) -> Iterator[None]:
        """Time the body as a piece of your own work, also if it raises.

        A span named `"blocked"` around the call of `save()` says how long that call took. Spans may
        be nested, and may overlap, as those of asyncio tasks do.

        Args:
            name: Name of the work, such as `"train step"`.
            args: Values to show with it. Numbers and strings are kept, other values as their
                `str()`. So the trace keeps no array alive, but waits until an array is computed.

        Example:
            ```python
            with trace.span("train step", step=step):
                state = train_step(state)
            ```
        """
        shown = {key: plain(value) for key, value in args.items()}
        thread = threading.current_thread().name
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self._keep(self._spans, Span(name, began, time.perf_counter_ns(), thread, shown))

    def timeline(self, step: int | None = None, operation: str | None = None) -> Timeline:
        """Return the events and spans that were collected so far.

        Args:
            step: Only events of this step, and the spans beside them; None for everything.
            operation: Only `"save"`, `"restore"`, `"verify"`, `"delete"` or `"drain"`; None for
                all.

        Raises:
            InvalidArgumentError: There are no events of that step or operation.

        Example:
            ```python
            timeline = trace.timeline(100, "save")
            print(timeline.overlap_ratio)
            ```
        """
        everything = self._everything()
        found = everything.only(step, operation)
        if not found.events and (step, operation) != (None, None):
            wanted = " ".join(
                text for text in (operation, None if step is None else f"step {step}") if text
            )
            raise InvalidArgumentError(f"no event of {wanted}: {self._held(everything)}")
        return found

    def clear(self) -> None:
        """Forget every event and span.

        Example:
            ```python
            trace.save_chrome("first.json")
            trace.clear()
            ```
        """
        with self._lock:
            self._events.clear()
            self._spans.clear()
            self._dropped = 0

    def save_chrome(self, path: PathLike) -> None:
        """Write everything collected as a trace file in the JSON format of Chrome.

        ui.perfetto.dev and chrome://tracing open it. Your spans, the saves and the restores are its
        processes. Every lane, every other kind of phase, and the whole operation with its outcome
        is a thread. Time 0 is the beginning of the first event or span.

        Args:
            path: The file to write, usually `*.json`. It is replaced if it exists.

        Raises:
            StorageError: The file cannot be written.

        Example:
            ```python
            trace.save_chrome("trace.json")
            ```
        """
        write_chrome(self._everything(), path, self._dropped)

    def _keep(self, kept: deque[Any], new: Event | Span) -> None:
        with self._lock:
            full = len(kept) == self._limit
            self._dropped += full
            first = full and self._dropped == 1
            kept.append(new)
        if first:
            logger.warning(
                "a trace has reached its limit of %d and drops the oldest events from now on; "
                "make it with a higher limit, or clear() it from time to time",
                self._limit,
            )

    def _everything(self) -> Timeline:
        with self._lock:
            return Timeline(tuple(self._events), tuple(self._spans))

    def _held(self, everything: Timeline) -> str:
        if not everything.events:
            return "nothing was observed yet. Pass the trace to a manager: observers=[trace]"
        steps = everything.steps
        more = "... " if len(steps) > _NAMED_STEPS else ""
        named = ", ".join(map(str, steps[-_NAMED_STEPS:]))
        dropped = f"; {self._dropped} older ones were dropped" if self._dropped else ""
        return f"there are {len(everything.events)} events, of steps {more}{named}{dropped}"


def write_chrome(timeline: Timeline, path: PathLike, dropped: int = 0) -> None:
    """Write a timeline as a trace file in the JSON format of Chrome; see `Trace.save_chrome`.

    Raises:
        StorageError: The file cannot be written.
    """
    trace = {
        "traceEvents": chrome_events(timeline),
        "displayTimeUnit": "ms",
        "otherData": {"dropped": dropped},
    }
    write_file(path, json.dumps(trace, allow_nan=False).encode())


def chrome_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the events of a timeline in the trace event format of Chrome."""
    found = tracks(timeline)
    # Process 1 is the caller, even if it has no spans.
    groups = list(dict.fromkeys([SPANS, *(track.group for track in found)]))
    zero = min((track.entries[0].began_ns for track in found), default=0)
    events: list[dict[str, Any]] = []
    for pid, group in enumerate(groups, 1):
        named = [track for track in found if track.group == group]
        if not named:
            continue
        process = "your spans" if group == SPANS else f"ckpt {group}"
        events.append(_metadata("process_name", pid, 0, name=process))
        events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        for tid, track in enumerate(named, 1):
            events.append(_metadata("thread_name", pid, tid, name=track.label))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
            events.extend(_complete(entry, group, pid, tid, zero) for entry in track.entries)
    return events


def _metadata(what: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "ts": 0, "dur": 0, "pid": pid, "tid": tid, "args": args}


def _complete(entry: TrackEntry, group: str, pid: int, tid: int, zero: int) -> dict[str, Any]:
    args: dict[str, Any] = dict(entry.args)
    duration = entry.ended_ns - entry.began_ns
    speed = rate(entry.nbytes, duration)
    if entry.nbytes:
        args["nbytes"] = entry.nbytes
    if speed is not None:
        args["GB/s"] = float(f"{speed:.4g}")
    return {
        "ph": "X",
        "name": entry.name,
        "cat": group,
        "ts": (entry.began_ns - zero) / 1000,
        "dur": duration / 1000,
        "pid": pid,
        "tid": tid,
        "args": args,
    }
