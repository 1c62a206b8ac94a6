"""The protocols of a job of several processes."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class KeyValues(Protocol):
    """Values by name that all processes of a job share.

    Names are words with `/` between them; the names below a word are its folder. A value that is
    set never changes, except by `touch`. Values may have megabytes. Calls may come from any event
    loop, and several at once. All raise `CoordinationError` if the shared values cannot be reached.
    All may be cancelled; a cancelled call may still set its value.
    """

    async def put(self, key: str, value: bytes) -> bool:
        """Set a value; if there is one, change nothing and return False: the first wins."""
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
        """Increase a counter and return it: 1, 2, 3 and so on, each to one caller only."""
        ...

    async def drop(self, folder: str) -> None:
        """Remove everything below `folder`, if there is anything."""
        ...

    async def touch(self, key: str, value: bytes) -> None:
        """Set a value, or replace it."""
        ...


@runtime_checkable
class Coordinator(Protocol):
    """The job that this process is part of: `CheckpointManager(coordinator=...)`."""

    @property
    def process_index(self) -> int:
        """Number of this process, from 0; process 0 is the primary, which publishes."""
        ...

    @property
    def process_count(self) -> int:
        """Number of processes."""
        ...

    def key_values(self) -> KeyValues:
        """Return the values that the processes share."""
        ...
