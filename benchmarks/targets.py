"""What the project wants of itself, next to what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks import blocked, blocked_loop, first_save, heartbeat, memory, overlap
from benchmarks.figures import digits, table
from benchmarks.floors import DEVICE_PUT, MEMCPY
from benchmarks.tables import BASELINE, ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.results import Results

OURS = "ckpt"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one figure of a run.

    Attributes:
        row: What is asked.
        bound: The figure that is wanted.
        unit: Written after both figures.
        measured: Gives the figure, or None where the run does not have it.
        at_least: Whether more is better; else less is.
    """

    row: str
    bound: float
    unit: str
    measured: Callable[[Results], float | None]
    at_least: bool = False

    def is_met(self, figure: float) -> bool:
        """Tells whether a figure is within the bound."""
        return figure >= self.bound if self.at_least else figure <= self.bound

    def line(self, run: Results) -> tuple[str, str, str, str]:
        """Returns the row of the table."""
        bound = f"{'at least' if self.at_least else 'at most'} {digits(self.bound)}{self.unit}"
        figure = self.measured(run)
        if figure is None:
            return self.row, bound, "", "not measured"
        met = "met" if self.is_met(figure) else "**missed**"
        return self.row, bound, f"{digits(figure)}{self.unit}", met


def markdown(run: Results) -> str:
    """Returns the table of all targets."""
    return table(("", "target", "measured", ""), [each.line(run) for each in TARGETS], align="---")


def _faster(name: str, over: str, measure: str) -> Callable[[Results], float | None]:
    """How many times as fast ckpt is as another row."""

    def measured(run: Results) -> float | None:
        scenario = run.scenario(name)
        return None if scenario is None else ratio(scenario, over, OURS, measure)

    return measured


def _share(name: str, of: str, measure: str) -> Callable[[Results], float | None]:
    """The time of ckpt as a share of another row's."""

    def measured(run: Results) -> float | None:
        scenario = run.scenario(name)
        own = None if scenario is None else scenario.sample(OURS, measure)
        other = None if scenario is None else scenario.sample(of, measure)
        return None if own is None or other is None else own.median / other.median

    return measured


def _median(name: str, *measures: str, factor: float = 1.0) -> Callable[[Results], float | None]:
    """The worst of the medians of ckpt."""

    def measured(run: Results) -> float | None:
        scenario = run.scenario(name)
        samples = [scenario.sample(OURS, each) for each in measures] if scenario else []
        found = [sample.median * factor for sample in samples if sample is not None]
        return max(found) if found else None

    return measured


def _worst(name: str, *measures: str, factor: float = 1.0) -> Callable[[Results], float | None]:
    """The highest of all rounds of ckpt."""

    def measured(run: Results) -> float | None:
        scenario = run.scenario(name)
        samples = [scenario.sample(OURS, each) for each in measures] if scenario else []
        found = [sample.high * factor for sample in samples if sample is not None]
        return max(found) if found else None

    return measured


def _of_budget(run: Results) -> float | None:
    """The highest peak of ckpt as a share of its budget, in percent."""
    scenario = run.scenario(memory.NAME)
    if scenario is None:
        return None
    factor = 100 / scenario.facts[memory.BUDGET]
    return _worst(memory.NAME, "saves_total_bytes", "array_total_bytes", factor=factor)(run)


_WAITS = ("commit", "restore")

TARGETS: tuple[Target, ...] = (
    Target("save, large leaves: speed vs Orbax", 6, "x", _faster("large", BASELINE, "save"), True),
    Target(
        "save, large leaves: speed vs one raw stream", 1, "x", _faster("large", "raw", "save"), True
    ),
    Target(
        "restore, large leaves, cached: speed vs Orbax",
        3,
        "x",
        _faster("large", BASELINE, "restore"),
        True,
    ),
    Target(
        "restore, large leaves, cached: speed vs a warm memcpy",
        0.5,
        "x",
        _faster("large", MEMCPY, "restore"),
        True,
    ),
    Target("save, small leaves: speed vs Orbax", 40, "x", _faster("small", BASELINE, "save"), True),
    Target(
        "save, small leaves: time vs safetensors", 1.5, "x", _share("small", "safetensors", "save")
    ),
    Target("save, small leaves: blocked", 40, " ms", _median("small", "blocked", factor=1e3)),
    Target(
        "restore, small leaves: speed vs Orbax",
        15,
        "x",
        _faster("small", BASELINE, "restore"),
        True,
    ),
    Target(
        "restore, small leaves: time vs read and device_put",
        0.8,
        "x",
        _share("small", DEVICE_PUT, "restore"),
    ),
    Target(
        "first restore of a process: speed vs Orbax",
        2.5,
        "x",
        _faster("first_restore", BASELINE, "first_restore"),
        True,
    ),
    Target(
        "first restore of a process: speed vs safetensors",
        1.2,
        "x",
        _faster("first_restore", "safetensors", "first_restore"),
        True,
    ),
    Target(
        "first restore and first step of a process: speed vs Orbax",
        2,
        "x",
        _faster("first_restore", BASELINE, "first_step"),
        True,
    ),
    Target(
        "first restore of a process, small leaves: speed vs Orbax",
        10,
        "x",
        _faster("first_restore_small", BASELINE, "first_restore"),
        True,
    ),
    Target(
        "first restore of a process, small leaves: speed vs safetensors",
        1,
        "x",
        _faster("first_restore_small", "safetensors", "first_restore"),
        True,
    ),
    Target(
        "first restore of a process, over 8 devices: speed vs Orbax",
        3,
        "x",
        _faster("first_restore_sharded", BASELINE, "first_restore"),
        True,
    ),
    Target(
        "import of what a save and a restore need",
        100,
        " ms",
        _median("first_restore", "import", factor=1e3),
    ),
    Target(
        "training lost per save: share of Orbax's", 0.3, "", _share(overlap.NAME, BASELINE, "lost")
    ),
    Target(
        "blocked by save() of very many leaves: share of Orbax's",
        0.15,
        "",
        _share(blocked.NAME, BASELINE, "blocked"),
    ),
    Target(
        "event loop lag while awaiting a commit or a restore: p99",
        5,
        " ms",
        _median(heartbeat.NAME, *(f"{each}_p99" for each in _WAITS), factor=1e3),
    ),
    Target(
        "event loop lag while awaiting a commit or a restore: max of all rounds",
        25,
        " ms",
        _worst(heartbeat.NAME, *(f"{each}_max" for each in _WAITS), factor=1e3),
    ),
    Target(
        "commit beside a blocked event loop: rate vs a free one",
        0.9,
        "x",
        _median(blocked_loop.NAME, "asleep_rate_ratio"),
        True,
    ),
    Target("host memory beyond the state: share of the budget", 110, " %", _of_budget),
    Target(
        "host memory: drift over many saves",
        10,
        " MiB",
        _worst(memory.NAME, "drift_bytes", factor=1 / _MIB),
    ),
    Target(
        "first save of a process: share of Orbax's",
        1,
        "",
        _share(first_save.NAME, BASELINE, "first_save"),
    ),
)
