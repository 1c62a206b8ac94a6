"""Cost as work grows: save and restore against bytes, and against leaves.

Every point is measured as a workload is. A measure is called `save@N`, where N is the number of
bytes or of leaves; `benchmarks.fit` draws a line through them.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import jax

from benchmarks import workloads
from benchmarks.results import Scenario
from benchmarks.rounds import Log, Setting, in_turn, opened
from benchmarks.throughput import save_and_restore
from benchmarks.trees import size_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
    leaves = size = 0
    with opened(setting.only("ckpt", "orbax"), setting.directory) as running:
        for place, point in enumerate(points):
            gc.collect()
            tree = workloads.make(axis.shapes(point))
            leaves, size = len(jax.tree.leaves(tree)), size_bytes(tree)
            for turn in range(setting.rounds + 1):
                for name, peer in in_turn(running, turn):
                    if point > axis.limits.get(name, point):
                        continue
                    step = place * 1_000 + turn
                    # Compared at the small sizes only: it takes as long as the rest.
                    check = turn == 0 and size <= 256 * _MIB
                    tree, seconds = save_and_restore(peer, tree, step, check=check)
                    peer.delete(step)
                    log.add(turn, name, {f"{key}@{point}": each for key, each in seconds.items()})
            del tree
    return Scenario(
        name=axis.name,
        kind=KIND,
        summary=f"up to this much of {axis.summary}",
        leaves=leaves,
        size_bytes=size,
        measures=log.samples(),
        facts={"points": float(len(points))},
    )
