"""Formats: values, rules by leaf path, chunk shapes, and the plans they lead to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt._engine.plan_cache import PlanCache
from ckpt._format.array_format import DTYPES, ArrayFormat, Blosc, Zstd, cast_refusal, choose_chunk
from ckpt._format.regions import chunk_grid, chunk_region
from ckpt._plan.save_plan import WHOLE, SavePlan, compile_formats, plan_save
from ckpt._plan.write_batches import aligned, encoded_bound
from ckpt._tree.leaf_specs import LeafSpec
from ckpt._tree.structure import describe
from ckpt.errors import InvalidArgumentError, UnsupportedLeafError

F32 = LeafSpec("numpy", "float32", (64, 64))
MIB = 1 << 20


# -- values ---------------------------------------------------------------------------------------


def test_a_format_is_the_same_however_it_is_written() -> None:
    written = [
        ArrayFormat(dtype="bfloat16", compression="zstd", split_axes=(0, -1)),
        ArrayFormat(dtype=jnp.bfloat16, compression=Zstd(), split_axes=[0, -1]),  # type: ignore[arg-type]
        ArrayFormat(
            dtype=np.dtype(ml_dtypes.bfloat16), compression=Zstd(level=1), split_axes=(0, -1)
        ),
    ]
    assert len(set(written)) == 1
    assert ArrayFormat().is_default
    assert not written[0].is_default


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float31"}, "float31"),
        ({"dtype": object}, "object"),
        ({"dtype": ">f4"}, "f4"),
        ({"chunk_bytes": 4095}, "whole number, 4096 or more"),
        ({"chunk_bytes": 1e6}, "whole number"),
        ({"chunk_bytes": True}, "whole number"),
        ({"split_axes": ()}, "axes"),
        ({"split_axes": (0, 0)}, "axes"),
        ({"split_axes": 0}, "axes"),
        ({"split_axes": (0.0,)}, "axes"),
        ({"compression": "gzip"}, "gzip"),
        ({"compression": 3}, "zstd"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ArrayFormat(**arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Zstd(level=0),
        lambda: Zstd(level=23),
        lambda: Zstd(level="fast"),  # type: ignore[arg-type]
        lambda: Blosc(cname="gzip"),  # type: ignore[arg-type]
        lambda: Blosc(clevel=10),
        lambda: Blosc(shuffle=True),  # type: ignore[arg-type]
    ],
)
def test_settings_of_a_codec_are_checked(make: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="expected"):
        make()


# -- casts ----------------------------------------------------------------------------------------


def values_of(dtype: str) -> set[int]:
    if dtype.lstrip("u") in ("int2", "int4"):
        info: Any = ml_dtypes.iinfo(dtype)
    else:
        info = np.iinfo(dtype)
    return {int(info.min), int(info.max)}


def test_integers_are_cast_only_to_what_holds_all_of_them() -> None:
    names = [name for name in DTYPES if name.startswith(("int", "uint"))]
    for source, target in itertools.product(names, repeat=2):
        low, high = min(values_of(target)), max(values_of(target))
        holds = all(low <= value <= high for value in values_of(source))
        assert (cast_refusal(source, target) is None) == holds, (source, target)


def test_no_cast_changes_the_kind_of_number() -> None:
    def kind(name: str) -> str:
        if name == "float8_e8m0fnu" or name == "bool":
            return name
        return name.replace("bfloat", "float").replace("uint", "int").rstrip("0123456789mebfnuz_")

    for source, target in itertools.permutations(DTYPES, 2):
        if kind(source)[:3] != kind(target)[:3] or "e8m0" in source + target:
            assert cast_refusal(source, target) is not None, (source, target)
    assert cast_refusal("float32", "float8_e4m3fn") is None
    assert cast_refusal("bfloat16", "float64") is None
    assert cast_refusal("complex128", "complex64") is None


# -- rules ----------------------------------------------------------------------------------------


def formatted(
    formats: Any, paths: Sequence[str], specs: Sequence[LeafSpec]
) -> list[ArrayFormat | None]:
    rules = compile_formats(formats)
    assert rules is not None
    found = rules.formatted(paths, specs)
    rules.check_used([found])
    return [spec.format for spec in found.specs]


def test_the_first_pattern_that_covers_a_leaf_counts() -> None:
    small, large = ArrayFormat(chunk_bytes=4096), ArrayFormat(chunk_bytes=8192)
    formats = {"a.*.bias": ArrayFormat(), "a": small, "**.w": large}
    found = formatted(formats, ["a.0.w", "a.0.bias", "b.w", "b.c"], [F32] * 4)
    assert found == [small, None, large, None]


def test_a_function_is_asked_for_arrays_only() -> None:
    asked = []

    def choose(path: str, leaf: jax.ShapeDtypeStruct) -> ArrayFormat | None:
        asked.append((path, leaf.shape, leaf.dtype))
        return ArrayFormat(dtype="bfloat16") if len(leaf.shape) == 2 else None

    specs = [F32, LeafSpec("int", "int64"), LeafSpec("key", "uint32", (2,), impl="fry"),
             LeafSpec("numpy", "float32", (3,)), LeafSpec("str")]  # fmt: skip
    found = formatted(choose, ["a", "b", "c", "d", "e"], specs)
    assert [spec is not None for spec in found] == [True, False, False, False, False]
    assert asked == [("a", (64, 64), np.float32), ("d", (3,), np.float32)]


@given(st.sampled_from(["float16", "bfloat16", "float64", "complex64", "int64"]), st.data())
def test_a_format_for_all_casts_the_arrays_of_its_kind(dtype: str, data: Any) -> None:
    """A tree of parameters and counters needs no pattern for each: no other dtype is refused."""
    dtypes = data.draw(st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=5))
    specs = [LeafSpec("numpy", each, (64, 64)) for each in dtypes]
    paths = [f"x.{number}" for number in range(len(dtypes))]
    packed = ArrayFormat(dtype=dtype, compression="zstd")
    ways: list[Any] = [dtype, DTYPES[dtype], packed]
    for given_as in ways:
        rules = compile_formats(given_as)
        assert rules is not None
        found = rules.formatted(paths, specs)
        for before, after in zip(dtypes, found.specs, strict=True):
            assert after.dtype == (dtype if cast_refusal(before, dtype) is None else before)
            if isinstance(given_as, ArrayFormat):
                assert after.format is not None
                assert after.format.compression == Zstd()
        rules.check_used([found])


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ({"parms": ArrayFormat()}, r"'parms' covers no leaf \(is it 'params"),
        ({"params": ArrayFormat(), "params.w": ArrayFormat()}, "'params' comes before it"),
        ({"rng": ArrayFormat()}, "'rng' is a PRNG key"),
        ({"**.step": ArrayFormat(dtype="int32")}, "'step' is a leaf of kind int"),
    ],
)
def test_a_pattern_that_decides_nothing_is_an_error(formats: Any, message: str) -> None:
    specs = [F32, LeafSpec("key", "uint32", (2,), impl="fry"), LeafSpec("int", "int64")]
    with pytest.raises(InvalidArgumentError, match=message):
        formatted(formats, ["params.w", "rng", "step"], specs)


def test_a_pattern_may_decide_in_any_item_of_a_save() -> None:
    rules = compile_formats({"a": ArrayFormat(), "b": ArrayFormat()})
    assert rules is not None
    rules.check_used([rules.formatted([name], [F32]) for name in "ab"])


@pytest.mark.parametrize(
    ("formats", "spec", "message"),
    [
        ({"x": ArrayFormat(dtype="int32")}, F32, "another kind"),
        ({"x": ArrayFormat(dtype="bfloat16")}, LeafSpec("jax", "int32", (3,)), "another kind"),
        ({"x": ArrayFormat(dtype="int8")}, LeafSpec("jax", "int32", (3,)), "does not hold all"),
        ({"x": ArrayFormat(split_axes=(2,))}, F32, "2 dimensions"),
        ({"x": ArrayFormat(split_axes=(-3,))}, F32, "2 dimensions"),
    ],
)
def test_a_format_that_an_array_cannot_have_names_the_leaf(
    formats: Any, spec: LeafSpec, message: str
) -> None:
    with pytest.raises(UnsupportedLeafError, match=message) as caught:
        formatted(formats, ["x"], [spec])
    assert caught.value.leaf == "x"


@pytest.mark.parametrize(
    "formats", [{"x": "zstd"}, {"": ArrayFormat()}, {3: ArrayFormat()}, "zstd"]
)
def test_formats_that_are_none_are_refused_at_once(formats: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        compile_formats(formats)


def test_a_function_that_returns_something_else_names_the_leaf() -> None:
    with pytest.raises(InvalidArgumentError, match="expected an ArrayFormat") as caught:
        formatted(lambda path, leaf: "zstd", ["x"], [F32])
    assert caught.value.leaf == "x"


def test_one_array_in_two_formats_is_stored_twice_and_no_more() -> None:
    rules = compile_formats({"b": ArrayFormat(dtype="bfloat16")})
    assert rules is not None
    shared = LeafSpec("jax", "float32", (4,), same_as=0)
    first = LeafSpec("jax", "float32", (4,))
    found = rules.formatted(["a", "b.0", "b.1", "c"], [first, shared, shared, shared])
    assert [spec.same_as for spec in found.specs] == [None, None, 1, 0]


def test_a_structure_that_was_planned_is_not_matched_again() -> None:
    asked: list[str] = []

    def choose(path: str, leaf: Any) -> ArrayFormat:
        asked.append(path)
        return ArrayFormat(dtype="bfloat16")

    cache = PlanCache(compile_formats(choose))
    trees = [{"a": jnp.ones(3) * n, "b": jnp.zeros(3)} for n in range(3)]
    plans = [cache.plan("state", describe(tree), 64 * MIB, WHOLE) for tree in trees]
    assert plans[0] is plans[1] is plans[2]
    assert asked == ["a", "b"]
    other = cache.plan("state", describe({"a": jnp.ones(4)}), 64 * MIB, WHOLE)
    assert other is not plans[0]
    assert asked == ["a", "b", "a"]


# -- chunk shapes ---------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...]]:
    shard = tuple(draw(st.lists(st.integers(1, 5000), min_size=1, max_size=4)))
    shape = tuple(n * draw(st.sampled_from([1, 2, 4])) for n in shard)
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    axes = draw(st.permutations(range(len(shard))))
    chosen = tuple(axes[: draw(st.integers(0, len(axes)))])
    return shape, shard, itemsize, draw(st.integers(itemsize, 1 << 22)), chosen


@given(cuts())
def test_chunks_of_chosen_axes_tile_the_array_within_the_size(case: Any) -> None:
    shape, shard, itemsize, target, axes = case
    chunk = choose_chunk(shape, shard, itemsize, target, axes)
    assert math.prod(chunk) * itemsize <= target
    assert all(1 <= n <= part for n, part in zip(chunk, shard, strict=True))
    grid = chunk_grid(shape, chunk)
    if math.prod(grid) <= 4096:
        total = sum(chunk_region(place, chunk, shape).size for place in np.ndindex(*grid))
        assert total == math.prod(shape)


POWERS = st.sampled_from([2**n for n in range(12)])


@given(st.lists(POWERS, min_size=1, max_size=4), st.integers(8, 1 << 20), st.data())
def test_where_lengths_allow_only_the_chosen_axes_are_cut_and_evenly(
    shard: list[int], target: int, data: Any
) -> None:
    axes = tuple(data.draw(st.permutations(range(len(shard)))))
    axes = axes[: data.draw(st.integers(1, len(axes)))]
    chunk = choose_chunk(shard, shard, 8, target, axes)
    pieces = [part // n for part, n in zip(shard, chunk, strict=True)]
    assert all(part % n == 0 for part, n in zip(shard, chunk, strict=True))
    others = [axis for axis in range(len(shard)) if axis not in axes]
    if any(pieces[axis] > 1 for axis in others):
        # All that could be cut of the chosen ones is.
        assert all(chunk[axis] == 1 for axis in axes)
    # Each as often as the others, but for those that can be cut no further.
    open_axes = [axis for axis in axes if chunk[axis] > 1]
    if open_axes:
        counts = [pieces[axis] for axis in open_axes]
        assert max(counts) <= 2 * min(counts)


def test_a_finer_sharding_along_the_chosen_axes_is_made_of_whole_chunks() -> None:
    shape = (4096, 4096)
    chunk = choose_chunk(shape, (1024, 2048), 4, MIB, (0, 1))
    for mesh in itertools.product([4, 8, 16], [2, 4]):
        finer = [length // n for length, n in zip(shape, mesh, strict=True)]
        assert all(part % n == 0 for part, n in zip(finer, chunk, strict=True)), (chunk, finer)
    # Leading axes first, chunks are rows: every shard of columns would need them all.
    assert choose_chunk(shape, (1024, 2048), 4, MIB)[1] == 2048


# -- plans ----------------------------------------------------------------------------------------


def plan_of(*specs: LeafSpec, budget: int = 64 * MIB) -> SavePlan:
    return plan_save([f"leaf{number}" for number in range(len(specs))], specs, budget)


def spec_of(shape: tuple[int, ...], **chosen: Any) -> LeafSpec:
    return LeafSpec("numpy", "float32", shape, format=ArrayFormat(**chosen))


def test_chunk_bytes_bounds_chunks_and_the_budget_does_too() -> None:
    plan = plan_of(
        spec_of((1024, 1024), chunk_bytes=MIB), spec_of((1024, 1024), chunk_bytes=100 * MIB)
    )
    assert [leaf.grid for leaf in plan.leaves] == [(4, 1), (1, 1)]
    assert plan_of(spec_of((1024, 1024), chunk_bytes=100 * MIB), budget=MIB).leaves[0].grid == (
        16,
        1,
    )


def test_a_small_leaf_is_packed_unless_smaller_chunks_are_asked_for() -> None:
    plan = plan_of(spec_of((100, 100), compression="zstd"), spec_of((100, 100), chunk_bytes=10_000))
    assert [leaf.packed for leaf in plan.leaves] == [True, False]
    assert plan.leaves[0].compression is None
    assert plan.leaves[1].grid == (4, 1)


def test_shards_are_cut_along_their_own_axes_when_chunks_have_a_size() -> None:
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    spec = LeafSpec(
        "jax", "float32", (1024, 1024), sharding, format=ArrayFormat(chunk_bytes=1 << 18)
    )
    assert plan_of(spec).leaves[0].chunk == (1024, 64)
    rows = LeafSpec(
        "jax", "float32", (1024, 1024), sharding,
        format=ArrayFormat(chunk_bytes=1 << 18, split_axes=(0,)),
    )  # fmt: skip
    assert plan_of(rows).leaves[0].chunk == (256, 256)


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 700)), min_size=1, max_size=4),
    st.sampled_from([None, 4096, 65_536, 1 << 20]),
    st.sampled_from([1 << 20, 4 << 20, 64 << 20]),
)
def test_what_encoding_needs_is_counted_and_fits_the_budget(
    shapes: list[tuple[int, int]], chunk_bytes: int | None, budget: int
) -> None:
    specs = [spec_of(shape, compression="zstd", chunk_bytes=chunk_bytes) for shape in shapes]
    plan = plan_of(*specs, budget=budget)
    assert all(batch.block_bytes <= budget for batch in plan.batches)
    for batch in plan.batches:
        sizes = [chunk.stored_nbytes for chunk in batch.chunks]
        assert batch.encoded == (plan.leaves[batch.chunks[0].leaf].compression is not None)
        if not batch.encoded:
            assert (batch.staged_at, batch.block_bytes) == (0, batch.nbytes)
            continue
        assert batch.block_bytes >= batch.staged_at + batch.nbytes + 2 * max(sizes)
        # Encoded as badly as can be, no chunk reaches what is still to be encoded.
        end = 0
        for chunk, size in zip(batch.chunks, sizes, strict=True):
            end = aligned(end, 4096 if encoded_bound(size) > 4096 else 64) + encoded_bound(size)
            assert end <= batch.staged_at + chunk.offset + size


def test_a_plan_without_formats_does_not_serve_where_they_apply() -> None:
    cache = PlanCache(compile_formats({"a": ArrayFormat(dtype="bfloat16")}))
    structure = describe({"a": jnp.ones(3)})
    dtypes = [
        cache.plan("state", structure, 64 * MIB, WHOLE, formatted).save.leaves[0].spec.dtype
        for formatted in (False, True, False)
    ]
    assert dtypes == ["float32", "bfloat16", "float32"]


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e8m0fnu"])
def test_nothing_is_rounded_to_a_dtype_without_nan_or_infinity(dtype: str) -> None:
    assert cast_refusal("float32", dtype) is not None
    assert cast_refusal("float32", "float8_e4m3fn") is None
