"""Tracks: the phases and spans of a timeline in rows in which no two overlap. Pure.

A track is a row of a picture, or a thread of a trace file. The writes of every lane have a track,
and so has every other kind of phase, and every thread of the caller. If phases of one kind overlap,
as copies by several threads do, or the lanes of two items, further tracks hold the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields

from msgspec import Struct

from ckpt._events import Event
from ckpt.observers._tracing.intervals import Interval, measure, pack
from ckpt.observers._tracing.timeline import BLOCKED, END, PREEMPTED, Span, Timeline

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
