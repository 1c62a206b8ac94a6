"""Vital signs: equal however an array is cut, another one for every flipped bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt._format.array_format import DTYPES
from ckpt._vitals.signs import (
    SIGNS,
    LeafSigns,
    box_signs,
    join_signs,
    no_signs,
    signs_of,
    whole_signs,
)
from tests.support.signed_leaves import record_of

Array = np.ndarray[Any, Any]
NAMES = sorted(DTYPES)
WORD = 0xFFFFFFFF


def odd(index: int, dimension: int, table: int) -> int:
    """The odd number of a digit, as docs/reference/format.md defines it."""
    x = (index + 0x9E3779B9 * (1 + table + 4 * dimension)) & WORD
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return (x ^ x >> 16) | 1


def factor(index: int, dimension: int, table: int) -> int:
    lower, high = index % 4096, index // 4096
    return odd(lower, dimension, table) * (odd(high & WORD, dimension, 3) if high else 1)


def slow_fingerprint(array: Array) -> str:
    """The fingerprint word by word, as docs/reference/format.md defines it."""
    shape = array.shape or (1,)
    rows = math.prod(shape[:-1])
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()
    width = len(data) // rows if rows else 0
    sums = [0, 0]
    for row, place in enumerate(itertools.product(*map(range, shape[:-1]))):
        weight = math.prod(factor(index, d, 2) for d, index in enumerate(place))
        mine = data[row * width : (row + 1) * width]
        for column in range(0, width, 4):
            word = int.from_bytes(mine[column : column + 4], "little")
            for channel in range(2):
                last = factor(column // 4, len(shape) - 1, channel)
                sums[channel] += (word + (word >> 16)) * weight * last
    return f"{sums[1] & WORD:08x}{sums[0] & WORD:08x}"


def values_of(array: Array) -> Array:
    """The values as 64-bit floats, through the dtype's own casts."""
    if array.dtype.kind == "c":
        return np.abs(array.astype(np.complex128)).reshape(-1)
    return array.astype(np.float64).reshape(-1)


def signs_of_box(array: Array, offset: tuple[int, ...]) -> Array:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    taken: list[bytes] = []
    record = box_signs(raw, offset, array.shape, array.dtype, lambda d: taken.append(bytes(d)))
    assert b"".join(taken) == raw.tobytes()
    return record


def signs(array: Array) -> LeafSigns:
    found = signs_of(signs_of_box(array, (0,) * array.ndim))
    assert found is not None
    return found


def random_array(shape: tuple[int, ...], name: str, seed: int) -> Array:
    """Any bytes, so that NaN, infinities and numbers below the normal ones are among them."""
    dtype = DTYPES[name]
    rng = np.random.default_rng(seed)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    if name in ("int2", "int4", "uint2", "uint4", "float4_e2m1fn"):
        return rng.integers(-1 if name[0] == "i" else 0, 2, shape).astype(dtype)
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def boxes(shape: tuple[int, ...], cuts: list[list[int]]) -> Iterator[tuple[slice, ...]]:
    edges = [
        sorted({0, n, *(c % (n + 1) for c in cut)}) for n, cut in zip(shape, cuts, strict=True)
    ]
    yield from itertools.product(*(map(slice, e[:-1], e[1:]) for e in edges))


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
cut_points = st.lists(st.lists(st.integers(0, 5000), max_size=2), min_size=4, max_size=4)


@given(shapes, st.sampled_from(NAMES), cut_points, st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None)
def test_the_boxes_of_an_array_add_up_to_what_it_is_word_by_word(
    shape: tuple[int, ...], name: str, cuts: list[list[int]], seed: int
) -> None:
    array = random_array(shape, name, seed)
    parts = [
        signs_of_box(array[box], tuple(each.start for each in box))
        for box in boxes(shape, cuts[: len(shape)])
    ]
    joined = join_signs(np.array(parts, SIGNS), np.zeros(len(parts), np.int64), 1)[0]
    found = signs_of(joined)
    assert found is not None
    assert found.fingerprint == slow_fingerprint(array) == signs(array).fingerprint
    with np.errstate(all="ignore"):
        values = values_of(array)
        finite = np.abs(values[np.isfinite(values)])
        most = finite.max(initial=0.0)
        norm = most * math.sqrt(np.square(finite / most).sum()) if most else 0.0
    assert found.nonfinite == len(values) - len(finite)
    assert found.absmax == pytest.approx(most, rel=1e-6)
    assert found.norm == pytest.approx(min(norm, np.finfo(np.float64).max), rel=1e-5)


