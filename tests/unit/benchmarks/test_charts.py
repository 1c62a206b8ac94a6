"""Charts and captions say what was measured, and nothing of them is cut off or unexplained."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgba
from matplotlib.text import Text

from benchmarks import captions, charts, heartbeat, history, overlap, report, results, tables
from benchmarks.results import Results, Sample
from tests.support.paths import ROOT

RUN = results.read(ROOT / report.RESULTS)
NAMES = ("ratios", "training", "heartbeat", "growth")


def figure_of(name: str, run: Results = RUN) -> Any:
    for drawn, figure in charts.figures(run):
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
    assert tuple(name for name, _ in charts.figures(RUN)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_cut_off_or_lies_on_another(name: str) -> None:
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
    scenario = RUN.scenario(heartbeat.NAME)
    assert scenario is not None
    table = tables.of(scenario)
    assert "| other process doing the same I/O |" in table
    assert "| idle loop |" in table


@pytest.mark.parametrize("name", captions.ALT)
def test_a_caption_says_where_how_often_and_what_is_better(name: str) -> None:
    text = captions.picture(RUN, name, "folder")
    assert f"(folder/{name}.png)" in text
    assert "2 cores" in text
    assert "better" in text
    assert "rounds" in text or "a single save, not a median" in text


# --- The page -------------------------------------------------------------------------------------


def test_the_page_is_what_the_record_says() -> None:
    page = ROOT / report.PAGE
    assert report.updated(RUN, page) == page.read_text(encoding="utf-8")
    tables = report.tables_of(page).read_text(encoding="utf-8")
    assert report.updated_tables(RUN, page) == tables


def test_the_readme_has_figures_of_the_same_record() -> None:
    readme = ROOT / report.README
    assert report.updated_readme(RUN, readme) == readme.read_text(encoding="utf-8")


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
    marks = (report.SUMMARY_START, report.SUMMARY_END, history.START, history.END)
    page.write_text("\n".join(marks), encoding="utf-8")
    text = report.updated(wild_run(), page)
    assert "| training loses, in all | 100 ms | 1.5 s | 15x |" in text
    assert "| `save()` blocks for | 50 ms | 100 ms | 2x |" in text
