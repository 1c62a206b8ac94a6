"""The timeline from a file that `ckpt.observers.JsonLines` has written with all phases."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct, field

from ckpt._events import Event, Outcome
from ckpt.errors import InvalidArgumentError, StorageError
from ckpt.observers._tracing.timeline import END, Span, Timeline

# A line whose clock is off by more than this belongs to another process or another boot.
_SAME_CLOCK_NS = 1_000_000_000


class _Line(Struct, frozen=True):
    """A line of the file: an event, or a span of the user."""

    time: float
    seconds: float
    operation: str = ""
    phase: str = ""
    step: int | None = None
    nbytes: int = 0
    lane: int | None = None
    batch: int | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    span: str | None = None
    thread: str = ""
    args: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    clock_ns: int | None = None


class RecordedTrace(Struct, frozen=True):
    """The contents of a trace file.

    Attributes:
        timeline: Its events and spans; their times count from 1970.
        unreadable: Number of lines that are not an observer's, such as a truncated one.
    """

    timeline: Timeline
    unreadable: int


def read_trace(path: str | os.PathLike[str]) -> RecordedTrace:
    """Return the timeline of a file.

    Raises:
        StorageError: The file cannot be read.
        InvalidArgumentError: No line is an observer's, or the file was written without phases.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = parse_trace(file)
    except OSError as error:
        raise StorageError(
            f"cannot read {Path(path)}: {error.strerror or error}", errno=error.errno
        ) from error
    events = found.timeline.events
    if not events:
        raise InvalidArgumentError(
            f"{Path(path)} holds no events. Give the file that an observer "
            "ckpt.observers.JsonLines(path, phases=True) has written"
        )
    if all(event.phase == END for event in events):
        raise InvalidArgumentError(
            f"{Path(path)} was written without phases. Record it with "
            "ckpt.observers.JsonLines(path, phases=True)"
        )
    return found


def parse_trace(lines: Iterable[str]) -> RecordedTrace:
    """Return the timeline of some lines."""
    events: list[Event] = []
    spans: list[Span] = []
    unreadable = 0
    offset: int | None = None
    for text in lines:
        line = _parsed(text)
        if line is None:
            unreadable += bool(text.strip())
            continue
        ended = round(line.time * 1e9)
        if line.clock_ns is not None:
            # All lines of a process get the same offset, so that they keep their order.
            own = ended - line.clock_ns
            offset = own if offset is None or abs(own - offset) > _SAME_CLOCK_NS else offset
            ended = line.clock_ns + offset
        began = ended - round(line.seconds * 1e9)
        if line.span is not None:
            spans.append(Span(line.span, began, ended, line.thread, line.args))
            continue
        events.append(
            Event(
                line.operation,
                line.phase,
                line.step,
                began,
                ended,
                line.nbytes,
                line.lane,
                line.batch,
                line.outcome,
                line.reason,
            )
        )
    return RecordedTrace(Timeline(tuple(events), tuple(spans)), unreadable)


def _parsed(text: str) -> _Line | None:
    try:
        # msgspec refuses texts with half a surrogate pair, which paths may contain.
        line = msgspec.convert(json.loads(text), _Line)
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None
    is_whole = line.span is not None or (line.operation and line.phase)
    # Times before 1970 or after 2200 are errors.
    times = math.isfinite(line.time) and 0 <= line.time < 1 << 33 and 0 <= line.seconds < 1 << 33
    return line if is_whole and times and line.nbytes >= 0 else None
