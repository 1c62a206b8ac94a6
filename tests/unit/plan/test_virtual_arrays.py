"""Arrays made of parts of stored ones: what is read chunk by chunk is what numpy makes of them."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckpt._format.leaf_table import LeafEntry
from ckpt._format.regions import Region, chunk_grid, whole
from ckpt._plan.chunk_reads import plan_chunk_reads
from ckpt._plan.slices import ArraySlice, boxes_between, copy_strided
from ckpt._plan.targets import (
    MOST_SLICES,
    ArrayRead,
    ArrayTarget,
    VirtualArray,
    concatenated,
    cut,
    drop_axis,
    insert_axis,
    repeat,
    reshape,
    resize,
    transpose,
)
from ckpt.handlers._tree_file import _value_of

Array = np.ndarray[Any, Any]
DTYPE = np.dtype("int32")


def entry(number: int, shape: tuple[int, ...], chunks: tuple[int, ...]) -> LeafEntry:
    count = int(np.prod(chunk_grid(shape, chunks)))
    return LeafEntry(
        name=str(number),
        kind="numpy",
        dtype="int32",
        shape=list(shape),
        chunks=list(chunks),
        digests=["0" * 32] * count,
        offsets=[0] * count,
    )


def stored_array(number: int, shape: tuple[int, ...]) -> Array:
    """An array of which every element of every leaf is another number, none of them zero."""
    size = int(np.prod(shape))
    return (np.arange(1, size + 1, dtype=DTYPE) + 10_000 * number).reshape(shape)


def read(
    leaves: list[LeafEntry],
    arrays: list[Array],
    wanted: list[tuple[VirtualArray, ArrayTarget]],
) -> list[list[tuple[Region, Array]]]:
    """Do by numpy what a plan says: every chunk once, its boxes copied to where they belong."""
    reads = [
        ArrayRead(target, source.shape, "int32", source.leaf, "", source.pieces)
        for source, target in wanted
    ]
    buffers = [
        [(region, np.zeros(region.shape, DTYPE)) for region in each.regions] for each in reads
    ]
    written = [[np.zeros(region.shape, int) for region, _ in each] for each in buffers]
    chunks = plan_chunk_reads(leaves, reads)
    seen = [(int(chunk.leaf.name), chunk.number) for chunk in chunks]
    assert len(set(seen)) == len(seen), "a chunk is read twice"
    for chunk in chunks:
        assert chunk.uses, "a chunk is read for nothing"
        grid = chunk_grid(chunk.leaf.shape, chunk.leaf.chunks)
        place = np.unravel_index(chunk.number, grid) if grid else ()
        corner = tuple(int(p) * c for p, c in zip(place, chunk.leaf.chunks, strict=True))
        assert chunk.covered.offset == corner
        data = arrays[int(chunk.leaf.name)][chunk.covered.slices]
        assert data.shape == chunk.covered.shape
        for use in chunk.uses:
            _, buffer = buffers[use.read][use.region]
            part = data[use.source.slices]
            assert part.shape == use.source.shape
            assert part.size > 0
            count = written[use.read][use.region]
            if use.strides:
                places = use.source.offset, use.target.offset
                once, ones = np.zeros_like(count), np.ones_like(data, count.dtype)
                copy_strided(data, places[0], buffer, places[1], use.strides)
                copy_strided(ones, places[0], once, places[1], use.strides)
                count += once
                continue
            target: Any = (*use.target.slices, ...)
            view = buffer[target]
            view[...] = part.reshape(view.shape)
            count[target] += 1
    assert all((count <= 1).all() for each in written for count in each), "written twice"
    return buffers


HOST = ArrayTarget("numpy", DTYPE)


def whole_of(source: VirtualArray, leaves: list[LeafEntry], arrays: list[Array]) -> Array:
    inside = whole(source.shape)
    for target in (piece.target for piece in source.parts):
        assert 0 in target.shape or target.intersect(inside) == target
    (((_, found),),) = read(leaves, arrays, [(source, HOST)])
    return found


def shapes(rank: int, longest: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(0, longest)] * rank)


@st.composite
def leaf_lists(
    draw: st.DrawFn, same_but: int | None = None, count: int | None = None
) -> tuple[list[LeafEntry], list[Array]]:
    """Leaves of one shape (but for the axis `same_but`), each with a chunk grid of its own."""
    rank = draw(st.integers(0 if same_but is None else 1, 3))
    shape = draw(shapes(rank))
    leaves, arrays = [], []
    for number in range(draw(st.integers(1, 4)) if count is None else count):
        sides = list(shape)
        if same_but is not None:
            sides[same_but % rank] = draw(st.integers(0, 4))
        chunks = tuple(draw(st.integers(1, max(side, 1))) for side in sides)
        leaves.append(entry(number, tuple(sides), chunks))
        arrays.append(stored_array(number, tuple(sides)))
    return leaves, arrays


def sources_of(leaves: list[LeafEntry]) -> list[VirtualArray]:
    return [VirtualArray.of(leaf, number, leaf.name) for number, leaf in enumerate(leaves)]


@given(leaf_lists(), st.data())
def test_a_stack_is_numpys(given_leaves: Any, data: st.DataObject) -> None:
    leaves, arrays = given_leaves
    axis = data.draw(st.integers(0, arrays[0].ndim))
    made = concatenated([insert_axis(source, axis) for source in sources_of(leaves)], axis)
    wanted = np.stack(arrays, axis)
    assert made.shape == wanted.shape
    np.testing.assert_array_equal(whole_of(made, leaves, arrays), wanted)
    assert made.used == tuple(leaf.name for leaf in leaves)


@given(leaf_lists(same_but=0))
def test_a_concatenation_is_numpys(given_leaves: Any) -> None:
    leaves, arrays = given_leaves
    made = concatenated(sources_of(leaves), 0)
    wanted = np.concatenate(arrays, 0)
    assert made.shape == wanted.shape
    np.testing.assert_array_equal(whole_of(made, leaves, arrays), wanted)


@given(leaf_lists(same_but=-1, count=1), st.data())
def test_a_cut_is_a_slice_and_a_dropped_axis_an_index(
    given_leaves: Any, data: st.DataObject
) -> None:
    leaves, arrays = given_leaves
    (source,), (array,) = sources_of(leaves), arrays
    axis = data.draw(st.integers(0, array.ndim - 1))
    start = data.draw(st.integers(0, array.shape[axis]))
    length = data.draw(st.integers(0, array.shape[axis] - start))
    made = cut(source, axis, start, length)
    wanted = np.take(array, range(start, start + length), axis)
    assert made.shape == wanted.shape
    np.testing.assert_array_equal(whole_of(made, leaves, arrays), wanted)
    if length == 1:
        dropped = drop_axis(made, axis)
        np.testing.assert_array_equal(
            whole_of(dropped, leaves, arrays), np.take(array, start, axis)
        )


@given(leaf_lists(count=1), st.data())
def test_a_resize_keeps_the_common_corner_and_zeros_the_rest(
    given_leaves: Any, data: st.DataObject
) -> None:
    leaves, (array,) = given_leaves
    shape = data.draw(shapes(array.ndim, 7))
    made = resize(sources_of(leaves)[0], shape)
    wanted = np.zeros(shape, DTYPE)
    common = tuple(slice(min(a, b)) for a, b in zip(shape, array.shape, strict=True))
    wanted[common] = array[common]
    assert made.shape == shape
    np.testing.assert_array_equal(whole_of(made, leaves, [array]), wanted)


STEPS = st.sampled_from(
    ["insert", "drop", "cut", "join", "resize", "transpose", "repeat", "reshape", "reshape"]
)


@st.composite
def same_size(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """A shape of an array of `size` elements."""
    shape: list[int] = []
    while size > 1 and len(shape) < 4:
        shape.append(draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])))
        size //= shape[-1]
    return draw(st.permutations([*shape, size]).map(tuple))


def step(
    name: str, source: VirtualArray, array: Array, data: st.DataObject
) -> tuple[VirtualArray, Array]:
    if name == "insert":
        axis = data.draw(st.integers(0, array.ndim))
        return insert_axis(source, axis), np.expand_dims(array, axis)
    if name == "resize":
        shape = data.draw(shapes(array.ndim, 6))
        wanted = np.zeros(shape, DTYPE)
        common = tuple(slice(min(a, b)) for a, b in zip(shape, array.shape, strict=True))
        wanted[common] = array[common]
        return resize(source, shape), wanted
    if name == "transpose":
        axes = data.draw(st.permutations(range(array.ndim)))
        return transpose(source, axes), np.transpose(array, axes)
    if name == "reshape":
        shape = data.draw(same_size(array.size))
        made = reshape(source, shape)
        assert made is not None
        return made, array.reshape(shape)
    if array.ndim == 0:
        return source, array
    axis = data.draw(st.integers(0, array.ndim - 1))
    if name == "repeat":
        times = data.draw(st.integers(1, 3 if array.size < 200 else 1))
        return repeat(source, axis, times), np.repeat(array, times, axis)
    if name == "drop":
        if array.shape[axis] != 1:
            return source, array
        return drop_axis(source, axis), np.squeeze(array, axis)
    if name == "cut":
        start = data.draw(st.integers(0, array.shape[axis]))
        length = data.draw(st.integers(0, array.shape[axis] - start))
        return cut(source, axis, start, length), np.take(array, range(start, start + length), axis)
    if array.size > 200:
        return source, array
    return concatenated([source, source], axis), np.concatenate([array, array], axis)


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """A sharding over the local devices that divides `shape`, or None."""
    rows = draw(st.sampled_from([1, 2, 4]))
    mesh = Mesh(np.array(jax.devices()).reshape(rows, -1), ("x", "y"))
    spec: list[str | None] = []
    free = ["x", "y"]
    for side in shape:
        fitting = [None, *(name for name in free if side % mesh.shape[name] == 0)]
        spec.append(draw(st.sampled_from(fitting)))
        free = [name for name in free if name != spec[-1]]
    return draw(st.sampled_from([None, NamedSharding(mesh, PartitionSpec(*spec))]))


@given(leaf_lists(), st.lists(STEPS, max_size=5), st.data())
def test_any_steps_one_after_the_other_are_numpys_on_any_devices(
    given_leaves: Any, names: list[str], data: st.DataObject
) -> None:
    leaves, arrays = given_leaves
    wanted, targets = [], []
    for source, array in zip(sources_of(leaves), arrays, strict=True):
        for name in names:
            source, array = step(name, source, array, data)
        assert source.shape == array.shape
        sharding = data.draw(shardings(array.shape))
        targets.append((source, ArrayTarget("jax", DTYPE, sharding)))
        wanted.append(array)
    # All of them at once, and the first once more: it needs no chunk a second time.
    targets.append(targets[0])
    wanted.append(wanted[0])
    for array, regions in zip(wanted, read(leaves, arrays, targets), strict=True):
        covered = np.zeros(array.shape, bool)
        for region, found in regions:
            np.testing.assert_array_equal(found, array[region.slices])
            covered[region.slices] = True
        assert covered.all()


@given(leaf_lists(count=1), st.lists(STEPS, max_size=5), st.data())
def test_what_is_made_of_arrays_in_memory_is_numpys(
    given_leaves: Any, names: list[str], data: st.DataObject
) -> None:
    leaves, (array,) = given_leaves
    source, wanted = sources_of(leaves)[0], array
    for name in names:
        source, wanted = step(name, source, wanted, data)
    read = ArrayRead(HOST, source.shape, "int32", source.leaf, "", source.pieces)
    np.testing.assert_array_equal(_value_of(read, [array]), wanted)


@given(leaf_lists(count=1), st.lists(STEPS, max_size=5), st.data())
def test_every_device_reads_only_the_chunks_that_hold_its_part(
    given_leaves: Any, names: list[str], data: st.DataObject
) -> None:
    leaves, (array,) = given_leaves
    source, wanted = sources_of(leaves)[0], array
    for name in names:
        source, wanted = step(name, source, wanted, data)
    target = ArrayTarget("jax", DTYPE, data.draw(shardings(wanted.shape)))
    each = ArrayRead(target, source.shape, "int32", source.leaf, "", source.pieces)
    found: dict[int, set[int]] = {number: set() for number in range(len(each.regions))}
    for chunk in plan_chunk_reads(leaves, [each]):
        for use in chunk.uses:
            found[use.region].add(chunk.number)
    grid, sides = chunk_grid(leaves[0].shape, leaves[0].chunks), leaves[0].chunks
    for number, region in enumerate(each.regions):
        # The elements are numbers of their places, but for one, and padding is zero.
        part = wanted[region.slices]
        places = np.array([value - 1 for value in part.reshape(-1) if value], int)
        corners = np.transpose(np.unravel_index(places, array.shape)) // sides if grid else [()]
        numbers = {int(np.ravel_multi_index(tuple(each), grid)) if grid else 0 for each in corners}
        assert found[number] == (numbers if places.size else set())


@given(leaf_lists(count=1), st.data())
def test_a_part_reads_only_the_chunks_that_hold_it(given_leaves: Any, data: st.DataObject) -> None:
    leaves, (array,) = given_leaves
    made = sources_of(leaves)[0]
    part: Array = np.arange(array.size).reshape(array.shape)
    for axis, side in enumerate(array.shape):
        start = data.draw(st.integers(0, side))
        length = data.draw(st.integers(0, side - start))
        made = cut(made, axis, start, length)
        part = np.take(part, range(start, start + length), axis)
    chunks = plan_chunk_reads(
        leaves, [ArrayRead(HOST, made.shape, "int32", made.leaf, "", made.pieces)]
    )
    sides = np.array(leaves[0].chunks, int)
    needed = {
        tuple(np.array(np.unravel_index(place, array.shape), int) // sides) if array.ndim else ()
        for place in part.reshape(-1)
    }
    grid = chunk_grid(leaves[0].shape, leaves[0].chunks)
    numbers = {int(np.ravel_multi_index(place, grid)) if grid else 0 for place in needed}
    assert {chunk.number for chunk in chunks} == numbers


@given(st.data())
@example(None)
def test_boxes_are_carried_there_and_back(data: Any) -> None:
    if data is None:
        piece = ArraySlice(0, Region((3,), (4,)), Region((5, 0), (1, 4)))
        assert piece.to_source(Region((5, 2), (1, 2))) == Region((5,), (2,))
        assert piece.to_target(Region((5,), (2,))) == Region((5, 2), (1, 2))
        return
    sides = data.draw(st.lists(st.integers(2, 5), max_size=3))

    def box() -> Region:
        shape = list(sides)
        for _ in range(data.draw(st.integers(0, 2))):
            shape.insert(data.draw(st.integers(0, len(shape))), 1)
        return Region(tuple(data.draw(st.integers(0, 9)) for _ in shape), tuple(shape))

    piece = ArraySlice(0, box(), box())
    offset, shape = [], []
    for corner, side in zip(piece.target.offset, piece.target.shape, strict=True):
        start = data.draw(st.integers(0, side - 1))
        offset.append(corner + start)
        shape.append(data.draw(st.integers(1, side - start)))
    part = Region(tuple(offset), tuple(shape))
    there = piece.to_source(part)
    assert there.size == part.size
    assert there.intersect(piece.source) == there
    assert piece.to_target(there) == part


# -- how many slices there are --------------------------------------------------------------------


def stored_slices(made: VirtualArray | None) -> int:
    assert made is not None
    return len(made.parts)


def test_large_arrays_in_other_forms_are_few_slices() -> None:
    leaf = entry(0, (128, 32_000), (128, 32_000))
    source = VirtualArray.of(leaf, 0, "0")
    assert stored_slices(transpose(source, (1, 0))) == 1
    assert stored_slices(repeat(source, 1, 1000)) == 1
    assert stored_slices(reshape(source, (128, 32, 10, 100))) == 1
    assert stored_slices(reshape(source, (4_096_000,))) == 1
    # Rows that end within rows, and once more after a hundred of them.
    assert stored_slices(reshape(source, (32_000, 128))) == 1
    assert stored_slices(reshape(cut(source, 1, 0, 31_999), (31_999, 128))) <= 3 * 128
    # Heads that are repeated, then fused, then cut where no head begins.
    heads = reshape(repeat(source, 1, 4), (128, 100, 1280))
    assert heads is not None
    assert stored_slices(reshape(heads, (128, 128_000))) == 1
    assert stored_slices(cut(heads, 2, 3, 1000)) <= 3


def test_what_is_brought_back_to_its_form_is_plain_again() -> None:
    source = VirtualArray.of(entry(0, (6, 20), (2, 20)), 0, "0")
    there = reshape(transpose(source, (1, 0)), (4, 5, 3, 2))
    assert there is not None
    back = reshape(transpose(there, (2, 3, 0, 1)), (6, 20))
    assert back is not None
    assert back.parts == source.parts


def test_a_shape_that_takes_too_many_slices_is_refused() -> None:
    shape = (20_000, 20_001)
    source = VirtualArray.of(entry(0, shape, shape), 0, "0")
    assert reshape(source, shape[::-1]) is None
    assert stored_slices(reshape(source, (20_000 * 20_001,))) == 1
    # Those there are already are not counted.
    many = concatenated([VirtualArray.of(entry(0, (1, 6), (1, 6)), 0, "0")] * 2 * MOST_SLICES, 0)
    assert stored_slices(reshape(many, (MOST_SLICES, 2, 3, 2))) == 2 * MOST_SLICES


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=4),
    st.integers(-3, 90),
    st.integers(-3, 90),
)
def test_what_is_between_two_bounds_is_a_few_boxes(
    digits: list[tuple[int, int]], low: int, high: int
) -> None:
    """Each step is as long as all shorter ones together, or up to three times that."""
    strides: list[tuple[int, int]] = []
    for length, spare in digits:
        reach = sum((n - 1) * step for n, step in strides)
        strides.insert(0, (length, (reach + 1) * spare))
    boxes = list(boxes_between(strides, low, high))
    found = [
        sum(each * step for each, (_, step) in zip(place, strides, strict=True))
        for box in boxes
        for place in itertools.product(*(range(first, first + n) for first, n in box))
    ]
    everything = itertools.product(*(range(length) for length, _ in strides))
    places = [sum(a * b for a, (_, b) in zip(each, strides, strict=True)) for each in everything]
    assert sorted(found) == [place for place in sorted(places) if low <= place < high]
    assert len(boxes) <= max(2 * len(strides) - 1, 1)


def test_an_array_without_elements_needs_no_chunk() -> None:
    leaves = [entry(0, (0, 3), (1, 3))]
    for made in (sources_of(leaves)[0], resize(sources_of(leaves)[0], (2, 2))):
        each = ArrayRead(HOST, made.shape, "int32", made.leaf, "", made.pieces)
        assert plan_chunk_reads(leaves, [each]) == []


@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_a_scalar_is_one_chunk(kind: str) -> None:
    leaves = [entry(0, (), ())]
    (((_, found),),) = read(
        leaves, [stored_array(0, ())], [(sources_of(leaves)[0], ArrayTarget(kind, DTYPE))]
    )
    assert found == 1
