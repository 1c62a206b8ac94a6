"""The plan of a save: every byte once, in batches of bounded size, the same for equal specs."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckpt._format.array_format import DTYPES, MAX_KEY_BYTES, stored_dtype, zarr_metadata_bytes
from ckpt._format.regions import chunk_region
from ckpt._interop.orbax.sidecars import database_keys
from ckpt._plan.chunking import PACKED_BYTES
from ckpt._plan.item_reports import ChunkTable, ItemReport
from ckpt._plan.save_plan import SavePlan, plan_save
from ckpt._plan.write_batches import CHUNK_ALIGNMENT, SECTOR, aligned
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.leaf_specs import LeafSpec
from ckpt.errors import UnsupportedLeafError

MIB = 1 << 20


def keys_of(plan: SavePlan) -> list[bytes]:
    """The keys of the database of an item that is saved by `plan`."""
    report = ItemReport.of(plan.batches, [""] * len(plan.batches))
    stored = ChunkTable.merged(plan.leaves, [report])
    return [each.key for each in database_keys(plan.leaves, stored)]


SPECS = [
    PartitionSpec(),
    PartitionSpec("x"),
    PartitionSpec(None, "y"),
    PartitionSpec("y", "x"),
    PartitionSpec(("x", "y")),
    PartitionSpec(None, ("y", "x")),
]


def sharding(spec: PartitionSpec, *, backwards: bool = False) -> NamedSharding:
    devices = np.array(jax.devices()[:: -1 if backwards else 1]).reshape(2, 4)
    return NamedSharding(Mesh(devices, ("x", "y")), spec)


@st.composite
def array_specs(draw: st.DrawFn) -> LeafSpec:
    """Arrays of nothing up to some tens of kilobytes, on the host or on eight devices."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    if draw(st.booleans()):
        shape = tuple(draw(st.lists(st.integers(0, 24), max_size=3)))
        return LeafSpec("numpy", dtype, shape)
    shape = (8 * draw(st.integers(0, 6)), 8 * draw(st.integers(0, 6)))
    placed = sharding(draw(st.sampled_from(SPECS)), backwards=draw(st.booleans()))
    return LeafSpec("jax", dtype, shape, placed)


SCALARS = {"int": "int64", "float": "float64", "bool": "bool", "str": None, "bytes": None}
SCALAR_SPECS = st.sampled_from([LeafSpec(*pair) for pair in SCALARS.items()])
LEAF_SPECS = st.lists(st.one_of(array_specs(), array_specs(), SCALAR_SPECS), max_size=6)
# Small budgets make many chunks and batches of small arrays.
BUDGETS = st.sampled_from([4 * 64, 1000, 4096, 5003, 40_000, MIB])


def planned(specs: list[LeafSpec], budget: int) -> SavePlan:
    return plan_save([f"leaf{n}" for n in range(len(specs))], specs, budget)


# -- every byte once ------------------------------------------------------------------------------


@given(LEAF_SPECS, BUDGETS)
def test_every_byte_of_every_array_is_written_exactly_once(
    specs: list[LeafSpec], budget: int
) -> None:
    plan = planned(specs, budget)
    counts = [np.zeros(spec.shape, np.int64) for spec in specs]
    total = 0
    for batch in plan.batches:
        for chunk in batch.chunks:
            spec = specs[chunk.leaf]
            assert spec.dtype is not None
            counts[chunk.leaf][chunk.region.slices] += 1
            assert chunk.nbytes == chunk.region.size * DTYPES[spec.dtype].itemsize
            whole = math.prod(plan.leaves[chunk.leaf].chunk) * DTYPES[spec.dtype].itemsize
            assert chunk.stored_nbytes == whole >= chunk.nbytes
            if spec.kind in ARRAY_KINDS:
                total += chunk.nbytes
    for spec, count in zip(specs, counts, strict=True):
        assert (count == (0 if spec.dtype is None else 1)).all()
    arrays = [spec for spec in specs if spec.kind in ARRAY_KINDS]
    assert plan.nbytes == total == sum(spec.nbytes for spec in arrays)


