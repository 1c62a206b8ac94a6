"""The steps of a root as they are committed, one after the other, pinned while in use.

The coroutines of a `Watcher` run on an engine's loop of its own, so that leases are renewed while
the caller evaluates, whatever it blocks.
"""

from __future__ import annotations

import errno
import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from ckpt._commit import StepInfo, step_info
from ckpt._format.manifest import Manifest
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt._steps.pins import PinLease, hold
from ckpt.errors import InvalidArgumentError, StepNotFoundError, StorageError
from ckpt.step_names import StepNames
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest

__all__ = ["WatchOptions", "Watcher"]

logger = logging.getLogger("ckpt")

_RENEWALS = 6
_MOST_FAILURES = 5
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What a watch is to give out; times are in seconds.

    Attributes:
        timeout: How long is waited for a new step. Where the root could not be looked at when it
            is over, that is raised.
        min_interval: From one step to the next at least.
        until: Asked while there is nothing new: whether nothing more is to come.
        last: The step at which it ends, or any greater one.
        after: Only steps greater than this one.
        only_latest: Leave out all new steps but the greatest.
        poll_interval: From one look to the next.
        pin: Whether the step in hand is pinned.
    """

    timeout: float
    min_interval: float
    until: Callable[[], object] | None
    last: float
    after: float
    only_latest: bool
    poll_interval: float
    pin: bool


class Watcher:
    """What goes on behind a watch. Its coroutines run on one engine's loop, one at a time."""

    def __init__(self, storage: Storage, names: StepNames, wishes: WatchOptions) -> None:
        """Watch the steps of `storage` that are called as `names` says."""
        self._storage = storage
        self._index = StepIndex(storage, names)
        self._wishes = wishes
        # Steps that were given out, with the attempts that wrote them.
        self._seen: dict[int, str] = {}
        self._lease: PinLease | None = None
        self._given: tuple[int, str | None] | None = None
        self._next_time = -math.inf
        self._is_over = False
        self._stopped = False
        self._scope: anyio.CancelScope | None = None

    async def keep(self) -> None:
        """Renew the lease of the step in hand until cancelled; then let go of everything."""
        try:
            while True:
                await anyio.sleep(self._storage.lease_seconds / _RENEWALS)
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

    async def take_back(self) -> None:
        """Undo the last `advance`: the caller was cancelled before it got the step."""
        if self._given is not None:
            step, attempt = self._given
            self._given = None
            self._seen.pop(step)
            if attempt is not None:
                self._seen[step] = attempt
            self._is_over = False
        await self._release()

    async def advance(self) -> StepInfo | None:
        """Let go of the step in hand; return the next one, or None where the watch has ended."""
        self._given = None
        await self._release()
        with anyio.CancelScope() as self._scope:
            info = None if self._is_over or self._stopped else await self._advance()
            if not self._stopped:
                return info
        # It may have come with a step that nobody lets go of any more.
        await self._release()
        return None

    async def _advance(self) -> StepInfo | None:
        await anyio.sleep(max(0.0, self._next_time - anyio.current_time()))
        deadline = anyio.current_time() + self._wishes.timeout
        failures = 0
        while True:
            try:
                info = await self._next()
                if info is None and await self._is_enough():
                    # It may have been saved before that was so.
                    info = await self._next()
                    if info is None:
                        return None
            except StorageError as error:
                failures += 1
                is_late = anyio.current_time() >= deadline
                # That nothing new is there is not known.
                if is_late or failures > _MOST_FAILURES or error.errno in _FORBIDDEN:
                    raise
                logger.debug("%s could not be looked at: %s", self._storage.location, error)
            else:
                failures = 0
                if info is not None or anyio.current_time() >= deadline:
                    return info
            left = max(0.0, deadline - anyio.current_time())
            await anyio.sleep(min(left, self._wishes.poll_interval))

    async def _is_enough(self) -> bool:
        until = self._wishes.until
        if until is None:
            return False
        # In a thread, and not waited for when cancelled: it is not ours and may block.
        answer = await anyio.to_thread.run_sync(until, abandon_on_cancel=True)
        if inspect.isawaitable(answer):
            if inspect.iscoroutine(answer):
                # Nobody will await it; Python would warn of that.
                answer.close()
            raise InvalidArgumentError(
                f"watch(until=...): the function returned {type(answer).__name__!r}, which is to "
                "be awaited; expected an answer, such as True or False"
            )
        return bool(answer)

    async def _next(self) -> StepInfo | None:
        """Return the next new step, pinned; None if there is none."""
        found = [
            each
            for each in (await self._index.refresh()).values()
            if each.step > self._wishes.after and self._seen.get(each.step) != each.attempt
        ]
        for each in reversed(found) if self._wishes.only_latest else found:
            manifest = await self._take(each)
            if manifest is None:
                continue
            if self._wishes.only_latest:
                older = {other.step: other.attempt for other in found if other.step < each.step}
                self._seen |= older
            self._given = each.step, self._seen.get(each.step)
            self._seen[each.step] = manifest.attempt
            self._next_time = anyio.current_time() + self._wishes.min_interval
            self._is_over = each.step >= self._wishes.last
            return step_info(manifest, f"{self._storage.location}/{each.entry}")
        return None

    async def _take(self, each: IndexedStep) -> Manifest | None:
        """Pin a step; None if it has gone, is going, or was given out before."""

        async def look() -> Manifest | None:
            try:
                manifest = await read_manifest(self._storage, each.entry, step=each.step)
            except StepNotFoundError:
                return None
            return None if self._seen.get(each.step) == manifest.attempt else manifest

        try:
            if not self._wishes.pin:
                return await look()
            held = await hold(self._storage, each.step, look)
        except StorageError as error:
            if error.errno in _FORBIDDEN and self._wishes.pin:
                raise StorageError(
                    f"the step cannot be pinned: {error.message}. A root that may not be written "
                    "to is watched with pin=False; its steps may be deleted while they are read",
                    errno=error.errno,
                    step=each.step,
                ) from error
            raise
        except Exception:
            # It is told once. Who goes on then gets the next one.
            self._seen[each.step] = each.attempt
            raise
        if held is None:
            return None
        self._lease, manifest = held
        return manifest
