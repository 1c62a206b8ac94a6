"""Items of Orbax without trees: JSON, protocol buffers, and any other files."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from types import MappingProxyType

from ckpt._format.manifest import ItemEntry, JsonValue
from ckpt._format.step_files.per_process import combine, own_path, owner_of, renamed
from ckpt._interop.orbax.layout import OrbaxItem, Sizes
from ckpt._runtime.tasks import for_each
from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from ckpt.handlers._stateful import files_entry
from ckpt.storage._base import Storage

# Limit of files that are read to describe the step; states of iterators are smaller.
_MOST_BYTES = 64 << 20
_CONCURRENT_READS = 16
# For items of one file: their handler here, the name of the file, and the data of the entry.
_ONE_FILE: Mapping[str, tuple[str, str, Mapping[str, JsonValue]]] = MappingProxyType(
    {"json": ("json", "metadata", {"model": None}), "proto": ("bytes", "text.txt", {"type": "str"})}
)
# The entry, and its files by path relative to it.
Plain = tuple[ItemEntry, Mapping[str, bytes]]


async def plain_item(storage: Storage, step_dir: str, item: OrbaxItem, sizes: Sizes) -> Plain:
    """Return an item without a tree.

    Raises:
        CorruptCheckpointError: A file of the item is missing.
        UnsupportedFormatError: The item has too many bytes, or states of several jobs.
        StorageError: The store refused.
    """
    where = f"{storage.location}/{step_dir}/{item.folder}".rstrip("/")
    if not item.files:
        raise CorruptCheckpointError(f"{where} is missing, or has no files; it was damaged")
    nbytes = sum(sizes[path] or 0 for path in item.files)
    if nbytes > _MOST_BYTES:
        raise UnsupportedFormatError(
            f"{where} has {nbytes} bytes in files of a kind that is not known here: read them with "
            "the program that wrote them"
        )
    found: dict[str, bytes] = {}

    async def read(path: str) -> None:
        found[path] = await storage.read(step_dir, path, _MOST_BYTES) or b""

    await for_each(read, item.files, _CONCURRENT_READS)
    # In the order of the list, whichever read ended first.
    files = {posixpath.relpath(path, item.folder or "."): found[path] for path in item.files}
    if item.kind in _ONE_FILE:
        [content] = files.values()
        handler, name, about = _ONE_FILE[item.kind]
        return ItemEntry(handler, nbytes=len(content), data={**about}), {name: content}
    return _by_process(files, where)


def _by_process(files: Mapping[str, bytes], where: str) -> Plain:
    """Return files as states of the processes in their names; of one process if none is named."""
    owners = {path: owner_of(path) for path in files}
    counts = {owner[1] for owner in owners.values() if owner is not None} or {1}
    owned = {owner[0] for owner in owners.values() if owner is not None} or {0}
    [count, *others] = sorted(counts)
    if others:
        raise UnsupportedFormatError(
            f"{where} has states of jobs of {count} and of {others[0]} processes"
        )
    if len(owned) != count:
        raise CorruptCheckpointError(
            f"{where} has the states of {len(owned)} of {count} processes; it was damaged"
        )
    parts: list[ItemEntry] = []
    kept: dict[str, bytes] = {}
    for process in range(count):
        own = [path for path in files if owners[path] in (None, (process, count))]
        parts.append(files_entry({renamed(path, 0, 1): len(files[path]) for path in own}))
        kept |= {own_path(renamed(path, 0, 1), process, count): files[path] for path in own}
    return combine(parts), kept
