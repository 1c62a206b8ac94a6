"""Safetensors, opened: one file, or several with an index, as a manifest over these files."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import anyio

from ckpt._engine.restore.step_files import FilePlace
from ckpt._format.digests import digest
from ckpt._format.leaf_table import LeafTable
from ckpt._format.manifest import ItemEntry
from ckpt._interop.foreign import ITEM, ForeignCheckpoint, ForeignFiles, manifest_of, structure_of
from ckpt._interop.nested_names import nested
from ckpt._interop.runs_of_bytes import leaf_of_run
from ckpt._interop.safetensors.header import (
    LENGTH_BYTES,
    Header,
    Tensor,
    header_length,
    parse_header,
    parse_index,
)
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CorruptCheckpointError, StorageError, UnsupportedFormatError, located
from ckpt.storage._base import Storage
from ckpt.storage._resolve import followed

logger = logging.getLogger("ckpt")

# What a manifest is of that describes safetensors.
FORMAT = "safetensors"
SUFFIX = ".safetensors"
_INDEX = f"{SUFFIX}.index.json"
_MOST_INDEX_BYTES = 256 << 20
_CONCURRENT_READS = 16
# The files; the file of each tensor, if there is an index; where those really are that are links.
_Files = tuple[list[str], Mapping[str, str] | None, Mapping[str, FilePlace]]


class _StoredTensor:
    """A tensor in the place of its leaf."""

    __slots__ = ("file", "tensor")

    def __init__(self, file: int, tensor: Tensor) -> None:
        self.file = file
        self.tensor = tensor


async def open_safetensors(storage: Storage, name: str) -> ForeignCheckpoint | None:
    """Return the checkpoint of safetensors at a path; None if there is none.

    Args:
        storage: The directory, or the place in a store.
        name: A file `*.safetensors` in it; or a directory with such files, and with an index
            (`*.safetensors.index.json`) if there are several.

    Raises:
        CorruptCheckpointError: A file is damaged, or missing; names it.
        UnsupportedFormatError: A tensor has a dtype that is not read.
        StorageError: The store refused.
    """
    found: _Files | None
    if name.endswith(SUFFIX) or await _is_file_of_tensors(storage, name):
        found = ([name], None, {})
        folder = ""
    else:
        found, folder = await _listed(storage, name), name
        if found is None:
            return None
    files, listed, links = found
    where = f"{storage.location}/{folder}".rstrip("/")
    opened = ForeignFiles(storage, folder, {ITEM: ""}, links=links)
    headers: dict[str, Header] = {}
    slots = anyio.Semaphore(_CONCURRENT_READS)

    async def read(file: str) -> None:
        async with slots:
            headers[file] = await _header(opened, file, where)

    with located():
        async with anyio.create_task_group() as tasks:
            for file in files:
                tasks.start_soon(read, file)
    make = partial(_item, files, headers, listed, where)
    item, metadata = await run_in_thread(make)
    manifest = manifest_of(FORMAT, item, _identity(headers), metadata or None)
    return ForeignCheckpoint(manifest, opened)


async def _is_file_of_tensors(storage: Storage, name: str) -> bool:
    """Tell whether a file of any name is one: links in caches of models lead to other names."""
    head = bytearray(LENGTH_BYTES + 1)
    with contextlib.suppress(CorruptCheckpointError, StorageError):
        await storage.read_block("", name, 0, memoryview(head))
        return header_length(bytes(head[:-1])) > 0 and head[-1:] == b"{"
    return False


async def _listed(storage: Storage, folder: str) -> _Files | None:
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
    missing = sorted(set(listed.values()) - sizes.keys())
    if missing:
        raise CorruptCheckpointError(
            f"{where}/{indexes[0]}: files that it lists are missing ({len(missing)}): {missing[0]}"
        )
    files = sorted(set(listed.values()))
    return files, listed, _links(storage, folder, files, sizes)


def _links(
    storage: Storage, folder: str, files: Sequence[str], sizes: Mapping[str, int | None]
) -> dict[str, FilePlace]:
    """Return where those files really are that are links, as in caches of models."""
    return {
        f"{ITEM}/{file}": FilePlace(*followed(storage, folder, file))
        for file in files
        if sizes[file] is None
    }


async def _header(files: ForeignFiles, file: str, where: str) -> Header:
    try:
        data = await _bytes(files, file, 0, LENGTH_BYTES)
        data = await _bytes(files, file, LENGTH_BYTES, header_length(data))
        header = await run_in_thread(parse_header, data)
        if header.end > LENGTH_BYTES + len(data):
            # A file that was cut is found here, and not in the middle of a load.
            await _refuse_cut(files, file, header.end)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        if error.message.startswith(files.storage.location):
            raise
        raise type(error)(f"{where}/{file}: {error.message}", leaf=error.leaf) from None
    return header


async def _refuse_cut(files: ForeignFiles, file: str, end: int) -> None:
    try:
        await _bytes(files, file, end - 1, 1)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"it was cut, or its header lies: it is shorter than the {end} bytes of its tensors"
        ) from error


async def _bytes(files: ForeignFiles, file: str, offset: int, length: int) -> bytes:
    target = bytearray(length)
    await files.read_block(f"{ITEM}/{file}", offset, memoryview(target))
    return bytes(target)


def _item(
    files: list[str], headers: Mapping[str, Header], listed: Mapping[str, str] | None, where: str
) -> tuple[ItemEntry, Mapping[str, str]]:
    """Return the item of all tensors, and the texts that the files have with them."""
    leaves: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    for number, file in enumerate(files):
        metadata |= headers[file].metadata
        for name, tensor in headers[file].tensors.items():
            if listed is not None and listed.get(name) != file:
                continue
            if name in leaves:
                raise CorruptCheckpointError(f"{where}: two files have it", leaf=name)
            leaves[name] = _StoredTensor(number, tensor)
    lost = next((name for name in listed or () if name not in leaves), None)
    if lost is not None and listed is not None:
        raise CorruptCheckpointError(
            f"{where}/{listed[lost]} does not have it, and the index says so", leaf=lost
        )
    tree = nested(leaves, where)
    if tree is None:
        logger.warning(
            "%s: some names are parts of others, so the names are the keys of one dict",
            redact(where),
        )
        tree = leaves
    structure = structure_of(tree, where)
    entries = [
        leaf_of_run(
            name, "jax", leaf.tensor.dtype, leaf.tensor.shape, leaf.file, leaf.tensor.offset
        )
        for name, leaf in zip(structure.names, structure.leaves, strict=True)
    ]
    nbytes = sum(leaf.tensor.nbytes for leaf in leaves.values())
    table = LeafTable.of(entries)
    return ItemEntry("pytree", list(structure.nodes), table, [], files, nbytes), metadata


def _identity(headers: Mapping[str, Header]) -> str:
    """Return what tells these tensors from others at the same place."""
    texts = [f"{file} {headers[file]!r}" for file in sorted(headers)]
    return digest("\n".join(texts).encode())
