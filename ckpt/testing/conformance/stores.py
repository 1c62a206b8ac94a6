"""The conformance suite for stores: the promises of storages, tried on real stores.

Each check is a coroutine function of a `StoreCase`. It raises `AssertionError` (or the error of the
store) if the store breaks the promise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from ckpt.testing.conformance.store_cases import StoreCase
from ckpt.testing.conformance.store_step_dirs import CHECKS as STEP_DIR_CHECKS
from ckpt.testing.conformance.store_writers import CHECKS as WRITER_CHECKS

__all__ = ["CHECKS", "StoreCase", "check_store"]

CHECKS: tuple[Callable[[StoreCase], Awaitable[None]], ...] = (*STEP_DIR_CHECKS, *WRITER_CHECKS)


def check_store(case: StoreCase) -> None:
    """Run every check, each in its own root.

    Raises:
        AssertionError: The store fails a check.
        CheckpointError: The store refused a request that it should fulfil.
    """
    for check in CHECKS:
        anyio.run(check, case)
