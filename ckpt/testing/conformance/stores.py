"""The conformance suite for stores: every promise of `ckpt.storage.Storage`, tried on real ones.

Each check is a coroutine function of a `StoreCase`, and raises `AssertionError` (or the error of
the store) where the store does something else.
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
    """Run every check, each in a root of its own.

    Raises:
        AssertionError: The store fails one.
        CheckpointError: The store refused what it should do.
    """
    for check in CHECKS:
        anyio.run(check, case)
