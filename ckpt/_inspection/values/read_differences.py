"""Differences between the arrays of two checkpoints, which are both read piece by piece."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._inspection.differences import CheckpointDifferences, ComparedArray, PairedArray, compare
from ckpt._inspection.locations import Checkpoint
from ckpt._inspection.values.leaf_index import (
    PIECE_BYTES,
    PieceReader,
    WantedPiece,
    batched,
    pieces_of,
    whole_index,
)
from ckpt.errors import CorruptCheckpointError

Array = np.ndarray[Any, Any]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Naturals = np.ndarray[Any, np.dtype[np.uint64]]

# Number of elements that are compared together; they stay in the cache of a core.
_SLICE = 1 << 16


class ArrayChange(Struct, frozen=True):
    """The differences between two arrays.

    Two NaN are equal, and so are 0.0 and -0.0; `bits` counts elements that differ only in this way.

    Attributes:
        size: Number of elements of each array.
        different: Number of elements that differ.
        bits: Number of equal elements that are stored with other bits.
        nan: Number of elements that are NaN in only one of the arrays.
        inf: Number of other elements that are infinite in one array, or in both with other signs.
        max: The greatest absolute difference of elements that are finite in both; None if there are
            none, and for PRNG keys.
        mean: The mean absolute difference of these elements.
        ulps: The greatest difference of these elements in units in the last place, for floating
            dtypes: the number of steps from one number of the dtype to the next. None for other
            dtypes.
    """

    size: int
    different: int
    bits: int
    nan: int
    inf: int
    max: float | int | None
    mean: float | None
    ulps: int | None


class RunningChanges:
    """Accumulates the differences between two arrays, from pieces in any order."""

    def __init__(self, dtype: np.dtype[Any], *, is_key: bool = False) -> None:
        """Begin without elements of `dtype`; for PRNG keys, no sizes of differences are given."""
        self._is_whole = dtype.kind in "biu" or "int" in dtype.name
        self._is_key = is_key
        self._size = self._different = self._bits = self._nan = self._inf = 0
        self._count = 0
        self._max: float | int | None = None
        self._ulps: int | None = None
        self._sum = np.longdouble(0)

    def add(self, one: Array, other: Array) -> None:
        """Add a piece of each array."""
        # Contiguous in memory, so that their bits can be viewed.
        first, second = (np.ascontiguousarray(each).reshape(-1) for each in (one, other))
        for start in range(0, len(first), _SLICE):
            self._add(first[start : start + _SLICE], second[start : start + _SLICE])

    def _add(self, one: Array, other: Array) -> None:
        self._size += len(one)
        unlike = _bytes_of(one) != _bytes_of(other)
        changed = unlike.any(axis=1)
        if not changed.any():
            self._count += len(one)
            self._max = self._max or 0
            if not self._is_whole:
                # Equal NaN and infinities have no difference; for other numbers it is 0.
                self._ulps = self._ulps or 0
                self._count -= int((~np.isfinite(_wide(one))).sum())
            return
        if self._is_whole:
            self._different += int(changed.sum())
            self._note(_distances(_naturals(one), _naturals(other)))
            return
        first, second = _wide(one), _wide(other)
        nans = np.isnan(first), np.isnan(second)
        differ = (first != second) & ~(nans[0] & nans[1])
        self._different += int(differ.sum())
        self._bits += int((changed & ~differ).sum())
        self._nan += int((nans[0] ^ nans[1]).sum())
        finite = np.isfinite(first) & np.isfinite(second)
        self._inf += int((differ & ~finite & ~nans[0] & ~nans[1]).sum())
        if finite.any():
            with np.errstate(over="ignore"):
                sizes = np.abs(first[finite] - second[finite]).astype(np.float64, copy=False)
            self._note(np.minimum(sizes, sys.float_info.max))
            steps = _ulps(one[finite], other[finite])
            self._ulps = max(self._ulps or 0, int(steps.max()))

    def _note(self, sizes: Array) -> None:
        self._count += len(sizes)
        self._max = max(self._max or 0, sizes.max().item())
        self._sum += sizes.astype(np.float64, copy=False).sum(dtype=np.longdouble)

    def result(self) -> ArrayChange:
        """Return the differences between the pieces so far."""
        mean = float(self._sum / self._count) if self._count else None
        has_sizes = self._count > 0 and not self._is_key
        return ArrayChange(
            self._size,
            self._different,
            self._bits,
            self._nan,
            self._inf,
            self._max if has_sizes else None,
            mean if has_sizes else None,
            self._ulps if has_sizes else None,
        )


def _bytes_of(array: Array) -> Array:
    return array.view(np.uint8).reshape(len(array), array.dtype.itemsize)


def _wide(array: Array) -> Array:
    """Return numbers in float64 or complex128, which represent all of them exactly."""
    # numpy warns about signalling NaN.
    with np.errstate(invalid="ignore"):
        return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _naturals(array: Array) -> Naturals:
    """Return integers as uint64, with 2**63 added to signed ones, which keeps their order."""
    if array.dtype.kind in "bu" or "uint" in array.dtype.name:
        return array.astype(np.uint64)
    return array.astype(np.int64).view(np.uint64) ^ np.uint64(1 << 63)


def _distances(one: Naturals, other: Naturals) -> Naturals:
    return np.where(one > other, one - other, other - one)


def _ulps(one: Array, other: Array) -> Naturals:
    """Return the number of steps from float to next float that lie between two finite floats."""
    if one.dtype.kind == "c":
        parts = np.dtype(f"f{one.dtype.itemsize // 2}")
        one, other = one.view(parts), other.view(parts)
    return _distances(_ranks(one), _ranks(other))


def _ranks(array: Array) -> Naturals:
    """Return the rank of every number among all numbers of its dtype; 0.0 and -0.0 share one."""
    size = array.dtype.itemsize
    bits = array.view(f"u{size}").astype(np.uint64)
    name = array.dtype.name
    # float4_e2m1fn has fewer bits than its byte, and float8_e8m0fnu has no sign.
    width = 4 if name == "float4_e2m1fn" else 8 * size
    if name == "float8_e8m0fnu":
        return bits
    sign = np.uint64(1 << (width - 1))
    middle = np.uint64(1 << 63)
    below = middle - (bits & (sign - np.uint64(1)))
    return np.where(bits & sign, below, middle + bits)


async def compare_values(before: Checkpoint, after: Checkpoint) -> CheckpointDifferences:
    """Return how two checkpoints differ; arrays that digests do not call the same are read.

    Raises:
        CorruptCheckpointError: A chunk is damaged; names the checkpoint and the leaf.
    """
    found, pairs = compare(before, after)
    by_item: dict[str, list[PairedArray]] = {}
    for pair in pairs:
        by_item.setdefault(pair.item, []).append(pair)
    compared: list[ComparedArray] = []
    for item, members in by_item.items():
        changes = await _changes(before, after, item, members)
        compared += [
            replace(pair.compared, change=change)
            for pair, change in zip(members, changes, strict=True)
        ]
    unlike = [each for each in compared if each.change and each.change.different + each.change.bits]
    unlike.sort(key=_weight, reverse=True)
    same = found.same - len(found.same_by_fingerprint) + len(compared) - len(unlike)
    found = replace(
        found,
        contents=unlike,
        not_compared=[],
        same=same,
        values_read=True,
        same_by_fingerprint=[],
    )
    lists = (found.removed, found.added, found.types, found.values, found.items, found.contents)
    return replace(found, is_same=not any((*lists, found.metrics, found.metadata)))


def _weight(compared: ComparedArray) -> tuple[bool, float, int]:
    """Return the sort key of a change: numbers that are not finite in one array count most."""
    change = compared.change
    assert change is not None
    return change.nan + change.inf > 0, float(change.max or 0), change.different


async def _changes(
    before: Checkpoint, after: Checkpoint, item: str, pairs: list[PairedArray]
) -> list[ArrayChange]:
    """Return the differences between arrays of an item, in the order of `pairs`."""
    from ckpt._format.array_format import parse_dtype
    from ckpt._runtime.threads import run_in_thread

    first, second = PieceReader(before, item), PieceReader(after, item)
    numbers = {pair.numbers[0]: pair for pair in pairs}
    running = {}
    wanted = []
    for number, pair in numbers.items():
        form = pair.form
        dtype = parse_dtype(form.dtype)
        running[number] = RunningChanges(dtype, is_key=form.kind == "key")
        index = whole_index(form.shape)
        wanted += [
            WantedPiece(number, each, math.prod(each.shape) * dtype.itemsize)
            for each in pieces_of(index, form.chunks, dtype.itemsize, PIECE_BYTES)
        ]

    def take(batch: list[WantedPiece], one: list[Array], other: list[Array]) -> None:
        for each, mine, theirs in zip(batch, one, other, strict=True):
            running[each.leaf].add(mine, theirs)

    for batch in batched(wanted):
        others = [replace(each, leaf=numbers[each.leaf].numbers[1]) for each in batch]
        with _naming_checkpoint(before):
            one = await first.read(batch)
        with _naming_checkpoint(after):
            other = await second.read(others)
        await run_in_thread(take, batch, one, other)
    return [running[number].result() for number in numbers]


@contextlib.contextmanager
def _naming_checkpoint(checkpoint: Checkpoint) -> Iterator[None]:
    """Name the damaged one of both checkpoints in errors."""
    try:
        yield
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{checkpoint.location}: {error.message}",
            step=error.step,
            item=error.item,
            leaf=error.leaf,
        ) from error
