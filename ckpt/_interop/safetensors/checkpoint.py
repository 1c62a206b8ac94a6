"""Safetensors, opened as a manifest over the files: one file, or several with an index."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ckpt._engine.restore.step_files import FileLocation
from ckpt._interop.foreign import (
    ITEM,
    UNREAD_ERRORS,
    ForeignCheckpoint,
    ForeignFiles,
    checkpoint_of,
    named,
    structure_of,
)
from ckpt._interop.nested_names import nested
from ckpt._interop.runs_of_bytes import StoredRun
from ckpt._interop.safetensors.header import (
    LENGTH_BYTES,
    Header,
    header_length,
    parse_header,
    parse_index,
)
from ckpt._runtime.tasks import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CheckpointError, CorruptCheckpointError, StorageError
from ckpt.storage._base import Storage
from ckpt.storage._resolve import followed

# Format of a manifest that describes safetensors.
FORMAT = "safetensors"
SUFFIX = ".safetensors"
_INDEX = f"{SUFFIX}.index.json"
_MOST_INDEX_BYTES = 256 << 20
_CONCURRENT_READS = 16
# The files; the file of each tensor, if there is an index; the targets of files that are links.
_Files = tuple[list[str], Mapping[str, str] | None, Mapping[str, FileLocation]]


async def open_safetensors(
    storage: Storage, name: str, *, is_file: bool
) -> ForeignCheckpoint | None:
    """Return the checkpoint of safetensors at a path; None if there is none.

    Args:
        storage: The directory, or the place in a store.
        name: A file in it; or a directory with files `*.safetensors`, and with an index
            (`*.safetensors.index.json`) if there are several.
        is_file: True if it is a file.

    Raises:
        CorruptCheckpointError: A file is damaged, or missing; names it.
        UnsupportedFormatError: A tensor has an unsupported dtype.
        StorageError: The store refused.
    """
    found: _Files | None
    if is_file:
        found = ([name], None, {})
        folder = ""
    else:
        found, folder = await _list_files(storage, name), name
        if found is None:
            return None
    files, listed, links = found
    where = f"{storage.location}/{folder}".rstrip("/")
    opened = ForeignFiles(storage, folder, {ITEM: ""}, links=links)
    headers: dict[str, Header] = {}
    unread: dict[str, CheckpointError] = {}

    async def read(file: str) -> None:
        try:
            headers[file] = await _header(opened, file)
        except UNREAD_ERRORS as error:
            unread[file] = named(error, f"{where}/{file}")

    await for_each(read, files, _CONCURRENT_READS)
    if listed is None and unread:
        raise unread[files[0]]
    return await run_in_thread(_checkpoint, opened, files, headers, unread, listed, where)


def is_header(head: bytes) -> bool:
    """Return True if first bytes look like safetensors; links in model caches lose the suffix."""
    with contextlib.suppress(CorruptCheckpointError):
        header_length(head[:LENGTH_BYTES])
        return head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"
    return False


async def _list_files(storage: Storage, folder: str) -> _Files | None:
    """Return the files of a directory, the file of each tensor if there is an index, and links."""
    try:
        sizes = await storage.files(folder)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return None
    files = sorted(path for path in sizes if path.endswith(SUFFIX) and "/" not in path)
    indexes = [path for path in sizes if path.endswith(_INDEX) and "/" not in path]
    where = f"{storage.location}/{folder}"
    if len(indexes) > 1:
        raise CorruptCheckpointError(
            f"{where} has several indexes ({', '.join(sorted(indexes)):.200}): give the path of "
            "one file, or move one of them away"
        )
    if not indexes:
        if len(files) > 1:
            raise CorruptCheckpointError(
                f"{where} has {len(files)} files of safetensors and no index (*{_INDEX}), so it is "
                "not known which of them belong together: give the path of one"
            )
        return (files, None, _links(storage, folder, files, sizes)) if files else None
    root, at, index = storage, folder, indexes[0]
    if sizes[index] is None:
        root, at, index = followed(storage, folder, index)
    data = await root.read(at, index, _MOST_INDEX_BYTES) or b""
    try:
        listed = await run_in_thread(parse_index, data)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{where}/{indexes[0]}: {error.message}") from None
    files = sorted(set(listed.values()))
    return files, listed, _links(storage, folder, files, sizes)


def _links(
    storage: Storage, folder: str, files: Sequence[str], sizes: Mapping[str, int | None]
) -> dict[str, FileLocation]:
    """Return the targets of files that are links, as in model caches."""
    return {
        f"{ITEM}/{file}": FileLocation(*followed(storage, folder, file))
        for file in files
        if sizes.get(file, 0) is None
    }


async def _header(files: ForeignFiles, file: str) -> Header:
    data = await _bytes(files, file, 0, LENGTH_BYTES)
    data = await _bytes(files, file, LENGTH_BYTES, header_length(data))
    header = await run_in_thread(parse_header, data)
    names = list(header.tensors)
    # A truncated file is detected here, rather than in the middle of a load. The last tensor is
    # checked first, and in most files it is whole.
    whole, cut, look = 0, len(names), len(names) - 1
    while whole < cut:
        if await _has(files, file, header.ends[look]):
            whole = look + 1
        else:
            cut = look
        look = (whole + cut) // 2
    lost = CorruptCheckpointError(
        f"it was cut, or its header lies: it is shorter than the {header.ends[-1]} bytes of its "
        "tensors"
    )
    return replace(header, tensors={**header.tensors, **dict.fromkeys(names[whole:], lost)})


async def _has(files: ForeignFiles, file: str, end: int) -> bool:
    with contextlib.suppress(CorruptCheckpointError):
        await _bytes(files, file, end - 1, 1)
        return True
    return False


async def _bytes(files: ForeignFiles, file: str, offset: int, length: int) -> bytes:
    target = bytearray(length)
    await files.read_block(f"{ITEM}/{file}", offset, memoryview(target))
    return bytes(target)


def _checkpoint(
    opened: ForeignFiles,
    files: list[str],
    headers: Mapping[str, Header],
    unread: Mapping[str, CheckpointError],
    listed: Mapping[str, str] | None,
    where: str,
) -> ForeignCheckpoint:
    """Return the checkpoint of all tensors, with the metadata texts of the files."""
    leaves: dict[str, StoredRun | CheckpointError] = {}
    metadata: dict[str, str] = {}
    for number, file in enumerate(files):
        if file in unread:
            continue
        metadata |= headers[file].metadata
        for name, tensor in headers[file].tensors.items():
            if listed is not None and listed.get(name) != file:
                continue
            if isinstance(tensor, StoredRun):
                leaves[name] = replace(tensor, file=number)
            else:
                leaves[name] = named(tensor, f"{where}/{file}")
    for name, file in (listed or {}).items():
        if name not in leaves:
            what = f"{where}/{file} does not have it, and the index says so"
            leaves[name] = unread.get(file) or CorruptCheckpointError(what)
    structure = structure_of(nested(leaves, where), where)
    return checkpoint_of(FORMAT, opened, files, structure, structure.leaves, where, metadata)
