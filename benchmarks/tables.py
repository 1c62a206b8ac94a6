"""How figures are written, one Markdown table for every kind of scenario, and the targets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from benchmarks import event_loop, first_calls, growth, memory, overlap, throughput
from benchmarks.results import BASELINE, BYTES, OURS, PER_SECOND, SECONDS
from benchmarks.throughput import FLOORS, MEMCPY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.results import Results, Sample, Scenario

# What rows are called where people read them. The record keeps its own names.
_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "ckpt_orbax": "ckpt, by the names of Orbax",
        "orbax": "Orbax",
        "dcp": "PyTorch DCP",
        "safetensors": "safetensors, fsynced",
        "raw": "one raw file, fsynced",
        event_loop.NEIGHBOUR: "other process\ndoing the same I/O",
        event_loop.IDLE: "idle loop",
    }
)


def label(row: str) -> str:
    """Returns what a row is called in a chart."""
    return _LABELS.get(row, row)


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, first: str = "---", align: str = "---:"
) -> str:
    """Returns a Markdown table; its first column is text, and the others are figures."""
    lines = [head, [first, *[align] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def digits(value: float) -> str:
    """Returns a number with three digits, or with all of its whole ones."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def times(ratio: float) -> str:
    """Returns a ratio such as 2.5x."""
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def _scale(value: float, unit: str) -> tuple[float, str]:
    """Returns the factor and the unit in which a value reads best."""
    if unit == SECONDS:
        return (1.0, " s") if abs(value) >= 1 else (1e3, " ms")
    if unit == BYTES:
        return 1 / 2**20, " MiB"
    return 1.0, "/s" if unit == PER_SECOND else ""


def value(amount: float | None, unit: str = SECONDS) -> str:
    """Returns one value with its unit, or nothing for None."""
    if amount is None:
        return ""
    factor, name = _scale(amount, unit)
    return f"{digits(amount * factor)}{name}"


def spread(sample: Sample | None) -> str:
    """Returns the median, and the lowest and the highest round; nothing for None."""
    if sample is None:
        return ""
    if len(sample.rounds) == 1:
        return value(sample.median, sample.unit)
    factor, name = _scale(sample.median, sample.unit)
    median, low, high = (digits(x * factor) for x in (sample.median, sample.low, sample.high))
    return f"{median}{name} ({low} to {high})"


def size(count: float) -> str:
    """Returns bytes as MiB or GiB."""
    return f"{count / 2**30:g} GiB" if count >= 2**30 else f"{count / 2**20:,.3g} MiB"


def state(scenario: Scenario) -> str:
    """Returns the size of the state of a scenario."""
    return f"{size(scenario.size_bytes)} in {scenario.leaves:,} leaves"


def ratio(scenario: Scenario, over: str, row: str, measure: str) -> float | None:
    """Returns the median of row `over` divided by that of `row`: 2 is twice as fast."""
    above, below = scenario.sample(over, measure), scenario.sample(row, measure)
    if above is None or below is None or below.median <= 0:
        return None
    return above.median / below.median


def of(scenario: Scenario) -> str:
    """Returns the table of a scenario."""
    if scenario.kind == growth.KIND:
        return _growth(scenario)
    columns = _COLUMNS[scenario.kind]
    head = [name.format(**scenario.facts) for name, _ in columns]
    # Only this table has rows that are no peers.
    named = label if scenario.kind == event_loop.HEARTBEAT else str
    rows = [
        [named(row).replace("\n", " "), *(_cell(scenario, row, cell) for _, cell in columns)]
        for row in scenario.measures
    ]
    text = table(["", *head], rows)
    if scenario.kind == memory.KIND:
        budget = size(scenario.facts[memory.BUDGET])
        return f"Peaks beyond the state; ckpt has a budget of {budget}.\n\n{text}"
    return text


def _cell(scenario: Scenario, row: str, cell: str) -> str:
    """Returns a cell: `measure` has the median and the spread, `measure:how` something else."""
    measure, _, how = cell.partition(":")
    sample = scenario.sample(row, measure)
    if sample is None:
        return ""
    match how:
        case "first" | "median" | "high":
            return value(getattr(sample, how), sample.unit)
        case "MB/s":
            return f"{scenario.size_bytes / sample.median / 1e6:,.0f}"
        case "vs Orbax":
            found = None if row in FLOORS else ratio(scenario, BASELINE, row, measure)
            return "" if found is None else times(found)
        case "of memcpy":
            floor = scenario.sample(MEMCPY, measure)
            return f"{floor.median / sample.median:.2g}" if floor else ""
    return spread(sample)


