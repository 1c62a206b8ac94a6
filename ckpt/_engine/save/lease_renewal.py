"""Renewal of the lease of an attempt while the attempt is written."""

from __future__ import annotations

import logging

import anyio

from ckpt.errors import StorageError
from ckpt.storage._base import Attempt, Storage

logger = logging.getLogger("ckpt")

# Renewals within the time of one lease: some may fail or come late.
_RENEWALS = 6


async def renew_lease(storage: Storage, attempt: Attempt, renewal: anyio.CancelScope) -> None:
    """Renew the lease of an attempt until `renewal` is cancelled."""
    with renewal:
        while True:
            await anyio.sleep(storage.traits.lease_seconds / _RENEWALS)
            # Failures are only logged: publishing decides if the attempt is still ours.
            try:
                await storage.renew(attempt)
            except StorageError as error:
                logger.warning("the lease of an attempt was not renewed: %s", error)
