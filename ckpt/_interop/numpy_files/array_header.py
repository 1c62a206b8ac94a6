"""The header of an array as numpy saves it: dtype, shape, and the order of its bytes. Pure.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from msgspec import Struct

from ckpt._format.dtypes import DTYPES
from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError

_MAGIC = b"\x93NUMPY"
# Of its length, by the major version.
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
# As numpy; only those of structured dtypes are longer than a hundred bytes or so.
_MOST_TEXT_BYTES = 10_000
# The longest header.
MOST_HEADER_BYTES = len(_MAGIC) + 2 + 4 + _MOST_TEXT_BYTES
# From as many it can be told how long a header is. No header is shorter.
SHORTEST_HEADER_BYTES = len(_MAGIC) + 2 + 4
_MAX_RANK = 64
_LARGEST = 1 << 62
# What numpy calls dtypes that it knows itself, by the name that they have in a manifest.
_BY_TEXT = {
    text: (name, text[0] == ">")
    for name, dtype in DTYPES.items()
    if dtype.isbuiltin == 1 and dtype.kind in "biufc"
    for text in (dtype.str, dtype.newbyteorder(">").str)
}
# Python 2 wrote long integers so.
_LONG = re.compile(r"(?<=\d)L\b")


class ArrayHeader(Struct, frozen=True):
    """What a header says.

    Attributes:
        dtype: The dtype, by the name it has in a manifest.
        shape: The shape.
        is_fortran: Whether the first index is the fastest.
        is_big_endian: Whether the bytes of each number are the other way round.
        length: Bytes of the header; the elements follow.
    """

    dtype: str
    shape: tuple[int, ...]
    is_fortran: bool
    is_big_endian: bool
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def is_plain(self) -> bool:
        """Whether the elements are stored as this library stores them."""
        return not (self.is_fortran or self.is_big_endian)


def header_length(data: bytes) -> int | None:
    """Return how long a header is, from the bytes it begins with; None if these are too few.

    Raises:
        CorruptCheckpointError: It is no header.
        UnsupportedFormatError: It is of a version that is not known, or longer than any is.
    """
    if not data.startswith(_MAGIC[: len(data)]):
        raise CorruptCheckpointError("it does not begin like an array of numpy")
    start = len(_MAGIC) + 2
    if len(data) < start:
        return None
    major = data[len(_MAGIC)]
    if major not in _LENGTH_BYTES:
        raise UnsupportedFormatError(
            f"it is of version {major} of numpy's format, which is not known here"
        )
    end = start + _LENGTH_BYTES[major]
    if len(data) < end:
        return None
    length = int.from_bytes(data[start:end], "little")
    if length > _MOST_TEXT_BYTES:
        raise UnsupportedFormatError(
            f"its header has {length} bytes, more than the {_MOST_TEXT_BYTES} that numpy reads"
        )
    return end + length


def parse_array_header(data: bytes) -> ArrayHeader:
    """Return what a header, of which this is all, says.

    Raises:
        CorruptCheckpointError: It is damaged.
        UnsupportedFormatError: The dtype is not read here.
    """
    text = data[len(_MAGIC) + 2 + _LENGTH_BYTES[data[len(_MAGIC)]] :].decode("latin-1")
    found = _literal(text)
    if not isinstance(found, dict) or found.keys() != {"descr", "fortran_order", "shape"}:
        raise CorruptCheckpointError(f"its header is damaged: {text.strip()!r:.120}")
    shape, is_fortran, dtype = found["shape"], found["fortran_order"], found["descr"]
    if (
        type(shape) is not tuple
        or len(shape) > _MAX_RANK
        or not all(type(n) is int and 0 <= n <= _LARGEST for n in shape)
        or type(is_fortran) is not bool
    ):
        raise CorruptCheckpointError(f"its header is damaged: the shape is {shape!r:.80}")
    if type(dtype) is not str or dtype not in _BY_TEXT:
        raise _unknown(dtype)
    name, is_big_endian = _BY_TEXT[dtype]
    # With a single axis, there is one order.
    is_fortran = is_fortran and sum(n > 1 for n in shape) > 1
    return ArrayHeader(name, shape, is_fortran, is_big_endian, len(data))


def _literal(text: str) -> Any:
    for attempt in (text, _LONG.sub("", text)):
        try:
            return ast.literal_eval(attempt.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return None


def _unknown(dtype: Any) -> UnsupportedFormatError:
    """Return the error for a dtype that is not read."""
    if not isinstance(dtype, str):
        return UnsupportedFormatError(
            f"it has the structured dtype {dtype!r:.80}, which is not read here: save each of its "
            "fields as an array"
        )
    if re.fullmatch(r"[<>|=]?O\d*", dtype):
        return UnsupportedFormatError(
            "it is an array of Python objects, which numpy pickles, and to read a pickle is to run "
            "the code in it: that is not done here. Save arrays of numbers, each under its name"
        )
    if re.fullmatch(r"[<>|=]?([Vf]1|V\d+)", dtype):
        return UnsupportedFormatError(
            f"it has the dtype {dtype!r:.40}, as numpy calls bfloat16 and others that it does not "
            "know, so it cannot be told which. Save it with ckpt.save or as safetensors; or save "
            "array.view(numpy.uint16), or array.astype(numpy.float32)"
        )
    return UnsupportedFormatError(
        f"it has the dtype {dtype!r:.40}, which is not read here: save it as numbers"
    )
