"""`TransferStrategy`: the way in which a drainer brings steps to its target."""

from __future__ import annotations

from typing import Protocol

from ckpt._tiers.drains.drain import DrainResult
from ckpt._tiers.drains.drain_backlog import DrainBacklog


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
