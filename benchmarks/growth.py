"""Cost as work grows: save and restore against bytes, and against leaves.

Every point is measured as a workload is. A measure is called `save@N`, where N is the number of
bytes or of leaves. A line through the points tells what one more GiB or leaf costs.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import workloads
from benchmarks.rounds import Log, Setting, in_turn, opened
from benchmarks.throughput import save_and_restore
from benchmarks.workloads import size_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.results import Sample, Scenario

KIND = "growth"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Axis:
    """What grows.

    Attributes:
        name: The name of the scenario.
        unit: What the points count.
        summary: What is saved.
        points: The sizes, ascending.
        smoke_points: The sizes of a smoke run.
        limits: Peers that stop at a size, because they would take minutes beyond it.
        shapes: The state of one point.
    """

    name: str
    unit: str
    summary: str
    points: tuple[int, ...]
    smoke_points: tuple[int, ...]
    limits: Mapping[str, int]
    shapes: Callable[[int], workloads.Shapes]


def _of_bytes(size: int) -> workloads.Shapes:
    count = 64 if size >= 64 * _MIB else 4
    return {f"block_{i:02d}": workloads.f32(size // count // 4096, 1024) for i in range(count)}


AXES: Mapping[str, Axis] = MappingProxyType(
    {
        axis.name: axis
        for axis in (
            Axis(
                "growth_bytes",
                "bytes",
                "f32 in 64 equal leaves",
                tuple(64 * _MIB << power for power in range(7)),
                (_MIB, 2 * _MIB, 4 * _MIB),
                {"orbax": 1024 * _MIB},
                _of_bytes,
            ),
            Axis(
                "growth_leaves",
                "leaves",
                "f32 leaves of 4 KiB",
                (10, 100, 1_000, 5_000, 10_000, 50_000),
                (10, 50, 100),
                {"orbax": 5_000},
                workloads.leaf_shapes,
            ),
        )
    }
)


def run(setting: Setting, axis: Axis) -> Scenario:
    """Returns the samples of every point; call it in a fresh process."""
    points = axis.smoke_points if setting.smoke else axis.points
    log = Log(axis.name, setting.rounds)
    with opened(setting.both, setting.directory) as running:
        for place, point in enumerate(points):
            gc.collect()
            shapes = axis.shapes(point)
            tree = workloads.make(shapes)
            for turn in range(setting.rounds + 1):
                for name, peer in in_turn(running, turn):
                    if point > axis.limits.get(name, point):
                        continue
                    step = place * 1_000 + turn
                    # Compared at the small sizes only: it takes as long as the rest.
                    check = turn == 0 and size_bytes(tree) <= 256 * _MIB
                    tree, seconds = save_and_restore(peer, tree, step, check=check)
                    peer.delete(step)
                    log.add(turn, name, {f"{key}@{point}": each for key, each in seconds.items()})
            del tree
    summary = f"up to this much of {axis.summary}"
    return log.result(KIND, summary, shapes, points=float(len(points)))


@dataclass(frozen=True, slots=True)
class Line:
    """`seconds = intercept + slope * amount`, and how much of the variance it explains."""

    slope: float
    intercept: float
    r_squared: float


def samples_at(scenario: Scenario, row: str, measure: str) -> dict[int, Sample]:
    """Returns the samples `measure@N` of a row by N, ascending."""
    measures: Mapping[str, Sample] = scenario.measures.get(row, {})
    split = ((name.split("@"), sample) for name, sample in measures.items() if "@" in name)
    return dict(sorted((int(at), sample) for (name, at), sample in split if name == measure))


def line(amounts: Sequence[float], seconds: Sequence[float]) -> Line:
    """Returns the least-squares line of at least two points.

    Errors count relative to the seconds (weights of 1/seconds squared): the noise of a timing grows
    with it, and otherwise the largest point alone would decide about the intercept.
    """
    x, y = np.array(amounts, float), np.array(seconds, float)
    slope, intercept = np.polyfit(x, y, 1, w=1 / y)
    left, variance = (
        np.average((y - other) ** 2, weights=y**-2)
        for other in (intercept + slope * x, np.average(y, weights=y**-2))
    )
    return Line(float(slope), float(intercept), float(1 - left / variance) if variance else 1.0)


def line_of(scenario: Scenario, row: str, measure: str) -> Line | None:
    """Returns the line through the medians of a row, or None with fewer than two points."""
    found = samples_at(scenario, row, measure)
    if len(found) < 2:
        return None
    return line(list(found), [sample.median for sample in found.values()])
