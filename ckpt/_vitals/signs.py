"""Vital signs: records of boxes of arrays, joined into records of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from ckpt._vitals.fingerprint import (
    CHANNELS,
    PIECE_WORDS,
    column_factors,
    folded_words,
    pieces_of,
    row_factors,
    sum_of,
)
from ckpt._vitals.magnitudes import flat_magnitudes, joined_norm, magnitudes

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Array = np.ndarray[Any, Any]

# The signs of a box, or of an array. A norm of -1 means that they are unknown.
SIGNS = np.dtype(
    [("fingerprint", "<u4", (CHANNELS,)), ("nonfinite", "<u8"), ("norm", "<f8"), ("absmax", "<f8")]
)
UNKNOWN = -1.0
# Copy of a chunk in a process: leaf, number of the chunk, and fingerprint. If the devices of the
# process do not agree, there is one record for each fingerprint.
COPY = np.dtype(
    [("process", "<u4"), ("leaf", "<u4"), ("number", "<u4"), ("fingerprint", "<u4", (2,))]
)


class LeafSigns(Struct, frozen=True, gc=False):
    """Figures about the values of an array, the same however it is sharded and cut into chunks.

    Attributes:
        fingerprint: 16 hex digits. Two arrays of one shape and dtype have different fingerprints if
            they differ in a single bit, and the same one if they are equal.
        nonfinite: Number of values that are NaN or infinite.
        norm: Square root of the sum of the squares of the finite values.
        absmax: Largest absolute value of the finite values.

    Example:
        ```python
        extensions = [ckpt.extensions.VitalSigns()]
        info = await ckpt.save("runs/signed", {"w": jnp.ones(4)}, extensions=extensions)
        w = (await ckpt.metadata(info.path)).tree["w"]
        signs = ckpt.extensions.VitalSigns.of(w)
        assert (signs.nonfinite, signs.norm) == (0, 2.0)
        ```
    """

    fingerprint: str
    nonfinite: int
    norm: float
    absmax: float


def no_signs(count: int) -> Array:
    """Return records of arrays whose signs are unknown."""
    found = np.zeros(count, SIGNS)
    found["norm"] = UNKNOWN
    return found


def are_known(records: Array) -> Array:
    """Return, for each record, whether it has signs; impossible numbers do not count."""
    norm, absmax = records["norm"], records["absmax"]
    known: Array = np.isfinite(norm) & (norm >= 0) & np.isfinite(absmax) & (absmax >= 0)
    return known


def signs_of(record: Array) -> LeafSigns | None:
    """Return the signs of one record; None if it has none."""
    if not are_known(record):
        return None
    (one, two), nonfinite, norm, absmax = record.tolist()
    return LeafSigns(f"{two:08x}{one:08x}", nonfinite, norm, absmax)


def no_copies() -> Array:
    return np.zeros(0, COPY)


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
        found["norm"] = np.minimum(most * np.sqrt(squares), np.finfo(np.float64).max)
    found["norm"][owners[~known]] = UNKNOWN
    return found
