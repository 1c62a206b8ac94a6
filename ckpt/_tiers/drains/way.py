"""`Way`: how the steps of a drain get to its target. A drainer asks it."""

from __future__ import annotations

from typing import Protocol

from ckpt._tiers.drains.backlog import DrainBacklog
from ckpt._tiers.drains.drain import Drained


class Way(Protocol):
    """How steps get to the target. All methods raise `StorageError` if a storage refuses."""

    async def add(self, step: int, save: str) -> None:
        """Take notice of a step that was asked for, of this save if that is not empty."""

    async def next(self, backlog: DrainBacklog) -> int | None:
        """Wait until one of the steps that wait can be drained; None if none waits any more."""

    async def drain(self, step: int) -> Drained | None:
        """Drain the step that `next` has returned; None if it has to wait again."""

    async def ended(self, drained: Drained) -> None:
        """Take notice of what has become of a step, while it is still held."""

    async def tidy(self) -> None:
        """Remove what drains that were cut have left in the target."""
