"""Charts of a run, and the picture of one save: PNG files, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from benchmarks import event_loop, growth, overlap, throughput
from benchmarks.results import BASELINE
from benchmarks.tables import digits, label, ratio, size, state, times, value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.results import Results, Sample, Scenario
    from ckpt.observers import Timeline

_COLORS: Mapping[str, str] = MappingProxyType(
    {
        "ckpt": "#1769d2",
        BASELINE: "#e07b39",
        "dcp": "#8a5fb5",
        "safetensors": "#4c9f70",
        "raw": "#8c959f",
        event_loop.NEIGHBOUR: "#8c959f",
        event_loop.IDLE: "#c3c9d0",
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
        "xtick.major.size": 0,
        "xtick.minor.size": 0,
        "ytick.color": _INK,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "grid.color": _FAINT,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "figure.facecolor": "white",
        "figure.constrained_layout.use": True,
        "figure.dpi": 160,
        "savefig.bbox": "tight",
        "savefig.pad_inches": 0.15,
    }
)
# The colours of Okabe and Ito, which colour-blind people can tell apart, each with the colour of
# the text on it, by the kind of a phase or span.
_LIGHT, _DARK = "#ffffff", "#1b1b1b"
_OTHER = ("#7a7a7a", _LIGHT)
_PHASES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "span": ("#009e73", _LIGHT),
        **dict.fromkeys(("blocked", "publish"), ("#d55e00", _LIGHT)),
        "snapshot": ("#f0e442", _DARK),
        "stage": ("#e69f00", _DARK),
        "digest": ("#56b4e9", _DARK),
        "write": ("#0072b2", _LIGHT),
        **dict.fromkeys(("encode", "merge", "record"), ("#cc79a7", _DARK)),
    }
)


def is_possible() -> bool:
    """Tells whether matplotlib is installed; says so where it is not."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.stderr.write("pictures: left out, matplotlib is not installed\n")
        return False
    return True


def draw(run: Results, folder: Path) -> None:
    """Draws every chart that the scenarios of a run allow."""
    if is_possible():
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures(run):
            figure.savefig(folder / f"{name}.png")


def draw_one_save(folder: Path, directory: Path, smoke: bool) -> None:
    """Saves in a train loop, and draws one save into overlap.png.

    Args:
        folder: Where the picture goes.
        directory: A new folder on the disk to measure.
        smoke: Whether to use the small state.
    """
    if is_possible():
        save_figure(overlap.traced_save(directory, smoke)).savefig(folder / "overlap.png")


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def figures(run: Results) -> Iterator[tuple[str, Any]]:
    """Yields the name and the figure of every chart that the scenarios of a run allow."""
    pyplot = _pyplot()
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
    figure, panels = pyplot.subplots(2, 2, figsize=(10, height), sharey=True)
    for axes, (measure, title) in zip(panels.flat, titles.items(), strict=True):
        _ratio_bars(axes, scenarios, peers, measure)
        axes.set_title(title)
    panels[0][0].set_yticks(
        range(len(scenarios)), [f"{each.name}\n{state(each)}" for each in scenarios]
    )
    panels[0][0].invert_yaxis()
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLORS[peer], label=label(peer))
               for peer in peers]  # fmt: skip
    handles.append(pyplot.Line2D([], [], color=_COLORS[BASELINE], label=f"{label(BASELINE)} = 1x"))
    _explain(
        figure,
        "Speed compared with Orbax: right of the orange line is faster, left of it is slower\n"
        "Logarithmic scale. Safetensors and the raw file have no asynchronous save, so all of it "
        "blocks.",
        handles,
    )
    return figure


def _explain(figure: Any, text: str, handles: Sequence[Any] = (), **options: Any) -> None:
    """Puts a text above all panels, and a legend below them."""
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(text, x=0.01, ha="left", **options)


def _note(axes: Any, text: str, at: tuple[float, float], shift: tuple[float, float],
          **options: Any) -> None:  # fmt: skip
    axes.annotate(text, at, shift, textcoords="offset points", **options)


def _logarithmic(axes: Any, which: str, write: Callable[[float], str], **options: Any) -> None:
    """Gives the axis "x" or "y" a logarithmic scale with few labels."""
    getattr(axes, f"set_{which}scale")("log", **options)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(lambda x, _: write(x))
    axis.set_minor_formatter("")


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
            shift, side = (3, "left") if found >= 1 else (-3, "right")
            _note(axes, times(found), (found, y), (shift, 0), ha=side, va="center", fontsize=7)
    _logarithmic(axes, "x", times)
    axes.axvline(1, color=_COLORS[BASELINE], linewidth=1.5)
    # Beyond the longest bars there is room for their figures, which is a share of the width.
    low, high = min(*shown, 0.8), max(*shown, 1.25)
    room = (high / low) ** 0.16
    axes.set_xlim(low / (room if min(shown) < 1 else 1), high * room)
    axes.grid(axis="x")


