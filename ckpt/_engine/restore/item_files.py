"""The files of an item other than array data, read whole and checked."""

from __future__ import annotations

from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.step_files import StepFiles
from ckpt._format.manifest_head import FileEntry, digest
from ckpt._format.step_files import check_file_path
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import host_memory_bytes
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, StorageError

# Largest file that is hashed on the loop: a change of threads would take longer.
_SMALL_BYTES = 1 << 20


async def read_item_file(restore: RestoreContext, item: str, path: str) -> bytes:
    """Read a file of an item and check it; see `ItemReader.read_file`."""
    try:
        name = f"{item}/{check_file_path(path)}"
    except ValueError as error:
        raise CorruptCheckpointError(f"no file of an item: {error}", item=item) from None
    known = restore.manifest.files.get(name)
    if known is None:
        raise CorruptCheckpointError(f"the manifest knows no file {path!r:.120}", item=item)
    available = host_memory_bytes()
    if known.size > available:
        raise InvalidArgumentError(
            f"the file {path!r:.120} takes {known.size} bytes of memory, and this machine has "
            f"{available}. Leave the item out (items=), or take a larger machine",
            item=item,
        )
    where = f"{restore.storage.location}/{restore.folder}"
    with restore.recorder.phase("read", known.size):
        try:
            return await _checked(restore.files, name, known, where)
        except (CorruptCheckpointError, StorageError) as error:
            data = await _read_elsewhere(restore, item, name, known, error)
            if data is None:
                error.locate(item=item)
                raise
            return data


async def _checked(files: StepFiles, name: str, known: FileEntry, where: str) -> bytes:
    """Read a file of a step and check it against its entry `known` in the manifest.

    Raises:
        CorruptCheckpointError: The file is missing, or was changed.
    """
    data = await files.read(name, known.size)
    if data is None:
        problem = "is missing"
    elif len(data) != known.size:
        problem = f"has {len(data)} bytes instead of {known.size}"
    elif await _digest(data) != known.digest:
        problem = "was changed: its digest is another"
    else:
        return data
    raise CorruptCheckpointError(
        f"{where}/{name} {problem}. The step was damaged after it was committed; restore another "
        "one"
    )


async def _read_elsewhere(
    restore: RestoreContext, item: str, name: str, known: FileEntry, first: Exception
) -> bytes | None:
    """Return the file from the nearest other copy that has it intact; None if there is none."""
    if restore.copies is None:
        return None
    for copy in await restore.copies.found():
        there = copy.manifest.files.get(name)
        if there is None or there.digest != known.digest:
            continue
        try:
            data = await _checked(copy.files, name, there, copy.location)
        except (CorruptCheckpointError, StorageError):
            continue
        restore.copies.note(copy, item, [name.removeprefix(f"{item}/")], first)
        return data
    return None


async def _digest(data: bytes) -> str:
    if len(data) <= _SMALL_BYTES:
        return digest(data)
    return await run_in_thread(digest, data)
