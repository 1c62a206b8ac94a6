"""The picture of a save: where everything lies, and the file that shows it."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.save_chart import LEFT, RIGHT, chart, format_bytes, percent_text, ticks
from benchmarks.save_picture import draw_png
from ckpt._events import Event
from ckpt.errors import InvalidArgumentError
from ckpt.observers import Timeline
from tests.unit.observers.examples import TIMELINES, a_save, a_whole_save, end, event, span

SAVE = Timeline(
    (*a_save(), event("something <new>", 5, 15)),
    (
        span("train step", -40, -1),
        span("blocked", -1, 101),
        span("train step", 101, 200),
        span("train step", 220, 900),
    ),
)
RESTORE = Timeline(
    (
        event("read", 0, 50, operation="restore", nbytes=8 << 20),
        event("read", 10, 60, operation="restore", nbytes=8 << 20),
        event("place", 60, 80, operation="restore", nbytes=16 << 20),
    )
)
EPSILON = 1e-6


# --- The layout -----------------------------------------------------------------------------------


@given(TIMELINES)
def test_bars_lie_within_the_picture_and_beside_each_other(timeline: Timeline) -> None:
    drawn = chart(timeline)
    for row in drawn.rows:
        assert row.bars
        assert drawn.top <= row.y
        assert row.y + row.height <= drawn.bottom < drawn.height
        for bar in row.bars:
            assert bar.x >= LEFT - EPSILON
            assert bar.x + bar.width <= RIGHT + EPSILON
            assert bar.width >= 1.5
        for left, right in pairwise(row.bars):
            assert left.x + left.width <= right.x + EPSILON
    for upper, lower in pairwise(drawn.rows):
        assert upper.y + upper.height < lower.y
    for band in drawn.bands:
        assert LEFT <= band.x <= band.x + band.width <= RIGHT
    for left_tick, right_tick in pairwise(drawn.ticks):
        assert left_tick.x < right_tick.x
        assert left_tick.text != right_tick.text


@given(st.integers(1, 10**14))
def test_ticks_are_few_and_round_and_span_the_time(duration: int) -> None:
    marks = ticks(duration)
    assert marks[0] == (0, "0")
    step = marks[1][0] if len(marks) > 1 else None
    assert step is None or str(step).rstrip("0") in ("1", "2", "5")
    assert [at for at, _ in marks] == [n * (step or 1) for n in range(len(marks))]
    assert duration - (step or duration + 1) < marks[-1][0] <= duration
    assert (2 if duration > 1 else 1) <= len(marks) <= 9
    assert len({text for _, text in marks}) == len(marks)


def test_thousands_of_short_phases_share_bars() -> None:
    writes = tuple(
        Event("save", "write", 1, 1000 * n, 1000 * n + 900, 64 << 20, 0) for n in range(20_000)
    )
    (row,) = chart(Timeline(writes)).rows
    assert len(row.bars) < RIGHT - LEFT
    assert row.bars[-1].x > 0.9 * RIGHT


def test_the_title_says_the_overlap_and_the_rows_what_there_is() -> None:
    drawn = chart(SAVE)
    # In the background from 101 to 300, at work from 101 to 200 and from 220.
    assert drawn.title == 'Save of step 1: 90% of its background time overlaps "train step"'
    assert drawn.subtitle == (
        "8 MiB written · save() blocked 102 µs · durable after 301 µs · 50% of staging overlaps "
        "writing"
    )
    assert [row.label for row in drawn.rows] == [
        *("train step", "plan", "staging", "staging (2)", "lane 0", "lane 1", "publish"),
        *("preserve", "something <new>"),
    ]
    assert [role for role, _ in drawn.legend] == ["blocked", "overlap"]
    shaded = [band for band in drawn.bands if band.role == "overlap"]
    assert len(shaded) == 2
    (blocked,) = (band for band in drawn.bands if band.role == "blocked")
    steps = drawn.rows[0].bars
    assert (steps[1].role, steps[1].x) == ("blocked", pytest.approx(blocked.x))
    assert steps[1].width == pytest.approx(blocked.width)


def test_a_write_says_that_it_lasts_until_it_is_durable() -> None:
    # A few bytes that wait for the disk behind many.
    writes = (
        event("write", 0, 1000, nbytes=48 << 20, lane=0),
        event("write", 5, 1000, nbytes=64, lane=1),
        event("write", 1000, 1300, nbytes=64, lane=1),
    )
    drawn = chart(Timeline(writes))
    texts = [bar.text for row in drawn.rows for bar in row.bars]
    assert texts == [
        *("write 48 MiB, until durable", "write 64 B, until durable", "write 64 B, until durable")
    ]
    assert "until its file is durable" in drawn.note
    assert chart(RESTORE).note == ""


def test_a_restore_has_no_overlap_to_tell() -> None:
    drawn = chart(replace(RESTORE, spans=(span("train step", 0, 50),)))
    assert drawn.title == "Restore of step 1"
    assert drawn.subtitle == "16 MiB read · 80 µs in all"
    assert [row.label for row in drawn.rows] == ["train step", "read", "read (2)", "place"]
    assert drawn.bands == drawn.legend == ()


def test_a_whole_operation_is_no_bar_over_the_others() -> None:
    drawn = chart(Timeline(a_whole_save()))
    assert [row.label for row in drawn.rows] == [
        *("wait", "plan", "staging", "staging (2)", "lane 0", "lane 1", "publish", "preserve"),
    ]
    # The caller waits from the beginning.
    (blocked,) = drawn.bands
    assert blocked.role == "blocked"
    assert drawn.subtitle.startswith("8 MiB written · save() blocked 120 µs · durable after 320 µs")


def test_an_operation_that_has_nothing_but_its_end_is_a_bar() -> None:
    deleted = end(400, 450, operation="delete", step=0)
    twice = end(420, 460, operation="delete", step=1)
    drawn = chart(Timeline((*a_whole_save(2), deleted, twice)))
    assert [row.label for row in drawn.rows[-2:]] == ["delete: whole", "delete: whole (2)"]
    assert "save: whole" not in {row.label for row in drawn.rows}
    skipped = chart(Timeline((end(0, 1, "skipped", reason="every 100 steps"),)))
    assert len(skipped.rows[0].bars) == 1


def test_what_was_nearly_lost_does_not_stretch_a_picture() -> None:
    lost = event("preempted", -(10**9), 299)
    assert chart(Timeline((*a_whole_save(), lost))) == chart(Timeline(a_whole_save()))
    with pytest.raises(InvalidArgumentError, match="nothing to draw"):
        chart(Timeline((lost,)))


def test_only_the_blocked_phase_is_a_picture_without_rows() -> None:
    drawn = chart(Timeline((event("blocked", 0, 9),)))
    assert (drawn.rows, len(drawn.bands)) == ((), 1)


def test_several_operations_are_told_apart() -> None:
    later = Timeline(a_save(4, at=500)).events
    drawn = chart(Timeline(SAVE.events + later + RESTORE.events, SAVE.spans))
    assert drawn.title.startswith("2 saves and restore of steps 1 to 4: ")
    assert {"save: lane 0", "restore: read"} <= {row.label for row in drawn.rows}


def test_a_save_that_failed_says_that_it_was_not_published() -> None:
    failed = tuple(e for e in a_save() if e.phase not in ("publish", "preserve"))
    assert "not published" in chart(Timeline(failed)).subtitle


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (1e-9, "<1%"), (0.5, "50%"), (0.994, "99%"), (0.9999, ">99%"), (1.0, "100%")],
)
def test_a_share_is_whole_only_if_it_is(share: float, text: str) -> None:
    assert percent_text(share) == text


def test_sizes_have_three_digits() -> None:
    sizes = [0, 1023, 1536, 5 << 20, 123_456_789, 3 << 40]
    assert [format_bytes(n) for n in sizes] == [
        *("0 B", "1023 B", "1.5 KiB", "5 MiB", "118 MiB", "3072 GiB"),
    ]


# --- The PNG --------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeline", [SAVE, RESTORE], ids=["save", "restore"])
def test_the_png_is_a_png_of_the_charts_shape(timeline: Timeline, tmp_path: Path) -> None:
    draw_png(timeline, tmp_path / "picture.png")
    data = (tmp_path / "picture.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    drawn = chart(timeline)
    assert (width, height) == (2 * drawn.width, 2 * drawn.height)


@pytest.mark.parametrize("timeline", [SAVE, RESTORE], ids=["save", "restore"])
def test_no_text_of_the_png_is_cut_off_or_on_another(
    timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_png(timeline, tmp_path / "picture.png")
    (figure,) = figures
    canvas = FigureCanvasAgg(figure)
    texts = [each for each in figure.axes[0].texts if each.get_text()]
    assert chart(timeline).note in {each.get_text() for each in texts} | {""}
    boxes = [each.get_window_extent(canvas.get_renderer()) for each in texts]
    for text, box in zip(texts, boxes, strict=True):
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, text
    for (one, first), (two, second) in combinations(zip(texts, boxes, strict=True), 2):
        assert not first.overlaps(second), (one, two)


@settings(max_examples=3)
@given(TIMELINES)
def test_whatever_happened_is_drawn(
    tmp_path_factory: pytest.TempPathFactory, timeline: Timeline
) -> None:
    draw_png(timeline, tmp_path_factory.mktemp("pictures") / "picture.png")


def test_drawing_a_png_leaves_pyplot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    draw_png(SAVE, tmp_path / "picture.png")


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"observers=\[trace\]"):
        draw_png(Timeline((), SAVE.spans), tmp_path / "picture.png")
    assert not (tmp_path / "picture.png").exists()
