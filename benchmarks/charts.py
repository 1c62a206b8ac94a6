"""Charts of a run: PNG files, where matplotlib is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from benchmarks import blocked, fit, growth, heartbeat, overlap, throughput
from benchmarks.figures import digits, times, value
from benchmarks.tables import BASELINE, ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.results import Results, Scenario

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
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with pyplot.rc_context(dict(_STYLE)):
        for name, chart in _CHARTS.items():
            figure = chart(pyplot, run)
            if figure is None:
                continue
            if run.smoke:
                figure.text(
                    0.5, 0.5, "smoke run", fontsize=40, alpha=0.12, ha="center", va="center"
                )
            path = folder / f"{name}.png"
            figure.savefig(path, bbox_inches="tight", pad_inches=0.15)
            pyplot.close(figure)
            drawn.append(path)
    return drawn


def _ratios(pyplot: Any, run: Results) -> Any:
    """How many times as fast as Orbax each peer is, by workload."""
    scenarios = [
        each for each in run.scenarios if each.kind == throughput.KIND and BASELINE in each.measures
    ]
    if not scenarios:
        return None
    titles = {"save": "save, until durable", "blocked": "blocked by save()"}
    titles |= {"restore": "restore, cached", "restore_cold": "restore, cold"}
    peers = [name for name in _COLORS if name in scenarios[0].measures and name != BASELINE]
    height = 1.6 + 0.26 * len(scenarios) * (len(peers) + 1)
    figure, panels = pyplot.subplots(2, 2, figsize=(10, height), sharey=True, layout="constrained")
    for axes, (measure, title) in zip(panels.flat, titles.items(), strict=True):
        _ratio_bars(axes, scenarios, peers, measure)
        axes.set_title(title)
    _legend(figure, peers)
    title = "Times as fast as Orbax, the orange line; longer is better, the scale is logarithmic"
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def _ratio_bars(
    axes: Any, scenarios: Sequence[Scenario], peers: Sequence[str], measure: str
) -> None:
    step = 0.84 / len(peers)
    for number, peer in enumerate(peers):
        for place, scenario in enumerate(scenarios):
            found = ratio(scenario, BASELINE, peer, measure)
            if found is None:
                continue
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
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.8) / 1.3, max(high, 1.25) * 1.6)
    axes.xaxis.set_major_formatter(lambda x, _: times(x))
    axes.xaxis.set_minor_formatter("")
    axes.set_yticks(range(len(scenarios)), [each.name for each in scenarios])
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.grid(axis="x")


def _training(pyplot: Any, run: Results) -> Any:
    """What a save costs training, and how long it blocks with many leaves."""
    scenario = run.scenario(overlap.NAME)
    if scenario is None:
        return None
    many = run.scenario(blocked.NAME)
    figure, (lost, rate, leaves) = pyplot.subplots(1, 3, figsize=(10, 2.9), layout="constrained")
    peers = list(scenario.measures)
    medians = {
        peer: {name: sample.median for name, sample in measures.items()}
        for peer, measures in scenario.measures.items()
    }
    bars = [medians[peer]["blocked"] * 1e3 for peer in peers]
    slow = [max(0.0, medians[peer]["slowdown"]) * 1e3 for peer in peers]
    colors = [_COLORS[peer] for peer in peers]
    lost.bar(peers, bars, 0.6, color=colors)
    lost.bar(peers, slow, 0.6, bottom=bars, color=colors, alpha=0.45)
    for place, peer in enumerate(peers):
        _above(lost, place, bars[place] + slow[place], value(medians[peer]["lost"]))
    lost.set_title("training lost per save, ms")
    lost.set_xlabel("dark: blocked by save(); light: slower steps", fontsize=7.5)
    speeds = [medians[peer]["saving_steps_per_second"] for peer in peers]
    calm = max(medians[peer]["calm_steps_per_second"] for peer in peers)
    rate.bar(peers, speeds, 0.6, color=colors)
    rate.axhline(calm, color=_INK, linewidth=0.8, linestyle="--")
    rate.annotate("no saves", (1, calm), (0, 3), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right", fontsize=7.5)  # fmt: skip
    for place, speed in enumerate(speeds):
        _above(rate, place, speed, digits(speed), inside=True)
    rate.set_title(f"steps/s, a save every {scenario.facts['save_every_seconds']:g} s")
    if many is None:
        leaves.set_axis_off()
    else:
        names = list(many.measures)
        spans = [many.measures[name]["blocked"].median * 1e3 for name in names]
        leaves.bar(names, spans, 0.6, color=[_COLORS[name] for name in names])
        for place, span in enumerate(spans):
            _above(leaves, place, span, value(span / 1e3))
        leaves.set_title(f"blocked by save() of {many.leaves:,} leaves, ms")
    for axes in (lost, rate, leaves):
        axes.margins(y=0.18)
        axes.tick_params(length=0)
        axes.grid(axis="y")
    return figure


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
        1, 3, figsize=(10, 0.9 + 0.38 * len(rows)), sharex=True, sharey=True, layout="constrained"
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
            axes.plot(spots[:1], [place], "o", color=color, markersize=5)
            axes.plot(spots[1:2], [place], "D", color=color, markersize=5)
            axes.plot(spots[2:], [place], "|", color=color, markersize=11, markeredgewidth=2)
            axes.annotate(digits(spots[2]), (spots[2], place), (5, 0), va="center", fontsize=7.5,
                          textcoords="offset points")  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_title(title)
        axes.set_xlabel("ms; dot p50, diamond p99, bar max")
        axes.tick_params(length=0)
        axes.grid(axis="x")
    panels[0].set_yticks(range(len(rows)), rows)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    low, high = panels[0].get_xlim()
    panels[0].set_xlim(low, high * 2)
    figure.suptitle("Lag of the caller's event loop, a beat every millisecond", x=0.01, ha="left")
    return figure


def _growth(pyplot: Any, run: Results) -> Any:
    """Save and restore against the amount of work, with the fitted lines."""
    scenarios = [each for each in run.scenarios if each.kind == growth.KIND]
    if not scenarios:
        return None
    figure, panels = pyplot.subplots(
        1, len(scenarios), figsize=(5 * len(scenarios), 4.2), layout="constrained", squeeze=False
    )
    for axes, scenario in zip(panels.flat, scenarios, strict=True):
        in_bytes = growth.AXES[scenario.name].unit == "bytes"
        unit = 2**30 if in_bytes else 1
        for row in scenario.measures:
            for measure, dash in (("save", "-"), ("restore", "--")):
                _line(axes, scenario, row, measure, dash, unit)
        axes.set_xscale("log", base=2 if in_bytes else 10)
        axes.set_yscale("log")
        axes.set_title(
            "seconds, by size of the state" if in_bytes else "seconds, by leaves of 4 KiB"
        )
        axes.set_xlabel("GiB" if in_bytes else "leaves")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.xaxis.set_minor_locator(importlib.import_module("matplotlib.ticker").NullLocator())
        axes.yaxis.set_minor_formatter("")
        axes.tick_params(length=0)
        axes.grid()
        axes.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return figure


def _line(axes: Any, scenario: Scenario, row: str, measure: str, dash: str, unit: int) -> None:
    found = fit.points(scenario, row, measure)
    fitted = fit.of(scenario, row, measure)
    if fitted is None:
        return
    color = _COLORS[row]
    amounts = [place / unit for place in found]
    medians = [sample.median for sample in found.values()]
    errors = [
        [sample.median - sample.low for sample in found.values()],
        [sample.high - sample.median for sample in found.values()],
    ]
    per = (
        f"{digits(fitted.slope * 2**30)} s/GiB"
        if unit > 1
        else f"{digits(fitted.slope * 1e6)} us/leaf"
    )
    axes.errorbar(amounts, medians, errors, fmt="o", color=color, markersize=4, capsize=2,
                  markerfacecolor=color if measure == "save" else "white")  # fmt: skip
    # Enough points for a line to be a curve on these axes.
    first, last = min(found), max(found)
    bent = [first * (last / first) ** (i / 60) for i in range(61)]
    axes.plot(
        [each / unit for each in bent],
        [max(fitted.intercept + fitted.slope * each, 1e-9) for each in bent],
        dash,
        color=color,
        linewidth=1.3,
        label=f"{row} {measure}: {per} + {value(max(0.0, fitted.intercept))}",
    )


def _legend(figure: Any, peers: Sequence[str]) -> None:
    patches: Any = importlib.import_module("matplotlib.patches")
    handles = [patches.Patch(color=_COLORS[peer], label=peer) for peer in peers]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(peers))


_CHARTS: Mapping[str, Callable[[Any, Results], Any]] = MappingProxyType(
    {"ratios": _ratios, "training": _training, "heartbeat": _heartbeat, "growth": _growth}
)
# What each picture shows, for whoever cannot see it; the last is drawn by `benchmarks.picture`.
CAPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "ratios": "save, blocked and restore times of every peer next to those of Orbax",
        "training": "training lost per save, steps per second, and blocked time with many leaves",
        "overlap": "one save beside the train steps it overlaps with",
        "heartbeat": "lag of the caller's event loop while saving and restoring",
        "growth": "save and restore seconds against bytes and against leaves",
    }
)
