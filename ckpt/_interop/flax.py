"""Files of Flax: its msgpack, described as a manifest over the file.

A tree in one msgpack file, in the encoding of Flax. Pure. Source:
https://flax.readthedocs.io/en/latest/api_reference/flax.serialization.html.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from ckpt._format.array_format import DTYPES
from ckpt._format.leaf_table import LeafEntry
from ckpt._interop.foreign import (
    UNREAD_ERRORS,
    ForeignCheckpoint,
    ForeignFiles,
    checkpoint_of,
    naming,
    structure_of,
)
from ckpt._interop.runs_of_bytes import Fill, StoredRun
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import host_memory_bytes
from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from ckpt.storage._base import Storage

# Given a node or leaf and the keys above it, returns a replacement, or the node itself.
Replace = Callable[[Any, tuple[str, ...]], Any]

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
# First byte of a pickle. As a whole msgpack file, this byte is an empty dict, and it begins no dict
# that has keys.
_PICKLE = b"\x80"
_MAX_RANK = 64
# Errors for a file, or a value in it, that Flax cannot have written.
_WRONG = (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError)


class PackedArray(Struct, frozen=True):
    """An array whose bytes are in the msgpack file.

    Attributes:
        dtype: Name of its dtype in numpy.
        shape: Its shape.
        pieces: Offset and length of each piece of its bytes in the file, in their order.
        kind: Name of its kind in Orbax; `np.generic` for a number with a dtype.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]
    kind: str = "np.ndarray"


def parse_msgpack(data: bytes, path: str, replace: Replace | None = None) -> Any:
    """Return the tree in a msgpack file.

    Its leaves are a `PackedArray` for each array, a number or text, or the error of an unreadable
    leaf.

    Args:
        data: Content of the file.
        path: Path of the file, for messages.
        replace: Replaces nodes or leaves.

    Raises:
        CorruptCheckpointError: The file is damaged.
        UnsupportedFormatError: The file is a pickle.
    """
    if data[:1] == _PICKLE and len(data) > 1:
        raise UnsupportedFormatError(
            f"{path} is a pickle, and to read one is to run the code in it: that is not done here"
        )
    try:
        found = msgspec.msgpack.Decoder(ext_hook=_Extensions(data).value).decode(data)
        return _rebuild(found, (), replace or _itself)
    except _WRONG as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error!s:.200}") from error


class _Extensions:
    """Decodes extension values in place: arrays are not copied out of the file."""

    def __init__(self, data: bytes) -> None:
        self._start = _address(data)

    def value(self, code: int, data: memoryview) -> Any:
        try:
            return self._value(code, data)
        except _WRONG as error:
            return _damage(error)

    def _value(self, code: int, data: memoryview) -> Any:
        if code == _COMPLEX:
            return complex(*msgspec.msgpack.decode(data, type=tuple[float, float]))
        if code not in (_ARRAY, _SCALAR):
            return UnsupportedFormatError(f"it is a value of the unknown kind {code}")
        shape, dtype, content = msgspec.msgpack.decode(
            data, type=tuple[tuple[int, ...], str, memoryview]
        )
        if len(shape) > _MAX_RANK or any(n < 0 for n in shape):
            raise ValueError(f"an array has the shape {list(shape[:8])}")
        length = len(content)
        offset = _address(content) - self._start if length else 0
        kind = "np.generic" if code == _SCALAR else "np.ndarray"
        return PackedArray(dtype, shape, ((offset, length),), kind)