@pytest.mark.parametrize(
    "shape",
    [(70_001,), (3, 66_000), (5, 12_289), (9000, 2), (2, 4097, 3), (130, 513), (1, 1, 8193)],
)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "complex128"])
def test_large_arrays_are_cut_anywhere(shape: tuple[int, ...], name: str) -> None:
    array = random_array(shape, name, 7)
    whole = signs(array)
    rng = np.random.default_rng(1)
    cuts = [rng.integers(0, n + 1, 2).tolist() for n in shape]
    parts = [
        signs_of_box(array[box], tuple(each.start for each in box)) for box in boxes(shape, cuts)
    ]
    found = signs_of(join_signs(np.array(parts, SIGNS), np.zeros(len(parts), np.int64), 1)[0])
    assert found is not None
    assert (found.fingerprint, found.nonfinite) == (whole.fingerprint, whole.nonfinite)
    assert found.norm == pytest.approx(whole.norm, rel=1e-6)
    assert found.absmax == whole.absmax


@pytest.mark.parametrize("shape", [(70_001,), (5, 12_289), (9000, 2)])
def test_large_arrays_are_what_they_are_word_by_word(shape: tuple[int, ...]) -> None:
    array = random_array(shape, "float32", 3)
    assert signs(array).fingerprint == slow_fingerprint(array)


@given(shapes.filter(math.prod), st.sampled_from(NAMES), st.data())
@settings(max_examples=200, deadline=None)
def test_every_flipped_bit_changes_both_channels(
    shape: tuple[int, ...], name: str, data: st.DataObject
) -> None:
    array = random_array(shape, name, data.draw(st.integers(0, 1 << 32)))
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    before = box_signs(raw, (0,) * len(shape), shape, array.dtype, len)["fingerprint"]
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw = raw.copy()
    raw[bit // 8] ^= 1 << bit % 8
    after = box_signs(raw, (0,) * len(shape), shape, array.dtype, len)["fingerprint"]
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_signs_and_places_of_values_count() -> None:
    array = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    flipped = array.copy()
    flipped[0, 0], flipped[5, 7] = -array[0, 0], -array[5, 7]
    rows, columns = array[::-1].copy(), array[:, ::-1].copy()
    others = [-array, flipped, rows, columns, np.roll(array, 1, 0), array.T.copy()]
    found = {signs(each).fingerprint for each in (array, *others)}
    assert len(found) == len(others) + 1


def test_two_flipped_signs_are_found_at_any_two_places() -> None:
    array = np.ones((8, 4096), np.float32)
    before = signs(array).fingerprint
    rng = np.random.default_rng(0)
    for one, two in rng.integers(0, array.size, (500, 2)).tolist():
        if one != two:
            array.reshape(-1)[[one, two]] = -1
            assert signs(array).fingerprint != before
            array.reshape(-1)[[one, two]] = 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [n for n in NAMES if "float" in n or "complex" in n])
def test_values_that_are_not_finite_are_counted(name: str, value: float) -> None:
    array = np.ones(20_000, DTYPES[name])
    try:
        array[[3, 9_000, 19_999]] = value
    except (ValueError, OverflowError):
        pytest.skip("the dtype cannot hold it")
    expected = int((~np.isfinite(values_of(array))).sum())
    found = signs(array)
    assert found.nonfinite == expected
    plain = values_of(array)[np.isfinite(values_of(array))]
    assert found.norm == pytest.approx(math.sqrt(np.square(plain).sum()), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-20, 1e20, 3e38])
def test_the_norm_of_very_small_and_very_large_values_is_right(scale: float) -> None:
    array = np.full(10_000, scale, np.float32)
    assert signs(array).norm == pytest.approx(float(array[0]) * 100, rel=1e-6)
    assert signs(array).absmax == float(array[0])


@pytest.mark.parametrize("scale", [5e-324, 1e-200, 1e200])
def test_no_square_of_a_double_is_lost(scale: float) -> None:
    assert signs(np.full(10_000, scale)).norm == pytest.approx(scale * 100, rel=1e-6)
    assert signs(np.full(10_000, 1.7e308)).norm == np.finfo(np.float64).max


@given(st.lists(st.integers(1, 6), max_size=3).map(tuple), st.sampled_from(NAMES))
@settings(max_examples=100, deadline=None)
def test_many_small_arrays_together_have_the_signs_of_each(
    shape: tuple[int, ...], name: str
) -> None:
    arrays = [random_array(shape, name, seed) for seed in range(5)]
    raw = np.stack([each.reshape(-1).view(np.uint8) for each in arrays])
    for array, record in zip(arrays, whole_signs(raw, shape, DTYPES[name]), strict=True):
        found, alone = signs_of(record), signs(array)
        assert found is not None
        assert (found.fingerprint, found.nonfinite) == (alone.fingerprint, alone.nonfinite)
        assert found.norm == pytest.approx(alone.norm, rel=1e-6)
        assert found.absmax == alone.absmax


def test_what_is_not_known_of_a_part_is_not_known_of_the_whole() -> None:
    known = signs_of_box(np.ones(3), (0,))
    records = np.array([known, no_signs(1)[0], known], SIGNS)
    joined = join_signs(records, np.array([0, 0, 1]), 3)
    assert signs_of(joined[0]) is None
    assert signs_of(joined[1]) == signs_of(known)
    assert signs_of(joined[2]) == LeafSigns("0" * 16, 0, 0.0, 0.0)
    assert record_of(signs_of(known)) == known
