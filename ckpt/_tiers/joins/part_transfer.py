"""The transfer strategy for jobs: assemble each step from the parts of all processes."""

from __future__ import annotations

from ckpt._conversion.copies.step_copy import Pace
from ckpt._tiers.drains.drainer import DrainRoute, MakeStrategy, TransferStrategy
from ckpt._tiers.joins.follower import Follower
from ckpt._tiers.joins.leader import Leader


def part_transfer(process: int, count: int) -> MakeStrategy:
    """Return the strategy that joins the parts of steps, for `draining`.

    Args:
        process: The number of the process whose disk is drained.
        count: Number of processes.

    Example:
        ```python
        async with draining(DrainRoute(disk, root), print, strategy=part_transfer(1, 4)) as drainer:
            await drainer.request(100)
            late = await drainer.finish(seconds=30)
        ```
    """

    def make(route: DrainRoute, pace: Pace) -> TransferStrategy:
        if process == 0:
            return Leader(route, pace, count)
        return Follower(route, pace, process, count)

    return make
