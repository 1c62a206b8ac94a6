"""The weights of a fingerprint: an odd 32-bit number for every word of an array, in two channels.

An index along a dimension has two digits. A weight is the product of a factor for each digit of
each index. The lower digit along the last dimension is the *column*: its factor differs between the
channels, and all other factors are the same in both. `docs/design/018-vital-signs.md` gives the
reasons.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint32]]

CHANNELS = 2
# Bits of the lower digit: the factors of a long dimension are those of two short ones.
COLUMN_BITS = 12
COLUMNS = 1 << COLUMN_BITS

# 2**32 divided by the golden ratio: seeds that are far apart.
_SEED = 0x9E3779B9
_WORD = 0xFFFFFFFF
# Longest range whose factors are cached: 16 or 32 KiB each.
_MOST_KNOWN = 4096


def column_factors(dimension: int, start: int, count: int) -> Words:
    """Return the factors of a range of words of the last dimension; `[2, count]`, read only."""
    if count <= _MOST_KNOWN:
        return _known_columns(dimension, start, count)
    return _columns(dimension, start, count)


def row_factors(offset: Sequence[int], shape: Sequence[int], start: int, stop: int) -> Words:
    """Return the products of the factors of the rows of a box; `[stop - start]`.

    Args:
        offset: First index of the box along every dimension but the last.
        shape: Lengths of the box along those dimensions.
        start: The first row wanted, counted in C order.
        stop: The row after the last one.
    """
    if len(shape) == 1:
        return axis_factors(0, offset[0] + start, stop - start)
    rows = np.arange(start, stop, dtype=np.uint64)
    found = np.ones(stop - start, np.uint32)
    for dimension in reversed(range(len(shape))):
        rows, along = np.divmod(rows, np.uint64(max(shape[dimension], 1)))
        found *= _factors(dimension, along + np.uint64(offset[dimension]))
    return found


def axis_factors(dimension: int, start: int, count: int) -> Words:
    """Return the factors of a range of indexes along another dimension than the last; `[count]`."""
    if count <= _MOST_KNOWN:
        return _known_factors(dimension, start, count)
    return _factors(dimension, np.arange(start, start + count, dtype=np.uint64))


def high_factors(dimension: int, high: np.ndarray[Any, np.dtype[np.uint64]]) -> Words:
    """Return the factors of upper digits, 1 for a digit of 0; `[n]`."""
    digits = high.astype(np.uint32)
    return np.where(digits, _odd(digits, dimension, 3), np.uint32(1))


def seed(dimension: int, table: int) -> int:
    """Return the seed for the factors of a dimension, in one of its four tables."""
    return (_SEED * (1 + table + 4 * dimension)) & _WORD


def _columns(dimension: int, start: int, count: int) -> Words:
    words = np.arange(start, start + count, dtype=np.uint64)
    lower = (words & np.uint64(COLUMNS - 1)).astype(np.intp)
    high = high_factors(dimension, words >> np.uint64(COLUMN_BITS))
    return np.stack(
        [_column_table(channel, dimension)[lower] * high for channel in range(CHANNELS)]
    )


def _factors(dimension: int, indexes: np.ndarray[Any, np.dtype[np.uint64]]) -> Words:
    """Return the factors of indexes along another dimension than the last; `[n]`."""
    lower = (indexes & np.uint64(COLUMNS - 1)).astype(np.uint32)
    return _odd(lower, dimension, 2) * high_factors(dimension, indexes >> np.uint64(COLUMN_BITS))


@functools.lru_cache(maxsize=256)
def _known_columns(dimension: int, start: int, count: int) -> Words:
    found = _columns(dimension, start, count)
    found.setflags(write=False)
    return found


@functools.lru_cache(maxsize=256)
def _known_factors(dimension: int, start: int, count: int) -> Words:
    found = _factors(dimension, np.arange(start, start + count, dtype=np.uint64))
    found.setflags(write=False)
    return found


@functools.lru_cache(maxsize=64)
def _column_table(channel: int, dimension: int) -> Words:
    return _odd(np.arange(COLUMNS, dtype=np.uint32), dimension, channel)


def _odd(digits: Words, dimension: int, table: int) -> Words:
    """Return an odd number for each value of a digit, different in each of the four tables.

    The mixing function is `lowbias32` of Chris Wellons, which is in the public domain:
    https://nullprogram.com/blog/2018/07/31/
    """
    x = digits + np.uint32(seed(dimension, table))
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x | np.uint32(1)
