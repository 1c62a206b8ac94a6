"""Values in pieces: indexes, pieces and figures, compared with numpy on whole arrays."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis.extra.numpy as arrays
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt._inspection.values.leaf_index import LeafIndex, parse_index, pieces_of, whole_index
from ckpt._inspection.values.shown_leaf import ArrayStatistics, RunningStatistics
from ckpt.errors import InvalidArgumentError

Array = np.ndarray[Any, Any]

DTYPES = ["bool", "int8", "uint8", "int64", "uint64", "float16", "float32", "float64"]
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)


def index_text(index: Any) -> str:
    parts = index if isinstance(index, tuple) else (index,)
    texts = []
    for part in parts:
        if isinstance(part, slice):
            ends = ("" if each is None else str(each) for each in (part.start, part.stop))
            step = "" if part.step is None else f":{part.step}"
            texts.append(":".join(ends) + step)
        else:
            texts.append("..." if part is ... else str(part))
    return ", ".join(texts)


@given(st.data())
def test_an_index_read_in_pieces_takes_what_numpy_takes(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    array = np.arange(math.prod(shape)).reshape(shape)
    text = index_text(data.draw(arrays.basic_indices(shape, min_dims=0)))
    if not text:
        return
    index = parse_index(text, shape)
    expected = eval(f"array[{text}]", {"array": array})
    assert index.shape == expected.shape
    chunk = tuple(data.draw(st.integers(1, max(n, 1))) for n in shape)
    found = collected(array, index, chunk, data.draw(st.integers(1, 400)))
    np.testing.assert_array_equal(np.sort(found), np.sort(expected.reshape(-1)))


@pytest.mark.parametrize("most_bytes", [1, 200, 100_000])
@pytest.mark.parametrize("text", ["::3, ::-2", "1::7, 5", "-1::-4", ":, 8:2:-3", "..., 3:4"])
def test_a_part_with_steps_is_cut_at_chunks(text: str, most_bytes: int) -> None:
    array = np.arange(180).reshape(20, 9)
    expected = eval(f"array[{text}]", {"array": array})
    found = collected(array, parse_index(text, array.shape), (4, 2), most_bytes)
    np.testing.assert_array_equal(np.sort(found), np.sort(expected.reshape(-1)))


def collected(array: Array, index: LeafIndex, chunk: tuple[int, ...], most_bytes: int) -> Array:
    """Return all elements of all pieces, and check the pieces."""
    seen: set[tuple[int, ...]] = set()
    taken = [np.zeros(0, array.dtype)]
    for piece in pieces_of(index, chunk, array.dtype.itemsize, most_bytes):
        box: Any = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
        within: Any = piece.within
        places = [
            range(o // c, (o + n - 1) // c + 1)
            for o, n, c in zip(piece.offset, piece.shape, chunk, strict=True)
        ]
        chunks = set(itertools.product(*places))
        assert not chunks & seen, "a chunk is read twice"
        seen |= chunks
        part = array[(*box, ...)][(*within, ...)]
        assert part.size, "a piece without elements is read"
        assert len(chunks) == 1 or array[(*box, ...)].nbytes <= most_bytes
        taken.append(part.reshape(-1))
    return np.concatenate(taken)


@pytest.mark.parametrize(
    "text", ["", " ", "a", "0x1", "1:2:3:4", "1.0", "None", "[0]", ":b", "--1"]
)
def test_what_is_no_basic_index_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is no slice"):
        parse_index(text, (3,))


def figures(array: Array, cuts: list[int]) -> ArrayStatistics:
    found = RunningStatistics(array.dtype)
    for piece in np.split(array.reshape(-1), sorted(cuts)):
        found.add(piece)
    return found.result()


@given(st.data())
def test_figures_of_pieces_are_those_of_numpy(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    array = data.draw(arrays.arrays(dtype, st.integers(0, 300)))
    check(array, data.draw(st.lists(st.integers(0, array.size), max_size=4)))


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "int4"]
)
def test_figures_of_small_dtypes(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    limit = 1 << (4 if "4_e2" in name or name == "int4" else 8 * dtype.itemsize)
    bits = np.arange(limit).astype(f"u{dtype.itemsize}")
    array = np.arange(-8, 8).astype(dtype) if name == "int4" else bits.view(dtype)
    check(array, [3, len(array) // 2])


def test_figures_of_complex_numbers_are_those_of_their_absolute_values() -> None:
    found = figures(np.array([3 + 4j, 0, complex(math.nan, 1), complex(math.inf, 0)]), [1])
    assert (found.min, found.max, found.mean, found.nan, found.inf) == (0, 5, 2.5, 1, 1)


@pytest.mark.parametrize(
    "values",
    [
        [1e308, -1e308],
        [4e43, -1e-283],
        [5e-324, 0.0],
        [1e-200, 3e-200],
        [1e9, 1e9 + 1e-6],
        [0.0] * 3,
    ],
)
def test_figures_at_the_ends_of_the_range(values: list[float]) -> None:
    check(np.array(values), [1])
    check(np.array(values * 50), [1, 60])


def check(array: Array, cuts: list[int]) -> None:
    """Compare the figures of an array in pieces with those of numpy."""
    found = figures(array, cuts)
    is_whole = array.dtype.kind in "biu" or "int" in array.dtype.name
    with np.errstate(invalid="ignore"):
        wide = array.astype(object if is_whole else np.float64)
    finite = wide if is_whole else wide[np.isfinite(wide)]
    nans = 0 if is_whole else int(np.isnan(wide).sum())
    assert (found.nan, found.inf) == (nans, len(wide) - len(finite) - nans)
    if not len(finite):
        assert (found.min, found.max, found.mean, found.std) == (None,) * 4
        assert found.histogram == []
        return
    assert (found.min, found.max) == (min(finite), max(finite))
    exact = finite.astype(np.longdouble)
    mean = exact.mean()
    largest = float(max(abs(exact)))
    assert found.mean == pytest.approx(float(mean), rel=1e-9, abs=largest * 1e-12)
    assert found.std == pytest.approx(float(exact.std()), rel=1e-7, abs=largest * 1e-12)
    floats = finite.astype(np.float64)
    assert 1 <= len(found.histogram) <= 16
    assert found.histogram[0].count > 0
    assert found.histogram[-1].count > 0
    for each in found.histogram:
        # Beyond the range of float64 there is no end of the last bin.
        is_last = each.high >= np.finfo(np.float64).max
        below = (floats <= each.high) if is_last else (floats < each.high)
        assert each.count == int(((floats >= each.low) & below).sum())
    assert sum(each.count for each in found.histogram) == len(finite)


def test_the_whole_index_takes_everything() -> None:
    index = whole_index((3, 4))
    assert (index.shape, index.size) == ((3, 4), 12)
    assert whole_index(()).size == 1