def _training(pyplot: Any, run: Results) -> Any:
    """What a save costs training, and how long it blocks with many leaves."""
    scenario, many = run.scenario(overlap.NAME), run.scenario(throughput.BLOCKED_SMALL)
    if scenario is None or many is None:
        return None
    figure, (lost, rate, leaves) = pyplot.subplots(1, 3, figsize=(10, 3.2))
    peers = list(scenario.measures)
    _seconds_bars(lost, scenario, "lost", "training lost per save", inner="blocked")
    lost.set_xlabel(
        "seconds; shorter is better\ndark: blocked by save(), light: slower steps", fontsize=8
    )
    speeds = [scenario.measures[peer]["saving_steps_per_second"].median for peer in peers]
    calm = max(scenario.measures[peer]["calm_steps_per_second"].median for peer in peers)
    rate.bar([label(peer) for peer in peers], speeds, 0.6, color=[_COLORS[peer] for peer in peers])
    rate.axhline(calm, color=_INK, linewidth=0.8, linestyle="--")
    above = {"ha": "right", "fontsize": 7.5, "xycoords": ("axes fraction", "data")}
    _note(rate, "without saves", (1, calm), (0, 3), **above)
    for place, speed in enumerate(speeds):
        inside = {"ha": "center", "va": "top", "color": "white", "fontsize": 8}
        _note(rate, digits(speed), (place, speed), (0, -4), **inside)
    rate.set_title(f"training, a save every {scenario.facts['save_every_seconds']:g} s")
    rate.set_xlabel("train steps per second; longer is better", fontsize=8)
    _seconds_bars(leaves, many, "blocked", f"blocked by save(), {many.leaves:,} leaves")
    leaves.set_xlabel("seconds; shorter is better", fontsize=8)
    for axes in (lost, rate, leaves):
        axes.margins(y=0.18)
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
        range_line = {"color": _INK, "linewidth": 0.8, "capsize": 3, "fmt": "none"}
        axes.errorbar(place + 0.2, sample.median, _errors([sample]), **range_line)
        at = (place - 0.08, sample.median)
        _note(axes, f"{sample.median:.2f} s", at, (0, 3), ha="center", va="bottom", fontsize=8)
    axes.set_title(title)


def _errors(samples: Sequence[Sample]) -> list[list[float]]:
    """Returns how far the lowest and the highest rounds are from the medians."""
    return [[each.median - each.low for each in samples],
            [each.high - each.median for each in samples]]  # fmt: skip


def _heartbeat(pyplot: Any, run: Results) -> Any:
    """Lag of the caller's event loop: median, p99 and the highest of all rounds."""
    scenario = run.scenario(event_loop.HEARTBEAT)
    if scenario is None:
        return None
    titles = {"snapshot": "awaiting save()", "commit": "awaiting the commit"}
    titles |= {"restore": "awaiting restore()"}
    rows = [row for row in _COLORS if row in scenario.measures]
    figure, panels = pyplot.subplots(
        1, 3, figsize=(10, 1.4 + 0.38 * len(rows)), sharex=True, sharey=True
    )
    for axes, (phase, title) in zip(panels, titles.items(), strict=True):
        for place, row in enumerate(rows):
            samples = [scenario.sample(row, f"{phase}_{what}") for what in ("p50", "p99", "max")]
            found = [each for each in samples if each is not None]
            if len(found) < 3:
                continue
            spots = [1e3 * each for each in (found[0].median, found[1].median, found[2].high)]
            color = _COLORS[row]
            axes.plot(spots, [place] * 3, color=color, linewidth=2, alpha=0.5)
            for spot, options in zip(spots, _SPOTS.values(), strict=True):
                axes.plot([spot], [place], color=color, linestyle="", **options)
            _note(axes, digits(spots[2]), (spots[2], place), (5, 0), va="center", fontsize=7.5)
        _logarithmic(axes, "x", "{:g}".format)
        axes.set_title(title)
        axes.set_xlabel("milliseconds; left is better", fontsize=8)
        axes.grid(axis="x")
    panels[0].set_yticks(range(len(rows)), [label(row) for row in rows])
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    low, high_end = panels[0].get_xlim()
    panels[0].set_xlim(low, high_end * 2)
    _explain(
        figure,
        "How late the caller's event loop is, by a beat every millisecond (logarithmic scale)",
        [pyplot.Line2D([], [], color=_INK, linestyle="", label=name, **each)
         for name, each in _SPOTS.items()],
    )  # fmt: skip
    return figure


_SPOTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "median": {"marker": "o", "markersize": 5},
        "99th percentile": {"marker": "D", "markersize": 5},
        "highest of all rounds": {"marker": "|", "markersize": 11, "markeredgewidth": 2},
    }
)


