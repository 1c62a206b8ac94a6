"""What a job of several processes has to offer."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class KeyValues(Protocol):
    """Values by name that all processes of a job share.

    Names are words with `/` between them; those below one word are its folder. A value that is set
    is never changed, except by `touch`. Values may have megabytes. Calls may come from any event
    loop, and several at once. All raise `CoordinationError` where what is shared cannot be reached,
    and may be cancelled; what a cancelled call was about to set may be set nevertheless.
    """

    async def put(self, key: str, value: bytes) -> bool:
        """Set a value; return False, and change nothing, where there is one: the first wins."""
        ...

    async def wait(self, key: str, seconds: float) -> bytes | None:
        """Return the value as soon as it is there, or None when `seconds` have gone by.

        With 0 seconds or fewer it only looks.
        """
        ...

    async def list(self, folder: str) -> dict[str, bytes]:
        """Return the values below `folder`, by their names within it."""
        ...

    async def add(self, key: str) -> int:
        """Count one up and return the count: 1, 2, 3 and so on, each to one caller only."""
        ...

    async def drop(self, folder: str) -> None:
        """Remove everything below `folder`; nothing there is fine."""
        ...

    async def touch(self, key: str, value: bytes) -> None:
        """Set a value, or another one than before."""
        ...


@runtime_checkable
class Coordinator(Protocol):
    """The job that this process is part of: `CheckpointManager(coordinator=...)`."""

    @property
    def process_index(self) -> int:
        """Which process this is, from 0; 0 is the primary, which publishes."""
        ...

    @property
    def process_count(self) -> int:
        """How many processes there are."""
        ...

    def key_values(self) -> KeyValues:
        """Return what the processes share."""
        ...
