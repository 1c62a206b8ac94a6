"""The signs of life that this process gives in one operation, and where those of others are."""

from __future__ import annotations

import anyio

from ckpt.coordination._deadline import DeadlineKeyValues
from ckpt.coordination._signs import hello

__all__ = ["Pulse"]


class Pulse:
    """Signs of life of an operation, and of all parts of it: who works at one lives in all."""

    def __init__(self, shared: DeadlineKeyValues, index: int) -> None:
        """Make it; no sign is given yet.

        Args:
            shared: The values of the operation.
            index: Which process this is.
        """
        self._shared = shared
        self._index = index
        self._moved = 0
        self._shown = 0
        self._beat = 0
        self._beat_at = 0.0

    def advance(self, amount: int) -> None:
        """Say that so many bytes were moved; `show_moves` lets the others know."""
        self._moved += amount

    def is_due(self, seconds: float) -> bool:
        """Tell whether the last sign was given as long ago."""
        return anyio.current_time() - self._beat_at >= seconds

    async def show_moves(self) -> None:
        """Give a sign if something has moved since the last one for which it had."""
        if self._moved != self._shown:
            self._shown = self._moved
            await self.show()

    async def show(self) -> None:
        """Give a sign."""
        self._beat += 1
        self._beat_at = anyio.current_time()
        await self._shared.touch(f"life/{self._index}", hello(self._beat))

    async def of_primary(self) -> bytes | None:
        """Return the last sign of the primary, or None."""
        return await self._shared.wait("life/0", 0)

    async def of_all(self, count: int) -> dict[int, bytes]:
        """Return the last sign of each of `count` processes that has given one."""
        return await self._shared.numbered("life", count)
