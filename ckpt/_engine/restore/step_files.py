"""Read access to the files of a step: its own, and those that lie where another library put them.

Read access to a step's files, independent of where they are stored. Damaged files and chunks are
read from other copies of the step, if there are any.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import anyio
import numpy as np
from msgspec import Struct

from ckpt._format.manifest import Manifest
from ckpt._format.step_files import SourceFile
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError
from ckpt.storage._base import Storage, fingerprint
from ckpt.storage._manifests import files_folder
from ckpt.storage._resolve import open_beside

if TYPE_CHECKING:
    from ckpt._format.leaf_table import LeafEntry

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


MISSING = "is missing"
_CHANGED = "was changed after this step was made of it"


def files_of(storage: Storage, step_dir: str, manifest: Manifest) -> StepFiles:
    """Return the files of a step of this library, virtual or not."""
    own = OwnFiles(storage, files_folder(step_dir, manifest))
    return VirtualFiles(own, manifest) if manifest.sources else own


class VirtualFiles:
    """The files of a virtual step.

    As long as its chunks have no digests, a source is compared with its fingerprint after every
    read. Later the digests decide, and the fingerprint only explains why they differ.
    """

    def __init__(self, own: OwnFiles, manifest: Manifest) -> None:
        """Read files in the directory of the step with `own`."""
        self._own = own
        self._sources = manifest.sources
        self._unverified = unverified_arrays(manifest) > 0
        self._storages: dict[str, Storage] = {}

    async def read(self, path: str, limit: int) -> bytes | None:
        """Return a small file; small files are all the step's own."""
        return await self._own.read(path, limit)

    async def read_block(
        self,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Fill `target` with bytes of a data file; see `Storage.read_block`.

        Raises:
            CorruptCheckpointError: A source is missing, or was changed.
        """
        source = self._sources.get(path)
        if source is None:
            await self._own.read_block(path, offset, target, then)
            return
        try:
            await self._storage(source).read_block("", source.path, offset, target, then)
        except CorruptCheckpointError as error:
            await self._refuse_changed(source, error)
            raise
        except ExceptionGroup as damage:
            # The bytes differ from their digests.
            raise damage.derive(
                [_error_in_source(each, source) for each in damage.exceptions]
            ) from None
        if self._unverified:
            # Compared after the read: any change that the bytes reflect has changed the
            # fingerprint, too.
            await self._refuse_changed(source)

    async def problem(self, path: str) -> str | None:
        """Return the fault of a source, as far as it shows without reading it, or None.

        If there are digests, they decide, and not the time of a file: a backup may change it.
        """
        source = self._sources[path]
        found = await self._fingerprint(source)
        if found is None:
            return MISSING
        if self._unverified:
            return None if found == source.fingerprint else _CHANGED
        last = memoryview(bytearray(1))
        try:
            await self._storage(source).read_block("", source.path, source.size - 1, last)
        except CorruptCheckpointError:
            return "is shorter than it was"
        return None

    async def _refuse_changed(
        self, source: SourceFile, error: CorruptCheckpointError | None = None
    ) -> None:
        found = await self._fingerprint(source)
        if found == source.fingerprint:
            return
        what = f"{_CHANGED}; adopt it again"
        if found is None:
            what = f"{MISSING}; put it back, or adopt the files where they are now"
        raise CorruptCheckpointError(
            f"{redact(source.location)} {what}. The step in {redact(self._own.storage.location)}/"
            f"{self._own.folder} has no copy of its bytes",
            leaf=None if error is None else error.leaf,
        ) from (None if error is None else error.__cause__ or error)

    async def _fingerprint(self, source: SourceFile) -> str | None:
        return await fingerprint(self._storage(source), "", source.path)

    def _storage(self, source: SourceFile) -> Storage:
        if source.folder not in self._storages:
            try:
                opened = open_beside(self._own.storage, source.folder)
            except InvalidArgumentError as error:
                raise CorruptCheckpointError(
                    f"{redact(source.location)} cannot be reached: {error.message}"
                ) from error
            self._storages[source.folder] = opened
        return self._storages[source.folder]


def _error_in_source(error: Exception, source: SourceFile) -> Exception:
    """Return the error about a chunk, extended by the file that holds its bytes."""
    if not isinstance(error, CorruptCheckpointError):
        return error
    return CorruptCheckpointError(
        f"{error.message}. Its bytes are in {redact(source.location)}, which the step has no copy "
        "of",
        leaf=error.leaf,
    )


def unverified_arrays(manifest: Manifest) -> int:
    """Return the number of arrays with chunks whose digests are still unknown."""
    count = 0
    for item in manifest.items.values():
        chunks = item.leaves.unchecked()
        count += len(np.unique(np.searchsorted(item.leaves.firsts, chunks, side="right")))
    return count
