"""Read access to a step's files, independent of where they are stored.

Damaged files and chunks are read from other copies of the step, if there are any.
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
    """The files of a step of this library, all in its directory.

    Attributes:
        storage: Storage of the root.
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


class FileLocation(Struct, frozen=True):
    """The location of a file.

    Attributes:
        storage: Storage of the root.
        folder: The directory in it; empty for the root itself.
        path: Path of the file in the directory.
    """

    storage: Storage
    folder: str
    path: str

    @property
    def location(self) -> str:
        """Path or URL of the file, for messages."""
        return f"{self.place.rstrip('/')}/{self.path}"

    @property
    def place(self) -> str:
        """Path or URL of the directory of the file."""
        return f"{self.storage.location.rstrip('/')}/{self.folder}".rstrip("/") or "/"


class StepCopy(Struct, frozen=True):
    """Another copy of a step.

    Attributes:
        location: Location of the copy, for messages.
        manifest: Manifest of the copy. It describes the same content as the other, maybe in other
            files.
        files: Files of the copy.
    """

    location: str
    manifest: Manifest
    files: StepFiles


# As `StepFiles.read_block`.
BlockReader = Callable[[str, int, memoryview, Callable[[], None]], Awaitable[None]]
# Finds copies of a step in other places with the same content as this manifest.
Elsewhere = Callable[["Manifest"], Awaitable[Sequence[StepCopy]]]


class ItemElsewhere(Struct, frozen=True):
    """An item of another copy of a step.

    Attributes:
        step: The copy.
        leaves: Leaves of the item, by name.
        data_files: Data files of the item, by number and relative to the step.
    """

    step: StepCopy
    leaves: Mapping[str, LeafEntry]
    data_files: Sequence[str]


class OtherCopies:
    """The other copies of a step, for one restore; the nearest one first.

    The copies are searched for only when something is damaged: a restore of an intact step never
    does.

    Attributes:
        used: Names of the arrays and files that were read from each copy, by location of the copy.
        first: The first error that made a copy necessary.
    """

    def __init__(self, find: Callable[[], Awaitable[Sequence[StepCopy]]]) -> None:
        """Search for the copies with `find` when they are needed."""
        self._find = find
        self._found: Sequence[StepCopy] | None = None
        self._items: dict[str, Sequence[ItemElsewhere]] = {}
        self._finding = anyio.Lock()
        self.used: dict[str, list[str]] = {}
        self.first: Exception | None = None

    async def found(self) -> Sequence[StepCopy]:
        """Return the copies, nearest first."""
        async with self._finding:
            if self._found is None:
                self._found = await self._find()
            return self._found

    async def of_item(self, item: str) -> Sequence[ItemElsewhere]:
        """Return the item as each copy has it."""
        found = await self.found()
        async with self._finding:
            if item not in self._items:
                self._items[item] = await run_in_thread(_items, found, item)
            return self._items[item]

    def note(self, copy: StepCopy, item: str, names: Sequence[str], error: Exception) -> None:
        """Note the names that were read from a copy, and the error of the nearest one."""
        prefix = "" if copy.manifest.unnamed else f"{item}/"
        self.used.setdefault(copy.location, []).extend(f"{prefix}{name}" for name in names)
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        self.first = self.first or error

    def told(self) -> str:
        """Return a text for people that lists what was read from where."""
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
