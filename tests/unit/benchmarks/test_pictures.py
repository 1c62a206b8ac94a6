"""Pictures and captions say what was measured, and nothing is cut off or unexplained."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgba
from matplotlib.text import Text

from benchmarks import event_loop, overlap, pictures, report, results, tables
from benchmarks.results import Results, Sample
from ckpt.observers import Timeline
from tests.support.paths import ROOT
from tests.unit.observers.examples import a_whole_save, event, span

RUN = results.read(ROOT / report.RESULTS)
NAMES = ("ratios", "training", "heartbeat", "growth")


def figure_of(name: str, run: Results = RUN) -> Any:
    for drawn, figure in pictures.figures(run):
        if drawn == name:
            figure.canvas.draw()
            return figure
    raise KeyError(name)


def shown(parts: Any) -> list[Any]:
    return [each for each in parts if each.get_visible() and each.get_text().strip()]


def beyond_the_axes(figure: Any) -> set[Any]:
    """Labels of ticks that are not drawn, since the axis ends before them."""
    found = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                found |= {tick.label1, tick.label2}
    return found


def bars(axes: Any, kind: str) -> list[Any]:
    return [bar for group in axes.containers for bar in group if group.get_label() == kind]


def test_every_chart_is_drawn_from_the_record() -> None:
    assert tuple(name for name, _ in pictures.figures(RUN)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_no_text_of_a_chart_is_cut_off_or_lies_on_another(name: str) -> None:
    figure = figure_of(name)
    absent = beyond_the_axes(figure)
    for text in shown(set(figure.findobj(Text)) - absent):
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, text
    for axes in figure.axes:
        # The figures at the ends of the bars and lines.
        figures = shown(axes.texts)
        for text in figures:
            box = text.get_window_extent()
            assert axes.bbox.x0 <= box.x0 <= box.x1 <= axes.bbox.x1, text
        labels = shown(set(axes.get_xticklabels()) - absent)
        for one, other in combinations(figures + labels, 2):
            assert not one.get_window_extent().overlaps(other.get_window_extent()), (one, other)


def wild_run() -> Results:
    """A run in which the median of the sums is far from the sum of the medians."""
    scenario = RUN.scenario(overlap.NAME)
    assert scenario is not None
    orbax = scenario.measures["orbax"] | {
        "lost": Sample(None, [0.2, 1.5, 1.5]),
        "blocked": Sample(None, [0.1, 0.1, 1.4]),
        "slowdown": Sample(None, [0.1, 1.4, 0.1]),
    }
    ours = scenario.measures["ckpt"] | {
        "lost": Sample(None, [0.1, 0.1, 0.2]),
        "blocked": Sample(None, [0.04, 0.05, 0.06]),
    }
    measures = scenario.measures | {"orbax": orbax, "ckpt": ours}
    wild = replace(scenario, measures=measures)
    others = [each for each in RUN.scenarios if each.name != overlap.NAME]
    return replace(RUN, scenarios=[wild, *others])


@pytest.mark.parametrize("run", [RUN, wild_run()], ids=["recorded", "wild"])
def test_a_bar_is_as_high_as_its_figure_says(run: Results) -> None:
    lost, rate, leaves = figure_of("training", run).axes
    for axes in (lost, leaves):
        heights = [bar.get_height() for bar in bars(axes, "all")]
        texts = [text.get_text() for text in shown(axes.texts)]
        assert [f"{height:.2f} s" for height in heights] == texts
        assert [text.xy[1] for text in axes.texts] == heights
        assert "seconds" in axes.get_xlabel()
    scenario = run.scenario(overlap.NAME)
    assert scenario is not None
    medians = [measures["lost"].median for measures in scenario.measures.values()]
    assert [bar.get_height() for bar in bars(lost, "all")] == medians
    for whole, part in zip(bars(lost, "all"), bars(lost, "part"), strict=True):
        assert 0 < part.get_height() <= whole.get_height()
    speeds = [float(text.get_text()) for text in shown(rate.texts)[1:]]
    assert speeds == pytest.approx([bar.get_height() for bar in rate.patches], rel=0.005)


def test_the_direction_of_the_ratios_is_the_one_that_is_named() -> None:
    figure = figure_of("ratios")
    assert "right of the orange line is faster, left of it is slower" in figure.get_suptitle()
    for axes in figure.axes:
        for text in shown(axes.texts):
            ratio = float(text.get_text().rstrip("x"))
            assert (text.xy[0] >= 1) == (ratio >= 1)
            assert text.xy[0] == pytest.approx(ratio, rel=0.05)


def test_the_ratios_say_what_each_bar_and_state_is() -> None:
    figure = figure_of("ratios")
    (legend,) = figure.legends
    explained = {to_rgba(patch.get_facecolor()) for patch in legend.get_patches()}
    drawn = {bar.get_facecolor() for axes in figure.axes for bar in axes.patches}
    assert drawn == explained
    names = {text.get_text() for text in legend.get_texts()}
    large = RUN.scenario("large")
    assert large is not None
    # PyTorch is not installed everywhere.
    assert ("PyTorch DCP" in names) == ("dcp" in large.measures)
    assert {"ckpt", "Orbax = 1x"} <= names
    states = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert "large\n512 MiB in 96 leaves" in states
    assert all("leaves" in each for each in states)


def test_the_legend_of_growth_has_every_kind_of_point_and_line() -> None:
    def kind(line: Any) -> tuple[Any, ...]:
        return to_rgba(line.get_color()), to_rgba(line.get_markerfacecolor())

    for axes in figure_of("growth").axes:
        explained = {kind(line) for line in axes.get_legend().get_lines()}
        points = {kind(line) for line in axes.lines if line.get_marker() == "o"}
        assert points == explained
        assert len(points) == 4
        dashes = {(to_rgba(line.get_color()), line.get_linestyle()) for line in axes.lines}
        keys = {(to_rgba(line.get_color()), line.get_linestyle())
                for line in axes.get_legend().get_lines()}  # fmt: skip
        assert {each for each in dashes if each[1] in ("-", "--")} == keys


def test_sizes_are_those_that_people_say() -> None:
    by_bytes, by_leaves = figure_of("growth").axes
    texts = [text.get_text() for text in by_bytes.get_xticklabels()]
    assert texts == ["64 MiB", "128 MiB", "256 MiB", "512 MiB", "1 GiB", "2 GiB", "4 GiB"]
    assert {"10", "1,000"} <= {text.get_text() for text in by_leaves.get_xticklabels()}


def test_rows_of_the_machine_alone_have_names_that_explain_them() -> None:
    figure = figure_of("heartbeat")
    names = [text.get_text().replace("\n", " ") for text in figure.axes[0].get_yticklabels()]
    assert names == ["ckpt", "Orbax", "other process doing the same I/O", "idle loop"]
    (legend,) = figure.legends
    markers = {line.get_marker() for line in legend.get_lines()}
    drawn = {line.get_marker() for axes in figure.axes for line in axes.lines}
    assert drawn - {"None"} == markers
    scenario = RUN.scenario(event_loop.HEARTBEAT)
    assert scenario is not None
    table = tables.of(scenario)
    assert "| other process doing the same I/O |" in table
    assert "| idle loop |" in table


@pytest.mark.parametrize("name", report.ALT)
def test_a_caption_says_where_how_often_and_what_is_better(name: str) -> None:
    text = report.picture(RUN, name, "folder")
    assert f"(folder/{name}.png)" in text
    assert "2 cores" in text
    assert "better" in text
    assert "rounds" in text or "a single save, not a median" in text


# --- One save -------------------------------------------------------------------------------------


def saved() -> Timeline:
    """A save in the background from 101 to 300, beside train steps until 200 and from 220."""
    return Timeline(
        (*a_whole_save(), event("something new", 150, 160), event("preempted", -(10**9), 299)),
        (
            span("train step", -40, -22),
            span("blocked", -21, 101),
            span("train step", 101, 200),
            span("train step", 220, 900),
        ),
    )


def patches(axes: Any, kind: str) -> list[tuple[float, float]]:
    """The ends of the bands that are hatched, or are not."""
    return [
        (band.get_x() - 0.021, band.get_x() + band.get_width() - 0.021)
        for band in axes.patches
        if band.get_height() == 1 and bool(band.get_hatch()) == (kind == "blocked")
    ]


def test_the_picture_of_a_save_has_a_row_for_every_kind_of_work() -> None:
    (axes,) = pictures.save_figure(saved()).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        *("train step", "wait", "plan", "staging", "staging (2)", "lane 0", "lane 1"),
        *("publish", "preserve", "something new"),
    ]
    bars = [bar for bar in axes.patches if bar.get_height() < 1]
    # What the caller did, and every phase but `blocked`, the end and what would have been lost.
    assert len(bars) == 4 + 9
    texts = {text.get_text() for text in axes.texts}
    assert {"write 4 MiB", "train step", "4 MiB · 29.96 GB/s"} <= texts


def test_the_picture_of_a_save_shows_what_blocks_and_what_overlaps() -> None:
    figure = pictures.save_figure(saved())
    (axes,) = figure.axes
    ms = pytest.approx
    # From the call, which was 21 microseconds before 0.
    assert patches(axes, "blocked") == [(ms(-0.021), ms(0.101))]
    assert patches(axes, "overlap") == [(ms(0.101), ms(0.2)), (ms(0.22), ms(0.3))]
    assert figure.get_suptitle().split("\n") == [
        "Save of step 1: train steps overlap 89% of its background time",
        "8 MiB written · save() blocked 0.122 ms · durable after 0.321 ms",
    ]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == [
        *("save() blocks the caller", "train steps while the save is in the background"),
    ]
    # What would have been lost is long before the save, and the last step ends long after it.
    low, high = axes.get_xlim()
    assert -0.02 < low < 0
    assert 0.34 < high < 0.36


def test_no_text_of_the_picture_of_a_save_is_cut_off() -> None:
    figure = pictures.save_figure(saved())
    figure.canvas.draw()
    for text in shown(set(figure.findobj(Text)) - beyond_the_axes(figure)):
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, text


# --- The page -------------------------------------------------------------------------------------


def test_the_pages_and_the_readme_are_what_the_record_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    found = report.updated_pages(RUN, report.PAGE)
    assert set(found) == {report.PAGE, report.tables_of(report.PAGE), report.README}
    for page, text in found.items():
        assert text == page.read_text(encoding="utf-8")


def test_the_pages_begin_with_what_readers_want_and_go_on_to_targets() -> None:
    page = ROOT / report.PAGE
    text = page.read_text(encoding="utf-8") + report.tables_of(page).read_text(encoding="utf-8")
    order = [
        *("overlap.png", "training.png", "| `save()` blocks for |", "## How it is measured"),
        *("ratios.png", "heartbeat.png", "growth.png", "### large", "### Targets"),
    ]
    places = [text.index(each) for each in order]
    assert places == sorted(places)


def test_the_summary_gives_the_medians_of_the_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for path, names in (
        (page, ("bench:summary", "bench:history")),
        (report.tables_of(page), ("bench",)),
    ):
        marks = [f"<!-- {name}:{end} -->" for name in names for end in ("start", "end")]
        path.write_text("\n".join(marks), encoding="utf-8")
    text = report.updated_pages(wild_run(), page)[page]
    assert "| training loses, in all | 100 ms | 1.5 s | 15x |" in text
    assert "| `save()` blocks for | 50 ms | 100 ms | 2x |" in text
