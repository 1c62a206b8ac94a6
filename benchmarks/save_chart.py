"""The chart: the layout of a picture of a timeline, with rows, bars, bands and ticks. Pure.

All positions are pixels of a picture of width `WIDTH`, from its upper left corner. So drawing a
chart means only to draw its rectangles and texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from ckpt.errors import InvalidArgumentError
from ckpt.observers._tracing.timeline import BLOCKED, PREEMPTED, Interval, SaveTimes, Timeline
from ckpt.observers._tracing.trace import SPANS, WHOLE, Track, TrackEntry, rate, tracks

WIDTH = 1080.0
# Left and right end of the bars. Labels are to the left, sums to the right.
LEFT, RIGHT = 150.0, 930.0

# The upper edge of the rows, with a legend above them and without.
_TOP, _TOP_PLAIN = 96.0, 72.0
_ROW, _BAR = 24.0, 16.0
_GAP = 12.0
_AXIS, _NOTE = 40.0, 18.0
# A bar must be visible, however short the phase was.
_MIN_BAR = 2.0
# The space before the first and after the last event, as a share of the time between them.
_MARGINS = 0.015, 0.03
_LETTER = 6.4
_MOST_TICKS = 9
# Without this note, a write of 64 bytes that waits for the disk would look like a slow write.
_WRITES = (
    "A write lasts until its file is durable. So a few bytes may last as long as the large files "
    "that the disk is busy with."
)
_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))


class Bar(Struct, frozen=True):
    """One phase or span.

    Attributes:
        role: Kind of the phase or span; see `TrackEntry`.
        text: A text that fits into it, or "".
    """

    x: float
    width: float
    role: str
    text: str


class ChartRow(Struct, frozen=True):
    """One track.

    Attributes:
        y: The upper edge of its bars.
        sum: Amount of data that it moved, or the time for which it was busy.
        bars: The bars, from left to right.
    """

    y: float
    height: float
    label: str
    sum: str
    bars: tuple[Bar, ...]


class Band(Struct, frozen=True):
    """An interval that is marked through all rows.

    Attributes:
        role: `"blocked"` while `save()` had not returned, or `"overlap"` while the caller worked
            and a save was in the background.
    """

    x: float
    width: float
    role: str


class Tick(Struct, frozen=True):
    """A mark on the time axis."""

    x: float
    text: str


class Chart(Struct, frozen=True):
    """The layout of a picture.

    Attributes:
        top: The upper edge of the part with the rows.
        bottom: The lower edge of that part, where the axis is.
        title: The first line.
        subtitle: The second line.
        legend: The roles of the bands in the picture, each with its meaning.
        bands: Bands behind the rows, from left to right. Bands of one role do not overlap.
        note: Note about the bars, below the axis; or "".
    """

    width: float
    height: float
    top: float
    bottom: float
    title: str
    subtitle: str
    legend: tuple[tuple[str, str], ...]
    rows: tuple[ChartRow, ...]
    bands: tuple[Band, ...]
    ticks: tuple[Tick, ...]
    note: str


def chart(timeline: Timeline) -> Chart:
    """Lay out a picture of a timeline, best that of a single save or restore.

    Raises:
        InvalidArgumentError: The timeline has no events.
    """
    # The phase is left out, since the time that was nearly lost may be long before the save.
    events = [event for event in timeline.events if event.phase != PREEMPTED]
    if not events:
        raise InvalidArgumentError(
            "there is nothing to draw: the timeline has no events. Pass a Trace to the manager, "
            "observers=[trace], and draw trace.timeline(step) after a save of that step"
        )
    saves = timeline.saves()
    began = min([e.began_ns for e in events] + [save.began_ns for save in saves])
    ended = max([e.ended_ns for e in events] + [save.returned_ns for save in saves])
    duration = max(ended - began, 1)
    window = (began - round(_MARGINS[0] * duration), ended + round(_MARGINS[1] * duration) + 1)

    def place(interval: Interval) -> Interval | None:
        """Return the part of an interval that is in the picture; None if all of it is outside."""
        first, last = max(interval[0], window[0]), min(interval[1], window[1])
        return (first, last) if first <= last else None

    def x_of(instant: int) -> float:
        return LEFT + (RIGHT - LEFT) * (instant - window[0]) / (window[1] - window[0])

    bands = _bands(timeline, saves, x_of)
    top = _TOP if bands else _TOP_PLAIN
    rows, bottom = _rows(_shown(tracks(timeline)), top, place, x_of)
    note = _WRITES if any(bar.role == "write" for row in rows for bar in row.bars) else ""
    return Chart(
        width=WIDTH,
        height=bottom + _AXIS + (_NOTE if note else 0.0),
        top=top,
        bottom=bottom,
        title=_title(timeline, saves),
        subtitle=_subtitle(timeline, saves, duration),
        legend=_legend(bands, timeline),
        rows=rows,
        bands=bands,
        ticks=tuple(Tick(x_of(began + at), text) for at, text in ticks(duration)),
        note=note,
    )


def ticks(duration: int) -> list[tuple[int, str]]:
    """Return round numbers of nanoseconds from 0 to `duration`, in one unit, with their texts."""
    step = next(
        factor * 10**power
        for power in range(30)
        for factor in (1, 2, 5)
        if duration // (factor * 10**power) < _MOST_TICKS
    )
    marks = range(0, duration + 1, step)
    # The unit of the last mark. The others need at most two decimals in it.
    size, unit = next(each for each in _UNITS if marks[-1] >= each[0] or each[0] == 1.0)
    return [(at, f"{at / size:g} {unit}" if at else "0") for at in marks]


def duration_text(nanoseconds: float) -> str:
    """Return a duration in a unit that suits it, with three digits."""
    size, unit = next(each for each in _UNITS if nanoseconds >= each[0] or each[0] == 1.0)
    return f"{_digits(nanoseconds / size)} {unit}"


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes in a unit that suits it, with three digits."""
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**exponent:
            return f"{_digits(nbytes / 1024**exponent)} {unit}"
    return f"{nbytes} B"


