"""Who writes what: every chunk once, by a process that holds it, and nobody much more than others.

Devices are made up, so that jobs of any size are planned by the real planner.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from msgspec.structs import replace

from ckpt._format.array_format import choose_chunk
from ckpt._job.division import Division, Ownership, Partitioner, ProcessGroup
from ckpt._plan import save_plan
from ckpt._plan.chunking import holders_of
from ckpt._plan.save_plan import SavePlan, plan_save
from ckpt._plan.write_batches import aligned, alignment_of, encoded_bound
from ckpt._tree.leaf_specs import LeafSpec
from ckpt.errors import InvalidArgumentError, UnsupportedLeafError
from docs.explanation.scaling.fake_devices import devices_of
from tests.unit.plan.simulated_jobs import KIB, MIB, Job, chunks_in, jobs

Spec = PartitionSpec


def parts_of(spec: LeafSpec, process: int) -> list[tuple[slice, ...]]:
    """What each device of a process has of a leaf."""
    assert spec.sharding is not None
    of_devices: dict[Any, tuple[slice, ...]] = dict(spec.sharding.devices_indices_map(spec.shape))
    return [part for device, part in of_devices.items() if device.process_index == process]


def filled(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]


# -- any job --------------------------------------------------------------------------------------


@given(jobs())
def test_every_chunk_is_written_by_exactly_one_process(job: Job) -> None:
    plans = job.plans()
    written = [(c.leaf, c.number) for plan in plans for c in chunks_in(plan)]
    assert len(written) == len(set(written))
    assert set(written) == {
        (number, chunk)
        for number, leaf in enumerate(plans[0].leaves)
        if leaf.has_chunks
        for chunk in range(math.prod(leaf.grid))
    }


@given(jobs())
def test_only_a_process_that_holds_a_chunk_writes_it(job: Job) -> None:
    for process, plan in enumerate(job.plans()):
        for chunk in chunks_in(plan):
            spec = plan.leaves[chunk.leaf].spec
            if spec.sharding is None or chunk.leaf in plan.own:
                assert process == 0
                continue
            covered = np.zeros(chunk.region.shape, np.int64)
            if not chunk.parts:
                # Gathered from all shards that are here.
                whole = np.zeros(spec.shape, bool)
                for index in parts_of(spec, process):
                    whole[index] = True
                assert whole.all()
                continue
            for part in chunk.parts:
                starts = [a for a, _ in filled(parts_of(spec, process)[part.shard], spec.shape)]
                corner = tuple(a + b for a, b in zip(starts, part.source.offset, strict=True))
                at = tuple(
                    a + b for a, b in zip(chunk.region.offset, part.target.offset, strict=True)
                )
                assert corner == at
                ends = filled(parts_of(spec, process)[part.shard], spec.shape)
                for start, length, (_, end) in zip(corner, part.source.shape, ends, strict=True):
                    assert start + length <= end
                covered[part.target.slices] += 1
            assert (covered == 1).all()


@given(jobs())
def test_all_processes_cut_the_arrays_of_all_in_the_same_way(job: Job) -> None:
    plans = job.plans()
    for number, first in enumerate(plans[0].leaves):
        for plan in plans:
            leaf = plan.leaves[number]
            assert (leaf.name, leaf.grid, leaf.chunk) == (first.name, first.grid, first.chunk)
            assert (leaf.metadata, leaf.packed) == (first.metadata, first.packed)
        assert len({plan.nbytes for plan in plans}) == len({plan.own for plan in plans}) == 1


@given(jobs())
def test_no_chunk_has_parts_of_two_shards_where_processes_share_an_array(job: Job) -> None:
    plan = job.plans()[0]
    for number, leaf in enumerate(plan.leaves):
        sharding = leaf.spec.sharding
        if sharding is None or number in plan.own or leaf.packed or 0 in leaf.spec.shape:
            continue
        shard = sharding.shard_shape(leaf.spec.shape)
        for length, part, chunk in zip(leaf.spec.shape, shard, leaf.chunk, strict=True):
            assert part % chunk == 0 or part == length


@given(jobs())
def test_a_plan_depends_on_its_arguments_only(job: Job) -> None:
    def rebuilt(spec: LeafSpec) -> LeafSpec:
        if not isinstance(spec.sharding, NamedSharding):
            return spec
        mesh = Mesh(spec.sharding.mesh.devices.copy(), spec.sharding.mesh.axis_names)
        return replace(spec, sharding=NamedSharding(mesh, Spec(*spec.sharding.spec)))

    again = dataclasses.replace(job, trees=tuple(tuple(map(rebuilt, tree)) for tree in job.trees))
    assert again.plans()[-1] == job.plans()[-1]


@given(jobs(), st.sampled_from([4096, 10_000, 100 * KIB]))
def test_no_file_is_larger_than_the_store_takes(job: Job, largest: int) -> None:
    for plan in job.plans(largest):
        for batch in plan.batches:
            nbytes = batch.nbytes
            if batch.encoded:
                sizes = [encoded_bound(chunk.stored_nbytes) for chunk in batch.chunks]
                nbytes = sum(aligned(size, alignment_of(size)) for size in sizes)
            assert nbytes <= largest


@given(jobs())
def test_with_disks_of_their_own_processes_write_all_that_they_hold(job: Job) -> None:
    for process, plan in enumerate(dataclasses.replace(job, mode="local").plans()):
        found = {(chunk.leaf, chunk.region) for chunk in chunks_in(plan)}
        assert len(found) == len(chunks_in(plan))
        counts = [np.zeros(leaf.spec.shape, np.int64) for leaf in plan.leaves]
        for index, region in found:
            counts[index][region.slices] += 1
        for number, leaf in enumerate(plan.leaves):
            here = np.zeros(leaf.spec.shape, np.int64)
            if leaf.spec.same_as is not None or leaf.spec.dtype is None:
                continue
            if leaf.spec.sharding is None:
                here[...] = 1
            elif 0 not in leaf.spec.shape:
                for part in parts_of(leaf.spec, process):
                    here[part] = 1
            assert (counts[number] == here).all()
        assert plan.own == job.plan(process).own


@given(jobs())
def test_of_what_several_disks_have_one_process_is_the_owner(job: Job) -> None:
    plans = dataclasses.replace(job, mode="local").plans()
    owned: list[tuple[int, int]] = []
    for plan in plans:
        here = {(chunk.leaf, chunk.number) for chunk in chunks_in(plan)}
        assert plan.copies <= here
        owned += sorted(here - plan.copies)
    for number, leaf in enumerate(plans[0].leaves):
        of_leaf = sorted(chunk for each, chunk in owned if each == number)
        assert of_leaf == list(range(math.prod(leaf.grid) * leaf.has_chunks))


@given(jobs(), st.data())
def test_copies_of_what_others_own_are_in_files_of_their_own(job: Job, data: st.DataObject) -> None:
    for plan in dataclasses.replace(job, mode="local").plans():
        every = sorted((chunk.leaf, chunk.number) for chunk in chunks_in(plan))
        done = data.draw(st.sets(st.sampled_from(every))) if every else set()
        apart = data.draw(st.sets(st.sampled_from(every))) if every else set()
        rest = plan.rest(done, [apart - done])
        assert {(chunk.leaf, chunk.number) for chunk in chunks_in(rest)} == set(every) - done
        for batch in (*plan.batches, *rest.batches):
            are_copies = {(chunk.leaf, chunk.number) in plan.copies for chunk in batch.chunks}
            assert len(are_copies) == 1


def test_owners_of_replicas_have_about_the_same() -> None:
    mesh = Mesh(devices_of(4, 1), ("data",))
    tree = tuple(LeafSpec("jax", "float32", (MIB,), NamedSharding(mesh, Spec())) for _ in range(64))
    plans = dataclasses.replace(Job((tree,) * 4, 1 << 30), mode="local").plans()
    owned = [
        sum(c.nbytes for c in chunks_in(plan) if (c.leaf, c.number) not in plan.copies)
        for plan in plans
    ]
    assert owned == [64 * 4 * MIB // 4] * 4


@given(jobs())
def test_a_team_of_one_is_no_team(job: Job) -> None:
    tree = [spec for spec in job.trees[0] if spec.sharding is None and spec.same_as is None]
    names = [f"leaf{number}" for number in range(len(tree))]
    alone = plan_save(names, tree, job.budget)
    for mode in ("shared", "local"):
        group = ProcessGroup(0, 1, mode)
        team = plan_save(names, tree, job.budget, Division(group))
        assert (team.leaves, team.batches) == (alone.leaves, alone.batches)
    assert (alone.group, alone.own) == (None, ())


# -- balance --------------------------------------------------------------------------------------


def train_state(mesh: Mesh, layers: int, width: int) -> list[LeafSpec]:
    """Parameters and two moments of a transformer; matrices are cut along the axis `fsdp`."""
    rows, columns, all_of_it = Spec("fsdp", None), Spec(None, "fsdp"), Spec()
    shapes = [((51_200, width), rows), ((width,), all_of_it)]
    for _ in range(layers):
        shapes += [((width, 3 * width), rows), ((width, width), columns)]
        shapes += [((width, 4 * width), rows), ((4 * width, width), rows)]
        shapes += [((width,), all_of_it)] * 4
    arrays = [
        LeafSpec("jax", "float32", shape, NamedSharding(mesh, spec)) for shape, spec in shapes * 3
    ]
    return [LeafSpec("int", "int64"), *arrays, LeafSpec("numpy", "uint32", (2,))]


def loads(plans: list[SavePlan]) -> list[int]:
    return [sum(chunk.stored_nbytes for chunk in chunks_in(plan)) for plan in plans]


@pytest.mark.parametrize(
    ("processes", "each", "replicas"),
    [(2, 1, 2), (4, 2, 4), (8, 4, 8), (8, 4, 2), (8, 8, 1), (16, 8, 16), (6, 4, 3), (5, 2, 10)],
)
def test_a_train_state_is_shared_out_evenly(processes: int, each: int, replicas: int) -> None:
    devices = devices_of(processes, each)
    mesh = Mesh(devices.reshape(replicas, -1), ("data", "fsdp"))
    # Enough for every process to have many chunks.
    specs = train_state(mesh, layers=2 * processes, width=1024)
    plans = Job((tuple(specs),) * processes, 1 << 30).plans()
    written = loads(plans)
    assert sum(written) == pytest.approx(plans[0].nbytes, rel=0.01)
    assert max(written) <= 1.1 * np.mean(written)


@pytest.mark.parametrize("order", ["by process", "shuffled"])
def test_replicated_leaves_are_dealt_out_whether_large_or_small(order: str) -> None:
    devices = devices_of(8, 2)
    if order == "shuffled":
        devices = devices[np.random.default_rng(0).permutation(len(devices))]
    everywhere = NamedSharding(Mesh(devices, ("x",)), Spec())
    for shape in [(40 * MIB,), (25,), (MIB,)]:
        specs = [LeafSpec("jax", "float32", shape, everywhere)] * 400
        specs = [replace(spec, weak_type=bool(n % 2)) for n, spec in enumerate(specs)]
        written = loads(Job((tuple(specs),) * 8, 1 << 30).plans())
        assert max(written) - min(written) <= 32 * MIB
        assert max(written) <= 1.01 * np.mean(written)


def test_small_leaves_fill_up_what_large_ones_left() -> None:
    everywhere = NamedSharding(Mesh(devices_of(8, 1), ("x",)), Spec())
    small = [LeafSpec("jax", "float32", (16 * KIB,), everywhere)] * 4000
    large = [LeafSpec("jax", "float32", (8 * MIB,), everywhere)] * 7
    written = loads(Job((tuple(small + large),) * 8, 1 << 30).plans())
    assert max(written) <= 1.01 * np.mean(written)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 3, 1], [3, 0, 1, 2]])
def test_processes_that_have_the_shards_in_another_order_agree(order: list[int]) -> None:
    devices = devices_of(2, 2)[order].reshape(2, 2)
    cut = NamedSharding(Mesh(devices, ("x", "y")), Spec("y"))
    job = Job(((LeafSpec("jax", "float32", (6 * MIB,), cut),),) * 2, 64 * MIB)
    written = [chunk.number for plan in job.plans() for chunk in chunks_in(plan)]
    assert sorted(written) == list(range(len(written)))
    assert len(written) >= 2


def test_an_array_that_only_some_have_wholly_is_not_packed_on_disks_of_their_own() -> None:
    devices = devices_of(3, 2)[:4].reshape(2, 2)
    devices[1, 1].process_index = 2
    cut = NamedSharding(Mesh(devices, ("x", "y")), Spec("y"))
    job = Job(((LeafSpec("jax", "float32", (6,), cut),),) * 3, MIB)
    assert [len(chunks_in(plan)) for plan in dataclasses.replace(job, mode="local").plans()] == [
        2,
        1,
        1,
    ]
    assert [plan.leaves[0].packed for plan in job.plans()] == [True] * 3
    assert [len(chunks_in(plan)) for plan in job.plans()] == [1, 0, 0]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 1000)), max_size=30), st.data())
def test_no_member_of_a_group_has_more_than_a_chunk_beyond_another(
    jobs: list[tuple[int, int]], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 9))
    sharding = NamedSharding(Mesh(devices_of(count + 1, 1), ("x",)), Spec())
    taken: list[list[tuple[int, int]]] = []
    sums = []
    for index in range(count + 1):
        placement = Ownership(ProcessGroup(index, count + 1)).placement(sharding, (4,), "w")
        assert placement is not None
        ((group, _),) = placement.shards
        assert placement.whole_group is group
        partitioner = Partitioner()
        for leaf, (chunks, nbytes) in enumerate(jobs):
            partitioner.add(group, leaf, chunks, nbytes)
        own = {leaf: part for (leaf, _), part in partitioner.own().items()}
        taken.append([(leaf, chunk) for leaf, part in own.items() for chunk in part])
        sums.append(sum(jobs[leaf][1] for leaf, _ in taken[-1]))
    assert sorted(pair for pairs in taken for pair in pairs) == [
        (leaf, chunk) for leaf, (chunks, _) in enumerate(jobs) for chunk in range(chunks)
    ]
    assert max(sums) - min(sums) <= max((nbytes for _, nbytes in jobs), default=0)


def test_the_odd_leaf_is_not_always_written_by_the_first_process() -> None:
    writers = set()
    for processes in range(2, 12):
        sharding = NamedSharding(Mesh(devices_of(processes, 1), ("x",)), Spec())
        job = Job(((LeafSpec("jax", "float32", (4,), sharding),),) * processes, MIB)
        writers |= {p for p, plan in enumerate(job.plans()) if plan.batches}
    assert len(writers) > 2


# -- jobs larger than any machine -----------------------------------------------------------------


@settings(max_examples=5)
@given(st.sampled_from([0, 1, 777, 1999]))
def test_a_process_looks_at_its_own_share_only(process: int) -> None:
    devices = devices_of(2000, 8)
    mesh = Mesh(devices, ("fsdp",))
    cut = NamedSharding(mesh, Spec("fsdp"))
    specs = [LeafSpec("jax", "float32", (16_000 * 512, 2), cut)] * 20
    specs = [replace(spec, weak_type=bool(n % 2)) for n, spec in enumerate(specs)]
    names = [f"leaf{number}" for number in range(len(specs))]
    plan = plan_save(names, specs, 1 << 30, Division(ProcessGroup(process, 2000)))
    assert len(chunks_in(plan)) == 20 * 8
    assert len(plan.batches) == 1
    assert {chunk.number // 8 for chunk in chunks_in(plan)} == {process}


def test_more_chunks_than_a_manifest_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_plan, "MOST_CHUNKS", 100)
    cut = NamedSharding(Mesh(devices_of(20, 4), ("x",)), Spec("x"))
    leaf = LeafSpec("jax", "float32", (80,), cut)
    plan_save(["a"], [leaf], MIB, Division(ProcessGroup(3, 20)))
    with pytest.raises(InvalidArgumentError, match="160 chunks, of which 80 are") as caught:
        plan_save(
            ["a", "b"], [leaf, replace(leaf, weak_type=True)], MIB, Division(ProcessGroup(3, 20))
        )
    assert caught.value.leaf == "a"


# -- lengths without divisors ---------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.sampled_from([1, 2, 3])), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4, 16]),
    st.integers(16, 1 << 16),
)
def test_chunks_that_must_not_cross_shards_do_not(
    axes: list[tuple[int, int]], itemsize: int, target: int
) -> None:
    shard = tuple(length for length, _ in axes)
    shape = tuple(length * parts for length, parts in axes)
    chunk = choose_chunk(shape, shard, itemsize, target, (), 1 << 40)
    assert len(chunk) == len(shape)
    for length, part, each in zip(shape, shard, chunk, strict=True):
        assert part % each == 0 or part == length
    # Too many small chunks are worse than large ones.
    nbytes = math.prod(chunk) * itemsize
    assert nbytes * 64 >= min(target, math.prod(shard) * itemsize)
    free = choose_chunk(shape, shard, itemsize, target)
    if all(part % each == 0 for part, each in zip(shard, free, strict=True)):
        assert chunk == free


def test_an_axis_without_divisors_is_left_to_others() -> None:
    assert choose_chunk((200_006, 64), (100_003, 64), 4, MIB, (), 1 << 30) == (100_003, 2)
    assert choose_chunk((200_006,), (100_003,), 4, 64 * KIB, (), 1 << 30) == (100_003,)
    # Too large for the budget: small chunks, then.
    assert choose_chunk((200_006,), (100_003,), 4, 64 * KIB, (), 300_000) == (1,)


def test_a_shard_that_cannot_be_cut_is_refused() -> None:
    cut = NamedSharding(Mesh(devices_of(2, 1), ("x",)), Spec("x"))
    leaf = LeafSpec("jax", "float32", (2 * (2**31 - 1),), cut)
    with pytest.raises(InvalidArgumentError, match="4294967294 chunks, of which") as caught:
        plan_save(["w"], [leaf], 1 << 30, Division(ProcessGroup(0, 2)))
    assert caught.value.leaf == "w"


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0), (5, 3)])
def test_a_process_is_one_of_the_team(index: int, count: int) -> None:
    with pytest.raises(InvalidArgumentError, match="index from 0"):
        ProcessGroup(index, count)


def test_the_mode_of_a_team_is_one_of_two() -> None:
    with pytest.raises(InvalidArgumentError, match="expected 'shared' or 'local'"):
        ProcessGroup(0, 2, "elsewhere")  # type: ignore[arg-type]


def test_an_array_on_a_process_that_does_not_save_is_refused() -> None:
    everywhere = NamedSharding(Mesh(devices_of(3, 1), ("x",)), Spec())
    with pytest.raises(InvalidArgumentError, match="process 2, and only 2 processes") as caught:
        plan_save(
            ["w"], [LeafSpec("jax", "float32", (4,), everywhere)], MIB, Division(ProcessGroup(0, 2))
        )
    assert caught.value.leaf == "w"


def test_an_array_on_one_other_process_is_refused() -> None:
    there = NamedSharding(Mesh(devices_of(3, 1)[2:], ("x",)), Spec())
    leaf = LeafSpec("jax", "float32", (4,), there)
    with pytest.raises(UnsupportedLeafError, match="process 2 only") as caught:
        plan_save(["w"], [leaf], MIB, Division(ProcessGroup(0, 3)))
    assert caught.value.leaf == "w"
    # Process 2 cannot tell it from one of its own, which the primary writes.
    assert plan_save(["w"], [leaf], MIB, Division(ProcessGroup(2, 3))).own == (0,)


@pytest.mark.parametrize("largest", [0, -1, 4095])
def test_a_file_has_room_for_something(largest: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"largest_file_bytes={largest}"):
        plan_save([], [], MIB, largest_file_bytes=largest)


def test_the_holders_of_an_element_are_found() -> None:
    devices: Any = devices_of(4, 2).reshape(2, 4)
    sharding = NamedSharding(Mesh(devices, ("x", "y")), Spec("y"))
    assert [holders_of(sharding, (8, 3), (row, 2)) for row in (0, 2, 5, 7)] == [
        (0, 2),
        (0, 2),
        (1, 3),
        (1, 3),
    ]
