"""Dtypes that can be stored: a closed list."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ckpt.errors import CorruptCheckpointError

# Dtypes are parsed from files, and a file can name only these.
_NUMPY_DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
_ML_DTYPES = [
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "int2",
    "int4",
    "uint2",
    "uint4",
]
DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _NUMPY_DTYPES},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES if hasattr(ml_dtypes, name)},
}
# Floating dtypes that other numbers are not cast to: the first has only powers of two, without sign
# and zero; the second has no NaN and no infinity, so that a diverged value would look right.
UNROUNDED = frozenset({"float8_e8m0fnu", "float4_e2m1fn"})


def parse_dtype(name: str | None) -> np.dtype[Any]:
    """Return the dtype called `name` in a manifest.

    Raises:
        CorruptCheckpointError: The name is not in the closed list of storable dtypes.
    """
    found = DTYPES.get(name or "")
    if found is None:
        raise CorruptCheckpointError(f"a stored leaf has the unknown dtype {name!r:.80}")
    return found


def storable_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Return the dtype that a caller means by `"bfloat16"` or `jnp.bfloat16`, or None."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    try:
        # np.dtype(None) is float64.
        found: np.dtype[Any] = np.dtype("none" if dtype is None else dtype)
    except (TypeError, ValueError):
        return None
    return found if DTYPES.get(found.name) == found else None