def rate_text(speed: float) -> str:
    """Return gigabytes per second with two decimals."""
    return f"{speed:.2f} GB/s" if speed >= 0.005 else "<0.01 GB/s"


def percent_text(share: float) -> str:
    """Return a share in percent. 0% and 100% are only used for exactly these values."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _shown(found: Sequence[Track]) -> list[Track]:
    """Return the tracks that are drawn as rows."""
    # The phase `blocked` is drawn as a band.
    rows = [track for track in found if track.label != BLOCKED]
    # A bar for the whole operation adds nothing, unless it is the only one.
    parted = {track.group for track in rows if not track.label.startswith(WHOLE)}
    return [t for t in rows if not (t.label.startswith(WHOLE) and t.group in parted)]


def _rows(
    found: Sequence[Track],
    y: float,
    place: Callable[[Interval], Interval | None],
    x_of: Callable[[int], float],
) -> tuple[tuple[ChartRow, ...], float]:
    operations = {track.group for track in found} - {SPANS}
    rows: list[ChartRow] = []
    previous = found[0].group if found else ""
    for track in found:
        if track.group != previous:
            y, previous = y + _GAP, track.group
        bars = _bars(track, place, x_of)
        if not bars:
            continue
        label = track.label
        if len(operations) > 1 and track.group != SPANS:
            label = f"{track.group}: {label}"
        inset = (_ROW - _BAR) / 2
        rows.append(ChartRow(y + inset, _BAR, label, _sum(track), tuple(bars)))
        y += _ROW
    return tuple(rows), y + 4


def _bars(
    track: Track,
    place: Callable[[Interval], Interval | None],
    x_of: Callable[[int], float],
) -> list[Bar]:
    drawn: list[tuple[float, float, list[TrackEntry]]] = []
    free = LEFT
    for entry in track.entries:
        seen = place(entry.interval)
        if seen is None:
            continue
        left, right = max(x_of(seen[0]), free), x_of(seen[1])
        touching = left == free or free > RIGHT - _MIN_BAR
        if drawn and touching and right - left < _MIN_BAR:
            # The bar before was drawn wider than it is, or leaves no room. They share a bar.
            before, end, entries = drawn.pop()
            drawn.append((before, max(end, right), [*entries, entry]))
        else:
            left = min(left, RIGHT - _MIN_BAR)
            drawn.append((left, max(right, left + _MIN_BAR), [entry]))
        free = drawn[-1][1]
    return [
        Bar(left, right - left, entries[0].role, _bar_text(entries, right - left))
        for left, right, entries in drawn
    ]


def _bar_text(entries: Sequence[TrackEntry], width: float) -> str:
    """Return the longest text that fits."""
    entry = entries[0]
    texts = [entry.name]
    if len(entries) > 1:
        texts = []
    elif entry.role == "blocked":
        texts = ["save() blocks", "save()"]
    elif entry.role == "span" and "step" in entry.args:
        texts = [f"{entry.name} {entry.args['step']}", f"{entry.args['step']}"]
    elif entry.nbytes:
        texts = [f"{entry.name} {format_bytes(entry.nbytes)}", format_bytes(entry.nbytes)]
        if entry.role == "write":
            texts.insert(0, f"{texts[0]}, until durable")
    return next((text for text in texts if len(text) * _LETTER + 6 <= width), "")


def _sum(track: Track) -> str:
    if track.group == SPANS:
        lengths = [e.ended_ns - e.began_ns for e in track.entries if e.role == "span"]
        mean = sum(lengths) / max(len(lengths), 1)
        return f"{len(lengths)} × {duration_text(mean)}" if lengths else ""
    if not track.nbytes:
        return duration_text(track.busy_ns)
    speed = rate(track.nbytes, track.busy_ns)
    moved = format_bytes(track.nbytes)
    return moved if speed is None else f"{moved} · {rate_text(speed)}"


def _bands(
    timeline: Timeline, saves: Sequence[SaveTimes], x_of: Callable[[int], float]
) -> tuple[Band, ...]:
    found = [("overlap", each) for each in timeline.overlapped()]
    found += [("blocked", each.blocked) for each in saves]
    places = [(role, x_of(began), x_of(ended)) for role, (began, ended) in found]
    return tuple(Band(left, right - left, role) for role, left, right in places)


def _legend(bands: Sequence[Band], timeline: Timeline) -> tuple[tuple[str, str], ...]:
    roles = {band.role for band in bands}
    meanings = (
        ("blocked", "save() blocks the caller"),
        ("overlap", f"{_work(timeline)} while the save is in the background"),
    )
    return tuple((role, meaning) for role, meaning in meanings if role in roles)


def _work(timeline: Timeline) -> str:
    """Return the common name of the caller's spans."""
    names = {span.name for span in timeline.spans} - {BLOCKED}
    return f'"{names.pop()}"' if len(names) == 1 else "your spans"


