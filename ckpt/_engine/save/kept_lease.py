"""The lease of an attempt, renewed while the attempt is written."""

from __future__ import annotations

import logging

import anyio

from ckpt.errors import StorageError
from ckpt.storage._base import Attempt, Storage

logger = logging.getLogger("ckpt")

# Times that a lease is renewed before it would run out: some may fail or come late.
_RENEWALS = 6


async def keep_lease(storage: Storage, attempt: Attempt, keeper: anyio.CancelScope) -> None:
    """Renew the lease of an attempt until `keeper` is cancelled."""
    with keeper:
        while True:
            await anyio.sleep(storage.lease_seconds / _RENEWALS)
            # Whether the attempt is still ours is decided when it is published.
            try:
                await storage.renew(attempt)
            except StorageError as error:
                logger.warning("the lease of an attempt was not renewed: %s", error)
