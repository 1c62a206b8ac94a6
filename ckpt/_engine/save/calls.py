"""What a save consists of, call by call: a single call, or several that come one by one."""

from __future__ import annotations

from collections import deque

import anyio

from ckpt._engine.save.session import SaveCall

__all__ = ["SaveCalls"]


class SaveCalls:
    """The calls of one save, in the order of their calls. Used on the engine's loop."""

    def __init__(self, *, in_parts: bool = False) -> None:
        """Take calls that are added until `finish`.

        Args:
            in_parts: Whether an item may arrive in several parts.
        """
        self.in_parts = in_parts
        self._queue: deque[SaveCall] = deque()
        self._changed = anyio.Event()
        self._finished = False

    @classmethod
    def of(cls, call: SaveCall) -> SaveCalls:
        """Return the single call of an ordinary save."""
        calls = cls()
        calls.add(call)
        calls.finish()
        return calls

    def add(self, call: SaveCall) -> None:
        """Take one more call."""
        self._queue.append(call)
        self._changed.set()

    def finish(self) -> None:
        """Say that there will be no more."""
        self._finished = True
        self._changed.set()

    def drop(self) -> None:
        """Forget what nobody will save any more, and with it the callers' objects."""
        self._queue.clear()

    async def next(self) -> SaveCall | None:
        """Return the next call, waiting until there is one; None after the last."""
        while not self._queue:
            if self._finished:
                return None
            self._changed = anyio.Event()
            await self._changed.wait()
        return self._queue.popleft()
