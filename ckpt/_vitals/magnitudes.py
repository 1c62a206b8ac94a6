"""Magnitudes of an array: the number of nonfinite values, the norm, and the largest value.

Squares are summed up in runs of 1024 values, in 32 bits unless the values have more, and the runs
in 64 bits. Rows with values that are not finite, very large or very small are computed once more in
64 bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
from msgspec import Struct

Array = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Values in a row of a single array: a second look takes no more than a row.
_ROW = 8192
# Values in a run. BLAS multiplies runs without threads of its own, and errs by a millionth.
_RUN = 1024
_SMALL_32, _LARGE_32 = 1e-12, 1e16
_SMALL_64, _LARGE_64 = 1e-140, 1e150
_ML_FLOATS = {
    # Bits of the fraction, bias of the exponent, and the least pattern that is not finite; the
    # shifted patterns of these dtypes are floats of 32 bits, see `_of_small_floats`.
    "float16": (10, 15, 0x7C00),
    "float8_e5m2": (2, 15, 0x7C),
    "float8_e4m3": (3, 7, 0x78),
    "float8_e4m3fn": (3, 7, 0x7F),
    "float8_e3m4": (4, 3, 0x70),
}
_FLOATS_32 = frozenset({"bool", "int8", "uint8", "int16", "uint16"})


class Magnitudes(Struct, frozen=True, eq=False, gc=False):
    """The magnitudes of some rows, one value for each.

    Attributes:
        nonfinite: Number of values that are NaN or infinite.
        norm: Square root of the sum of the squares of the finite values.
        absmax: Largest absolute value of the finite values.
    """

    nonfinite: Array
    norm: Floats
    absmax: Floats


def magnitudes(rows: Bytes, dtype: np.dtype[Any]) -> Magnitudes:
    """Return the magnitudes of rows of values; integers and booleans are always finite.

    Args:
        rows: `[rows, bytes] uint8`, contiguous, at least one value in each row.
        dtype: The dtype of the values.
    """
    name = dtype.name
    with np.errstate(all="ignore"):
        if name in ("float32", "float64"):
            return _of_floats(rows.view(dtype))
        if name == "bfloat16":
            return _of_bfloat16(rows)
        if name in _ML_FLOATS:
            return _of_small_floats(rows, name)
        if name in _FLOATS_32:
            return _of_floats(rows.view(dtype).astype(np.float32))
        if name.startswith("complex"):
            return _of_complex(rows.view(dtype))
        if dtype.kind in "iu":
            return _of_floats(rows.view(dtype).astype(np.float64))
        return _of_floats(_table(name)[rows])


def flat_magnitudes(data: Bytes, dtype: np.dtype[Any]) -> tuple[int, float, float]:
    """Return the magnitudes of one array, given its bytes: nonfinite, norm and absmax."""
    quick = _quick(data.view(dtype)) if dtype.name == "float32" else None
    if quick is not None:
        return 0, *quick
    row = _ROW * dtype.itemsize
    whole = len(data) // row * row
    parts = data[:whole].reshape(-1, row), data[whole:].reshape(1, -1)
    found = [magnitudes(each, dtype) for each in parts if each.size]
    if not found:
        return 0, 0.0, 0.0
    return (
        sum(int(each.nonfinite.sum()) for each in found),
        joined_norm(np.concatenate([each.norm for each in found])),
        max(float(each.absmax.max()) for each in found),
    )


def _quick(values: Array) -> tuple[float, float] | None:
    """Return norm and absmax of plain floats of 32 bits; None if they need a second look."""
    if not len(values):
        return None
    with np.errstate(all="ignore"):
        absmax = max(float(values.max()), -float(values.min()))
        if not _SMALL_32 < absmax < _LARGE_32:
            return None
        squares = float(_squares(values.reshape(1, -1))[0])
    return math.sqrt(squares), absmax


def joined_norm(norms: Floats) -> float:
    """Return the norm of parts with these norms; no square becomes too large or too small."""
    most = float(norms.max(initial=0.0))
    if not most:
        return 0.0
    return _bounded(most * float(np.sqrt(np.square(norms / most).sum())))


def _bounded(norm: float) -> float:
    return min(norm, float(np.finfo(np.float64).max))


def _squares(values: Array) -> Floats:
    length = values.shape[1] // _RUN * _RUN
    runs = values[:, :length].reshape(len(values), -1, _RUN)
    found: Floats = np.vecdot(runs, runs).sum(axis=1, dtype=np.float64)
    if length < values.shape[1]:
        found += np.vecdot(values[:, length:], values[:, length:])
    return found


def _of_floats(values: Array) -> Magnitudes:
    squares = _squares(values)
    absmax = np.maximum(values.max(axis=1), -values.min(axis=1)).astype(np.float64)
    return _exact(squares, absmax, values)


def _exact(squares: Floats, absmax: Floats, values: Array) -> Magnitudes:
    """Return the magnitudes of rows, after a second look at those that need it."""
    is_double = values.dtype.itemsize == 8
    small, large = (_SMALL_64, _LARGE_64) if is_double else (_SMALL_32, _LARGE_32)
    norm = np.sqrt(squares)
    nonfinite = np.zeros(len(values), np.int64)
    # A comparison with NaN is false.
    plain = (absmax == 0) | ((absmax > small) & (absmax < large))
    for row in np.flatnonzero(~plain).tolist():
        finite = values[row][np.isfinite(values[row])].astype(np.float64)
        nonfinite[row] = values.shape[1] - len(finite)
        np.abs(finite, out=finite)
        most = absmax[row] = finite.max(initial=0.0)
        norm[row] = _bounded(most * np.linalg.norm(finite / most)) if most else 0.0
    return Magnitudes(nonfinite, norm, absmax)


def _of_bfloat16(rows: Bytes) -> Magnitudes:
    """Return the magnitudes of rows of bfloat16, the upper halves of floats of 32 bits."""
    patterns = rows.view(np.uint16) & np.uint16(0x7FFF)
    most = patterns.max(axis=1)
    absmax = _widened(most, 16).astype(np.float64)
    if patterns.shape[1] % 2:
        squares = _squares(_widened(patterns, 16))
    else:
        # Two values are one word: the upper half of one, and the lower half shifted.
        pairs = patterns.view(np.uint32)
        values = np.left_shift(pairs, 16).view(np.float32)
        squares = _squares(values)
        np.bitwise_and(pairs, np.uint32(0xFFFF0000), out=values.view(np.uint32))
        squares += _squares(values)
    plain = (most == 0) | ((absmax > _SMALL_32) & (absmax < _LARGE_32))
    norm, nonfinite = np.sqrt(squares), np.zeros(len(rows), np.int64)
    again = np.flatnonzero(~plain)
    if len(again):
        found = _of_floats(_widened(patterns[again], 16))
        nonfinite[again], norm[again], absmax[again] = found.nonfinite, found.norm, found.absmax
    return Magnitudes(nonfinite, norm, absmax)


def _widened(patterns: Array, shift: int) -> Array:
    """Return bit patterns, shifted, as floats of 32 bits."""
    wide = patterns.astype(np.uint32)
    return np.left_shift(wide, np.uint32(shift), out=wide).view(np.float32)


def _of_small_floats(rows: Bytes, name: str) -> Magnitudes:
    """Return the magnitudes of rows of floats of 8 or 16 bits with gradual underflow.

    The pattern of a value, shifted to the exponent and the fraction of a float of 32 bits, is that
    float but for the bias: times a power of two it is the value, even below the normal range.
    """
    fraction, bias, least = _ML_FLOATS[name]
    code = rows.view(np.uint16) if name == "float16" else rows
    patterns = code & code.dtype.type(0x7FFF if name == "float16" else 0x7F)
    nonfinite = np.zeros(len(rows), np.int64)
    if int(patterns.max()) >= least:
        bad = patterns >= least
        nonfinite = bad.sum(axis=1)
        patterns[bad] = 0
    scale = np.float32(2.0 ** (127 - bias))
    values = _widened(patterns, 23 - fraction)
    np.multiply(values, scale, out=values)
    absmax = (_widened(patterns.max(axis=1), 23 - fraction) * scale).astype(np.float64)
    return Magnitudes(nonfinite, np.sqrt(_squares(values)), absmax)


def _of_complex(values: Array) -> Magnitudes:
    absolute = np.abs(values.astype(np.complex128))
    found = _of_floats(absolute)
    if not found.nonfinite.any():
        return found
    bad = ~np.isfinite(values)
    absolute[bad] = 0
    # The absolute value may be infinite though both parts are finite.
    sound = _of_floats(np.minimum(absolute, np.finfo(np.float64).max))
    return Magnitudes(bad.sum(axis=1), sound.norm, sound.absmax)


@functools.lru_cache(maxsize=32)
def _table(name: str) -> Array:
    """Return the values of all patterns of a dtype of one byte."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    values: Array = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    return values
