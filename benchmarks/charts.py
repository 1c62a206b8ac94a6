"""Charts of a run: PNG files, where matplotlib is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from benchmarks import blocked, fit, growth, heartbeat, overlap, throughput
from benchmarks.figures import digits, size, times, value
from benchmarks.labels import label
from benchmarks.tables import BASELINE, ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.results import Results, Sample, Scenario

_COLORS: Mapping[str, str] = MappingProxyType(
    {
        "ckpt": "#1769d2",
        BASELINE: "#e07b39",
        "dcp": "#8a5fb5",
        "safetensors": "#4c9f70",
        "raw": "#8c959f",
        heartbeat.NEIGHBOUR: "#8c959f",
        heartbeat.IDLE: "#c3c9d0",
    }
)
_INK, _FAINT = "#24292f", "#d8dee4"
_STYLE = MappingProxyType(
    {
        "font.size": 9,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _FAINT,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "grid.color": _FAINT,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "figure.facecolor": "white",
        "savefig.dpi": 160,
    }
)


def draw(run: Results, folder: Path) -> list[Path]:
    """Draws every chart that the scenarios of a run allow; returns the files."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.stderr.write("charts: left out, matplotlib is not installed\n")
        return []
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, figure in figures(run):
        path = folder / f"{name}.png"
        figure.savefig(path, bbox_inches="tight", pad_inches=0.15)
        drawn.append(path)
    return drawn


