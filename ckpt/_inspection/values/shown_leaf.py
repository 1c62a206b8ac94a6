"""One leaf of a checkpoint with its values and statistics.

Statistics of arrays, computed piece by piece in one pass with little memory. Pure. All figures are
of the finite elements; for complex numbers, of their absolute values.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from msgspec import Struct

from ckpt._inspection.leaf_records import ChosenLeaf, LeafRecord
from ckpt._inspection.locations import Checkpoint
from ckpt._inspection.values.leaf_index import (
    PIECE_BYTES,
    LeafIndex,
    PieceReader,
    WantedPiece,
    parse_index,
    pieces_of,
    whole_index,
)
from ckpt.errors import InvalidArgumentError

Array = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float64]]

# Number of elements that are processed together; they stay in the cache of a core.
_SLICE = 1 << 16
_BINS = 1024
# Outside of these bounds, squares leave the range of float64.
_LEAST_SQUARED, _MOST_SQUARED = 1e-140, 1e140


class HistogramBin(Struct, frozen=True):
    """A bin: the number of elements that are at least `low` and less than `high`."""

    low: float
    high: float
    count: int


class ArrayStatistics(Struct, frozen=True):
    """Statistics of an array; figures are None if it has no finite elements.

    Attributes:
        min, max: The least and the greatest element.
        mean: The mean.
        std: The standard deviation of the whole population, as in numpy.
        nan: Number of elements that are NaN.
        inf: Number of infinite elements.
        histogram: The finite elements, in at most 16 bins.
    """

    min: float | int | None
    max: float | int | None
    mean: float | None
    std: float | None
    nan: int
    inf: int
    histogram: list[HistogramBin]


class RunningStatistics:
    """Accumulates the statistics of an array, from pieces in any order."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        # The dtypes of ml_dtypes have the kind V; their integers are named like those of numpy.
        self._is_whole = dtype.kind in "biu" or (dtype.kind not in "fc" and "int" in dtype.name)
        self._count = self._nan = self._inf = 0
        self._min: float | int | None = None
        self._max: float | int | None = None
        # Wider than float64 on machines that have such numbers.
        self._mean = self._squares = np.longdouble(0)
        self._histogram = GrowingHistogram(0 if self._is_whole else None)

    def add(self, array: Array) -> None:
        """Add a piece."""
        flat = array.reshape(-1)
        for start in range(0, len(flat), _SLICE):
            self._add(flat[start : start + _SLICE])

    def _add(self, values: Array) -> None:
        if self._is_whole:
            if values.dtype.itemsize < 8:
                values = values.astype(np.int64)
        else:
            values = self._finite(values)
        if not len(values):
            return
        low, high = values.min().item(), values.max().item()
        self._min = low if self._min is None else min(self._min, low)
        self._max = high if self._max is None else max(self._max, high)
        floats: Floats = values.astype(np.float64, copy=False)
        self._add_moments(floats, max(abs(low), abs(high)))
        self._histogram.add(floats)

    def _finite(self, values: Array) -> Floats:
        # numpy warns about signalling NaN.
        with np.errstate(invalid="ignore"):
            wide = values if values.dtype.kind == "c" else values.astype(np.float64)
        nan = np.isnan(wide)
        finite = np.isfinite(wide)
        nans = int(nan.sum())
        self._nan += nans
        self._inf += len(wide) - nans - int(finite.sum())
        if not finite.all():
            wide = wide[finite]
        if wide.dtype.kind != "c":
            return wide
        with np.errstate(over="ignore"):
            lengths: Floats = np.abs(wide).astype(np.float64, copy=False)
        return np.minimum(lengths, sys.float_info.max)

    def _add_moments(self, values: Floats, largest: float) -> None:
        wide: Any = values
        if largest and not _LEAST_SQUARED < largest < _MOST_SQUARED:
            wide = values.astype(np.longdouble)
        number = len(values)
        with np.errstate(all="ignore"):
            mean = np.longdouble(wide.mean())
            squares = np.longdouble(np.square(wide - mean.astype(wide.dtype)).sum())
            total = self._count + number
            step = mean - self._mean
            self._squares += squares + step * step * (np.longdouble(self._count) * number / total)
            self._mean += step * number / total
        self._count = total

    def result(self) -> ArrayStatistics:
        """Return the statistics of all pieces so far."""
        mean = std = None
        if self._count:
            mean = _finite_or_none(self._mean)
            std = _finite_or_none(np.sqrt(self._squares / self._count))
        bins = self._histogram.bins()
        return ArrayStatistics(self._min, self._max, mean, std, self._nan, self._inf, bins)


def _finite_or_none(value: np.longdouble) -> float | None:
    found = float(value)
    return found if math.isfinite(found) else None


