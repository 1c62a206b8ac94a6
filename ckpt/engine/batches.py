"""What a save consists of, call by call: a single batch, or several that come one by one."""

from __future__ import annotations

from collections import deque

import anyio

from ckpt.engine.session import Batch

__all__ = ["Batches"]


class Batches:
    """The batches of one save, in the order of their calls. Used on the engine's loop."""

    def __init__(self, *, in_parts: bool = False) -> None:
        """Take batches that are added until `finish`.

        Args:
            in_parts: Whether an item may arrive in several parts.
        """
        self.in_parts = in_parts
        self._queue: deque[Batch] = deque()
        self._changed = anyio.Event()
        self._finished = False

    @classmethod
    def of(cls, batch: Batch) -> Batches:
        """Return the single batch of an ordinary save."""
        batches = cls()
        batches.add(batch)
        batches.finish()
        return batches

    def add(self, batch: Batch) -> None:
        """Take one more batch."""
        self._queue.append(batch)
        self._changed.set()

    def finish(self) -> None:
        """Say that there will be no more."""
        self._finished = True
        self._changed.set()

    def drop(self) -> None:
        """Forget what nobody will save any more, and with it the callers' objects."""
        self._queue.clear()

    async def next(self) -> Batch | None:
        """Return the next batch, waiting until there is one; None after the last."""
        while not self._queue:
            if self._finished:
                return None
            self._changed = anyio.Event()
            await self._changed.wait()
        return self._queue.popleft()
