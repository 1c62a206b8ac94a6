"""Leaves whose values are in a msgpack file, as entries of a manifest. Pure."""

from __future__ import annotations

import base64
import math
from typing import Any

from ckpt._format.dtypes import DTYPES
from ckpt._format.leaf_table import LeafEntry
from ckpt._interop.flax.packed_tree import PackedArray
from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError


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
