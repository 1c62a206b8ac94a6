"""The drainer: copies steps of one root to another, one at a time, the newest first.

A waiting step is held, so that the retention of its root keeps it. A root that cannot be reached is
tried again without limit; the run that makes the steps never waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import anyio
from msgspec import Struct
from msgspec.structs import replace

from ckpt._arguments import shown
from ckpt._conversion.copies.step_copy import Pace, at_once
from ckpt._conversion.copies.step_location import StepLocation
from ckpt._conversion.copies.steps import refuse_same
from ckpt._redaction import redact
from ckpt._steps.pins import pins
from ckpt._tiers.drains.drain import DrainBacklog, DrainLeases, DrainResult, drain_step, pause_after
from ckpt.errors import InvalidArgumentError, StorageError, located
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

_PLAIN = Standard()
MOST_WAITING = 16
# Time to note the outcome of a step.
_LAST_WORDS_SECONDS = 10.0

OnResult = Callable[[DrainResult], None]


class DrainRoute(Struct, frozen=True):
    """The source and target of drains.

    Attributes:
        source: The root that has the steps.
        target: The root that gets them; it is created if it is missing.
        names: Naming of the step directories in both.
    """

    source: Storage
    target: Storage
    names: StepNames = _PLAIN

    @property
    def description(self) -> str:
        """The route, for people."""
        return f"from {redact(self.source.location)} to {redact(self.target.location)}"

    def place(self, storage: Storage, step: int) -> StepLocation:
        return StepLocation(storage, self.names.name(step))


class StepNameTable:
    """Names of steps that a function of another process may have made, as it has sent them."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def add(self, step: int, name: str) -> None:
        self._names[step] = name

    def name(self, step: int) -> str:
        return self._names[step]

    def step(self, name: str) -> int | None:
        return next((step for step, each in self._names.items() if each == name), None)


class TransferStrategy(Protocol):
    """A way to bring steps to the target. All methods raise `StorageError` if a storage refuses."""

    async def add(self, step: int, save: str) -> None:
        """Note a step that was asked for, and its save if that is not empty."""

    async def next(self, backlog: DrainBacklog) -> int | None:
        """Wait until a waiting step can be drained, and return it; None if no step waits."""

    async def drain(self, step: int) -> DrainResult | None:
        """Drain the step that `next` has returned; return None if it must wait again."""

    async def ended(self, drained: DrainResult) -> None:
        """Note the outcome of a step, while the step is still held."""

    async def tidy(self) -> None:
        """Remove leftovers of interrupted drains from the target."""


class WholeStepTransfer:
    """The usual strategy: each step is copied whole, as it is, the newest first."""

    def __init__(self, route: DrainRoute, pace: Pace) -> None:
        self._route = route
        self._pace = pace

    async def add(self, step: int, save: str) -> None:
        """Do nothing."""

    async def next(self, backlog: DrainBacklog) -> int | None:
        return next(iter(backlog.order), None)

    async def drain(self, step: int) -> DrainResult:
        route = self._route
        source, target = (route.place(root, step) for root in (route.source, route.target))
        return await drain_step(step, source, target, self._pace)

    async def ended(self, drained: DrainResult) -> None:
        """Do nothing."""

    async def tidy(self) -> None:
        await self._route.target.sweep()


MakeStrategy = Callable[[DrainRoute, Pace], TransferStrategy]


