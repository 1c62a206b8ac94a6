"""`Watcher`: finds the committed steps of a root one by one, and pins the current one.

Its coroutines run on an engine's loop of its own, so that leases are renewed even while the caller
blocks its own loop.
"""

from __future__ import annotations

import errno
import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import anyio
from msgspec.structs import replace

from ckpt._arguments import check_step, invalid, number_of_seconds, true_or_false
from ckpt._commit import StepInfo, step_info
from ckpt._format.manifest import Manifest
from ckpt._format.manifest_head import is_same_save, left_behind
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt._steps.opened import open_step
from ckpt._steps.pins import PinLease, hold
from ckpt.errors import InvalidArgumentError, NotACheckpointError, StorageError
from ckpt.step_names import StepNames
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

_RENEWALS = 6
_MOST_FAILURES = 5
_LONGEST_SECONDS = 365 * 86400.0
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}

Until = int | Callable[[], object] | None


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """The choice and the timing of the steps that a watch gives; see `ckpt.watch`.

    Raises:
        InvalidArgumentError: An option is invalid.
    """

    timeout: float | None
    min_interval: float
    until: Until
    after: int | None
    only_latest: bool
    poll_interval: float
    pin: bool

    def __post_init__(self) -> None:
        if callable(self.until):
            _check_until(self.until)
        elif self.until is not None:
            hint = "a step, 0 or more, or a function without arguments"
            until = check_step(self.until, "until", of="watch", hint=hint)
            object.__setattr__(self, "until", until)
        if self.after is not None:
            after = check_step(self.after, "after", of="watch", hint="a step, 0 or more")
            object.__setattr__(self, "after", after)
        true_or_false("only_latest", self.only_latest, of="watch")
        true_or_false("pin", self.pin, of="watch")
        for name in ("timeout", "min_interval", "poll_interval"):
            value = getattr(self, name)
            if value is not None or name != "timeout":
                zero = name != "poll_interval"
                number_of_seconds(name, value, of="watch", zero=zero, most=_LONGEST_SECONDS)


def _check_until(until: Callable[[], object]) -> None:
    """Refuse functions whose result is always true, whatever their author intends."""
    what = None
    if isinstance(until, type):
        what = "a class"
    elif any(map(inspect.iscoroutinefunction, (until, type(until).__call__))):
        what = "async"
    if what is not None:
        expected = f"a step, or a plain function without arguments; this one is {what}"
        raise invalid("until", until, expected, of="watch")


