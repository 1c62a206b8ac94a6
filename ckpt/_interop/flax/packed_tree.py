"""A tree in one msgpack file, in the encoding of Flax. Pure.

Source: https://flax.readthedocs.io/en/latest/api_reference/flax.serialization.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError

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
