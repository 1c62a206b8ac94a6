"""The weights of a fingerprint: an odd 32-bit number for every word of an array, in two channels.

An index along a dimension has two digits. A weight is the product of a factor for each digit of
each index. The lower digit along the last dimension is the *column*: its factor differs between the
channels, and all other factors are the same in both. `docs/design/018-vital-signs.md` gives the
reasons.

The fingerprint of an array, from the bytes of any boxes of it. The bytes of every row are 32-bit
words. Each word is folded and multiplied with its weight, and all are summed up modulo 2**32, in
two channels. So the sums of the boxes of an array, however it is cut, add up to the sums of the
array. `docs/design/018-vital-signs.md` has the definition, and what it proves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint32]]

CHANNELS = 2
# Bits of the lower digit: the factors of a long dimension are those of two short ones.
COLUMN_BITS = 12
COLUMNS = 1 << COLUMN_BITS

# 2**32 divided by the golden ratio: seeds that are far apart.
_SEED = 0x9E3779B9
# Longest range whose factors are cached: 16 or 32 KiB each.
_MOST_KNOWN = 4096


Factors = Callable[[int, int, int], Words]


def _kept(make: Factors) -> Factors:
    """Keep the results of a function of a dimension and a short range; they are read only."""

    @functools.lru_cache(maxsize=512)
    def known(dimension: int, start: int, count: int) -> Words:
        found = make(dimension, start, count)
        found.setflags(write=False)
        return found

    def kept(dimension: int, start: int, count: int) -> Words:
        return (known if count <= _MOST_KNOWN else make)(dimension, start, count)

    return kept


@_kept
def column_factors(dimension: int, start: int, count: int) -> Words:
    """Return the factors of a range of words of the last dimension; `[2, count]`."""
    words = np.arange(start, start + count, dtype=np.uint64)
    lower = (words & np.uint64(COLUMNS - 1)).astype(np.intp)
    high = high_factors(dimension, words >> np.uint64(COLUMN_BITS))
    return np.stack(
        [_column_table(channel, dimension)[lower] * high for channel in range(CHANNELS)]
    )


@_kept
def axis_factors(dimension: int, start: int, count: int) -> Words:
    """Return the factors of a range of indexes along another dimension than the last; `[count]`."""
    return _factors(dimension, np.arange(start, start + count, dtype=np.uint64))


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


def high_factors(dimension: int, high: np.ndarray[Any, np.dtype[np.uint64]]) -> Words:
    """Return the factors of upper digits, 1 for a digit of 0; `[n]`."""
    digits = high.astype(np.uint32)
    return np.where(digits, odd(digits, dimension, 3), np.uint32(1))


def _factors(dimension: int, indexes: np.ndarray[Any, np.dtype[np.uint64]]) -> Words:
    """Return the factors of indexes along another dimension than the last; `[n]`."""
    lower = (indexes & np.uint64(COLUMNS - 1)).astype(np.uint32)
    found: Words = odd(lower, dimension, 2)
    found *= high_factors(dimension, indexes >> np.uint64(COLUMN_BITS))
    return found


@functools.lru_cache(maxsize=64)
def _column_table(channel: int, dimension: int) -> Words:
    found: Words = odd(np.arange(COLUMNS, dtype=np.uint32), dimension, channel)
    return found


def odd(digits: Any, dimension: int, table: int) -> Any:
    """Return an odd number for each value of a digit, different in each of the four tables.

    The mixing function is `lowbias32` of Chris Wellons, which is in the public domain:
    https://nullprogram.com/blog/2018/07/31/. The digits are an array of numpy or of jax, `uint32`.
    """
    x = digits + np.uint32(_SEED * (1 + table + 4 * dimension) & 0xFFFFFFFF)
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return (x ^ (x >> 16)) | np.uint32(1)


# Words that are summed at once: with the memory for them folded, they stay in a processor's cache.
PIECE_WORDS = 1 << 16
# Longer rows are cut into columns.
_LONG_ROW = PIECE_WORDS
# Shorter rows are joined: each costs as much as some hundreds of words.
_SHORT_ROW = 512
_MOST_JOINED = 1 << 14
# Below this, multiplying every weight is less work than a loop for every row.
_FEW_COLUMNS = 64
_WORD_BYTES = 4


class WordMatrix(Struct, frozen=True, eq=False, gc=False):
    """Consecutive bytes of a box, as a matrix of words.

    Attributes:
        start: Offset of the first byte in the box.
        lead: Bytes of the first word of a row that come before the row, and count as 0.
        row_factors: Factors of the rows, `[rows]`.
        column_factors: Factors of the words, `[2, words of a row]`.
    """

    start: int
    rows: int
    row_bytes: int
    lead: int
    row_factors: Words
    column_factors: Words

    @property
    def stop(self) -> int:
        """Offset of the byte after the last one."""
        return self.start + self.rows * self.row_bytes


def pieces_of(offset: Sequence[int], shape: Sequence[int], itemsize: int) -> Iterator[WordMatrix]:
    """Yield the pieces of a box, in the order of its bytes; together they cover the box.

    Args:
        offset: The first corner of the box within the array.
        shape: Its shape.
        itemsize: Bytes of an element.
    """
    if not math.prod(shape):
        return
    # A scalar is a row of one element.
    *outer_offset, first = offset or (0,)
    *outer_shape, length = shape or (1,)
    begin, row_bytes = first * itemsize, length * itemsize
    lead = begin % _WORD_BYTES
    words = -(-(lead + row_bytes) // _WORD_BYTES)
    if words > _LONG_ROW:
        for row in range(math.prod(outer_shape)):
            weight = row_factors(outer_offset, outer_shape, row, row + 1)
            yield from _long_row(len(outer_shape), begin, row_bytes, row * row_bytes, weight)
        return
    columns = column_factors(len(outer_shape), begin // _WORD_BYTES, words)
    if lead + row_bytes == words * _WORD_BYTES and not lead:
        while outer_shape and words < _SHORT_ROW and words * outer_shape[-1] <= _MOST_JOINED:
            # All rows along this dimension become one row.
            axis = len(outer_shape) - 1
            along = axis_factors(axis, outer_offset.pop(), outer_shape[-1])
            columns = (along[:, None] * columns[:, None, :]).reshape(CHANNELS, -1)
            row_bytes *= outer_shape[-1]
            words *= outer_shape.pop()
    rows, step = math.prod(outer_shape), max(PIECE_WORDS // words, 1)
    for row in range(0, rows, step):
        stop = min(row + step, rows)
        along = row_factors(outer_offset, outer_shape, row, stop)
        yield WordMatrix(row * row_bytes, stop - row, row_bytes, lead, along, columns)


class BoxFingerprint:
    """The fingerprint of a box whose bytes come one after the other, in C order."""

    def __init__(self, offset: Sequence[int], shape: Sequence[int], itemsize: int) -> None:
        """Begin with the first byte of a box; see `pieces_of`."""
        self._pieces = pieces_of(offset, shape, itemsize)
        self._next = next(self._pieces, None)
        # Bytes that have come of the next piece; a piece that comes whole is not copied.
        self._held = bytearray()
        self._scratch = np.empty(min(PIECE_WORDS, math.prod(shape) * itemsize // 4 + 1), np.uint32)
        self._sums = [0] * CHANNELS

    def update(self, data: memoryview) -> None:
        at = 0
        while self._next is not None and at < len(data):
            missing = self._next.stop - self._next.start - len(self._held)
            some = data[at : at + missing]
            at += len(some)
            if self._held or len(some) < missing:
                self._held += some
            if len(some) == missing:
                self._take(np.frombuffer(bytes(self._held) or some, np.uint8), self._next)
                self._held.clear()
                self._next = next(self._pieces, None)

    def _take(self, data: Bytes, piece: WordMatrix) -> None:
        for channel, part in enumerate(sum_of(data, piece, self._scratch)):
            self._sums[channel] = (self._sums[channel] + part) & 0xFFFFFFFF

    def sums(self) -> tuple[int, int]:
        """Return the sums of all whole pieces so far."""
        one, two = self._sums
        return one, two


def _long_row(
    dimension: int, begin: int, nbytes: int, start: int, weight: Words
) -> Iterator[WordMatrix]:
    """Yield the pieces of a row of `nbytes` that is at byte `begin` of its row of the array."""
    block = COLUMNS * _WORD_BYTES
    end, at = begin + nbytes, begin
    while at < end:
        word, lead = divmod(at, _WORD_BYTES)
        high, within = divmod(at, block)
        if within or end - at < block:
            # The rest of a block, or the beginning of one.
            stop = min((high + 1) * block, end)
            words = -(-(stop - at + lead) // _WORD_BYTES)
            columns = column_factors(dimension, word, words)
            yield WordMatrix(start + at - begin, 1, stop - at, lead, weight, columns)
        else:
            rows = min((end - at) // block, PIECE_WORDS >> COLUMN_BITS)
            stop = at + rows * block
            along = weight * high_factors(dimension, np.arange(high, high + rows, dtype=np.uint64))
            yield WordMatrix(
                start + at - begin, rows, block, 0, along, column_factors(dimension, 0, COLUMNS)
            )
        at = stop


def sum_of(data: Bytes, piece: WordMatrix, scratch: Words) -> tuple[int, int]:
    """Return the weighted sums of a piece, one of each channel, modulo 2**32.

    Args:
        data: The bytes of the piece.
        piece: The piece.
        scratch: Memory for as many words as the piece has.
    """
    words = piece.column_factors.shape[1]
    folded = folded_words(
        data.reshape(piece.rows, piece.row_bytes), piece.lead, words, scratch
    ).reshape(piece.rows, words)
    along = piece.row_factors
    # No matrix products: numpy has threads of its own for those of floats, and none for integers.
    if piece.rows > 1 and words < _FEW_COLUMNS:
        weights = (along[:, None] * piece.column_factors[:, None, :]).reshape(CHANNELS, -1)
        return _sum_both_channels(folded.reshape(-1), weights, 1)
    if piece.rows > 1:
        return _sum_both_channels(np.einsum("i,ij->j", along, folded), piece.column_factors, 1)
    return _sum_both_channels(folded[0], piece.column_factors, int(along[0]))


def _sum_both_channels(words: Words, weights: Words, factor: int) -> tuple[int, int]:
    one, two = (
        int(np.einsum("i,i->", words, channel)) * factor & 0xFFFFFFFF for channel in weights
    )
    return one, two


def folded_words(rows: Bytes, lead: int, words: int, scratch: Words) -> Words:
    """Return the words of rows of bytes, folded; `[rows, words]`, in `scratch` if that is enough.

    A word `p` becomes `p + p // 2**16` modulo 2**32, so that its upper bits move the sum in as many
    places as its lower ones.
    """
    count = len(rows) * words
    out = scratch[:count] if count <= len(scratch) else np.empty(count, np.uint32)
    if lead or rows.shape[1] != words * _WORD_BYTES:
        whole = np.zeros((len(rows), words * _WORD_BYTES), np.uint8)
        whole[:, lead : lead + rows.shape[1]] = rows
        rows = whole
    plain = rows.reshape(-1).view("<u4")
    np.right_shift(plain, 16, out=out)
    np.add(out, plain, out=out)
    return out.reshape(len(rows), words)
