"""`MemoryKeyValues`: values shared by the tasks of one event loop, as if they were processes."""

from __future__ import annotations

import anyio
import anyio.lowlevel


class MemoryKeyValues:
    """`KeyValues` in memory: for one process, and for tests of several without starting any.

    Example:
        ```python
        values = ckpt.coordination.MemoryKeyValues()
        await values.put("ready", b"yes")
        assert await values.wait("ready", seconds=1.0) == b"yes"
        ```
    """

    def __init__(self) -> None:
        """Begin without values."""
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._changed = anyio.Event()

    async def put(self, key: str, value: bytes) -> bool:
        """Set a value unless there is one; return True if it was set."""
        await anyio.lowlevel.checkpoint()
        if key in self._values:
            return False
        self._set(key, value)
        return True

    async def wait(self, key: str, seconds: float) -> bytes | None:
        """Return the value as soon as it is there, or None when `seconds` have gone by."""
        await anyio.lowlevel.checkpoint()
        with anyio.move_on_after(max(seconds, 0)):
            while key not in self._values:
                await self._changed.wait()
        return self._values.get(key)

    async def list(self, folder: str) -> dict[str, bytes]:
        """Return the values below `folder`, by their names within it."""
        await anyio.lowlevel.checkpoint()
        start = f"{folder}/"
        return {
            key.removeprefix(start): value
            for key, value in self._values.items()
            if key.startswith(start)
        }

    async def add(self, key: str) -> int:
        """Increase a counter and return it."""
        await anyio.lowlevel.checkpoint()
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]

    async def drop(self, folder: str) -> None:
        """Remove everything below `folder`."""
        await anyio.lowlevel.checkpoint()
        for each in (self._values, self._counts):
            for key in [key for key in each if key.startswith(f"{folder}/")]:
                del each[key]

    async def touch(self, key: str, value: bytes) -> None:
        """Set a value, or replace it."""
        await anyio.lowlevel.checkpoint()
        self._set(key, value)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = bytes(value)
        self._changed.set()
        self._changed = anyio.Event()