def _growth(pyplot: Any, run: Results) -> Any:
    """Save and restore against the amount of work, with the fitted lines."""
    scenarios = [each for each in run.scenarios if each.kind == growth.KIND]
    if not scenarios:
        return None
    figure, panels = pyplot.subplots(
        1, len(scenarios), figsize=(5 * len(scenarios), 4.4), squeeze=False
    )
    for axes, scenario in zip(panels.flat, scenarios, strict=True):
        in_bytes = growth.AXES[scenario.name].unit == "bytes"
        places: set[int] = set()
        for row in scenario.measures:
            for measure in _MEASURES:
                places |= growth.samples_at(scenario, row, measure).keys()
                _line(axes, scenario, row, measure, in_bytes=in_bytes)
        _logarithmic(axes, "x", "{:,.0f}".format, base=2 if in_bytes else 10)
        _logarithmic(axes, "y", "{:g}".format)
        axes.set_title("by size of the state" if in_bytes else "by leaves of 4 KiB")
        axes.set_ylabel("seconds; lower is better")
        if in_bytes:
            axes.set_xticks(sorted(places), [size(place) for place in sorted(places)])
        else:
            axes.set_xlabel("leaves")
        axes.grid()
        axes.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    _explain(
        figure,
        "Points are medians, with the lowest and the highest round. Lines are fitted; both scales "
        "are logarithmic.",
        fontsize=9,
    )
    return figure


# Saves have filled points and whole lines, restores have neither.
_MEASURES: Mapping[str, str] = MappingProxyType({"save": "-", "restore": "--"})


def _line(axes: Any, scenario: Scenario, row: str, measure: str, *, in_bytes: bool) -> None:
    found = growth.samples_at(scenario, row, measure)
    fitted = growth.line_of(scenario, row, measure)
    if fitted is None:
        return
    color = _COLORS[row]
    medians = [sample.median for sample in found.values()]
    per = f"{digits(fitted.slope * 1e6)} µs/leaf"
    if in_bytes:
        per = f"{digits(fitted.slope * 2**30)} s/GiB"
    filled = color if measure == "save" else "white"
    points: dict[str, Any] = {"marker": "o", "markersize": 4, "markerfacecolor": filled}
    errors = _errors(list(found.values()))
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


def save_figure(timeline: Timeline) -> Any:
    """Returns the picture of one save: a row for each kind of work, and what `save()` blocked."""
    # Only here: they import the library.
    from ckpt.observers._tracing.timeline import BLOCKED, PREEMPTED
    from ckpt.observers._tracing.trace import SPANS, WHOLE, tracks

    [save] = timeline.saves()
    events = [event for event in timeline.events if event.phase != PREEMPTED]
    ends = [save.returned_ns, *(event.ended_ns for event in events)]
    whole = (max(ends) - save.began_ns) / 1e6
    low, high = -0.015 * whole, 1.03 * whole
    # The phase `blocked` and the whole save are no rows: the first is drawn behind all of them.
    rows = [each for each in tracks(timeline) if not each.label.startswith((BLOCKED, WHOLE))]

    def at(instant: int) -> float:
        return (instant - save.began_ns) / 1e6

    pyplot = _pyplot()
    with pyplot.rc_context(dict(_STYLE)):
        figure, axes = pyplot.subplots(figsize=(10.8, 1.7 + 0.24 * len(rows)))
        axes.axvspan(*map(at, save.blocked), color="#d55e00", alpha=0.3, linewidth=0, hatch="////",
                     fill=False, label="save() blocks the caller")  # fmt: skip
        for number, both in enumerate(timeline.overlapped()):
            text = "" if number else "train steps while the save is in the background"
            axes.axvspan(*map(at, both), color="#009e73", alpha=0.16, linewidth=0, label=text)
        for y, track in enumerate(rows):
            for entry in track.entries:
                # The part in the picture; a bar must be visible, however short the phase was.
                left = max(at(entry.began_ns), low)
                width = max(min(at(entry.ended_ns), high) - left, whole / 400)
                if left >= high or at(entry.ended_ns) < low:
                    continue
                fill, ink = _PHASES.get(entry.role, _OTHER)
                axes.barh(y, width, 0.66, left, color=fill, edgecolor="white", linewidth=0.6)
                moved = size(entry.nbytes) if entry.nbytes >= 2**20 else ""
                texts = (f"{entry.name} {moved}".strip(), moved)
                inside = [text for text in texts if len(text) < 95 * width / whole]
                middle = {"ha": "center", "va": "center", "fontsize": 7, "color": ink}
                axes.text(left + width / 2, y, inside[0] if inside else "", **middle)
            moved = value(track.busy_ns / 1e9)
            if track.nbytes >= 2**20 and track.group != SPANS:
                moved = f"{size(track.nbytes)} · {track.nbytes / track.busy_ns:.2f} GB/s"
            axes.text(1.01, y, moved, va="center", transform=axes.get_yaxis_transform())
        axes.set_yticks(range(len(rows)), [track.label for track in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(low, high)
        axes.grid(axis="x")
        axes.set_xlabel(
            "milliseconds. A write lasts until its file is durable, so a few bytes may last as "
            "long as the large files that the disk is busy with.",
            loc="left",
        )
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        written = sum(event.nbytes for event in events if event.phase == "write")
        durable = value(at(save.published_ns or max(ends)) / 1e3)
        # A whole share only where it is.
        share = int(100 * (timeline.overlap_ratio or 0))
        _explain(
            figure,
            f"Save of step {save.step}: train steps overlap {share}% of its background time\n"
            f"{size(written)} written · save() blocked {value(at(save.returned_ns) / 1e3)} · "
            f"durable after {durable}",
        )
    return figure
