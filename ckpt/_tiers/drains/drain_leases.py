"""`DrainLeases`: protect steps that wait to be drained from the retention of their root."""

from __future__ import annotations

import logging

import anyio
from msgspec import Struct

from ckpt._steps.pins import PinLease, hold
from ckpt.errors import StorageError
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

# The lease time is short: the leases of a killed process keep others from deleting.
_LEASE_SECONDS, _RENEWALS = 60.0, 6


class _LeasedStep(Struct):
    """A step that is held; it has no lease while its root refuses one."""

    step_dir: str
    lease: PinLease | None = None


class DrainLeases:
    """Pin leases on steps of one root."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._seconds = min(_LEASE_SECONDS, storage.traits.lease_seconds)
        self._leased: dict[int, _LeasedStep] = {}

    async def take(self, step: int, step_dir: str) -> bool:
        """Hold a step until it is dropped; return False if the step is not there.

        A root that refuses is asked again at the next renewal.
        """
        if step in self._leased:
            return True
        leased = self._leased[step] = _LeasedStep(step_dir)
        is_there = False
        try:
            is_there = await self._lease(step, leased)
        finally:
            if not is_there:
                self._leased.pop(step, None)
        return is_there

    async def drop(self, step: int) -> None:
        leased = self._leased.pop(step, None)
        if leased is not None and leased.lease is not None:
            await leased.lease.drop()

    async def drop_all(self) -> None:
        """Release all steps, even when cancelled."""
        with anyio.CancelScope(shield=True):
            for step in list(self._leased):
                await self.drop(step)

    async def renew(self) -> None:
        """Renew all leases until cancelled."""
        while True:
            await anyio.sleep(self._seconds / _RENEWALS)
            for step, leased in list(self._leased.items()):
                try:
                    if leased.lease is None or not await leased.lease.renew():
                        await self._lease(step, leased)
                except StorageError as error:
                    logger.debug("the hold on step %d was not renewed: %s", step, error)

    async def _lease(self, step: int, leased: _LeasedStep) -> bool:
        """Put a lease on a step; return False if the step is not there."""

        async def look() -> bool | None:
            return await self._storage.exists(leased.step_dir) or None

        try:
            found = await hold(self._storage, step, look, seconds=self._seconds)
        except StorageError as error:
            logger.debug("step %d is not held in %s: %s", step, self._storage.location, error)
            return True
        leased.lease = None if found is None else found[0]
        if leased.lease is not None and self._leased.get(step) is not leased:
            # The step was dropped meanwhile.
            await leased.lease.drop()
        return found is not None
