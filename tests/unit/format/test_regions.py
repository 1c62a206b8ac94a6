"""Regions, with numpy as the model; and those of shardings on eight CPU devices."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ckpt._format.regions import (
    Region,
    addressable_regions,
    chunk_grid,
    chunk_region,
    chunks_touching,
    whole,
)
from ckpt.testing.strategies import shapes

Shape = tuple[int, ...]


@st.composite
def regions_of(draw: st.DrawFn, shape: Shape) -> Region:
    """A region of an array of `shape`, empty ones included."""
    offset, sides = [], []
    for n in shape:
        start, end = sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
        offset.append(start)
        sides.append(end - start)
    return Region(tuple(offset), tuple(sides))


@st.composite
def regions(draw: st.DrawFn, count: int = 1) -> tuple[Shape, list[Region]]:
    shape = draw(shapes())
    return shape, [draw(regions_of(shape)) for _ in range(count)]


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[Shape, Shape]:
    shape = draw(shapes(max_side=7))
    return shape, tuple(draw(st.integers(1, max(n, 1) + 1)) for n in shape)


def cells(region: Region, shape: Shape) -> set[int]:
    """The flat indices of a region's elements."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    return set(numbers[region.slices].ravel().tolist())


@given(regions())
def test_a_region_is_a_numpy_index(case: tuple[Shape, list[Region]]) -> None:
    shape, (region,) = case
    part = np.empty(shape)[region.slices]
    assert part.shape == region.shape
    assert part.size == region.size


@given(shapes())
def test_the_whole_is_every_element(shape: Shape) -> None:
    assert whole(shape) == Region((0,) * len(shape), shape)
    assert len(cells(whole(shape), shape)) == np.prod(shape)


@given(regions(count=2))
def test_an_intersection_is_the_common_elements(case: tuple[Shape, list[Region]]) -> None:
    shape, (one, other) = case
    common = one.intersect(other)
    expected = cells(one, shape) & cells(other, shape)
    assert (cells(common, shape) if common is not None else set()) == expected
    assert (common is None) == (not expected)
    assert common == other.intersect(one)


@given(regions(count=2))
def test_within_makes_a_region_relative_to_another(case: tuple[Shape, list[Region]]) -> None:
    shape, (outer, other) = case
    inner = outer.intersect(other)
    if inner is None:
        return
    array = np.arange(int(np.prod(shape))).reshape(shape)
    relative = inner.within(outer)
    assert np.array_equal(array[outer.slices][relative.slices], array[inner.slices])


@pytest.mark.parametrize(
    "shape", [(), (1,), (4,), (3, 3), (1, 3), (3, 1), (2, 3, 2), (3, 1, 3), (2, 1, 2, 3)], ids=str
)
def test_contiguous_is_what_numpy_calls_contiguous(shape: Shape) -> None:
    array = np.empty(shape)
    spans = [[(a, b - a) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    for sides in itertools.product(*spans):
        region = Region(tuple(a for a, _ in sides), tuple(n for _, n in sides))
        assert region.is_contiguous_in(shape) == array[region.slices].flags.c_contiguous, region


@given(chunkings())
def test_chunks_tile_an_array(case: tuple[Shape, Shape]) -> None:
    shape, chunk = case
    count = np.zeros(shape, np.int64)
    for place in np.ndindex(*chunk_grid(shape, chunk)):
        region = chunk_region(place, chunk, shape)
        assert region.offset == tuple(p * c for p, c in zip(place, chunk, strict=True))
        assert all(0 < n <= c for n, c in zip(region.shape, chunk, strict=True))
        assert count[region.slices].shape == region.shape
        count[region.slices] += 1
    assert (count == 1).all()


@given(chunkings(), st.data())
def test_the_chunks_touching_a_region_are_those_that_share_an_element(
    case: tuple[Shape, Shape], data: st.DataObject
) -> None:
    shape, chunk = case
    region = data.draw(regions_of(shape))
    wanted = cells(region, shape)
    expected = [
        place
        for place in np.ndindex(*chunk_grid(shape, chunk))
        if cells(chunk_region(place, chunk, shape), shape) & wanted
    ]
    assert list(chunks_touching(region, chunk)) == expected


# -- eight devices --------------------------------------------------------------------------------

MESHES = [((8,), "x"), ((2, 4), "xy"), ((2, 2, 2), "xyz"), ((1, 3), "xy"), ((4,), "x")]


@st.composite
def shardings(draw: st.DrawFn) -> tuple[Shape, NamedSharding]:
    """A sharding over some devices in some order, and a shape that it divides."""
    sizes, names = draw(st.sampled_from(MESHES))
    devices = draw(st.permutations(jax.devices()))[: int(np.prod(sizes))]
    mesh = Mesh(np.array(devices).reshape(sizes), tuple(names))
    axes = list(draw(st.permutations(names)))
    rank = draw(st.integers(0, 3))
    spec: list[Any] = []
    for _ in range(rank):
        taken = draw(st.integers(0, min(2, len(axes))))
        used, axes = axes[:taken], axes[taken:]
        spec.append(tuple(used) or None)
    size_of = dict(zip(names, sizes, strict=True))
    shape = tuple(
        draw(st.integers(0, 3)) * int(np.prod([size_of[a] for a in part or ()])) for part in spec
    )
    return shape, NamedSharding(mesh, PartitionSpec(*spec))


@given(shardings())
def test_the_regions_of_a_sharding_tile_the_array(case: tuple[Shape, NamedSharding]) -> None:
    shape, sharding = case
    count = np.zeros(shape, np.int64)
    for region, holders in addressable_regions(sharding, shape):
        assert holders
        count[region.slices] += 1
    if count.size:
        assert (count == 1).all()


@given(shardings())
def test_the_holders_of_a_region_are_positions_in_addressable_shards(
    case: tuple[Shape, NamedSharding],
) -> None:
    shape, sharding = case
    values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    array = jax.device_put(values, sharding)
    found = addressable_regions(sharding, shape)
    every = sorted(position for _, holders in found for position in holders)
    assert every == list(range(len(array.addressable_shards)))
    for region, holders in found:
        for position in holders:
            shard = array.addressable_shards[position]
            assert np.array_equal(np.asarray(shard.data), values[region.slices])
            assert shard.data.shape == region.shape


@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_one_device_holds_the_whole(shape: Shape) -> None:
    assert addressable_regions(None, shape) == [(whole(shape), [0])]
    single = SingleDeviceSharding(jax.devices()[3])
    assert addressable_regions(single, shape) == [(whole(shape), [0])]


def test_a_replicated_array_is_one_region_held_by_all() -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    replicated = NamedSharding(mesh, PartitionSpec())
    assert addressable_regions(replicated, (4, 2)) == [(whole((4, 2)), list(range(8)))]