class Drainer:
    """Drains the requested steps; made by `draining`. Used on one event loop.

    Attributes:
        leases: Hold the waiting steps.
    """

    def __init__(
        self, route: DrainRoute, strategy: TransferStrategy, on_result: OnResult, most_waiting: int
    ) -> None:
        self._route = route
        self._strategy = strategy
        self._on_result = on_result
        self._backlog = DrainBacklog(most_waiting)
        self.leases: DrainLeases = DrainLeases(route.source)
        # By step, the save that was asked for last; empty if unknown.
        self._saves: dict[int, str] = {}
        # The save of the step under way, if there is one.
        self._save_under_way = ""
        self._failures = 0
        # Number of steps that have ended but are not reported yet.
        self._ending = 0
        self._is_prepared = False
        self._may_have_left = True
        # Events that are set and replaced whenever a task may wait for such a change.
        self._asked = anyio.Event()
        self._ended = anyio.Event()
        self._is_urgent = anyio.Event()

    @property
    def left(self) -> list[int]:
        """The steps that wait or are being drained, the newest first."""
        return self._backlog.left

    async def request(self, step: int, save: str = "") -> bool:
        """Ask for a step to be drained.

        Once this returns, the step is held, and its root may be tidied. If too many steps wait, the
        oldest one that is not pinned is given up. A step that the target has already is passed
        over. A step that is being drained is drained once more, unless it is known to be the same
        save.

        Args:
            step: A committed step of the source.
            save: The save of the step, if known: the outcome of a step that is not there can be
                noted for its save alone.

        Returns:
            False if there is no such step; `on_result` was called then.

        Raises:
            InvalidArgumentError: The step cannot be named.

        Cancellation: the step may be drained all the same.
        """
        name = self._route.names.name(step)
        if step == self._backlog.under_way and save and save == self._save_under_way:
            return True
        is_held = await self.leases.take(step, name)
        await self._strategy.add(step, save)
        self._saves[step] = save
        if not is_held:
            where = redact(f"{self._route.source.location}/{name}")
            gone = DrainResult(step, "deleted", reason=f"{where} is not there", save=save)
            await self._end(gone)
            return False
        self._backlog.add(step)
        self._asked = _wake_all(self._asked)
        # A drain of the step may have ended meanwhile, and released it.
        await self.leases.take(step, name)
        await self._shorten()
        return True

    async def finish(self, seconds: float | None = None) -> list[int]:
        """Wait until all steps are drained or given up, and leftovers of dead drains are swept.

        Args:
            seconds: Time to wait at most; None waits without limit.

        Returns:
            The steps that were not drained in that time, the newest first. Leaving the context
            stops the drain that is under way; another run can continue it.
        """
        self._is_urgent = _wake_all(self._is_urgent)
        with anyio.move_on_after(seconds):
            while self._backlog.left or self._ending:
                await self._ended.wait()
            await self._tidy()
        return self._backlog.left

    async def work(self) -> None:
        """Drain the requested steps until cancelled."""
        while True:
            if not self._backlog.waiting:
                asked = self._asked
                if self._is_prepared:
                    # Not before the first drain, which may continue leftovers.
                    await self._tidy()
                await asked.wait()
                continue
            try:
                drained = await self._drain_next()
            except StorageError as error:
                self._backlog.fail()
                await self._shorten()
                self._say_failing(error)
                # Not if somebody waits for the end.
                with anyio.move_on_after(pause_after(self._failures)):
                    await self._is_urgent.wait()
                continue
            if drained is None:
                self._backlog.put_back()
                continue
            self._say_working()
            self._backlog.end()
            await self._end(drained)

    async def _drain_next(self) -> DrainResult | None:
        """Drain the next possible step; None if it must wait again, or if no step waits."""
        if not self._is_prepared:
            # Once only: if a mounted disk has gone, its directory must not be created anew.
            await self._route.target.prepare()
            self._is_prepared = True
        step = await self._strategy.next(self._backlog)
        if step is None:
            return None
        self._backlog.begin(step)
        save = self._save_under_way = self._saves.get(step, "")
        drained = await self._strategy.drain(step)
        return drained if drained is None or drained.save else replace(drained, save=save)

    async def _end(self, drained: DrainResult) -> None:
        """Release a step, and report its outcome."""
        self._ending += 1
        try:
            # Other agents wait for this note, even if this drainer is being left.
            with anyio.move_on_after(_LAST_WORDS_SECONDS, shield=True):
                await self._strategy.ended(drained)
        except StorageError as error:
            # The note is tried again with the next step.
            logger.debug("what has become of step %d was not noted: %s", drained.step, error)
        if drained.step not in self._backlog:
            self._saves.pop(drained.step, None)
            # Release the step first: the receiver of the result tidies the root.
            await self.leases.drop(drained.step)
        self._on_result(drained)
        self._ending -= 1
        self._ended = _wake_all(self._ended)

    async def _shorten(self) -> None:
        """If too many steps wait, give up the oldest ones that are not pinned."""
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
            save = self._saves.get(step, "")
            await self._end(DrainResult(step, "given up", reason=reason, save=save))

    async def _tidy(self) -> None:
        """Remove leftovers of interrupted drains, once no step waits to continue one."""
        if not self._may_have_left:
            return
        try:
            await self._strategy.tidy()
        except StorageError as error:
            logger.debug("what dead writers left was not removed: %s", error)
        else:
            self._may_have_left = False

    def _say_failing(self, error: StorageError) -> None:
        self._may_have_left = True
        self._failures += 1
        if self._failures == 1:
            text = "steps cannot be copied %s: %s. It is tried again until that works"
            logger.warning(text, self._route.description, error)

    def _say_working(self) -> None:
        if self._failures:
            text = "steps can be copied %s again, after %d failures"
            logger.warning(text, self._route.description, self._failures)
        self._failures = 0