def _address(data: bytes | memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0


def _itself(node: Any, keys: tuple[str, ...]) -> Any:
    return node


def _rebuild(node: Any, keys: tuple[str, ...], replace: Replace) -> Any:
    """Return a decoded tree, checked, with the pieces of arrays joined."""
    if isinstance(node, dict) and _CHUNKED in node:
        try:
            return _join_chunks(node)
        except _WRONG as error:
            return _damage(error)
    found = replace(node, keys)
    if found is not node:
        return found
    if isinstance(node, dict):
        wrong = next((key for key in node if type(key) not in (str, int)), None)
        if wrong is not None:
            return CorruptCheckpointError(f"it has the key {wrong!r:.60}")
        return {key: _rebuild(child, (*keys, str(key)), replace) for key, child in node.items()}
    if isinstance(node, list):
        return [_rebuild(child, (*keys, str(place)), replace) for place, child in enumerate(node)]
    known = str | bytes | bool | int | float | complex | None | PackedArray | CheckpointError
    if not isinstance(node, known):
        return UnsupportedFormatError(f"it is a value of the unknown kind {type(node).__name__}")
    return node


def _damage(error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"it is damaged: {error!s:.200}")


def _join_chunks(node: Mapping[Any, Any]) -> PackedArray:
    """Return an array that was split, since it was too long for one msgpack value."""
    shape, pieces = _sequence(node["shape"]), _sequence(node["chunks"])
    if not pieces or not all(isinstance(piece, PackedArray) for piece in pieces):
        raise ValueError("an array in pieces has none, or others")
    if not all(isinstance(n, int) and n >= 0 for n in shape) or len(shape) > _MAX_RANK:
        raise ValueError(f"an array in pieces has the shape {shape[:8]!r:.80}")
    first = pieces[0]
    counts = [math.prod(piece.shape) for piece in pieces]
    places = tuple(place for piece in pieces for place in piece.pieces)
    lengths = [length for _, length in places]
    if (
        any(piece.dtype != first.dtype for piece in pieces)
        or sum(counts) != math.prod(shape)
        # All pieces must have the same number of bytes for each element.
        or any(n * counts[0] != m * lengths[0] for n, m in zip(lengths, counts, strict=True))
    ):
        raise ValueError("the pieces of an array do not fit together")
    return PackedArray(first.dtype, tuple(shape), places)


def _sequence(numbered: Mapping[str, Any]) -> list[Any]:
    return [numbered[str(place)] for place in range(len(numbered))]


def value_entry(name: str, leaf: Any) -> LeafEntry:
    """Return the leaf for a number or a text in the file.

    Raises:
        CheckpointError: The value is not a leaf, or cannot be read.
    """
    if isinstance(leaf, CheckpointError):
        raise leaf
    if isinstance(leaf, bool | str):
        return LeafEntry(name, type(leaf).__name__, value=leaf)
    if isinstance(leaf, int | float | complex):
        return LeafEntry(name, type(leaf).__name__, value=repr(leaf))
    if isinstance(leaf, bytes):
        return LeafEntry(name, "bytes", value=base64.b64encode(leaf).decode())
    raise CorruptCheckpointError(f"it is {leaf!r:.60}, which is no value")


def check_packed(leaf: PackedArray, writer: str) -> int:
    """Return the number of bytes of an array in the file.

    Args:
        leaf: The array.
        writer: The library that wrote it and can read unsupported dtypes, for messages.

    Raises:
        CorruptCheckpointError: The array contradicts itself.
        UnsupportedFormatError: The array has an unsupported dtype.
    """
    if leaf.dtype not in DTYPES:
        raise UnsupportedFormatError(
            f"it has the dtype {leaf.dtype!r:.40}, which is not read here: load it with {writer}"
        )
    nbytes = math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize
    if nbytes != sum(length for _, length in leaf.pieces):
        raise CorruptCheckpointError(f"it has not the {nbytes} bytes that it should have")
    return nbytes


def is_number(leaf: PackedArray) -> bool:
    """Return True for a number with a dtype, False for an array without dimensions."""
    return leaf.kind in ("np.generic", "scalar") and not leaf.shape


# Format of a manifest that describes a Flax file.
FORMAT = "flax"
# Placeholder for an array that is in another file, with parts from each process.
_ELSEWHERE = "//GDAPlaceholder:"


async def open_flax(storage: Storage, name: str) -> ForeignCheckpoint | None:
    """Return the checkpoint in a Flax file; None if the file is gone.

    The file is read once as a whole, to find the places of its arrays; they are read from it later.

    Args:
        storage: The directory, or the place in a store.
        name: Name of the file in it.

    Raises:
        CorruptCheckpointError: The file is damaged, or larger than the memory of this machine.
        UnsupportedFormatError: The file has an unsupported value; names the leaf.
        StorageError: The store refused.
    """
    data = await storage.read("", name, host_memory_bytes())
    if data is None:
        return None
    where = f"{storage.location}/{name}"
    tree = await run_in_thread(parse_msgpack, data, where)
    # Freed now: it may be as large as the arrays that are read next.
    del data
    read = partial(storage.read_block, "", name)
    with naming(where):
        structure = structure_of(tree, where)
        leaves = [
            _leaf(each, leaf, read)
            for each, leaf in zip(structure.names, structure.leaves, strict=True)
        ]
        found = ForeignFiles(storage, "")
        return await run_in_thread(checkpoint_of, FORMAT, found, [name], structure, leaves, where)


def _leaf(name: str, leaf: Any, read: Fill) -> StoredRun | LeafEntry | CheckpointError:
    try:
        if not isinstance(leaf, PackedArray):
            if isinstance(leaf, str) and leaf.startswith(_ELSEWHERE):
                raise UnsupportedFormatError(
                    "its array is in a directory beside the file, with parts from several "
                    "processes, which is not read here: load it with flax.training.checkpoints"
                )
            return value_entry(name, leaf)
        check_packed(leaf, "Flax")
    except UNREAD_ERRORS as error:
        return error
    fill = joined(read, leaf.pieces) if len(leaf.pieces) > 1 else None
    kind = "numpy_scalar" if is_number(leaf) else None
    return StoredRun(leaf.dtype, leaf.shape, leaf.pieces[0][0], fill=fill, kind=kind)


def joined(read: Fill, pieces: Sequence[tuple[int, int]]) -> Fill:
    """Return a function that reads an array from several pieces of a file.

    Args:
        read: Reads bytes of the file.
        pieces: Offset and length of each piece.
    """

    async def fill(offset: int, target: memoryview) -> None:
        start = 0
        for place, length in pieces:
            first, last = max(offset, start), min(offset + len(target), start + length)
            if first < last:
                await read(place + first - start, target[first - offset : last - offset])
            start += length

    return fill
