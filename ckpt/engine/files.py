"""Files of items other than array data: written and read whole, with size and digest."""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from ckpt.digests import digest
from ckpt.engine.session import SaveSession
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError
from ckpt.events import Recorder
from ckpt.handlers.base import FileData
from ckpt.layout.item_files import check_file_path
from ckpt.manifest import FileEntry
from ckpt.settings import host_memory_bytes
from ckpt.storage.base import Storage

__all__ = ["read_item_file", "write_item_file"]

# Up to here a file is hashed while the loop waits, and written in one go.
_SMALL_BYTES = 1 << 20


async def write_item_file(session: SaveSession, item: str, path: str, data: FileData) -> None:
    """Write a file of an item; see `ItemWriter.write_file`."""
    try:
        name = f"{item}/{check_file_path(path)}"
    except ValueError as error:
        raise InvalidArgumentError(f"no file of an item: {error}", item=item) from None
    if name in session.files:
        raise InvalidArgumentError(f"the file {path!r:.120} was written already", item=item)
    # Taken at once, so that nobody writes it a second time meanwhile.
    session.files[name] = FileEntry(size=0, digest="")
    attempt = await session.opened()
    with memoryview(data) as raw, raw.cast("B") as view:
        nbytes = len(view)
        session.hooks.advance(staged=nbytes, total=nbytes)
        async with session.lanes.taken() as lane:
            if nbytes <= _SMALL_BYTES:
                content = bytes(view)
                session.files[name] = FileEntry(size=nbytes, digest=digest(content))
                with session.recorder.phase("write", nbytes, lane):
                    await session.storage.write(attempt, name, content)
            else:
                with session.recorder.phase("digest", nbytes, lane):
                    found = await anyio.to_thread.run_sync(digest, view)
                session.files[name] = FileEntry(size=nbytes, digest=found)
                with session.recorder.phase("write", nbytes, lane):
                    await session.storage.write_block(attempt, name, view)
    session.hooks.advance(written=nbytes)
    session.joint.advance(nbytes)


async def read_item_file(
    storage: Storage,
    entry: str,
    item: str,
    path: str,
    files: Mapping[str, FileEntry],
    recorder: Recorder,
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