@contextlib.asynccontextmanager
async def draining(
    route: DrainRoute,
    on_result: OnResult,
    *,
    bytes_per_second: float | None = None,
    most_waiting: int = MOST_WAITING,
    strategy: MakeStrategy = WholeStepTransfer,
) -> AsyncIterator[Drainer]:
    """Drain steps while the body runs.

    Args:
        route: The source and the target.
        on_result: Called once for each requested step, on this loop; it must not block.
        bytes_per_second: The most bytes to move per second; None for no limit.
        most_waiting: The most steps that may wait.
        strategy: The way in which steps get to the target.

    Yields:
        The drainer, which takes the requests.

    Raises:
        InvalidArgumentError: The roots are the same, or the limit is not a number above 0.
        Exception: `on_result` or the body has raised it.

    Cancellation: the drain under way is stopped and leaves nothing visible, and all steps are
    released.

    Example:
        ```python
        async with draining(DrainRoute(open_root(disk), open_root(bucket)), print) as drainer:
            await drainer.request(100)
            late = await drainer.finish(seconds=30)
        ```
    """
    refuse_same(route.source, route.target)
    made = strategy(route, paced(bytes_per_second))
    drainer = Drainer(route, made, on_result, most_waiting)
    with located():
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(drainer.work)
                tasks.start_soon(drainer.leases.renew)
                yield drainer
                tasks.cancel_scope.cancel()
        finally:
            await drainer.leases.drop_all()


def _wake_all(event: anyio.Event) -> anyio.Event:
    """Wake all waiters of an event; return a new event for later waiters."""
    event.set()
    return anyio.Event()


class ByteRate:
    """A limit of bytes per second. Pure: the time is an argument.

    A piece may begin once all pieces promised before it are paid for. So in any time, the bytes of
    the pieces that begin exceed the rate by one piece at most.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        # The time at which all promised pieces are paid for.
        self._free = -math.inf

    def wait_for(self, nbytes: int, now: float) -> float:
        """Promise a piece; return the seconds until it may begin."""
        begins = max(self._free, now)
        self._free = begins + nbytes / self._rate
        return begins - now


def paced(bytes_per_second: float | None) -> Pace:
    """Return a pace with this many bytes per second; None sets no limit.

    Raises:
        InvalidArgumentError: The rate is not a number above 0.
    """
    if bytes_per_second is None:
        return at_once
    given: object = bytes_per_second
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not 0 < bytes_per_second < math.inf:
        raise InvalidArgumentError(
            f"bytes per second {shown(given)}: expected a number above 0, or None for no limit"
        )
    rate = ByteRate(bytes_per_second)

    async def pace(nbytes: int) -> None:
        await anyio.sleep(rate.wait_for(nbytes, anyio.current_time()))

    return pace