# The heading of each column, and the cells below it.
_COLUMNS: Mapping[str, Sequence[tuple[str, str]]] = MappingProxyType(
    {
        throughput.KIND: (
            ("save", "save"),
            ("MB/s", "save:MB/s"),
            ("vs Orbax", "save:vs Orbax"),
            ("first save", "save:first"),
            ("blocked", "blocked"),
            ("vs Orbax", "blocked:vs Orbax"),
            ("restore, cached", "restore"),
            ("MB/s", "restore:MB/s"),
            ("vs Orbax", "restore:vs Orbax"),
            ("of memcpy", "restore:of memcpy"),
            ("restore, cold", "restore_cold"),
        ),
        overlap.KIND: (
            ("lost per save", "lost"),
            ("vs Orbax", "lost:vs Orbax"),
            ("first save", "lost:first"),
            ("blocked", "blocked"),
            ("slowdown of steps", "slowdown"),
            ("slowest step", "worst_step"),
            ("undisturbed step", "undisturbed_step"),
            ("committed after", "committed"),
            ("overlap ratio", "overlap_ratio"),
            ("steps/s, a save every {save_every_seconds:g} s", "saving_steps_per_second"),
            ("steps/s, no saves", "calm_steps_per_second"),
        ),
        throughput.BLOCKED: (
            ("blocked", "blocked"),
            ("vs Orbax", "blocked:vs Orbax"),
            ("first", "blocked:first"),
            ("durable after", "committed"),
            ("vs Orbax", "committed:vs Orbax"),
        ),
        event_loop.HEARTBEAT: (
            ("awaiting save(): p50", "snapshot_p50:median"),
            ("p99", "snapshot_p99"),
            ("max", "snapshot_max"),
            ("awaiting the commit: p50", "commit_p50:median"),
            ("p99", "commit_p99"),
            ("max", "commit_max"),
            ("awaiting restore(): p50", "restore_p50:median"),
            ("p99", "restore_p99"),
            ("max", "restore_max"),
        ),
        event_loop.BLOCKED_LOOP: (
            ("commit, loop free", "unblocked"),
            ("asleep", "asleep"),
            ("rate", "asleep_rate_ratio"),
            ("spinning in Python", "spinning"),
            ("rate", "spinning_rate_ratio"),
        ),
        memory.KIND: (
            ("{saves:.0f} saves, own memory", "saves_own_bytes:high"),
            ("in all", "saves_total_bytes:high"),
            ("one array twice the budget, own memory", "array_own_bytes:high"),
            ("in all", "array_total_bytes:high"),
            ("restore, in all", "restore_total_bytes:high"),
            ("drift over {lasting_saves:.0f} saves", "drift_bytes:high"),
            ("taken once", "fixed_bytes:high"),
        ),
        first_calls.SAVE: (
            ("first save", "first_save"),
            ("vs Orbax", "first_save:vs Orbax"),
            ("its blocked", "first_blocked"),
            ("second save", "second_save"),
            ("its blocked", "second_blocked"),
            ("import", "import"),
            ("open the manager", "open"),
        ),
        first_calls.RESTORE: (
            ("import, open, restore", "first_restore"),
            ("vs Orbax", "first_restore:vs Orbax"),
            ("import", "import"),
            ("restore", "restore"),
            ("first step", "step"),
            ("until the end of the first step", "first_step"),
            ("vs Orbax", "first_step:vs Orbax"),
            ("buffers that it reused", "reused_ratio"),
        ),
    }
)


def _growth(scenario: Scenario) -> str:
    axis = growth.AXES[scenario.name]
    write = size if axis.unit == "bytes" else "{:,.0f}".format
    columns = [(row, measure) for measure in ("save", "restore") for row in scenario.measures]
    found = [growth.samples_at(scenario, *column) for column in columns]
    rows = [
        [write(place), *(spread(each.get(place)) for each in found)]
        for place in sorted(set().union(*found))
    ]
    per, factor, unit = ("GiB", 2**30, "s") if axis.unit == "bytes" else ("leaf", 1e6, "us")
    lines = [growth.line_of(scenario, *column) for column in columns]
    rows += [
        [f"{unit}/{per}", *(digits(each.slope * factor) if each else "" for each in lines)],
        ["at nothing", *(value(each.intercept) if each else "" for each in lines)],
        ["R²", *(f"{each.r_squared:.3f}" if each else "" for each in lines)],
    ]
    return table([axis.unit, *(f"{measure}, {row}" for row, measure in columns)], rows)


