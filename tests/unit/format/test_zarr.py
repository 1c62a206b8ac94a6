"""Chunk shapes, and zarr v3 as real TensorStore reads and writes it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt._format.array_format import (
    DTYPES,
    choose_chunk,
    chunk_key,
    stored_dtype,
    zarr_metadata,
    zarr_metadata_bytes,
)
from ckpt._format.regions import Region, chunk_grid, chunk_region
from ckpt.testing.strategies import arrays

SHORT = st.integers(1, 12)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


@st.composite
def sharded_shapes(
    draw: st.DrawFn,
    lengths: st.SearchStrategy[int] = SHORT,
    parts: tuple[int, ...] = (1, 2, 3),
) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """A global shape, a shard shape that divides it, an item size and a target."""
    shard = tuple(draw(st.lists(lengths, max_size=3)))
    shape = tuple(n * draw(st.sampled_from(parts)) for n in shard)
    itemsize = draw(ITEMSIZES)
    largest = max(math.prod(shard) * itemsize, itemsize)
    small = st.integers(itemsize, min(8 * itemsize, largest))
    return shape, shard, itemsize, draw(st.one_of(small, st.integers(itemsize, largest)))


def chunks_of(shape: tuple[int, ...], chunk: tuple[int, ...]) -> list[Region]:
    return [chunk_region(place, chunk, shape) for place in np.ndindex(*chunk_grid(shape, chunk))]


# -- chunk shapes ---------------------------------------------------------------------------------


@given(
    st.one_of(
        sharded_shapes(st.sampled_from([1, 2, 8, 64, 1024]), parts=(1, 2, 8)),
        sharded_shapes(),
        sharded_shapes(st.integers(1, 10_000)),
    )
)
@example(((7,), (7,), 2, 5))
@example(((11, 2), (11, 2), 1, 7))
def test_no_chunk_is_larger_than_the_target(case: Any) -> None:
    shape, shard, itemsize, target = case
    assert math.prod(choose_chunk(shape, shard, itemsize, target)) * itemsize <= target


@given(sharded_shapes(st.integers(1, 10_000)))
def test_a_chunk_has_a_length_along_every_axis_and_no_shard_is_smaller(case: Any) -> None:
    shape, shard, itemsize, target = case
    chunk = choose_chunk(shape, shard, itemsize, target)
    assert all(1 <= n <= whole for n, whole in zip(chunk, shard, strict=True))


@given(sharded_shapes(st.sampled_from([1, 2, 6, 8, 12, 60, 64, 96])))
def test_no_chunk_crosses_a_shard_that_has_many_divisors(case: Any) -> None:
    shape, shard, itemsize, target = case
    chunk = choose_chunk(shape, shard, itemsize, target)
    # Axis by axis: all chunks of three axes would be a million.
    for length, whole, step in zip(shape, shard, chunk, strict=True):
        for region in chunks_of((length,), (step,)):
            start, end = region.offset[0], region.offset[0] + region.shape[0]
            assert start // whole == (end - 1) // whole


@pytest.mark.parametrize("shard", range(1, 64))
def test_chunks_divide_a_shard_where_a_divisor_comes_near(shard: int) -> None:
    for target in range(1, shard + 1):
        (chunk,) = choose_chunk((3 * shard,), (shard,), 1, target)
        near = [n for n in range(1, target + 1) if shard % n == 0 and 8 * n >= target]
        assert shard % chunk == 0 or not near


@given(sharded_shapes())
def test_chunks_tile_the_array(case: Any) -> None:
    shape, shard, itemsize, target = case
    count = np.zeros(shape, np.int64)
    for region in chunks_of(shape, choose_chunk(shape, shard, itemsize, target)):
        assert region.size
        count[region.slices] += 1
    assert (count == 1).all()


@given(sharded_shapes(parts=(1,)))
def test_a_chunk_of_an_array_on_one_device_is_one_run_of_memory(case: Any) -> None:
    shape, shard, itemsize, target = case
    for region in chunks_of(shape, choose_chunk(shape, shard, itemsize, target)):
        assert np.empty(shape)[region.slices].flags.c_contiguous


def test_a_chunk_of_a_shard_is_one_run_of_memory() -> None:
    for shard in [(8, 6), (4, 4, 4), (16,), (2, 3, 8)]:
        shape = (2 * shard[0], *shard[1:])
        for target in range(1, math.prod(shard) + 1):
            for region in chunks_of(shape, choose_chunk(shape, shard, 1, target)):
                start = (region.offset[0] // shard[0] * shard[0], *(0 for _ in shard[1:]))
                inside = region.within(Region(start, shard))
                assert np.empty(shard)[inside.slices].flags.c_contiguous


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 0), (0, 1 << 40)])
def test_an_array_without_elements_has_chunks_too(shape: tuple[int, ...]) -> None:
    chunk = choose_chunk(shape, shape, 8, 1 << 20)
    assert len(chunk) == len(shape)
    assert all(n >= 1 for n in chunk)
    assert math.prod(chunk) * 8 <= 1 << 20
    assert not math.prod(chunk_grid(shape, chunk))


@given(sharded_shapes())
def test_a_shard_that_fits_the_target_is_one_chunk(case: Any) -> None:
    shape, shard, itemsize, _ = case
    target = math.prod(shard) * itemsize
    assert choose_chunk(shape, shard, itemsize, target) == shard


def test_large_leading_axes_are_split_first() -> None:
    assert choose_chunk((1024, 1024), (1024, 1024), 4, 1 << 20) == (256, 1024)
    assert choose_chunk((1024, 1024), (512, 1024), 4, 1 << 20) == (256, 1024)
    assert choose_chunk((2, 1 << 20), (2, 1 << 20), 4, 1 << 20) == (1, 1 << 18)
    assert choose_chunk((1000, 1000), (125, 500), 4, 1 << 30) == (125, 500)


# -- zarr v3 --------------------------------------------------------------------------------------


def memory() -> ts.KvStore:
    return ts.KvStore.open({"driver": "memory"}).result()


def as_stored(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view(stored_dtype(array.dtype.name))


def encoded_chunk(array: np.ndarray[Any, Any], region: Region, chunk: tuple[int, ...]) -> bytes:
    """The chunk as the format describes it: C order, little endian, zeros beyond the array."""
    block = np.zeros(chunk, array.dtype)
    block[tuple(slice(n) for n in region.shape)] = array[region.slices]
    return block.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


@st.composite
def chunked(draw: st.DrawFn, dtype: str) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    shapes = st.sampled_from([(3, 4), (5,), (7, 1)])
    array = np.ascontiguousarray(draw(arrays(DTYPES[dtype], shapes)))
    return array, tuple(draw(st.integers(1, n)) for n in array.shape)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@given(data=st.data())
def test_what_tensorstore_writes_are_the_raw_bytes(dtype: str, data: st.DataObject) -> None:
    array, chunk = data.draw(chunked(dtype))
    store = memory()
    opened = ts.open(
        {
            "driver": "zarr3",
            "metadata": zarr_metadata(array.shape, chunk, dtype),
            "store_data_equal_to_fill_value": True,
        },
        kvstore=store / "leaf/",
        create=True,
    ).result()
    opened.write(as_stored(array)).result()
    for place in np.ndindex(*chunk_grid(array.shape, chunk)):
        stored = store.read(f"leaf/{chunk_key(place)}").result()
        region = chunk_region(place, chunk, array.shape)
        assert stored.value == encoded_chunk(array, region, chunk)
    found = json.loads(store.read("leaf/zarr.json").result().value)
    assert found == json.loads(zarr_metadata_bytes(array.shape, chunk, dtype))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@given(data=st.data())
def test_tensorstore_reads_what_is_encoded_by_hand(dtype: str, data: st.DataObject) -> None:
    array, chunk = data.draw(chunked(dtype))
    store = memory()
    store.write("leaf/zarr.json", zarr_metadata_bytes(array.shape, chunk, dtype)).result()
    for place in np.ndindex(*chunk_grid(array.shape, chunk)):
        region = chunk_region(place, chunk, array.shape)
        value = encoded_chunk(array, region, chunk)
        store.write(f"leaf/{chunk_key(place)}", value).result()
    opened = ts.open({"driver": "zarr3"}, kvstore=store / "leaf/", open=True).result()
    assert opened.dtype.name == stored_dtype(dtype)
    found = np.ascontiguousarray(opened.read().result())
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,) * 32])
def test_tensorstore_opens_arrays_without_axes_or_elements(
    dtype: str, shape: tuple[int, ...]
) -> None:
    array = np.ones(shape, DTYPES[dtype])
    chunk = choose_chunk(shape, shape, array.dtype.itemsize, 1 << 20)
    store = memory()
    store.write("leaf/zarr.json", zarr_metadata_bytes(shape, chunk, dtype)).result()
    if array.size:
        store.write(f"leaf/{chunk_key((0,) * len(shape))}", array.tobytes()).result()
    opened = ts.open({"driver": "zarr3"}, kvstore=store / "leaf/", open=True).result()
    found = opened.read().result()
    assert found.shape == shape
    assert found.tobytes() == array.tobytes()


def test_a_dtype_zarr_has_no_name_for_is_stored_as_its_bytes() -> None:
    others = {name: stored_dtype(name) for name in DTYPES if stored_dtype(name) != name}
    assert set(others.values()) == {"uint8"}
    assert set(others) == {"uint2", "uint4", "float8_e4m3"}


def test_chunk_keys_are_those_of_the_default_encoding() -> None:
    assert chunk_key(()) == "c"
    assert chunk_key((0,)) == "c/0"
    assert chunk_key((1, 20, 3)) == "c/1/20/3"