def _title(timeline: Timeline, saves: Sequence[SaveTimes]) -> str:
    operations = sorted({event.operation for event in timeline.events}, reverse=True)
    if len(saves) > 1:
        operations = [f"{len(saves)} saves" if each == "save" else each for each in operations]
    title = " and ".join(operations)
    steps = timeline.steps
    if len(steps) == 1:
        title += f" of step {steps[0]}"
    elif steps:
        title += f" of steps {steps[0]} to {steps[-1]}"
    title = title[0].upper() + title[1:]
    ratio = timeline.overlap_ratio
    if ratio is None or not any(span.name != BLOCKED for span in timeline.spans):
        return title
    whose = "their" if len(saves) > 1 else "its"
    return f"{title}: {percent_text(ratio)} of {whose} background time overlaps {_work(timeline)}"


def _subtitle(timeline: Timeline, saves: Sequence[SaveTimes], duration: int) -> str:
    moved = [0, 0]
    for event in timeline.events:
        moved[0] += event.nbytes if (event.operation, event.phase) == ("save", "write") else 0
        moved[1] += event.nbytes if (event.operation, event.phase) == ("restore", "read") else 0
    parts = [
        f"{format_bytes(nbytes)} {verb}"
        for nbytes, verb in zip(moved, ("written", "read"), strict=True)
        if nbytes
    ]
    if len(saves) == 1:
        save = saves[0]
        parts.append(f"save() blocked {duration_text(save.returned_ns - save.began_ns)}")
        if save.published_ns is None:
            parts.append("not published")
        else:
            parts.append(f"durable after {duration_text(save.published_ns - save.began_ns)}")
    else:
        parts.append(f"{duration_text(duration)} in all")
    staging = timeline.staging_overlap_ratio
    if staging is not None:
        parts.append(f"{percent_text(staging)} of staging overlaps writing")
    return " · ".join(parts)