@dataclass(frozen=True, slots=True)
class Target:
    """What the project wants of itself: a bound on one figure of a run.

    Attributes:
        row: What is asked.
        name: The scenario.
        figure: `save vs raw` is how many times as fast ckpt is as another row, `save of raw` its
            time as a share of the other's, and `median` or `high` with measures is the highest of
            the medians, or of all rounds, of ckpt.
        direction: "at least" or "at most".
        bound: The figure that is wanted.
        unit: Written after both figures. Percent are those of a budget.
    """

    row: str
    name: str
    figure: str
    direction: str
    bound: str
    unit: str

    def measured(self, run: Results) -> float | None:
        """Returns the figure, or None where the run does not have it."""
        scenario = run.scenario(self.name)
        if scenario is None:
            return None
        match self.figure.split():
            case [measure, "vs", other]:
                return ratio(scenario, other, OURS, measure)
            case [measure, "of", other]:
                return ratio(scenario, OURS, other, measure)
        which, *measures = self.figure.split()
        factor = {" ms": 1e3, " MiB": 2**-20}.get(self.unit, 1.0)
        if self.unit == " %":
            factor = 100 / scenario.facts[memory.BUDGET]
        samples = [scenario.sample(OURS, each) for each in measures]
        return max((getattr(each, which) * factor for each in samples if each), default=None)

    def line(self, run: Results) -> tuple[str, str, str, str]:
        """Returns the row of the table."""
        wanted = f"{self.direction} {self.bound}{self.unit}"
        figure, bound = self.measured(run), float(self.bound)
        if figure is None:
            return self.row, wanted, "", "not measured"
        is_met = figure >= bound if self.direction == "at least" else figure <= bound
        return self.row, wanted, f"{digits(figure)}{self.unit}", "met" if is_met else "**missed**"


def targets(run: Results) -> str:
    """Returns the table of all targets."""
    return table(("", "target", "measured", ""), [each.line(run) for each in TARGETS], align="---")


_TARGET = re.compile(r"(\w+): (.+), (at least|at most) ([\d.]+)(.*)")


def _target(row: str, text: str) -> Target:
    parts = _TARGET.fullmatch(text)
    assert parts is not None, text
    return Target(row, *parts.groups())


TARGETS = tuple(
    _target(row, text)
    for row, text in {
        "save, large leaves: speed vs Orbax": "large: save vs orbax, at least 6x",
        "save, large leaves: speed vs one raw stream": "large: save vs raw, at least 1x",
        "restore, large leaves, cached: speed vs Orbax": "large: restore vs orbax, at least 3x",
        "restore, large leaves, cached: speed vs a warm memcpy": (
            "large: restore vs memcpy, at least 0.5x"
        ),
        "save, small leaves: speed vs Orbax": "small: save vs orbax, at least 40x",
        "save, small leaves: time vs safetensors": "small: save of safetensors, at most 1.5x",
        "save, small leaves: blocked": "small: median blocked, at most 40 ms",
        "restore, small leaves: speed vs Orbax": "small: restore vs orbax, at least 15x",
        "restore, small leaves: time vs read and device_put": (
            "small: restore of device_put, at most 0.8x"
        ),
        "first restore of a process: speed vs Orbax": (
            "first_restore: first_restore vs orbax, at least 2.5x"
        ),
        "first restore of a process: speed vs safetensors": (
            "first_restore: first_restore vs safetensors, at least 1.2x"
        ),
        "first restore and first step of a process: speed vs Orbax": (
            "first_restore: first_step vs orbax, at least 2x"
        ),
        "first restore of a process, small leaves: speed vs Orbax": (
            "first_restore_small: first_restore vs orbax, at least 10x"
        ),
        "first restore of a process, small leaves: speed vs safetensors": (
            "first_restore_small: first_restore vs safetensors, at least 1x"
        ),
        "first restore of a process, over 8 devices: speed vs Orbax": (
            "first_restore_sharded: first_restore vs orbax, at least 3x"
        ),
        "import of what a save and a restore need": "first_restore: median import, at most 100 ms",
        "training lost per save: share of Orbax's": "overlap: lost of orbax, at most 0.3",
        "blocked by save() of very many leaves: share of Orbax's": (
            "blocked_small: blocked of orbax, at most 0.15"
        ),
        "event loop lag while awaiting a commit or a restore: p99": (
            "heartbeat: median commit_p99 restore_p99, at most 5 ms"
        ),
        "event loop lag while awaiting a commit or a restore: max of all rounds": (
            "heartbeat: high commit_max restore_max, at most 25 ms"
        ),
        "commit beside a blocked event loop: rate vs a free one": (
            "blocked_loop: median asleep_rate_ratio, at least 0.9x"
        ),
        "host memory beyond the state: share of the budget": (
            "memory: high saves_total_bytes array_total_bytes, at most 110 %"
        ),
        "host memory: drift over many saves": "memory: high drift_bytes, at most 10 MiB",
        "first save of a process: share of Orbax's": "first_save: first_save of orbax, at most 1",
    }.items()
)
