"""The way of parts: how a keeper takes part in the joins of its job."""

from __future__ import annotations

from ckpt._conversion.copies.step_copy import Pace
from ckpt._tiers.drains.drainer import DrainRoute, MakeWay
from ckpt._tiers.drains.way import Way
from ckpt._tiers.joins.follower import Follower
from ckpt._tiers.joins.leader import Leader


def joining(process: int, count: int) -> MakeWay:
    """Return the way in which the parts of steps are joined, for `draining`.

    Args:
        process: The number of the process whose disk is drained.
        count: How many processes there are.

    Example:
        ```python
        async with draining(DrainRoute(disk, root), print, way=joining(1, 4)) as drainer:
            await drainer.request(100)
            late = await drainer.finish(seconds=30)
        ```
    """

    def make(route: DrainRoute, pace: Pace) -> Way:
        if process == 0:
            return Leader(route, pace, count)
        return Follower(route, pace, process, count)

    return make
