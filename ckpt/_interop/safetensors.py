"""Files of safetensors, described as a manifest over the file.

The header of a safetensors file and the index of several files: places of tensors. Pure. Source:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ckpt._engine.restore.step_files import FileLocation
from ckpt._format.array_format import DTYPES
from ckpt._format.step_files import UNNAMED
from ckpt._interop.foreign import (
    UNREAD_ERRORS,
    ForeignCheckpoint,
    ForeignFiles,
    checkpoint_of,
    named,
    structure_of,
)
from ckpt._interop.runs_of_bytes import StoredRun, nested
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedFormatError,
)
from ckpt.storage._base import Storage
from ckpt.storage._resolve import followed

# The length of the header comes first, as eight bytes, little endian.
LENGTH_BYTES = 8
# The limit of the format itself.
MOST_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_FILE = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.=+,@-]{0,254}\Z")
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
# Names of dtypes in safetensors.
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_Size = Annotated[int, Meta(ge=0, le=1 << 62)]


class Header(Struct, frozen=True):
    """The contents of a header.

    Attributes:
        tensors: The tensors by name, in the order of their bytes; an error for an unreadable one.
        metadata: Texts by name.
        ends: Offset in the file at which the bytes of each tensor end.
    """

    tensors: Mapping[str, StoredRun | CheckpointError]
    metadata: Mapping[str, str]
    ends: Sequence[int]


class _Entry(Struct):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


class _Index(Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


def header_length(data: bytes) -> int:
    """Return the length of a header, from the first bytes of its file.

    Raises:
        CorruptCheckpointError: The number cannot be the length of a header.
    """
    length = int.from_bytes(data, "little")
    if len(data) != LENGTH_BYTES or not 2 <= length <= MOST_HEADER_BYTES:
        raise CorruptCheckpointError("it does not begin like a safetensors file")
    return length


def parse_header(data: bytes) -> Header:
    """Return the contents of a header.

    Raises:
        CorruptCheckpointError: The header is damaged, or contradicts itself; names the tensor.
    """
    try:
        # The standard library reports names that occur twice; msgspec does not.
        members = json.loads(data.decode(), object_pairs_hook=_members)
        if not isinstance(members, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"its header is damaged: {error!s:.200}") from error
    metadata: Mapping[str, str] = {}
    entries: dict[str, _Entry] = {}
    for name, value in members.items():
        try:
            if name == _METADATA:
                metadata = msgspec.convert(value, dict[str, str])
            else:
                entries[name] = msgspec.convert(value, _Entry)
        except msgspec.ValidationError as error:
            raise CorruptCheckpointError(
                f"its header is damaged at {name!r:.200}: {error!s:.200}"
            ) from error
    start = LENGTH_BYTES + len(data)
    tensors: dict[str, StoredRun | CheckpointError] = {}
    ends = [start]
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].data_offsets):
        begin, end = (start + offset for offset in entry.data_offsets)
        if begin != ends[-1]:
            what = "overlap others" if begin < ends[-1] else "leave a gap before them"
            raise CorruptCheckpointError(f"its header is damaged: the bytes {what}", leaf=name)
        tensors[name] = _tensor(entry, begin, end)
        ends.append(end)
    return Header(tensors, metadata, ends[1:] or ends)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object.

    Raises:
        ValueError: Two have the same name; other readers take one or the other.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"{names.most_common(1)[0][0]!r:.120} is there twice")
    return found


def _tensor(entry: _Entry, begin: int, end: int) -> StoredRun | CheckpointError:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None or dtype not in DTYPES:
        return UnsupportedFormatError(
            f"it has the dtype {entry.dtype!r:.40}, which is not read here"
        )
    run = StoredRun(dtype, tuple(entry.shape), begin)
    if end - begin != run.nbytes:
        return CorruptCheckpointError(
            f"its header is damaged: {dtype}{entry.shape} has {run.nbytes} bytes, and its place in "
            f"the file has {end - begin}"
        )
    return run


def parse_index(data: bytes) -> Mapping[str, str]:
    """Return the file of every tensor that an index of several files lists.

    Raises:
        CorruptCheckpointError: The index is damaged, or names a file outside of its directory.
    """
    try:
        found = msgspec.json.decode(data, type=_Index).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"it is damaged: {error!s:.200}") from error
    wrong = next((file for file in found.values() if not _FILE.match(file)), None)
    if wrong is not None:
        raise CorruptCheckpointError(
            f"it is damaged: it names {wrong!r:.120}, which cannot be a file beside it"
        )
    return found


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
    opened = ForeignFiles(storage, folder, links=links)
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
        f"{UNNAMED}/{file}": FileLocation(*followed(storage, folder, file))
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
    await files.read_block(f"{UNNAMED}/{file}", offset, memoryview(target))
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
