"""The drainer: copies steps of one root to another, one at a time, the newest first.

A step that waits is held, so that the retention of its root leaves it. A root that cannot be
reached is tried again for as long as it takes; the run that makes the steps never waits for that.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import anyio
from msgspec import Struct

from ckpt._conversion.copies.place import CopyPlace
from ckpt._conversion.copies.step_copy import Pace
from ckpt._conversion.copies.steps import refuse_same
from ckpt._redaction import redact
from ckpt._steps.pins import pins
from ckpt._tiers.drains.backlog import DrainBacklog, pause_after
from ckpt._tiers.drains.drain import Drained, drain_step
from ckpt._tiers.drains.holds import Holds
from ckpt._tiers.drains.rate import paced
from ckpt._tiers.drains.way import Way
from ckpt.errors import StorageError, located
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

_PLAIN = Standard()
MOST_WAITING = 16
# To say what has become of a step.
_LAST_WORDS_SECONDS = 10.0

Told = Callable[[Drained], None]


class DrainRoute(Struct, frozen=True):
    """From where to where steps are drained.

    Attributes:
        source: The root that has them.
        target: The root that gets them. It is made if it is missing.
        names: How the directories of steps are named in both.
    """

    source: Storage
    target: Storage
    names: StepNames = _PLAIN

    def place(self, storage: Storage, step: int) -> CopyPlace:
        """Return where a step is in one of the roots."""
        return CopyPlace(storage, self.names.name(step))


class Copies:
    """The usual way: each step is copied whole, as it is, the newest first."""

    def __init__(self, route: DrainRoute, pace: Pace) -> None:
        """Copy steps of a route at a pace."""
        self._route = route
        self._pace = pace

    async def add(self, step: int, save: str) -> None:
        """Do nothing."""

    async def next(self, backlog: DrainBacklog) -> int | None:
        """Return the step that is next in the backlog."""
        return next(iter(backlog.order), None)

    async def drain(self, step: int) -> Drained:
        """Copy a step."""
        route = self._route
        source, target = (route.place(root, step) for root in (route.source, route.target))
        return await drain_step(step, source, target, self._pace)

    async def ended(self, drained: Drained) -> None:
        """Do nothing."""

    async def tidy(self) -> None:
        """Sweep the target."""
        await self._route.target.sweep()


MakeWay = Callable[[DrainRoute, Pace], Way]


class Drainer:
    """Drains the steps that are asked for; made by `draining`. Used on one event loop."""

    def __init__(self, route: DrainRoute, way: Way, told: Told, most_waiting: int) -> None:
        self._route = route
        self._way = way
        self._told = told
        self._backlog = DrainBacklog(most_waiting)
        self._holds = Holds(route.source)
        self._failures = 0
        # How many steps have ended without that having been told yet.
        self._ending = 0
        self._is_prepared = False
        self._may_have_left = True
        # Set, and replaced, whenever a task may have waited for that.
        self._asked = anyio.Event()
        self._ended = anyio.Event()
        self._is_urgent = anyio.Event()

    @property
    def left(self) -> list[int]:
        """The steps that wait or are being drained, the newest first."""
        return self._backlog.left

    async def request(self, step: int, save: str = "") -> bool:
        """Have a step drained.

        From the moment in which this returns the step is held, and its root may be tidied. Of too
        many steps that wait the oldest one that is not pinned is given up. A step that is there
        already is passed over.

        Args:
            step: A committed step of the source.
            save: The save that it is of, where that is known: what has become of a step that is
                not there can be said of its save alone.

        Returns:
            False if there is no such step, which `told` has heard.

        Raises:
            InvalidArgumentError: The step cannot be named.

        Cancellation: the step may be drained all the same.
        """
        name = self._route.names.name(step)
        is_held = await self._holds.take(step, name)
        await self._way.add(step, save)
        if not is_held:
            where = redact(f"{self._route.source.location}/{name}")
            await self._end(Drained(step, "deleted", reason=f"{where} is not there"))
            return False
        self._backlog.add(step)
        self._asked = _told_again(self._asked)
        await self._shorten()
        return True

    async def finish(self, seconds: float | None = None) -> list[int]:
        """Wait until all steps are drained or given up, and what dead drains left is swept.

        Args:
            seconds: How long to wait at most; None waits for as long as it takes.

        Returns:
            The steps that were not drained in that time, the newest first. Leaving the context
            stops the drain that is under way; another run can go on with it.
        """
        self._is_urgent = _told_again(self._is_urgent)
        with anyio.move_on_after(seconds):
            while self._backlog.left or self._ending:
                await self._ended.wait()
            await self._tidy()
        return self._backlog.left

    async def work(self) -> None:
        """Drain what is asked for, for ever."""
        while True:
            if not self._backlog.waiting:
                asked = self._asked
                if self._is_prepared:
                    # Not before the first drain, which may go on with what is there.
                    await self._tidy()
                await asked.wait()
                continue
            try:
                drained = await self._drain_next()
            except StorageError as error:
                self._backlog.fail()
                await self._shorten()
                self._say_failing(error)
                await self._pause()
                continue
            if drained is None:
                self._backlog.put_back()
                continue
            self._say_working()
            self._backlog.end()
            await self._end(drained)

    async def keep(self) -> None:
        """Keep the steps that wait from being deleted, for ever."""
        await self._holds.renew()

    async def let_go(self) -> None:
        """Let all steps go, also when cancelled."""
        await self._holds.drop_all()

    async def _drain_next(self) -> Drained | None:
        """Drain the step that can be; None if it waits again, or none waits any more."""
        if not self._is_prepared:
            # Once only: where a disk that was mounted is gone, its directory must not be made anew.
            await self._route.target.prepare()
            self._is_prepared = True
        step = await self._way.next(self._backlog)
        if step is None:
            return None
        self._backlog.begin(step)
        return await self._way.drain(step)

    async def _end(self, drained: Drained) -> None:
        """Let a step go, and tell what has become of it."""
        self._ending += 1
        try:
            # Others wait to hear of it, also if this drainer is being left.
            with anyio.move_on_after(_LAST_WORDS_SECONDS, shield=True):
                await self._way.ended(drained)
        except StorageError as error:
            # It is tried again with the next step.
            logger.debug("what has become of step %d was not noted: %s", drained.step, error)
        # First: who hears of it tidies the root.
        await self._holds.drop(drained.step)
        self._told(drained)
        self._ending -= 1
        self._ended = _told_again(self._ended)

    async def _shorten(self) -> None:
        """Give up the oldest steps that are not pinned, of more than may wait."""
        while self._backlog.is_too_long:
            try:
                found = await pins(self._route.source)
            except StorageError as error:
                # The next request looks again.
                logger.debug("pins cannot be read: %s", error)
                return
            pinned = [
                step for step, each in found.items() if any(pin.seconds is None for pin in each)
            ]
            step = self._backlog.give_up(pinned)
            if step is None:
                return
            reason = "too many newer steps wait. The target is too slow for so many, or not there"
            await self._end(Drained(step, "given up", reason=reason))

    async def _tidy(self) -> None:
        """Remove what drains that were cut have left, once all that could go on has done so."""
        if not self._may_have_left:
            return
        try:
            await self._way.tidy()
        except StorageError as error:
            logger.debug("what dead writers left was not removed: %s", error)
        else:
            self._may_have_left = False

    def _say_failing(self, error: StorageError) -> None:
        self._may_have_left = True
        self._failures += 1
        if self._failures == 1:
            logger.warning(
                "steps cannot be copied from %s to %s: %s. It is tried again until that works",
                redact(self._route.source.location),
                redact(self._route.target.location),
                error,
            )

    def _say_working(self) -> None:
        if self._failures:
            logger.warning(
                "steps can be copied from %s to %s again, after %d failures",
                redact(self._route.source.location),
                redact(self._route.target.location),
                self._failures,
            )
        self._failures = 0

    async def _pause(self) -> None:
        """Wait before the next try, unless somebody waits for the end."""
        with anyio.move_on_after(pause_after(self._failures)):
            await self._is_urgent.wait()


@contextlib.asynccontextmanager
async def draining(
    route: DrainRoute,
    told: Told,
    *,
    bytes_per_second: float | None = None,
    most_waiting: int = MOST_WAITING,
    way: MakeWay = Copies,
) -> AsyncIterator[Drainer]:
    """Drain steps for as long as the body runs.

    Args:
        route: From where to where.
        told: Told once of each step that was asked for, on this loop; it must not block.
        bytes_per_second: How many bytes are moved a second at most; None for no limit.
        most_waiting: How many steps may wait.
        way: How they get there.

    Yields:
        What takes the requests.

    Raises:
        InvalidArgumentError: The roots are the same, or the limit is not a number above 0.
        What `told` or the body raises.

    Cancellation: the drain under way is stopped and leaves nothing that can be seen, and all steps
    are let go.

    Example:
        ```python
        async with draining(DrainRoute(open_root(disk), open_root(bucket)), print) as drainer:
            await drainer.request(100)
            late = await drainer.finish(seconds=30)
        ```
    """
    refuse_same(route.source, route.target)
    made = way(route, paced(bytes_per_second))
    drainer = Drainer(route, made, told, most_waiting)
    with located():
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(drainer.work)
                tasks.start_soon(drainer.keep)
                yield drainer
                tasks.cancel_scope.cancel()
        finally:
            await drainer.let_go()


def _told_again(event: anyio.Event) -> anyio.Event:
    """Wake all that wait for an event; return the one for those that will."""
    event.set()
    return anyio.Event()