@given(LEAF_SPECS, BUDGETS)
def test_a_chunk_is_where_the_zarr_metadata_says(specs: list[LeafSpec], budget: int) -> None:
    plan = planned(specs, budget)
    places: set[tuple[int, tuple[int, ...]]] = set()
    for batch in plan.batches:
        for chunk in batch.chunks:
            leaf = plan.leaves[chunk.leaf]
            assert chunk.region == chunk_region(chunk.place, leaf.chunk, leaf.spec.shape)
            assert (chunk.leaf, chunk.place) not in places
            places.add((chunk.leaf, chunk.place))
            assert list(np.ndindex(*leaf.grid))[chunk.number] == chunk.place
    for number, leaf in enumerate(plan.leaves):
        if leaf.spec.dtype is not None:
            expected = {(number, place) for place in np.ndindex(*leaf.grid)}
            assert {place for place in places if place[0] == number} == expected


@given(LEAF_SPECS, BUDGETS)
def test_the_source_of_a_chunk_is_in_the_shard_it_names(specs: list[LeafSpec], budget: int) -> None:
    plan = planned(specs, budget)
    for batch in plan.batches:
        for chunk in batch.chunks:
            spec = specs[chunk.leaf]
            if batch.packed:
                assert chunk.parts == ()
                continue
            values = np.arange(math.prod(spec.shape), dtype=np.int32).reshape(spec.shape)
            shards = [values]
            if spec.sharding is not None:
                array = jax.device_put(values, spec.sharding)
                shards = [np.asarray(shard.data) for shard in array.addressable_shards]
            found = np.full(chunk.region.shape, -1)
            for part in chunk.parts:
                assert (found[part.target.slices] == -1).all()
                found[part.target.slices] = shards[part.shard][part.source.slices]
            assert np.array_equal(found, values[chunk.region.slices])


@given(LEAF_SPECS, BUDGETS)
def test_each_leaf_has_its_metadata(specs: list[LeafSpec], budget: int) -> None:
    plan = planned(specs, budget)
    assert [leaf.name for leaf in plan.leaves] == [f"leaf{n}" for n in range(len(specs))]
    assert [leaf.spec for leaf in plan.leaves] == specs
    for leaf in plan.leaves:
        dtype = leaf.spec.dtype
        if dtype is None:
            assert leaf.metadata is None
            continue
        assert leaf.metadata == zarr_metadata_bytes(leaf.spec.shape, leaf.chunk, dtype)
        assert json.loads(leaf.metadata)["data_type"] == stored_dtype(dtype)


# -- batches -------------------------------------------------------------------------------------


