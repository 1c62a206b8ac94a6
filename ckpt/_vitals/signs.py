"""Vital signs of arrays: records of boxes, made anywhere, are joined into records of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ckpt._vitals.fingerprint import PIECE_WORDS, folded_words, pieces_of, sum_of
from ckpt._vitals.magnitudes import flat_magnitudes, joined_norm, magnitudes
from ckpt._vitals.records import SIGNS, UNKNOWN, Array, are_known
from ckpt._vitals.weights import CHANNELS, column_factors, row_factors

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


# Takes the next bytes of a box.
Taker = Callable[[memoryview], object]


def box_signs(
    data: Bytes, offset: Sequence[int], shape: Sequence[int], dtype: np.dtype[Any], take: Taker
) -> Array:
    """Return the record of a box of an array.

    Args:
        data: The bytes of the box, in C order.
        offset: The first corner of the box within the array.
        shape: Its shape.
        dtype: Dtype of the elements.
        take: Takes the bytes while they are in the processor's cache.
    """
    channels = [0] * CHANNELS
    found: list[tuple[int, float, float]] = []
    scratch = np.empty(min(PIECE_WORDS, len(data) // 4 + 1), np.uint32)
    for piece in pieces_of(offset, shape, dtype.itemsize):
        mine = data[piece.start : piece.stop]
        take(mine.data)
        for channel, part in enumerate(sum_of(mine, piece, scratch)):
            channels[channel] = (channels[channel] + part) & 0xFFFFFFFF
        found.append(flat_magnitudes(mine, dtype))
    record = np.zeros((), SIGNS)
    record["fingerprint"] = channels
    record["nonfinite"] = sum(each[0] for each in found)
    record["norm"] = joined_norm(np.array([each[1] for each in found]))
    record["absmax"] = max((each[2] for each in found), default=0.0)
    return record


def whole_signs(arrays: Bytes, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return the records of many small arrays of one shape and dtype.

    Args:
        arrays: `[arrays, bytes] uint8`, contiguous; at least one byte.
        shape: Shape of each array.
        dtype: Dtype of the elements.
    """
    *outer, length = shape or (1,)
    nbytes = length * dtype.itemsize
    words, rows = -(-nbytes // 4), math.prod(outer)
    columns = column_factors(len(outer), 0, words)
    along = row_factors([0] * len(outer), outer, 0, rows)
    weights = (along[:, None] * columns[:, None, :]).reshape(CHANNELS, -1)
    none = np.empty(0, np.uint32)
    folded = folded_words(arrays.reshape(-1, nbytes), 0, words, none).reshape(len(arrays), -1)
    records = np.zeros(len(arrays), SIGNS)
    for channel in range(CHANNELS):
        records["fingerprint"][:, channel] = np.einsum("ij,j->i", folded, weights[channel])
    found = magnitudes(arrays, dtype)
    records["nonfinite"], records["norm"] = found.nonfinite, found.norm
    records["absmax"] = found.absmax
    return records


def join_signs(records: Array, owners: Array, count: int) -> Array:
    """Return the records of arrays from those of their boxes.

    Args:
        records: Records of boxes that do not overlap and that cover the arrays.
        owners: Number of its array, for each box.
        count: Number of arrays.
    """
    found = np.zeros(count, SIGNS)
    for channel in range(CHANNELS):
        # Wraps around, as the sums do.
        np.add.at(found["fingerprint"][:, channel], owners, records["fingerprint"][:, channel])
    np.add.at(found["nonfinite"], owners, records["nonfinite"])
    known = are_known(records)
    np.maximum.at(found["absmax"], owners, np.where(known, records["absmax"], 0))
    each = np.where(known, records["norm"], 0)
    most = np.zeros(count)
    np.maximum.at(most, owners, each)
    scale = np.where(most > 0, most, 1)
    squares = np.zeros(count)
    np.add.at(squares, owners, np.square(each / scale[owners]))
    with np.errstate(over="ignore"):
        norms = most * np.sqrt(squares)
    found["norm"] = np.minimum(norms, np.finfo(np.float64).max)
    found["norm"][owners[~known]] = UNKNOWN
    return found
