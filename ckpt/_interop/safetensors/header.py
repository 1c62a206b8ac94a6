"""The header of a safetensors file and the index of several files: places of tensors. Pure.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ckpt._format.dtypes import DTYPES
from ckpt._interop.runs_of_bytes import StoredRun
from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError

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