class Watcher:
    """Finds and pins the steps for one iterator. Its coroutines run on one loop, one at a time."""

    def __init__(self, storage: Storage, names: StepNames, options: WatchOptions) -> None:
        self._storage = storage
        self._index = StepIndex(storage, names, missing="awaited")
        self._options = options
        # The steps given so far, as they were at that time.
        self._seen: dict[int, IndexedStep] = {}
        self._lease: PinLease | None = None
        self._given: tuple[int, IndexedStep | None] | None = None
        self._next_time = -math.inf
        self._is_over = False
        self._stopped = False
        self._scope: anyio.CancelScope | None = None

    async def keep(self) -> None:
        """Renew the lease of the current step until cancelled; then release everything."""
        try:
            while True:
                await anyio.sleep(self._storage.traits.lease_seconds / _RENEWALS)
                await self._renew()
        finally:
            self._stopped = True
            if self._scope is not None:
                self._scope.cancel()
            await self._release()

    async def _renew(self) -> None:
        lease = self._lease
        if lease is None:
            return
        try:
            is_there = await lease.renew()
        except StorageError as error:
            logger.warning("the lease of step %d was not renewed: %s", lease.step, error)
            return
        if not is_there and self._lease is lease:
            self._lease = None
            logger.warning("the lease of step %d ran out: the step may be deleted", lease.step)

    async def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.drop()

    async def undo_advance(self) -> None:
        """Undo the last `advance`, whose caller was cancelled before it got the step."""
        if self._given is not None:
            step, before = self._given
            self._given = None
            self._seen.pop(step)
            if before is not None:
                self._seen[step] = before
            self._is_over = False
        await self._release()

    async def advance(self) -> StepInfo | None:
        """Release the current step; return the next one, or None when the watch has ended."""
        self._given = None
        await self._release()
        with anyio.CancelScope() as self._scope:
            info = None if self._is_over or self._stopped else await self._advance()
            if not self._stopped:
                return info
        # Release a step that was found before the watch was stopped: it would stay pinned.
        await self._release()
        return None

    async def _advance(self) -> StepInfo | None:
        await anyio.sleep(max(0.0, self._next_time - anyio.current_time()))
        timeout = self._options.timeout
        deadline = math.inf if timeout is None else anyio.current_time() + timeout
        failures = 0
        while True:
            try:
                info = await self._next()
                if info is None and await self._is_enough():
                    # A step may have been saved just before `until` came true.
                    info = await self._next()
                    if info is None:
                        return None
            except StorageError as error:
                failures += 1
                is_late = anyio.current_time() >= deadline
                # Raise even at the deadline: nobody knows if there is a new step.
                if is_late or failures > _MOST_FAILURES or error.errno in _FORBIDDEN:
                    raise
                logger.debug("%s could not be read: %s", self._storage.location, error)
            else:
                failures = 0
                if info is not None or anyio.current_time() >= deadline:
                    return info
            left = max(0.0, deadline - anyio.current_time())
            await anyio.sleep(min(left, self._options.poll_interval))

    async def _is_enough(self) -> bool:
        until = self._options.until
        if not callable(until):
            return False
        # Run in a thread that is abandoned when cancelled: a user's function may block.
        answer = await run_in_thread(until, abandon_on_cancel=True)
        if inspect.isawaitable(answer):
            if inspect.iscoroutine(answer):
                # Without this, Python warns that the coroutine was never awaited.
                answer.close()
            raise InvalidArgumentError(
                f"watch(until=...): the function returned an awaitable, {type(answer).__name__!r}; "
                "expected True or False"
            )
        return bool(answer)

    async def _next(self) -> StepInfo | None:
        """Return the next new step, pinned; None if there is none."""
        after, until = self._options.after, self._options.until
        every = (await self._index.refresh()).values()
        found = [
            each
            for each in every
            if (after is None or each.step > after) and not self._was_given(each)
        ]
        behind = left_behind(every)
        branch = [each for each in reversed(found) if each.created_ns not in behind]
        for each in branch if self._options.only_latest else found:
            manifest = await self._take(each)
            if manifest is None:
                continue
            if self._options.only_latest:
                self._seen |= {other.step: other for other in found if other.step < each.step}
            self._given = each.step, self._seen.get(each.step)
            self._seen[each.step] = replace(
                each,
                attempt=manifest.attempt,
                created_ns=manifest.created_ns,
                committed_ns=manifest.committed_ns,
                dropped=tuple(manifest.dropped),
            )
            self._next_time = anyio.current_time() + self._options.min_interval
            is_left = each.created_ns in behind
            self._is_over = isinstance(until, int) and each.step >= until and not is_left
            return step_info(manifest, f"{self._storage.location}/{each.step_dir}")
        return None

    def _was_given(self, found: IndexedStep | Manifest) -> bool:
        """Return True if a step was given before, even if it has lost items since."""
        known = None if found.step is None else self._seen.get(found.step)
        return known is not None and is_same_save(found, known)

    async def _take(self, each: IndexedStep) -> Manifest | None:
        """Pin a step; return None if it is deleted, being deleted, or was given before."""

        async def look() -> Manifest | None:
            try:
                opened = await open_step(self._storage, each.step_dir, each.step)
            except NotACheckpointError:
                opened = None
            if opened is None or self._was_given(opened.manifest):
                return None
            return opened.manifest

        try:
            if not self._options.pin:
                return await look()
            held = await hold(self._storage, each.step, look)
        except StorageError as error:
            if error.errno in _FORBIDDEN and self._options.pin:
                raise StorageError(
                    f"the step cannot be pinned: {error.message}. Use pin=False for a root that is "
                    "not writable; its steps may then be deleted while they are read",
                    errno=error.errno,
                    step=each.step,
                ) from error
            raise
        except Exception:
            # The error is raised once; the next call goes on to the next step.
            self._seen[each.step] = each
            raise
        if held is None:
            return None
        self._lease, manifest = held
        return manifest