def figures(run: Results) -> Iterator[tuple[str, Any]]:
    """Yields the name and the figure of every chart that the scenarios of a run allow."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    with pyplot.rc_context(dict(_STYLE)):
        for name, chart in _CHARTS.items():
            figure = chart(pyplot, run)
            if figure is None:
                continue
            if run.smoke:
                figure.text(
                    0.5, 0.5, "smoke run", fontsize=40, alpha=0.12, ha="center", va="center"
                )
            yield name, figure
            pyplot.close(figure)


def _ratios(pyplot: Any, run: Results) -> Any:
    """How many times as fast as Orbax each peer is, by workload."""
    scenarios = [
        each for each in run.scenarios if each.kind == throughput.KIND and BASELINE in each.measures
    ]
    if not scenarios:
        return None
    titles = {"save": "save, until durable", "blocked": "time for which save() blocks"}
    titles |= {"restore": "restore, cached", "restore_cold": "restore, cold"}
    peers = [name for name in _COLORS if name in scenarios[0].measures and name != BASELINE]
    height = 1.9 + 0.26 * len(scenarios) * (len(peers) + 1)
    figure, panels = pyplot.subplots(2, 2, figsize=(10, height), sharey=True, layout="constrained")
    for axes, (measure, title) in zip(panels.flat, titles.items(), strict=True):
        _ratio_bars(axes, scenarios, peers, measure)
        axes.set_title(title)
    patches: Any = importlib.import_module("matplotlib.patches")
    lines: Any = importlib.import_module("matplotlib.lines")
    handles = [patches.Patch(color=_COLORS[peer], label=label(peer)) for peer in peers]
    handles.append(lines.Line2D([], [], color=_COLORS[BASELINE], label=f"{label(BASELINE)} = 1x"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(
        "Speed compared with Orbax: right of the orange line is faster, left of it is slower\n"
        "Logarithmic scale. Safetensors and the raw file have no asynchronous save, so all of it "
        "blocks.",
        x=0.01,
        ha="left",
    )
    return figure


def _ratio_bars(
    axes: Any, scenarios: Sequence[Scenario], peers: Sequence[str], measure: str
) -> None:
    step = 0.84 / len(peers)
    shown = [1.0]
    for number, peer in enumerate(peers):
        for place, scenario in enumerate(scenarios):
            found = ratio(scenario, BASELINE, peer, measure)
            if found is None:
                continue
            shown.append(found)
            y = place - 0.42 + (number + 0.5) * step
            axes.barh(y, found - 1, step * 0.9, left=1, color=_COLORS[peer])
            axes.annotate(
                times(found),
                (found, y),
                (3 if found >= 1 else -3, 0),
                textcoords="offset points",
                ha="left" if found >= 1 else "right",
                va="center",
                fontsize=7,
            )
    axes.set_xscale("log")
    axes.axvline(1, color=_COLORS[BASELINE], linewidth=1.5)
    # Beyond the longest bars there is room for their figures, which is a share of the width.
    low, high = min(*shown, 0.8), max(*shown, 1.25)
    room = (high / low) ** 0.16
    axes.set_xlim(low / (room if min(shown) < 1 else 1), high * room)
    axes.xaxis.set_major_formatter(lambda x, _: times(x))
    axes.xaxis.set_minor_formatter("")
    names = [f"{each.name}\n{_state(each)}" for each in scenarios]
    axes.set_yticks(range(len(scenarios)), names)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.tick_params(length=0, which="both")
    axes.grid(axis="x")


def _state(scenario: Scenario) -> str:
    return f"{size(scenario.size_bytes)} in {scenario.leaves:,} leaves"


def _training(pyplot: Any, run: Results) -> Any:
    """What a save costs training, and how long it blocks with many leaves."""
    scenario = run.scenario(overlap.NAME)
    if scenario is None:
        return None
    many = run.scenario(blocked.NAME)
    figure, (lost, rate, leaves) = pyplot.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    peers = list(scenario.measures)
    _seconds_bars(lost, scenario, "lost", "training lost per save", inner="blocked")
    lost.set_xlabel(
        "seconds; shorter is better\ndark: blocked by save(), light: slower steps", fontsize=8
    )
    speeds = [scenario.measures[peer]["saving_steps_per_second"].median for peer in peers]
    calm = max(scenario.measures[peer]["calm_steps_per_second"].median for peer in peers)
    rate.bar([label(peer) for peer in peers], speeds, 0.6, color=[_COLORS[peer] for peer in peers])
    rate.axhline(calm, color=_INK, linewidth=0.8, linestyle="--")
    rate.annotate("without saves", (1, calm), (0, 3), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right", fontsize=7.5)  # fmt: skip
    for place, speed in enumerate(speeds):
        _above(rate, place, speed, digits(speed), inside=True)
    rate.set_title(f"training, a save every {scenario.facts['save_every_seconds']:g} s")
    rate.set_xlabel("train steps per second; longer is better", fontsize=8)
    if many is None:
        leaves.set_axis_off()
    else:
        _seconds_bars(leaves, many, "blocked", f"blocked by save(), {many.leaves:,} leaves")
        leaves.set_xlabel("seconds; shorter is better", fontsize=8)
    for axes in (lost, rate, leaves):
        axes.margins(y=0.18)
        axes.tick_params(length=0)
        axes.grid(axis="y")
    return figure


def _seconds_bars(
    axes: Any, scenario: Scenario, measure: str, title: str, *, inner: str | None = None
) -> None:
    """Draws a bar for every peer: its median is its height and its figure.

    Args:
        axes: Where.
        scenario: What was measured.
        measure: The measure.
        title: Of the panel.
        inner: A measure that is a part of it, and is drawn in the bar.
    """
    for place, (peer, measures) in enumerate(scenario.measures.items()):
        sample, color = measures[measure], _COLORS[peer]
        name = label(peer)
        axes.bar(name, sample.median, 0.6, color=color, alpha=0.45 if inner else None, label="all")
        if inner is not None:
            # A median of the parts; the sum of those of all parts is not the median of the sum.
            part = min(measures[inner].median, sample.median)
            axes.bar(name, part, 0.6, color=color, label="part")
        # Beside each other, so that the figure stands at the height that it tells.
        _range(axes, place + 0.2, sample)
        _above(axes, place - 0.08, sample.median, f"{sample.median:.2f} s")
    axes.set_title(title)


def _range(axes: Any, x: float, sample: Sample) -> None:
    """Draws a line from the lowest to the highest round."""
    error = [[max(0.0, sample.median - sample.low)], [max(0.0, sample.high - sample.median)]]
    axes.errorbar(x, sample.median, error, color=_INK, linewidth=0.8, capsize=3, fmt="none")


def _above(axes: Any, x: float, y: float, text: str, *, inside: bool = False) -> None:
    axes.annotate(
        text,
        (x, y),
        (0, -4 if inside else 3),
        textcoords="offset points",
        ha="center",
        va="top" if inside else "bottom",
        color="white" if inside else _INK,
        fontsize=8,
    )


def _heartbeat(pyplot: Any, run: Results) -> Any:
    """Lag of the caller's event loop: median, p99 and the highest of all rounds."""
    scenario = run.scenario(heartbeat.NAME)
    if scenario is None:
        return None
    titles = {"snapshot": "awaiting save()", "commit": "awaiting the commit"}
    titles |= {"restore": "awaiting restore()"}
    rows = [row for row in _COLORS if row in scenario.measures]
    figure, panels = pyplot.subplots(
        1, 3, figsize=(10, 1.4 + 0.38 * len(rows)), sharex=True, sharey=True, layout="constrained"
    )
    for axes, (phase, title) in zip(panels, titles.items(), strict=True):
        for place, row in enumerate(rows):
            middle = scenario.sample(row, f"{phase}_p50")
            high = scenario.sample(row, f"{phase}_p99")
            top = scenario.sample(row, f"{phase}_max")
            if middle is None or high is None or top is None:
                continue
            spots = [1e3 * each for each in (middle.median, high.median, top.high)]
            color = _COLORS[row]
            axes.plot(spots, [place] * 3, color=color, linewidth=2, alpha=0.5)
            for spot, options in zip(spots, _SPOTS.values(), strict=True):
                axes.plot([spot], [place], color=color, **options)
            axes.annotate(digits(spots[2]), (spots[2], place), (5, 0), va="center", fontsize=7.5,
                          textcoords="offset points")  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_title(title)
        axes.set_xlabel("milliseconds; left is better", fontsize=8)
        axes.tick_params(length=0, which="both")
        axes.grid(axis="x")
    panels[0].set_yticks(range(len(rows)), [label(row) for row in rows])
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    low, high = panels[0].get_xlim()
    panels[0].set_xlim(low, high * 2)
    lines: Any = importlib.import_module("matplotlib.lines")
    handles = [
        lines.Line2D([], [], color=_INK, label=name, **each) for name, each in _SPOTS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(
        "How late the caller's event loop is, by a beat every millisecond (logarithmic scale)",
        x=0.01,
        ha="left",
    )
    return figure


_SPOTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "median": {"marker": "o", "markersize": 5, "linestyle": ""},
        "99th percentile": {"marker": "D", "markersize": 5, "linestyle": ""},
        "highest of all rounds": {
            "marker": "|", "markersize": 11, "markeredgewidth": 2, "linestyle": "",
        },
    }
)  # fmt: skip


