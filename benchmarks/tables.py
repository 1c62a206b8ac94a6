"""One Markdown table for every kind of scenario."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from benchmarks import (
    blocked,
    blocked_loop,
    first_restore,
    first_save,
    fit,
    growth,
    heartbeat,
    memory,
    overlap,
    throughput,
)
from benchmarks.figures import digits, size, spread, table, times, value
from benchmarks.floors import MEMCPY
from benchmarks.floors import NAMES as FLOORS
from benchmarks.labels import label

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.results import Sample, Scenario

BASELINE = "orbax"


def of(scenario: Scenario) -> str:
    """Returns the table of a scenario."""
    return _TABLES[scenario.kind](scenario)


def _throughput(scenario: Scenario) -> str:
    head = (
        "", "save", "MB/s", "vs Orbax", "first save", "blocked", "vs Orbax",
        "restore, cached", "MB/s", "vs Orbax", "of memcpy", "restore, cold",
    )  # fmt: skip
    rows = []
    for row, measures in scenario.measures.items():
        save, restore = measures.get("save"), measures["restore"]
        rows.append(
            (
                row,
                spread(save),
                _rate(scenario, save),
                _ratio(scenario, row, "save"),
                value(save.first) if save else "",
                spread(measures.get("blocked")),
                _ratio(scenario, row, "blocked"),
                spread(restore),
                _rate(scenario, restore),
                _ratio(scenario, row, "restore"),
                _share(scenario, MEMCPY, "restore", restore),
                spread(measures.get("restore_cold")),
            )
        )
    return table(head, rows)


def _overlap(scenario: Scenario) -> str:
    rows = [
        (
            row,
            spread(measures["lost"]),
            _ratio(scenario, row, "lost"),
            value(measures["lost"].first),
            *(spread(measures[name]) for name in ("blocked", "slowdown", "worst_step")),
            *(spread(measures[name]) for name in ("undisturbed_step", "committed")),
            spread(measures["overlap_ratio"]),
            spread(measures["saving_steps_per_second"]),
            spread(measures["calm_steps_per_second"]),
        )
        for row, measures in scenario.measures.items()
    ]
    head = (
        "", "lost per save", "vs Orbax", "first save", "blocked", "slowdown of steps",
        "slowest step", "undisturbed step", "committed after", "overlap ratio",
        f"steps/s, a save every {scenario.facts['save_every_seconds']:g} s", "steps/s, no saves",
    )  # fmt: skip
    return table(head, rows)


def _blocked(scenario: Scenario) -> str:
    rows = [
        (
            row,
            spread(measures["blocked"]),
            _ratio(scenario, row, "blocked"),
            value(measures["blocked"].first),
            spread(measures["committed"]),
            _ratio(scenario, row, "committed"),
        )
        for row, measures in scenario.measures.items()
    ]
    return table(("", "blocked", "vs Orbax", "first", "durable after", "vs Orbax"), rows)


def _heartbeat(scenario: Scenario) -> str:
    head = [""]
    for phase in ("awaiting save()", "awaiting the commit", "awaiting restore()"):
        head += [f"{phase}: p50", "p99", "max"]
    rows = [
        [
            label(row).replace("\n", " "),
            *(
                text
                for phase in heartbeat.PHASES
                for text in (
                    _median(measures.get(f"{phase}_p50")),
                    spread(measures.get(f"{phase}_p99")),
                    spread(measures.get(f"{phase}_max")),
                )
            ),
        ]
        for row, measures in scenario.measures.items()
    ]  # fmt: skip
    return table(head, rows)


def _blocked_loop(scenario: Scenario) -> str:
    rows = [
        (
            row,
            *(spread(measures[name]) for name in ("unblocked", "asleep", "asleep_rate_ratio")),
            *(spread(measures[name]) for name in ("spinning", "spinning_rate_ratio")),
        )
        for row, measures in scenario.measures.items()
    ]
    head = ("", "commit, loop free", "asleep", "rate", "spinning in Python", "rate")
    return table(head, rows)


def _memory(scenario: Scenario) -> str:
    names = [
        "saves_own", "saves_total", "array_own", "array_total", "restore_total", "drift", "fixed"
    ]  # fmt: skip
    rows = [
        (row, *(_peak(measures.get(f"{name}_bytes")) for name in names))
        for row, measures in scenario.measures.items()
    ]
    facts = scenario.facts
    head = (
        "", f"{facts[memory.SAVES]:.0f} saves, own memory", "in all",
        "one array twice the budget, own memory", "in all", "restore, in all",
        f"drift over {facts[memory.LASTING_SAVES]:.0f} saves", "taken once",
    )  # fmt: skip
    budget = f"Peaks beyond the state; ckpt has a budget of {size(facts[memory.BUDGET])}."
    return f"{budget}\n\n{table(head, rows)}"


def _first_save(scenario: Scenario) -> str:
    names = ("first_save", "first_blocked", "second_save", "second_blocked", "import", "open")
    rows = [
        (
            row,
            spread(measures["first_save"]),
            _ratio(scenario, row, "first_save"),
            *(spread(measures[name]) for name in names[1:]),
        )
        for row, measures in scenario.measures.items()
    ]
    head = (
        "", "first save", "vs Orbax", "its blocked", "second save", "its blocked", "import",
        "open the manager",
    )  # fmt: skip
    return table(head, rows)


def _first_restore(scenario: Scenario) -> str:
    rows = [
        (
            row,
            spread(measures["first_restore"]),
            _ratio(scenario, row, "first_restore"),
            spread(measures["import"]),
            spread(measures["restore"]),
            spread(measures["step"]),
            spread(measures["first_step"]),
            _ratio(scenario, row, "first_step"),
            spread(measures["reused_ratio"]),
        )
        for row, measures in scenario.measures.items()
    ]
    head = (
        "", "import, open, restore", "vs Orbax", "import", "restore", "first step",
        "until the end of the first step", "vs Orbax", "buffers that it reused",
    )  # fmt: skip
    return table(head, rows)


def _growth(scenario: Scenario) -> str:
    axis = growth.AXES[scenario.name]
    write = size if axis.unit == "bytes" else "{:,.0f}".format
    columns = [(row, measure) for measure in ("save", "restore") for row in scenario.measures]
    found = {column: fit.points(scenario, *column) for column in columns}
    places = sorted({place for each in found.values() for place in each})
    rows = [
        [write(place), *(spread(found[column].get(place)) for column in columns)]
        for place in places
    ]
    per, factor, unit = ("GiB", 2**30, "s") if axis.unit == "bytes" else ("leaf", 1e6, "us")
    lines = {column: fit.of(scenario, *column) for column in columns}
    rows += [
        [
            f"{unit}/{per}",
            *(digits(each.slope * factor) if each else "" for each in lines.values()),
        ],
        ["at nothing", *(value(each.intercept) if each else "" for each in lines.values())],
        ["R²", *(f"{each.r_squared:.3f}" if each else "" for each in lines.values())],
    ]  # fmt: skip
    return table([axis.unit, *(f"{measure}, {row}" for row, measure in columns)], rows)


def _median(sample: Sample | None) -> str:
    return value(sample.median, sample.unit) if sample else ""


def _peak(sample: Sample | None) -> str:
    return value(sample.high, sample.unit) if sample else ""


def _rate(scenario: Scenario, sample: Sample | None) -> str:
    return f"{scenario.size_bytes / sample.median / 1e6:,.0f}" if sample else ""


def ratio(scenario: Scenario, over: str, row: str, measure: str) -> float | None:
    """Returns the median of row `over` divided by that of `row`: 2 is twice as fast."""
    above, below = scenario.sample(over, measure), scenario.sample(row, measure)
    if above is None or below is None or below.median <= 0:
        return None
    return above.median / below.median


def _ratio(scenario: Scenario, row: str, measure: str) -> str:
    found = None if row in FLOORS else ratio(scenario, BASELINE, row, measure)
    return "" if found is None else times(found)


def _share(scenario: Scenario, over: str, measure: str, sample: Sample) -> str:
    floor = scenario.sample(over, measure)
    return f"{floor.median / sample.median:.2g}" if floor else ""


_TABLES: Mapping[str, Callable[[Scenario], str]] = MappingProxyType(
    {
        throughput.KIND: _throughput,
        overlap.KIND: _overlap,
        blocked.KIND: _blocked,
        heartbeat.KIND: _heartbeat,
        blocked_loop.KIND: _blocked_loop,
        memory.KIND: _memory,
        first_save.KIND: _first_save,
        first_restore.KIND: _first_restore,
        growth.KIND: _growth,
    }
)
