"""Kinds of leaves in manifests, and the values of stored scalars.

Imports no jax: tools that look at a manifest need no devices.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ckpt._format.leaf_table import LeafEntry
from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError

# `key` is a typed PRNG key: the array of its key data.
ARRAY_KINDS = frozenset({"jax", "key", "numpy", "numpy_scalar"})
SCALAR_KINDS = frozenset(
    {"bool", "int", "float", "complex", "str", "bytes", "numpy_str", "numpy_bytes"}
)
# Most values of an item that other readers find as an array each: an array takes a hundred times
# the room and the time of a value.
MOST_SHOWN = 4096
# A function among the leaves: only its name is stored, and a target has to provide it.
CALLABLE = "callable"
# Kind of a leaf, or handler of an item, of another library's checkpoint that cannot be read. The
# value is the reason, which is raised when the leaf is wanted. In memory only.
UNREAD = "unread"
UNREADABLE: Mapping[str, type[CheckpointError]] = MappingProxyType(
    {"damaged": CorruptCheckpointError, UNREAD: UnsupportedFormatError}
)


def unreadable_kind(error: CheckpointError) -> str:
    """Return the kind of a leaf that cannot be read because of an error."""
    return UNREAD if isinstance(error, UnsupportedFormatError) else "damaged"


def unreadable_leaf(name: str, error: CheckpointError) -> LeafEntry:
    """Return a leaf that stands for a leaf that cannot be read."""
    return LeafEntry(name, unreadable_kind(error), value=error.message)


def decode_scalar(entry: LeafEntry) -> Any:
    """Return the Python scalar of a manifest entry; the inverse of `encode_scalar`.

    Raises:
        CorruptCheckpointError: The text is not a value of its kind.
        CheckpointError: The leaf cannot be read; the message says why.
    """
    value = entry.value
    if entry.kind in UNREADABLE:
        raise UNREADABLE[entry.kind](str(value), leaf=entry.name)
    try:
        match entry.kind, value:
            case "bool", bool():
                return value
            case "str", str():
                return value
            case "int", str():
                return int(value, 0)
            case "float", str():
                return float(value)
            case "complex", str():
                return complex(value)
            case "bytes", str():
                return base64.b64decode(value, validate=True)
            case "numpy_str", str():
                return np.str_(value)
            case "numpy_bytes", str():
                return np.bytes_(base64.b64decode(value, validate=True))
    except ValueError as error:
        raise CorruptCheckpointError(
            f"the stored value {value!r:.60} is not a {entry.kind}", leaf=entry.name
        ) from error
    raise CorruptCheckpointError(
        f"a stored leaf of kind {entry.kind!r:.60} has the value {value!r:.60}", leaf=entry.name
    )


def scalar_array(kind: str, value: Any) -> np.ndarray[Any, Any] | None:
    """Return the 0-d array in which zarr readers find a Python scalar, or None if it has none.

    The exact value is in the manifest; the array is only for other readers. An int beyond 64 bits
    has no such array.
    """
    if kind == "bool":
        return np.asarray(value, np.bool_)
    if kind == "int" and -(2**63) <= value < 2**63:
        return np.asarray(value, np.int64)
    if kind == "float":
        return np.asarray(value, np.float64)
    return None


def encode_scalar(kind: str, value: Any) -> str | bool:
    """Return the manifest form of a Python scalar; exact, but for the payload of a NaN."""
    if kind == "bool":
        return value  # type: ignore[no-any-return]
    if kind in ("str", "numpy_str"):
        return str(value)
    if kind == "int":
        # Hexadecimal beyond 64 bits: Python limits the length of decimal texts.
        return str(value) if -(2**63) <= value < 2**63 else hex(value)
    if kind in ("bytes", "numpy_bytes"):
        return base64.b64encode(value).decode()
    return repr(value)
