"""An allowance of memory that several tasks share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio


class Allowance:
    """So many bytes may be in use at once; who asks for more than all of them gets it alone."""

    def __init__(self, nbytes: int) -> None:
        """Allow that many bytes."""
        self._all = self._left = nbytes
        self._changed = anyio.Condition()

    @contextlib.asynccontextmanager
    async def taken(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until that many bytes are left, and take them for the body."""
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
