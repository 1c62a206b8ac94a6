"""`checkpoint`: the tree of an item in one file of msgpack, as the oldest versions wrote it. Pure.

It has the whole tree. A leaf in it is its value, or a text that says which array stands for it.
Versions that write `_METADATA` too keep there only leaves that were to be aggregated. The encoding
is Flax's: https://flax.readthedocs.io/en/latest/api_reference/flax.serialization.html.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._interop.orbax.tree import UNKNOWN, Param
from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError

_PREFIXES = ("PLACEHOLDER://", "AGGREGATED://")
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
# A file of msgpack of one byte is an empty dict; in others this begins no dict that has keys.
_PICKLE = b"\x80"
_MAX_RANK = 64
# The bytes that dicts, lists and values of these kinds begin with.
_FIRST_BYTES = frozenset([*range(0x80, 0xA0), *range(0xDC, 0xE0), *range(0xC7, 0xCA)])


class PackedArray(Struct, frozen=True):
    """An array whose bytes are in the file of msgpack.

    Attributes:
        dtype: What numpy calls its dtype.
        shape: Its shape.
        pieces: Offset and length of its bytes in the file, one piece after the other.
        kind: What Orbax calls it; `np.generic` for a number with a dtype.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]
    kind: str = "np.ndarray"


def may_be_packed(head: bytes) -> bool:
    """Tell whether a file that begins with these bytes may be such a tree.

    TensorFlow has text files of the same name.
    """
    return bool(head) and head[0] in _FIRST_BYTES


def parse_packed(data: bytes, path: str, tree: Any = None) -> Any:
    """Return the tree in a file of msgpack.

    Its leaves are a `Param` for each array of its own, a `PackedArray`, or a number or text.

    Args:
        data: The file.
        path: Where it is.
        tree: The tree of `_METADATA`, which then gets the values that it does not have.

    Raises:
        CorruptCheckpointError: The file is damaged.
        UnsupportedFormatError: It is a pickle.
    """
    if data[:1] == _PICKLE and len(data) > 1:
        raise UnsupportedFormatError(
            f"{path} is a pickle, and to read one is to run the code in it: that is not done here"
        )
    try:
        found = msgspec.msgpack.Decoder(ext_hook=_Extensions(data).value).decode(data)
        packed = _placed(found, ())
        return packed if tree is None else _filled(tree, packed)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error!s:.200}") from error


class _Extensions:
    """Decodes what is no value of msgpack, in place: arrays are not copied out of the file."""

    def __init__(self, data: bytes) -> None:
        self._start = _address(data)

    def value(self, code: int, data: memoryview) -> Any:
        if code == _COMPLEX:
            return complex(*msgspec.msgpack.decode(data, type=tuple[float, float]))
        if code not in (_ARRAY, _SCALAR):
            raise ValueError(f"it has a value of the unknown kind {code}")
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


def _placed(node: Any, keys: tuple[str, ...]) -> Any:
    """Return a decoded tree with a `Param` wherever an array of its own stands for a leaf."""
    if isinstance(node, dict):
        if _CHUNKED in node:
            return _joined(node)
        if node.get("driver") == "zarr" and isinstance(node.get("kvstore"), dict):
            # The very first versions wrote how TensorStore opens it.
            return Param(".".join(keys), UNKNOWN)
        if not all(isinstance(key, str) for key in node):
            raise ValueError(f"it has the key {next(k for k in node if type(k) is not str)!r:.60}")
        return {key: _placed(child, (*keys, key)) for key, child in node.items()}
    if isinstance(node, list):
        return [_placed(child, (*keys, str(place))) for place, child in enumerate(node)]
    if isinstance(node, str) and node.startswith(_PREFIXES):
        return Param(node.partition("://")[2], UNKNOWN)
    known = str | bytes | bool | int | float | complex | None | PackedArray
    if not isinstance(node, known):
        raise ValueError(f"it has a value of the unknown kind {type(node).__name__}")
    return node


def _filled(tree: Any, packed: Any) -> Any:
    """Return a tree of `_METADATA` with the values that a file of msgpack has for its leaves."""
    if isinstance(tree, Param):
        if not tree.is_packed or isinstance(packed, Param):
            return tree
        return replace(packed, kind=tree.kind) if isinstance(packed, PackedArray) else packed
    if isinstance(tree, dict) and isinstance(packed, dict):
        return {
            key: _filled(child, packed[key]) if key in packed else child
            for key, child in tree.items()
        }
    if isinstance(tree, list) and isinstance(packed, list) and len(tree) == len(packed):
        return [_filled(child, other) for child, other in zip(tree, packed, strict=True)]
    return tree


def _joined(node: Mapping[Any, Any]) -> PackedArray:
    """Return an array that was too long for one value of msgpack."""
    shape, pieces = _sequence(node["shape"]), _sequence(node["chunks"])
    if not pieces or not all(isinstance(piece, PackedArray) for piece in pieces):
        raise ValueError("an array in pieces has none, or others")
    if not all(isinstance(n, int) and n >= 0 for n in shape) or len(shape) > _MAX_RANK:
        raise ValueError(f"an array in pieces has the shape {shape[:8]!r:.80}")
    first = pieces[0]
    counts = [math.prod(piece.shape) for piece in pieces]
    if any(piece.dtype != first.dtype for piece in pieces) or sum(counts) != math.prod(shape):
        raise ValueError("the pieces of an array do not fit together")
    places = tuple(place for piece in pieces for place in piece.pieces)
    return PackedArray(first.dtype, tuple(shape), places)


def _sequence(numbered: Mapping[str, Any]) -> list[Any]:
    return [numbered[str(place)] for place in range(len(numbered))]