class GrowingHistogram:
    """Counts numbers in bins whose width, a power of two, doubles when the range outgrows them.

    Bins begin at multiples of their width. Two neighbours can therefore become one without knowing
    their numbers, and the counts are exact, in one pass, in any order of the numbers.
    """

    def __init__(self, exponent: int | None = None) -> None:
        """Begin with bins of width `2 ** exponent`; if None, of a width for the first numbers."""
        self._exponent = exponent
        self._first = 0
        self._counts = np.zeros(0, np.int64)

    def add(self, values: Floats) -> None:
        """Count finite numbers; there must be at least one."""
        low, high = float(values.min()), float(values.max())
        exponent = _least_exponent(low, high)
        if self._exponent is None or exponent > self._exponent:
            self._widen(exponent)
        while True:
            assert self._exponent is not None
            first, last = (_bin(bound, self._exponent) for bound in (low, high))
            if len(self._counts):
                first = min(first, self._first)
                last = max(last, self._first + len(self._counts) - 1)
            if last - first < _BINS:
                break
            self._widen(self._exponent + 1)
        counts = np.zeros(last - first + 1, np.int64)
        at = self._first - first if len(self._counts) else 0
        counts[at : at + len(self._counts)] = self._counts
        scaled = np.ldexp(values, -self._exponent)
        if low < 0:
            # A negative number that becomes 0 by scaling belongs below zero.
            scaled[(scaled == 0) & (values < 0)] = -1
        numbers = np.floor(scaled).astype(np.int64) - first
        counts += np.bincount(numbers, minlength=len(counts))
        self._first, self._counts = first, counts

    def bins(self, most: int = 16) -> list[HistogramBin]:
        """Return the numbers in at most `most` bins of equal width."""
        if not len(self._counts):
            return []
        assert self._exponent is not None
        first, counts, shift = self._first, self._counts, 0
        while len(counts) > most:
            first, counts = _halved(first, counts)
            shift += 1
        exponent = self._exponent + shift
        return [
            HistogramBin(_edge(first + n, exponent), _edge(first + n + 1, exponent), count)
            for n, count in enumerate(counts.tolist())
        ]

    def _widen(self, exponent: int) -> None:
        if self._exponent is not None and len(self._counts):
            # The range of exponents bounds this loop to about 2,000 rounds.
            for _ in range(exponent - self._exponent):
                self._first, self._counts = _halved(self._first, self._counts)
        self._exponent = exponent


def _least_exponent(low: float, high: float) -> int:
    """Return the least exponent with which numbers fit the bins, and bin numbers fit 53 bits."""
    largest = max(abs(low), abs(high))
    span = high / _BINS - low / _BINS
    # Not below -1022: dividing by the exponent of subnormal numbers would overflow.
    exponents = [math.frexp(each)[1] for each in (span, largest * 2.0**-52) if each]
    return max(-1022, *exponents) if exponents else -1022


def _bin(value: float, exponent: int) -> int:
    return math.floor(math.ldexp(value, -exponent)) or (-1 if value < 0 else 0)


