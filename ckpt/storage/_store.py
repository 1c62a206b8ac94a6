"""`Store`: what a store of another package has to offer, which is objects and conditional writes.

Commits, leases, the trash, notes, stamps and sweeps are built from these; see
docs/design/006-object-stores.md.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from msgspec import Struct


class StoredObject(Struct, frozen=True):
    """An object of a store.

    Attributes:
        data: The bytes that were asked for.
        generation: A value that every write of the object changes.

    Example:
        ```python
        found = ckpt.storage.StoredObject(b"bytes of an object", generation=b"7")
        ```
    """

    data: bytes
    generation: bytes


class Swap(Struct, frozen=True):
    """The result of a conditional write.

    Attributes:
        generation: The generation of the object that was written; None if the condition did not
            hold.
        doubtful: True if an answer was lost. Then, if `generation` is None, the object may have
            been written and replaced since.
        abandoned: True if a request is still in flight, and may be carried out later.

    Example:
        ```python
        written = ckpt.storage.Swap(generation=b"8")
        ```
    """

    generation: bytes | None
    doubtful: bool = False
    abandoned: bool = False


class StoreLimits(Struct, frozen=True):
    """What a store can do at most.

    Attributes:
        request_seconds: Longest time that a request may take.
        largest_bytes: Size of the largest object, at least 64 MiB. Its bytes are held in memory.
        usual_bytes: The best size of objects, roughly. Large items have larger ones.

    Example:
        ```python
        limits = ckpt.storage.StoreLimits(largest_bytes=100 << 20)
        ```
    """

    request_seconds: float = 30.0
    largest_bytes: int = 1 << 30
    usual_bytes: int = 16 << 20


@runtime_checkable
class Store(Protocol):
    """Objects below one place: all that a store of another package has to offer.

    Every call that takes a path takes an object of such a class: its place is the root or the
    checkpoint.

    Keys are paths with `/`, relative to the place. Reads and lists show everything that was written
    before. All methods raise `StorageError` if the store fails, and none waits without a limit.
    After a call has raised or was cancelled, the store must not carry it out any more, except for
    `swap`.
    """

    @property
    def location(self) -> str:
        """The place, as messages show it."""

    @property
    def limits(self) -> StoreLimits:
        """The limits of the store."""

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> StoredObject | None:
        """Return bytes of an object, as a slice of it has them; None if it does not exist.

        Args:
            key: Key of the object.
            start: First byte; a negative number counts from the end.
            stop: The byte after the last one; None reads to the end.
        """

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object, atomically; it is durable on return."""

    async def swap(self, key: str, data: bytes, generation: bytes | None) -> Swap:
        """Write an object, atomically and durably, if it has this generation.

        If the call raises `StorageError`, it may have been carried out, or be carried out later.

        Args:
            key: Key of the object.
            data: Its new bytes, which differ from everything that was ever written there.
            generation: The expected generation; None if the object must not exist.
        """

    async def delete(self, key: str) -> None:
        """Remove an object; one that does not exist is no error."""

    async def delete_if(self, key: str, generation: bytes) -> bool:
        """Remove an object unless it has been written since; False if it has, or is gone."""

    async def list(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`, sorted, without it.

        Raises:
            StorageError: The place cannot be used at all, for example because there is no bucket.
        """


@runtime_checkable
class CopiesObjects(Protocol):
    """A store that copies objects within itself, so that unchanged arrays are not sent again."""

    async def copy(self, source: str, target: str, nbytes: int) -> int | None:
        """Copy an object; return the size of the copy, or None if there is no such object.

        Args:
            source: Its key.
            target: Key of the copy.
            nbytes: The expected size; larger objects get more time.

        Raises:
            StorageError: The store failed, or refused the copy. It may still be carried out.
        """


async def refuse_missing(store: Store) -> None:
    """Raise if the bucket does not exist, which reads and conditional writes do not report.

    Raises:
        StorageError: The bucket does not exist, or the store failed.
    """
    await store.list(".ckpt-none/")
