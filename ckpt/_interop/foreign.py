"""A checkpoint that another library wrote: a manifest in memory, over that library's files."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from ckpt._engine.restore.step_files import FilePlace
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.step_files.item_file_names import is_item_name
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.flatten import Structure, describe
from ckpt.errors import (
    CorruptCheckpointError,
    StorageError,
    UnsupportedFormatError,
    UnsupportedLeafError,
)
from ckpt.storage._base import Storage

T = TypeVar("T")

logger = logging.getLogger("ckpt")

# The item of a checkpoint that has no items.
ITEM = "default"

# Fills a buffer with the bytes of a file from an offset on.
Fill = Callable[[int, memoryview], Awaitable[None]]


class ForeignCheckpoint(Struct, frozen=True):
    """A checkpoint of another library.

    Attributes:
        manifest: What it holds.
        files: Its files, under the names that they have in the manifest.
    """

    manifest: Manifest
    files: ForeignFiles


class ForeignFiles(Struct, frozen=True):
    """The files of such a checkpoint, under the names of a manifest.

    Attributes:
        storage, step_dir: Where it is.
        folders: Of every item its directory there, with `/` at the end unless it is empty.
        kept: Files that are in memory.
        links: Files that are links, by their names in the manifest: where they really are.
        made: Files that are made of parts of others when they are read.
    """

    storage: Storage
    step_dir: str
    folders: Mapping[str, str]
    kept: Mapping[str, bytes] = {}
    links: Mapping[str, FilePlace] = {}
    made: Mapping[str, Fill] = {}

    def place_of(self, path: str) -> FilePlace:
        """Return where a data file that is not in memory is."""
        found = self.links.get(path)
        if found is not None:
            return found
        item, _, rest = path.partition("/")
        return FilePlace(self.storage, self.step_dir, self.folders[item] + rest)

    async def read(self, path: str, limit: int) -> bytes | None:
        """Return a small file; see `Storage.read`."""
        return self.kept.get(path)

    async def read_block(
        self,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Fill `target` with bytes of a data file; see `Storage.read_block`."""
        kept, fill = self.kept.get(path), self.made.get(path)
        if kept is None and fill is None:
            place = self.place_of(path)
            await place.storage.read_block(place.folder, place.path, offset, target, then)
            return
        if kept is not None:
            target[:] = kept[offset : offset + len(target)]
        elif fill is not None:
            await fill(offset, target)
        if then is not None:
            await run_in_thread(then)


def manifest_of(
    library: str, item: ItemEntry, identity: str, metadata: Mapping[str, Any] | None = None
) -> Manifest:
    """Return the manifest of a checkpoint that is one tree.

    Args:
        library: What it is of.
        item: The tree.
        identity: What tells it from another checkpoint at the same place.
        metadata: What is kept with it.
    """
    return Manifest(
        format=library,
        version=1,
        step=None,
        attempt=identity,
        unnamed=True,
        items={ITEM: item},
        created_ns=0,
        committed_ns=0,
        writer={},
        process_count=1,
        files={},
        metadata=None if metadata is None else dict(metadata),
    )


def with_own_names(items: Mapping[str, T]) -> dict[str, T]:
    """Return the items whose names this library gives, too; a warning names the others."""
    found = {name: item for name, item in items.items() if is_item_name(name)}
    others = [name for name in items if name not in found]
    if others:
        logger.warning(
            "%s: no step of this library has items of such names, so they are left out. Load them, "
            "and save them under other names",
            ", ".join(f"the item {name!r}" for name in others),
        )
    return found


def structure_of(tree: Any, where: str) -> Structure:
    """Return leaves, names and nodes of the tree of a file.

    Raises:
        UnsupportedFormatError: No tree of this library can be like it.
    """
    try:
        return describe(tree)
    except UnsupportedLeafError as error:
        raise UnsupportedFormatError(f"{where}: {error.message}", leaf=error.leaf) from error


async def is_file(storage: Storage, name: str) -> bool:
    """Tell whether something is a file: neither a directory nor missing.

    Raises:
        StorageError: The store refused.
    """
    try:
        if await storage.files(name):
            return False
        # Nothing is below it: in a store it may be an object, on a disk an empty directory.
        await storage.read_block("", name, 0, memoryview(bytearray(1)))
    except CorruptCheckpointError:
        return False
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return error.errno == errno.ENOTDIR
    return True
