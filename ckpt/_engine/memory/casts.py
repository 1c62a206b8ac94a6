"""Casts of arrays from one dtype to another, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt._format.dtypes import DTYPES

Array = np.ndarray[Any, Any]


def cast(array: Array, dtype: str) -> Array:
    """Return `array` as `dtype`, rounded to the nearest value, and ties to even.

    From float64 to dtypes narrower than float16, ml_dtypes goes through float32, so a value close
    to the middle of two neighbours may be rounded to the other one.
    """
    if array.dtype == DTYPES[dtype]:
        return array
    # Too large values become infinite, or NaN in dtypes without infinity, as with `astype`.
    with np.errstate(all="ignore"):
        return array.astype(DTYPES[dtype])


def cast_into(target: Array, source: Array) -> None:
    """Copy `source` into `target`, of another dtype, rounded as by `cast`, without a temporary."""
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")


def is_narrowed(source: str, target: str) -> bool:
    """Return True if elements of `target` take fewer bytes."""
    return DTYPES[target].itemsize < DTYPES[source].itemsize
