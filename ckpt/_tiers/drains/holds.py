"""Holds: steps that wait to be drained are kept from the retention of their root."""

from __future__ import annotations

import logging

import anyio
from msgspec import Struct

from ckpt._steps.pins import PinLease, hold
from ckpt.errors import StorageError
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

# Short: the leases of a process that was killed keep others from deleting.
_LEASE_SECONDS, _RENEWALS = 60.0, 6


class _HeldStep(Struct):
    """A step that is held; without a lease as long as its root refuses one."""

    step_dir: str
    lease: PinLease | None = None


class Holds:
    """Pin leases on steps of one root."""

    def __init__(self, storage: Storage) -> None:
        """Hold steps of this root."""
        self._storage = storage
        self._seconds = min(_LEASE_SECONDS, storage.lease_seconds)
        self._held: dict[int, _HeldStep] = {}

    async def take(self, step: int, step_dir: str) -> bool:
        """Hold a step until it is dropped; False if it is not there.

        A root that refuses is asked again at the next renewal.
        """
        if step in self._held:
            return True
        held = self._held[step] = _HeldStep(step_dir)
        is_there = False
        try:
            is_there = await self._lease(step, held)
        finally:
            if not is_there:
                self._held.pop(step, None)
        return is_there

    async def drop(self, step: int) -> None:
        """Let a step go."""
        held = self._held.pop(step, None)
        if held is not None and held.lease is not None:
            await held.lease.drop()

    async def drop_all(self) -> None:
        """Let all steps go, also when cancelled."""
        with anyio.CancelScope(shield=True):
            for step in list(self._held):
                await self.drop(step)

    async def renew(self) -> None:
        """Renew all leases, for ever."""
        while True:
            await anyio.sleep(self._seconds / _RENEWALS)
            for step, held in list(self._held.items()):
                try:
                    if held.lease is None or not await held.lease.renew():
                        await self._lease(step, held)
                except StorageError as error:
                    logger.debug("the hold on step %d was not renewed: %s", step, error)

    async def _lease(self, step: int, held: _HeldStep) -> bool:
        """Put a lease on a step; False if it is not there."""

        async def look() -> bool | None:
            return await self._storage.exists(held.step_dir) or None

        try:
            found = await hold(self._storage, step, look, seconds=self._seconds)
        except StorageError as error:
            logger.debug("step %d is not held in %s: %s", step, self._storage.location, error)
            return True
        held.lease = None if found is None else found[0]
        if held.lease is not None and self._held.get(step) is not held:
            # It was dropped meanwhile.
            await held.lease.drop()
        return found is not None
