"""Files of numpy, opened: an archive of arrays, or one array, as a manifest over the file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio

from ckpt._format.digests import digest
from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._interop.foreign import (
    ITEM,
    Fill,
    ForeignCheckpoint,
    ForeignFiles,
    is_file,
    manifest_of,
    structure_of,
)
from ckpt._interop.nested_names import nested
from ckpt._interop.numpy_files.array_header import (
    SHORTEST_HEADER_BYTES,
    header_length,
    parse_array_header,
)
from ckpt._interop.numpy_files.stored_arrays import (
    Content,
    NumpyArray,
    UnpackedElements,
    array_of,
    bytes_at,
    header_in,
)
from ckpt._interop.numpy_files.zip_directory import (
    END_BYTES,
    ZipMember,
    content_offset,
    directory_place,
    parse_directory,
)
from ckpt._interop.runs_of_bytes import kind_of, leaf_of_run
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import host_memory_bytes
from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError, located
from ckpt.storage._base import UNKNOWN_SIZE, ReadsTails, Storage

logger = logging.getLogger("ckpt")

# What a manifest is of that describes a file of numpy.
FORMAT = "numpy"
SUFFIXES = (ARCHIVE, ARRAY) = (".npz", ".npy")
# The header of a member and that of its array, in one request.
_HEAD_BYTES = 1 << 10
_CONCURRENT_READS = 16


class _ArrayLeaf:
    """An array in the place of its leaf."""

    __slots__ = ("array",)

    def __init__(self, array: NumpyArray) -> None:
        self.array = array


async def open_numpy(storage: Storage, name: str) -> ForeignCheckpoint | None:
    """Return the checkpoint that a file of numpy is; None if there is no such file.

    Args:
        storage: The directory, or the place in a store.
        name: The file in it.

    Raises:
        CorruptCheckpointError: It is damaged; names the array.
        UnsupportedFormatError: An array is of a kind that is not read; names the array.
        StorageError: The store refused.
    """
    tail = await _tail(storage, name) if await is_file(storage, name) else None
    if tail is None:
        return None
    where = f"{storage.location}/{name}"
    read = partial(storage.read_block, "", name)
    try:
        with located():
            if name.endswith(ARRAY):
                tree: Any = _ArrayLeaf(await _single(read, tail[1]))
            else:
                tree = _tree(await _members(read, *tail, where), where)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        if error.message.startswith(storage.location):
            raise
        raise type(error)(f"{where}: {error.message}", leaf=error.leaf) from error
    manifest, made = await run_in_thread(_manifest, tree, name, where, read)
    return ForeignCheckpoint(manifest, ForeignFiles(storage, "", {ITEM: ""}, made=made))


async def _tail(storage: Storage, name: str) -> tuple[bytes, int] | None:
    """Return the end of a file and its size, if it exists."""
    if isinstance(storage, ReadsTails):
        return await storage.read_tail("", name, END_BYTES)
    data = await storage.read("", name, host_memory_bytes())
    return None if data is None else (data[-END_BYTES:], len(data))


async def _single(read: Fill, size: int) -> NumpyArray:
    """Return the array that is a file of its own."""
    # Enough to tell how long the header is, and no more than the shortest file has.
    most = SHORTEST_HEADER_BYTES if size == UNKNOWN_SIZE else min(size, SHORTEST_HEADER_BYTES)
    head = await bytes_at(read, 0, most)
    length = header_length(head)
    if length is None:
        raise CorruptCheckpointError("it ends within its header")
    header = parse_array_header(await bytes_at(read, 0, length))
    nbytes = length + header.nbytes
    # A file that was cut is found here, and not in the middle of a load.
    await bytes_at(read, nbytes - 1, 1)
    return array_of(Content(0, nbytes, nbytes), header)


async def _members(read: Fill, tail: bytes, size: int, where: str) -> Mapping[str, NumpyArray]:
    """Return the arrays of an archive by name."""
    place = directory_place(tail, size)
    data = await bytes_at(read, place.offset, place.nbytes)
    members = await run_in_thread(parse_directory, data, place)
    arrays = [member for member in members if member.name.endswith(ARRAY)]
    others = [member.name for member in members if not member.name.endswith(ARRAY)]
    if others and not arrays:
        raise UnsupportedFormatError(
            f"it holds no array of numpy, but {len(others)} other files, such as {others[0]!r:.120}"
        )
    if others:
        logger.warning(
            "%s: %d files in it are no arrays and are left out, such as %r",
            redact(where),
            len(others),
            others[0][:120],
        )
    found: dict[str, NumpyArray] = {}
    waiting = iter(arrays)

    async def work() -> None:
        for member in waiting:
            name = member.name.removesuffix(ARRAY)
            with located(leaf=name):
                found[name] = await _member_array(read, member)

    async with anyio.create_task_group() as tasks:
        for _ in range(_CONCURRENT_READS):
            tasks.start_soon(work)
    return {name: found[name] for name in sorted(found)}


async def _member_array(read: Fill, member: ZipMember) -> NumpyArray:
    most = _HEAD_BYTES + len(member.raw_name)
    head = await bytes_at(read, member.start, min(most, member.end - member.start))
    offset = content_offset(member, head)
    content = Content(offset, member.packed, member.nbytes, member.is_deflated, member.crc)
    return array_of(content, await header_in(read, content, head[offset - member.start :]))


def _tree(arrays: Mapping[str, NumpyArray], where: str) -> Any:
    leaves = {name: _ArrayLeaf(array) for name, array in arrays.items()}
    tree = nested(leaves, where, "./")
    if tree is None:
        logger.warning(
            "%s: some names are parts of others, so the names are the keys of one dict",
            redact(where),
        )
    return leaves if tree is None else tree


def _manifest(tree: Any, file: str, where: str, read: Fill) -> tuple[Manifest, Mapping[str, Fill]]:
    """Return the manifest of a tree of arrays, and the files that are made when they are read."""
    structure = structure_of(tree, where)
    files = [file]
    made: dict[str, Fill] = {}
    entries: list[LeafEntry] = []
    for name, leaf in zip(structure.names, structure.leaves, strict=True):
        array, header = leaf.array, leaf.array.header
        number, offset = 0, array.offset
        if not array.is_plain:
            # Relative to the file, which is none of a directory: no other file has such a name.
            number, offset = len(files), 0
            files.append(f"{file}/{number}")
            made[f"{ITEM}/{files[-1]}"] = UnpackedElements(where, name, read, array).fill
        kind = kind_of(header.dtype)
        entries.append(
            leaf_of_run(
                name, kind, header.dtype, header.shape, number, offset, in_blocks=array.is_plain
            )
        )
    nbytes = sum(leaf.array.header.nbytes for leaf in structure.leaves)
    table = LeafTable.of(entries)
    item = ItemEntry("pytree", list(structure.nodes), table, [], files, nbytes)
    texts = [
        f"{name} {leaf.array!r}"
        for name, leaf in zip(structure.names, structure.leaves, strict=True)
    ]
    return manifest_of(FORMAT, item, digest("\n".join(texts).encode())), made
