"""The files of a step, as a restore reads them: where they are is not the engine's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from ckpt.storage._base import Storage


class StepFiles(Protocol):
    """The files of a step, by path relative to it."""

    async def read(self, path: str, limit: int) -> bytes | None:
        """Return a small file, or None if it does not exist; see `Storage.read`."""

    async def read_block(
        self,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Fill `target` with bytes of a data file; see `Storage.read_block`."""


class OwnFiles(Struct, frozen=True):
    """The files of a step of this library: they are in its directory.

    Attributes:
        storage: The root.
        folder: The directory in it.
    """

    storage: Storage
    folder: str

    async def read(self, path: str, limit: int) -> bytes | None:
        """Return a small file; see `Storage.read`."""
        return await self.storage.read(self.folder, path, limit)

    async def read_block(
        self,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Fill `target` with bytes of a data file; see `Storage.read_block`."""
        await self.storage.read_block(self.folder, path, offset, target, then)


class FilePlace(Struct, frozen=True):
    """Where a file is.

    Attributes:
        storage: The root.
        folder: The directory in it; empty for the root itself.
        path: The file there.
    """

    storage: Storage
    folder: str
    path: str

    @property
    def location(self) -> str:
        """Its path or URL, for messages."""
        return f"{self.place.rstrip('/')}/{self.path}"

    @property
    def place(self) -> str:
        """The path or URL of the directory that it is in."""
        return f"{self.storage.location.rstrip('/')}/{self.folder}".rstrip("/") or "/"
