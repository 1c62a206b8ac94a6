"""Kinds of leaves in manifests, and the values of stored scalars.

Imports no jax: tools that look at a manifest need no devices.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ckpt._format.leaf_table import LeafEntry
from ckpt.errors import CorruptCheckpointError

# `key` is a typed PRNG key: the array of its key data.
ARRAY_KINDS = frozenset({"jax", "key", "numpy", "numpy_scalar"})
SCALAR_KINDS = frozenset(
    {"bool", "int", "float", "complex", "str", "bytes", "numpy_str", "numpy_bytes"}
)
# A function among the leaves: only its name is stored, and a target has to provide it.
CALLABLE = "callable"


def decode_scalar(entry: LeafEntry) -> Any:
    """Return the Python scalar of a manifest entry; the inverse of `encode_scalar`.

    Raises:
        CorruptCheckpointError: The text is not a value of its kind.
    """
    value = entry.value
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