def _growth(pyplot: Any, run: Results) -> Any:
    """Save and restore against the amount of work, with the fitted lines."""
    scenarios = [each for each in run.scenarios if each.kind == growth.KIND]
    if not scenarios:
        return None
    figure, panels = pyplot.subplots(
        1, len(scenarios), figsize=(5 * len(scenarios), 4.4), layout="constrained", squeeze=False
    )
    ticker: Any = importlib.import_module("matplotlib.ticker")
    for axes, scenario in zip(panels.flat, scenarios, strict=True):
        in_bytes = growth.AXES[scenario.name].unit == "bytes"
        places: set[int] = set()
        for row in scenario.measures:
            for measure in _MEASURES:
                places |= fit.points(scenario, row, measure).keys()
                _line(axes, scenario, row, measure, in_bytes=in_bytes)
        axes.set_xscale("log", base=2 if in_bytes else 10)
        axes.set_yscale("log")
        axes.set_title("by size of the state" if in_bytes else "by leaves of 4 KiB")
        axes.set_ylabel("seconds; lower is better")
        if in_bytes:
            axes.set_xticks(sorted(places), [size(place) for place in sorted(places)])
        else:
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
            axes.set_xlabel("leaves")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.yaxis.set_minor_formatter("")
        axes.tick_params(length=0, which="both")
        axes.grid()
        axes.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    figure.suptitle(
        "Points are medians, with the lowest and the highest round. Lines are fitted; both scales "
        "are logarithmic.",
        x=0.01,
        ha="left",
        fontsize=9,
    )
    return figure


# Saves have filled points and whole lines, restores have neither.
_MEASURES: Mapping[str, str] = MappingProxyType({"save": "-", "restore": "--"})


def _line(axes: Any, scenario: Scenario, row: str, measure: str, *, in_bytes: bool) -> None:
    found = fit.points(scenario, row, measure)
    fitted = fit.of(scenario, row, measure)
    if fitted is None:
        return
    color = _COLORS[row]
    medians = [sample.median for sample in found.values()]
    errors = [
        [sample.median - sample.low for sample in found.values()],
        [sample.high - sample.median for sample in found.values()],
    ]
    per = (
        f"{digits(fitted.slope * 2**30)} s/GiB"
        if in_bytes
        else f"{digits(fitted.slope * 1e6)} µs/leaf"
    )
    points = {
        "marker": "o",
        "markersize": 4,
        "markerfacecolor": color if measure == "save" else "white",
    }
    axes.errorbar(list(found), medians, errors, color=color, capsize=2, linestyle="", **points)
    # Enough points for a line to be a curve on these axes.
    first, last = min(found), max(found)
    bent = [first * (last / first) ** (i / 60) for i in range(61)]
    curve = [max(fitted.intercept + fitted.slope * each, 1e-9) for each in bent]
    axes.plot(bent, curve, _MEASURES[measure], color=color, linewidth=1.3)
    # The key of both: the point and the line.
    name = f"{label(row)} {measure}: {per} + {value(max(0.0, fitted.intercept))}"
    axes.plot([], [], _MEASURES[measure], color=color, linewidth=1.3, label=name, **points)


_CHARTS: Mapping[str, Callable[[Any, Results], Any]] = MappingProxyType(
    {"ratios": _ratios, "training": _training, "heartbeat": _heartbeat, "growth": _growth}
)