@given(LEAF_SPECS, BUDGETS)
@example([LeafSpec("numpy", "uint8", (250,))], 1000)
def test_batches_are_kept_to_a_quarter_of_the_budget(specs: list[LeafSpec], budget: int) -> None:
    for batch in planned(specs, budget).batches:
        assert batch.chunks
        assert batch.nbytes <= aligned(budget // 4, CHUNK_ALIGNMENT)


@given(LEAF_SPECS, BUDGETS)
def test_chunks_within_a_batch_do_not_overlap(specs: list[LeafSpec], budget: int) -> None:
    for batch in planned(specs, budget).batches:
        end = 0
        for chunk in sorted(batch.chunks, key=lambda chunk: chunk.offset):
            assert chunk.offset >= end
            assert chunk.offset % CHUNK_ALIGNMENT == 0
            end = chunk.offset + chunk.stored_nbytes
        assert end <= batch.nbytes < end + SECTOR


@given(LEAF_SPECS, BUDGETS)
def test_the_biggest_batches_come_first(specs: list[LeafSpec], budget: int) -> None:
    sizes = [batch.nbytes for batch in planned(specs, budget).batches]
    assert sizes == sorted(sizes, reverse=True)


@given(LEAF_SPECS, BUDGETS)
def test_a_packed_leaf_is_one_chunk(specs: list[LeafSpec], budget: int) -> None:
    plan = planned(specs, budget)
    for batch in plan.batches:
        for chunk in batch.chunks:
            leaf = plan.leaves[chunk.leaf]
            assert leaf.packed == batch.packed
            assert not leaf.packed or chunk.region.shape == leaf.spec.shape


def test_batches_of_large_arrays_fit_several_times_into_the_budget() -> None:
    specs = [LeafSpec("numpy", "float32", (rows, 1000)) for rows in (100_003, 25_000, 70)]
    plan = planned(specs, 64 * MIB)
    assert len(plan.batches) >= 30
    assert max(batch.nbytes for batch in plan.batches) <= 16 * MIB
    assert sum(c.nbytes for g in plan.batches for c in g.chunks) == plan.nbytes


def test_small_leaves_share_batches() -> None:
    specs = [LeafSpec("numpy", "float32", (1024,))] * 5000
    plan = planned(specs, 1 << 30)
    assert all(leaf.packed for leaf in plan.leaves)
    assert len(plan.batches) == 1


def test_a_leaf_is_packed_up_to_the_limit() -> None:
    for extra, packed in ((0, True), (1, False)):
        plan = planned([LeafSpec("numpy", "uint8", (PACKED_BYTES + extra,))], 1 << 30)
        assert plan.leaves[0].packed is packed


def test_a_replicated_array_is_written_by_one_shard() -> None:
    spec = LeafSpec("jax", "float32", (1024, 1024), sharding(PartitionSpec(None, "y")))
    plan = planned([spec], 1 << 30)
    assert [c.region.shape for g in plan.batches for c in g.chunks] == [(1024, 256)] * 4


@pytest.mark.parametrize("rows", [100_003, 2 * 100_003, 1 << 18])
def test_a_shard_of_any_length_is_written_in_large_chunks_within_the_budget(rows: int) -> None:
    spec = LeafSpec("jax", "float32", (8 * rows,), sharding(PartitionSpec(("x", "y"))))
    plan = planned([spec], MIB)
    # Prime lengths have no divisor to cut them by, so these chunks cross the shards.
    assert sum(len(batch.chunks) for batch in plan.batches) <= 8 * 64
    assert max(batch.nbytes for batch in plan.batches) <= MIB


# -- equal specs ----------------------------------------------------------------------------------


@given(LEAF_SPECS, BUDGETS)
def test_equal_specs_give_equal_plans(specs: list[LeafSpec], budget: int) -> None:
    again = [
        LeafSpec(
            spec.kind,
            spec.dtype,
            tuple(spec.shape),
            None if spec.sharding is None else rebuilt(spec.sharding),
        )
        for spec in specs
    ]
    assert again == specs
    assert planned(again, budget) == planned(specs, budget)


def rebuilt(old: Any) -> NamedSharding:
    mesh = Mesh(copy.copy(old.mesh.devices), old.mesh.axis_names)
    return NamedSharding(mesh, PartitionSpec(*old.spec))


@pytest.mark.parametrize(
    "other",
    [
        LeafSpec("jax", "float32", (8, 16), sharding(PartitionSpec("x"))),
        LeafSpec("jax", "float32", (8, 8), sharding(PartitionSpec("y"))),
        LeafSpec("jax", "float32", (8, 8), sharding(PartitionSpec("x"), backwards=True)),
        LeafSpec("jax", "int32", (8, 8), sharding(PartitionSpec("x"))),
        LeafSpec("jax", "float32", (8, 8), sharding(PartitionSpec("x")), weak_type=True),
        LeafSpec("jax", "float32", (8, 8), sharding(PartitionSpec("x")), committed=False),
        LeafSpec("numpy", "float32", (8, 8)),
    ],
)
def test_specs_that_differ_in_anything_are_not_equal(other: LeafSpec) -> None:
    assert LeafSpec("jax", "float32", (8, 8), sharding(PartitionSpec("x"))) != other


def test_no_leaves_give_an_empty_plan() -> None:
    plan = planned([], MIB)
    assert (plan.leaves, plan.batches, plan.nbytes) == ((), (), 0)


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "longest_key"),
    [
        (LeafSpec("numpy", "float32", ()), "zarr.json"),
        (LeafSpec("numpy", "float32", (0,)), "zarr.json"),
        (LeafSpec("int", "int64"), "zarr.json"),
        (LeafSpec("numpy", "uint8", (4, 3, 2, 2, 2)), "c/0/0/0/0/0"),
        # A thousand and one chunks of 192 bytes: the last has the longest key.
        (LeafSpec("numpy", "uint8", (1001, 192)), "zarr.json"),
        (LeafSpec("numpy", "uint8", (1001, 1, 96, 2)), "c/1000/0/0/0"),
    ],
)
def test_a_name_may_be_as_long_as_all_its_keys_fit(spec: LeafSpec, longest_key: str) -> None:
    room = MAX_KEY_BYTES - len(longest_key) - 1
    for name in ("x" * room, "\u00e9" * (room // 2) + "x" * (room % 2)):
        plan = plan_save([name], [spec], 1000)
        assert max(map(len, keys_of(plan))) == MAX_KEY_BYTES
        with pytest.raises(UnsupportedLeafError, match=f"{room + 1} bytes") as caught:
            plan_save(["ok", f"{name}x"], [spec, spec], 1000)
        assert caught.value.leaf == f"{name}x"


def test_a_value_without_an_array_may_have_any_name() -> None:
    plan = plan_save(["x" * 100_000], [LeafSpec("str")], 1000)
    assert keys_of(plan) == []
