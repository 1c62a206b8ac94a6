"""`Links`: the steps of tiers on their way, each tier to the next place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import anyio
from anyio.abc import TaskGroup

from ckpt._tiers.drains.drain import Drained
from ckpt._tiers.drains.drainer import Copies, Drainer, DrainRoute, draining
from ckpt._tiers.joins.way import joining
from ckpt._tiers.keeper.fetches import Fetches
from ckpt._tiers.keeper.messages import Fetch, FromKeeper, Held, Link, Moved, Step, place_of_json
from ckpt._tiers.keeper.told_names import ToldNames
from ckpt.errors import StorageError
from ckpt.storage._resolve import open_root


class Links:
    """Drains the steps of all tiers; made by `linked`. Used on the keeper's loop."""

    def __init__(
        self, links: Sequence[Link], told: Callable[[FromKeeper], None], tasks: TaskGroup
    ) -> None:
        count = len(links)
        self._told = told
        self._fetches = Fetches(links, tasks, told)
        self._drainers: list[Drainer] = []
        self._names = [ToldNames() for _ in range(count)]
        # By tier, the newest step that is not wanted at the next place, unless in the end.
        self._unwanted: list[Step | None] = [None] * count
        self._requested: list[set[int]] = [set() for _ in range(count)]
        self._moved: list[list[Moved]] = [[] for _ in range(count)]

    async def add(self, step: Step) -> None:
        """Take a step that was committed at a tier; say when it is held."""
        self._names[step.link].add(step.step, step.step_dir)
        if step.is_wanted:
            await self._request(step)
            return
        kept = self._unwanted[step.link]
        if kept is None or step.step > kept.step:
            self._unwanted[step.link] = step

    def fetch(self, fetch: Fetch) -> None:
        """Copy a step back to the nearest tier, and tell what has become of it."""
        self._fetches.start(fetch)

    async def _request(self, step: Step) -> None:
        self._requested[step.link].add(step.step)
        try:
            held = await self._drainers[step.link].request(step.step, step.save)
        except StorageError as error:
            self._told(Moved(step.link, step.step, step.step_dir, problem=error.message))
            return
        if held:
            self._told(Held(step.link, step.step))

    async def finish(self, seconds: float) -> list[int]:
        """Drain what is left, and the newest step of each tier; return what was not drained."""
        ends, left = time.monotonic() + seconds, set[int]()
        for link, drainer in enumerate(self._drainers):
            newest = self._unwanted[link]
            if newest is not None and newest.step > max(self._requested[link], default=-1):
                await self._request(newest)
            left.update(await drainer.finish(max(ends - time.monotonic(), 0.0)))
            if link + 1 < len(self._drainers):
                # The trainer may have said so already, and cannot any more.
                for moved in self._moved[link]:
                    if not moved.problem and moved.step not in self._requested[link + 1]:
                        await self.add(Step(link + 1, moved.step, moved.step_dir, True))
        return sorted(left)

    def _drained(self, link: int, drained: Drained) -> None:
        problem = "" if drained.is_safe else drained.reason or drained.outcome
        step_dir = self._names[link].name(drained.step)
        moved = Moved(
            link,
            drained.step,
            step_dir,
            drained.nbytes,
            drained.seconds,
            problem,
            is_damaged=drained.outcome == "damaged",
            is_gone=drained.outcome == "deleted",
        )
        self._moved[link].append(moved)
        self._told(moved)


@contextlib.asynccontextmanager
async def linked(links: Sequence[Link], told: Callable[[FromKeeper], None]) -> AsyncIterator[Links]:
    """Drain steps for as long as the body runs; `told` hears what has become of them."""
    async with contextlib.AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        # What is still being fetched in the end is given up: nothing of it can be seen.
        stack.callback(tasks.cancel_scope.cancel)
        found = Links(links, told, tasks)
        for number, link in enumerate(links):
            places = open_root(place_of_json(link.source)), open_root(place_of_json(link.target))
            drainer = await stack.enter_async_context(
                draining(
                    DrainRoute(*places, found._names[number]),
                    partial(found._drained, number),
                    bytes_per_second=link.bytes_per_second,
                    most_waiting=link.most_waiting,
                    way=Copies if link.process[1] == 1 else joining(*link.process),
                )
            )
            found._drainers.append(drainer)
        yield found
