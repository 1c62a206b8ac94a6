"""Shared reads: every byte that is needed is read by one member, and found by all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ckpt._format.regions import whole
from ckpt._job.read_groups import ReadBatch, fill, grouping_of_all, groupings_of, shares_key
from ckpt._plan.chunk_reads import ByteRange
from ckpt._plan.slices import ArraySlice
from ckpt._plan.targets import ArrayRead, ArrayTarget
from docs.explanation.scaling.fake_devices import devices_of

P = PartitionSpec
SIZE = 40_000
FILES = {
    name: np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)
    for number, name in enumerate(("d/a", "d/b"))
}

ranges = st.builds(
    lambda path, start, length: ByteRange(path, start, min(start + length, SIZE)),
    st.sampled_from(sorted(FILES)),
    st.integers(0, SIZE - 1),
    st.sampled_from([1, 2, 100, 4096, 9000, 30_000]),
)
requests = st.lists(ranges, max_size=16)


@given(requests, st.sampled_from([1, 5000, 20_000, 1 << 20]))
def test_batches_hold_all_requests_in_order(requests: list[ByteRange], capacity: int) -> None:
    batches = fill(requests, capacity)
    assert [number for batch in batches for number in batch.requests] == list(range(len(requests)))
    for batch in batches:
        assert batch.requests
        assert batch.nbytes <= capacity or len(batch.requests) == 1


@given(requests, st.integers(2, 5), st.sampled_from([5000, 1 << 20]))
def test_what_members_read_is_what_all_of_them_find(
    requests: list[ByteRange], members: int, capacity: int
) -> None:
    for batch in fill(requests, capacity):
        share = -(-batch.nbytes // members)
        memory = np.zeros(share * members, np.uint8)
        read = 0
        for member in range(members):
            own = memory[member * share : (member + 1) * share]
            for part in batch.parts(member * share, (member + 1) * share):
                assert part.nbytes > 0
                own[part.at : part.at + part.nbytes] = FILES[part.path][
                    part.start : part.start + part.nbytes
                ]
                read += part.nbytes
        # Nothing twice.
        assert read == batch.nbytes
        for each in (requests[number] for number in batch.requests):
            at = batch.place(each.path, each.start, each.nbytes)
            found = memory[at : at + each.nbytes]
            assert (found == FILES[each.path][each.start : each.end]).all()


def test_what_nearly_touches_is_read_at_once_and_what_is_not_there_is_not_found() -> None:
    batch = ReadBatch(
        range(1), [ByteRange("a", 9000, 9100), ByteRange("a", 100, 200), ByteRange("a", 264, 300)]
    )
    assert [(part.start, part.nbytes) for part in batch.parts(0, 1000)] == [(100, 200), (9000, 100)]
    for path, start, nbytes in (("a", 0, 10), ("a", 290, 20), ("b", 100, 10), ("a", 5000, 1)):
        with pytest.raises(KeyError):
            batch.place(path, start, nbytes)


def test_only_the_same_reads_have_the_same_key() -> None:
    one, two = [ByteRange("a", 0, 10)], [ByteRange("a", 0, 11)]
    assert shares_key(fill(one, 100)) == shares_key(fill(one, 100))
    assert shares_key(fill(one, 100)) != shares_key(fill(two, 100))
    # Other batches would be other rounds.
    both = [*one, ByteRange("a", 9000, 9010)]
    assert shares_key(fill(both, 1 << 20)) != shares_key(fill(both, 10))


# -- who needs the same ---------------------------------------------------------------------------


def read_of(leaf: int | None, sharding: Any, shape: tuple[int, ...] = (8, 8), **more: Any) -> Any:
    target = ArrayTarget("jax", np.dtype(np.float32), sharding)
    return ArrayRead(target, shape, "float32", leaf, **more)


def devices(processes: int, each: int = 2) -> Any:
    return devices_of(processes, each)


def test_processes_that_hold_the_same_are_a_group() -> None:
    job = devices(4)
    tiles, line = Mesh(job.reshape(2, 4), ("x", "y")), Mesh(job, ("x",))
    reads = [
        read_of(0, NamedSharding(line, P())),
        read_of(1, NamedSharding(tiles, P("x"))),
        read_of(2, NamedSharding(tiles, P("y"))),
        read_of(3, NamedSharding(line, P("x"))),
        read_of(4, NamedSharding(line, P()), (0, 3)),
    ]
    found = groupings_of(reads, 4)
    assert {leaf: grouping.groups for leaf, grouping in found.items()} == {
        0: ((0, 1, 2, 3),),
        1: ((0, 1), (2, 3)),
        2: ((0, 2), (1, 3)),
    }
    assert [len(each) for each in found[0].devices] == [2, 2, 2, 2]
    assert [[d.process_index for d in each] for each in found[1].devices] == [
        [number] * 2 for number in range(4)
    ]
    assert (found[1].members, found[1].lanes, found[1].group_of(2)) == (2, 2, (2, 3))


def test_processes_may_have_different_numbers_of_devices() -> None:
    job = devices(3)
    everywhere = NamedSharding(Mesh(job[[5, 0, 3, 2]], ("x",)), P())
    (found,) = groupings_of([read_of(0, everywhere)], 3).values()
    assert [[device.id for device in each] for each in found.devices] == [[0], [2, 3], [5]]
    assert (found.members, found.lanes) == (3, 1)


def test_only_the_same_processes_and_devices_have_the_same_key() -> None:
    job = devices(4)
    tiles, line = Mesh(job.reshape(2, 4), ("x", "y")), Mesh(job, ("x",))
    meshes = [line, Mesh(job[::-1], ("x",)), Mesh(job[::2], ("x",))]
    keys = [
        found.key
        for sharding in (
            *(NamedSharding(mesh, P()) for mesh in meshes),
            NamedSharding(tiles, P("x")),
            NamedSharding(tiles, P("y")),
        )
        for found in groupings_of([read_of(0, sharding)], 4).values()
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def test_what_not_all_processes_hold_alike_is_not_shared() -> None:
    job = devices(3)
    some = Mesh(job[:4], ("x",))
    # Two processes have the one half, and one has the other.
    uneven = Mesh(job[[0, 2, 4, 5]].reshape(2, 2), ("x", "y"))
    reads = [
        read_of(0, NamedSharding(some, P())),
        read_of(1, NamedSharding(uneven, P("x"))),
        read_of(2, SingleDeviceSharding(job[0])),
        read_of(3, None),
    ]
    assert groupings_of(reads, 3) == {}


def test_what_each_process_has_for_itself_is_shared_apart_from_what_all_hold() -> None:
    job = devices(3)
    everywhere = NamedSharding(Mesh(job, ("x",)), P())
    reads = [
        read_of(0, everywhere),
        read_of(1, SingleDeviceSharding(job[0])),
        read_of(2, None),
        read_of(3, None, (0, 3)),
        # Needed by both, and so by neither of them together.
        read_of(4, None),
        read_of(4, everywhere),
    ]
    found = groupings_of(reads, 3, grouping_of_all(job, 3))
    assert found.keys() == {0, 1, 2}
    assert found[1] == found[2]
    assert found[0].groups == found[1].groups == ((0, 1, 2),)
    # A process that has for itself what others hold together is told so.
    assert found[0] != found[1]
    assert found[0].key != found[1].key


@pytest.mark.parametrize("processes", [2, 4])
def test_without_devices_of_all_processes_there_is_no_exchange(processes: int) -> None:
    assert grouping_of_all(devices(3), processes) is None


def test_a_leaf_that_arrays_need_in_different_ways_is_not_shared() -> None:
    job = devices(4)
    everywhere = NamedSharding(Mesh(job, ("x",)), P())
    halves = NamedSharding(Mesh(job.reshape(2, 4), ("x", "y")), P("x"))
    pieces = (
        ArraySlice(2, whole((8, 8)), whole((8, 8))),
        ArraySlice(3, whole((8, 8)), whole((8, 8))),
    )
    reads = [
        read_of(0, everywhere),
        read_of(0, halves),
        read_of(1, everywhere),
        read_of(1, everywhere),
        read_of(None, halves, pieces=pieces),
        read_of(3, everywhere),
        read_of(3, halves),
    ]
    assert {leaf: each.groups for leaf, each in groupings_of(reads, 4).items()} == {
        1: ((0, 1, 2, 3),),
        2: ((0, 1), (2, 3)),
    }
