"""The files of a step, as a restore reads them: where they are is not the engine's business.

There may be other copies of the step. Then what is damaged in this one is read from them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import anyio
from msgspec import Struct

from ckpt._runtime.threads import run_in_thread
from ckpt.storage._base import Storage

if TYPE_CHECKING:
    from ckpt._format.leaf_table import LeafEntry
    from ckpt._format.manifest import Manifest

_NAMED = 3


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


class StepCopy(Struct, frozen=True):
    """Another copy of a step.

    Attributes:
        location: Where it is, for messages.
        manifest: Its manifest. It holds the same as the other one, maybe in other files.
        files: Its files.
    """

    location: str
    manifest: Manifest
    files: StepFiles


class ItemElsewhere(Struct, frozen=True):
    """An item of another copy of a step.

    Attributes:
        step: The copy.
        leaves: Its leaves, by name.
        data_files: Its data files, by number and relative to the step.
    """

    step: StepCopy
    leaves: Mapping[str, LeafEntry]
    data_files: Sequence[str]


class OtherCopies:
    """The other copies of a step, for one restore; the nearest one first.

    They are looked for once something is damaged: a restore of what is whole never asks for them.

    Attributes:
        used: By location of a copy, the names of the arrays and files that were read there.
        first: What was wrong with the first of them.
    """

    def __init__(self, find: Callable[[], Awaitable[Sequence[StepCopy]]]) -> None:
        """Look for them with `find`."""
        self._find = find
        self._found: Sequence[StepCopy] | None = None
        self._items: dict[str, Sequence[ItemElsewhere]] = {}
        self._finding = anyio.Lock()
        self.used: dict[str, list[str]] = {}
        self.first: Exception | None = None

    async def found(self) -> Sequence[StepCopy]:
        """Return the copies."""
        async with self._finding:
            if self._found is None:
                self._found = await self._find()
            return self._found

    async def of_item(self, item: str) -> Sequence[ItemElsewhere]:
        """Return an item of each copy."""
        found = await self.found()
        async with self._finding:
            if item not in self._items:
                self._items[item] = await run_in_thread(_items, found, item)
            return self._items[item]

    def note(self, copy: StepCopy, item: str, names: Sequence[str], error: Exception) -> None:
        """Note what of an item was read from a copy, and what was wrong with it in the nearest."""
        prefix = "" if copy.manifest.unnamed else f"{item}/"
        self.used.setdefault(copy.location, []).extend(f"{prefix}{name}" for name in names)
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        self.first = self.first or error

    def told(self) -> str:
        """Return what was read from where, for people."""
        texts = []
        for location, names in self.used.items():
            every = list(dict.fromkeys(names))
            more = "" if len(every) <= _NAMED else f" and {len(every) - _NAMED} more"
            texts.append(f"{', '.join(every[:_NAMED])}{more} from {location}")
        return "; ".join(texts)


def _items(copies: Sequence[StepCopy], item: str) -> list[ItemElsewhere]:
    found = []
    for copy in copies:
        entry = copy.manifest.items[item]
        leaves = {leaf.name: leaf for leaf in entry.leaves}
        found.append(ItemElsewhere(copy, leaves, [f"{item}/{path}" for path in entry.data_files]))
    return found