def _halved(first: int, counts: Array) -> tuple[int, Array]:
    """Return the bins of twice the width."""
    padded = np.zeros(len(counts) + (first & 1) + 1, np.int64)
    padded[first & 1 : (first & 1) + len(counts)] = counts
    pairs = padded[: len(padded) // 2 * 2].reshape(-1, 2).sum(axis=1)
    return first >> 1, pairs


def _edge(number: int, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.copysign(sys.float_info.max, number)


# numpy prints so many elements in full, and so many at both ends of longer axes.
_MOST_PRINTED, _EDGE = 1000, 3
# Python refuses to print integers of more bits in decimal by default.
_MOST_BITS = 14_000
# With more axes, the corners alone would be many elements.
_MOST_EDGE_AXES = 5


class ShownLeaf(Struct, frozen=True):
    """A leaf, or a part of one.

    Attributes:
        path: Path of the checkpoint.
        step: Its number, or None.
        leaf: Record of the leaf.
        index: The requested part, or None for the whole leaf.
        shape: Shape of that part; for PRNG keys, with the axis of their data.
        values: Its elements in nested lists, if there are at most 1,000; else None. Values that
            JSON has no numbers for (NaN, infinities, complex numbers) are text. For a leaf that is
            not an array, its value.
        statistics: Statistics of an array of numbers with at least one element; else None.
    """

    path: str
    step: int | None
    leaf: LeafRecord
    index: str | None
    shape: tuple[int, ...]
    values: Any
    statistics: ArrayStatistics | None


class PrintedArray(Struct, frozen=True):
    """An array for people: its elements, or only those at its edges if there are many.

    Attributes:
        elements: The elements; for a cut axis the first three, a placeholder for those left out,
            and the last three.
        is_cut: True if elements are left out.
    """

    elements: Array
    is_cut: bool


async def show_leaf(
    checkpoint: Checkpoint, chosen: ChosenLeaf
) -> tuple[ShownLeaf, PrintedArray | None]:
    """Return a leaf with its values and statistics; for an array, also the elements to print.

    An array is read once, in pieces of 32 MiB, or of one chunk if that is larger.

    Args:
        checkpoint: The checkpoint.
        chosen: The leaf, and its part.

    Raises:
        InvalidArgumentError: The leaf has no such part.
        CorruptCheckpointError: A chunk is damaged; names the leaf.
    """
    item, number, record, index = chosen.item, chosen.number, chosen.record, chosen.index
    manifest = checkpoint.opened.manifest
    if not record.is_array:
        if index is not None:
            raise InvalidArgumentError(
                f"{checkpoint.location}: {record.path!r:.200} is no array ({record.kind}), so that "
                f"there is no [{index:.80}] of it"
            )
        value = _value(checkpoint, item, number)
        return ShownLeaf(checkpoint.location, manifest.step, record, None, (), value, None), None
    part = whole_index(record.shape) if index is None else parse_index(index, record.shape)
    if record.kind == "key":
        data = (
            manifest.items[item]
            .leaves.forms[int(manifest.items[item].leaves.form[number])]
            .shape[-1]
        )
        part = LeafIndex((*part.axes, range(data)), (*part.kept, len(part.axes)))
    printed, statistics = await _read(PieceReader(checkpoint, item), number, record, part)
    values = None if printed.is_cut else _json(printed.elements)
    shown = ShownLeaf(
        checkpoint.location, manifest.step, record, index, part.shape, values, statistics
    )
    return shown, printed


def _value(checkpoint: Checkpoint, item: str, number: int) -> Any:
    from ckpt._tree.leaf_kinds import CALLABLE, decode_scalar

    leaf = checkpoint.opened.manifest.items[item].leaves.bare(number)
    value = leaf.value if leaf.kind == CALLABLE else decode_scalar(leaf)
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int) and abs(value) < 1 << 53:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        # Python refuses to print thousands of decimal digits.
        return hex(value)
    return str(value)


async def _read(
    arrays: PieceReader, number: int, record: LeafRecord, part: LeafIndex
) -> tuple[PrintedArray, ArrayStatistics | None]:
    import numpy as np

    from ckpt._format.array_format import parse_dtype
    from ckpt._runtime.threads import run_in_thread

    dtype = parse_dtype(record.dtype)
    chunk = record.chunks
    pieces = [
        WantedPiece(number, each, math.prod(each.shape) * dtype.itemsize)
        for each in pieces_of(part, chunk, dtype.itemsize, PIECE_BYTES)
    ]
    edges = [_edges(axis, part, record) for axis in part.axes]
    elements = np.zeros([len(axis) for axis in edges], dtype)
    statistics = None if record.kind == "key" else RunningStatistics(dtype)

    def take(batch: list[WantedPiece], found: list[Array]) -> None:
        for wanted, array in zip(batch, found, strict=True):
            _take_edges(elements, edges, wanted, array)
            if statistics is not None:
                statistics.add(array)

    async for batch, found in arrays.batches(pieces):
        await run_in_thread(take, batch, found)
    shape = [len(edges[axis]) for axis in part.kept]
    is_cut = elements.size < part.size
    has_figures = statistics is not None and part.size > 0
    figures = statistics.result() if statistics is not None and has_figures else None
    return PrintedArray(elements.reshape(shape), is_cut), figures


def _edges(axis: range, part: LeafIndex, record: LeafRecord) -> list[int]:
    """Return the indexes of an axis that are printed."""
    edge = _EDGE if len(part.kept) <= _MOST_EDGE_AXES else 1
    if part.size <= _MOST_PRINTED or len(axis) <= 2 * edge:
        return list(axis)
    # The index between both ends is the placeholder for those left out.
    return [*axis[: edge + 1], *axis[-edge:]]


def _take_edges(elements: Array, edges: list[list[int]], wanted: WantedPiece, array: Array) -> None:
    """Copy the elements of a piece that are printed."""
    import numpy as np

    piece = wanted.piece
    into, source = [], []
    for axis, start, length, within in zip(
        edges, piece.offset, piece.shape, piece.within, strict=True
    ):
        step = within.step or 1
        places = [n for n, index in enumerate(axis) if start <= index < start + length]
        into.append(places)
        source.append([(axis[n] - start - within.start) // step for n in places])
    if all(into):
        if into:
            elements[np.ix_(*into)] = array[np.ix_(*source)]
        else:
            elements[...] = array


def _json(array: Array) -> Any:
    import numpy as np

    kind = array.dtype.kind
    if kind in "biu":
        return array.tolist()
    if kind == "c":
        return np.vectorize(str, otypes=[object])(array).tolist() if array.size else array.tolist()
    if "int" in array.dtype.name:
        return array.astype(np.int64).tolist()
    with np.errstate(invalid="ignore"):
        plain = array.astype(np.float64)
    if np.isfinite(plain).all():
        return plain.tolist()
    texts = np.vectorize(lambda x: x if math.isfinite(x) else str(x), otypes=[object])
    return texts(plain).tolist()
