"""`Trace`: an observer that keeps events and spans, and writes them for Perfetto."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpt._arguments import whole_number
from ckpt._events import Event
from ckpt.errors import InvalidArgumentError
from ckpt.observers._tracing.files import PathLike, write_file
from ckpt.observers._tracing.timeline import Span, Timeline
from ckpt.observers._tracing.tracks import SPANS, TrackEntry, plain, rate, tracks

logger = logging.getLogger("ckpt")

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
