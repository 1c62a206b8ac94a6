"""A memory allowance that several tasks share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio


class Allowance:
    """A limit of bytes in use at once; a task that asks for more than the limit gets all of it."""

    def __init__(self, nbytes: int) -> None:
        self._all = self._left = nbytes
        self._changed = anyio.Condition()

    @contextlib.asynccontextmanager
    async def taken(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until `nbytes` are left, and take them for the body."""
        share = min(nbytes, self._all)
        async with self._changed:
            while self._left < share:
                await self._changed.wait()
            self._left -= share
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                async with self._changed:
                    self._left += share
                    self._changed.notify_all()
