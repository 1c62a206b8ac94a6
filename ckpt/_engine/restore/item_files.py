"""Files of items other than array data: read whole and checked."""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from ckpt._events import EventRecorder
from ckpt._format.digests import digest
from ckpt._format.item_file_names import check_file_path
from ckpt._format.manifest import FileEntry
from ckpt._settings import host_memory_bytes
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError
from ckpt.storage._base import Storage

__all__ = ["read_item_file"]

# Up to here a file is hashed while the loop waits, and written in one go.
_SMALL_BYTES = 1 << 20


async def read_item_file(
    storage: Storage,
    entry: str,
    item: str,
    path: str,
    files: Mapping[str, FileEntry],
    recorder: EventRecorder,
) -> bytes:
    """Read a file of an item and check it; see `ItemReader.read_file`."""
    try:
        name = f"{item}/{check_file_path(path)}"
    except ValueError as error:
        raise CorruptCheckpointError(f"no file of an item: {error}", item=item) from None
    known = files.get(name)
    if known is None:
        raise CorruptCheckpointError(f"the manifest knows no file {path!r:.120}", item=item)
    available = host_memory_bytes()
    if known.size > available:
        raise InvalidArgumentError(
            f"the file {path!r:.120} takes {known.size} bytes of memory, and this machine has "
            f"{available}. Leave the item out (items=), or take a larger machine",
            item=item,
        )
    with recorder.phase("read", known.size):
        data = await storage.read(entry, name, known.size)
    problem = None
    if data is None:
        problem = "is missing"
    elif len(data) != known.size:
        problem = f"has {len(data)} bytes instead of {known.size}"
    elif await _digest(data) != known.digest:
        problem = "was changed: its digest is another"
    if data is None or problem is not None:
        raise CorruptCheckpointError(
            f"{storage.location}/{entry}/{name} {problem}. The step was damaged after it was "
            "committed; restore another one",
            item=item,
        )
    return data


async def _digest(data: bytes) -> str:
    if len(data) <= _SMALL_BYTES:
        return digest(data)
    return await anyio.to_thread.run_sync(digest, data)
