"""Files of items other than array data: written whole, with size and digest."""

from __future__ import annotations

import anyio

from ckpt._engine.save.session import SaveSession
from ckpt._format.digests import digest
from ckpt._format.item_file_names import check_file_path
from ckpt._format.manifest import FileEntry
from ckpt.errors import InvalidArgumentError
from ckpt.handlers._base import FileData

__all__ = ["write_item_file"]


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
