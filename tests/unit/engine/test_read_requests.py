"""What is read at once, and what is too large to be shared between processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from msgspec.structs import replace

from ckpt._engine.restore.destinations import Destination
from ckpt._format.leaf_table import UNCHECKED, LeafEntry
from ckpt._format.regions import whole
from ckpt._job.shared_reads import Broadcast
from ckpt._plan.chunk_reads import chunks_elsewhere, plan_chunk_reads, plan_requests
from ckpt._plan.slices import ArraySlice
from ckpt._plan.targets import (
    ArrayRead,
    ArrayTarget,
    VirtualArray,
    concatenated,
    insert_axis,
    reshape,
    resize,
)
from docs.explanation.scaling.fake_devices import devices_of

MIB = 1 << 20


def leaf_of(shape: tuple[int, ...], chunks: tuple[int, ...], **more: Any) -> LeafEntry:
    grid = [-(-n // c) for n, c in zip(shape, chunks, strict=True)]
    count = int(np.prod(grid))
    nbytes = int(np.prod(chunks))
    given = {
        "digests": [f"{number:032x}" for number in range(count)],
        "offsets": [number * nbytes for number in range(count)],
        **more,
    }
    return LeafEntry(
        name="a", kind="numpy", dtype="uint8", shape=list(shape), chunks=list(chunks), **given
    )


def read_of(leaf: LeafEntry, sharding: Any = None) -> ArrayRead:
    target = ArrayTarget("numpy" if sharding is None else "jax", np.dtype(np.uint8), sharding)
    return ArrayRead(target, tuple(leaf.shape), "uint8", 0)


def test_the_padding_of_chunks_counts_for_what_is_read_at_once() -> None:
    """Of every chunk a hundredth is wanted, but all of it has to be read."""
    leaf = leaf_of((100 * 100, 1), (100, 100))
    chunks = plan_chunk_reads([leaf], [read_of(leaf)])
    requests = plan_requests(chunks, ["d/a"], 50_000)
    sizes = [each.source.nbytes for each in requests]
    assert sum(sizes) >= 100 * 9_901
    assert max(sizes) <= 50_000
    assert len(sizes) < 30
    assert sum(each.nbytes for each in requests) == 100 * 100


def test_a_packed_leaf_that_is_wanted_twice_is_read_once() -> None:
    leaf = leaf_of((8,), (8,), packed=True)
    once, part = read_of(leaf), ArraySlice(0, whole((8,)), whole((8,)))
    for reads in ([once, once], [once, replace(once, leaf=None, pieces=(part,))]):
        [request] = plan_requests(plan_chunk_reads([leaf], reads), ["d/a"], MIB)
        [chunk] = request.chunks
        assert [use.read for use in chunk.uses] == [0, 1]


def small_leaves(offsets: list[int], nbytes: int = 100) -> list[LeafEntry]:
    return [
        replace(leaf_of((nbytes,), (nbytes,), packed=True, offsets=[offset]), name=str(number))
        for number, offset in enumerate(offsets)
    ]


@pytest.mark.parametrize(
    ("offsets", "limit", "ranges"),
    [
        ([0, 100, 200], MIB, [(0, 300)]),
        ([200, 0, 100], MIB, [(0, 300)]),
        ([0, 100, 200], 200, [(0, 200), (200, 300)]),
        ([0, 100, 200], 1, [(0, 100), (100, 200), (200, 300)]),
        # Gaps are read over up to 64 KiB.
        ([0, 100 + (64 << 10)], MIB, [(0, 200 + (64 << 10))]),
        ([0, 101 + (64 << 10)], MIB, [(0, 100), (101 + (64 << 10), 201 + (64 << 10))]),
        # A manifest may lie: the bytes of all chunks are within the range.
        ([0, 0, 50], MIB, [(0, 150)]),
    ],
)
def test_small_chunks_that_are_neighbours_are_read_at_once(
    offsets: list[int], limit: int, ranges: list[tuple[int, int]]
) -> None:
    leaves = small_leaves(offsets)
    reads = [replace(read_of(leaf), leaf=number) for number, leaf in enumerate(leaves)]
    requests = plan_requests(plan_chunk_reads(leaves, reads), ["d/a"], limit)
    assert [(each.source.start, each.source.end) for each in requests] == ranges
    assert {each.source.path for each in requests} == {"d/a"}
    assert sum(len(each.chunks) for each in requests) == len(leaves)


def test_large_chunks_are_read_singly_and_in_the_order_of_their_arrays() -> None:
    size = 2 * MIB
    leaf = leaf_of((4, size), (1, size), offsets=[3 * size, 2 * size, size, 0])
    requests = plan_requests(plan_chunk_reads([leaf], [read_of(leaf)]), ["d/a"], 64 * MIB)
    assert [each.source.start for each in requests] == [3 * size, 2 * size, size, 0]


@pytest.mark.parametrize(
    ("leaf", "is_shared"),
    [
        (leaf_of((8, MIB // 2), (1, MIB // 2)), True),
        # A batch is two thirds of the memory here.
        (leaf_of((8, MIB * 3 // 4), (1, MIB * 3 // 4)), False),
        (leaf_of((8, MIB), (1, MIB), codec="zstd", lengths=[MIB // 2] * 8), True),
        (leaf_of((8, MIB), (1, MIB), codec="zstd", lengths=[*[9] * 7, MIB * 3 // 4]), False),
    ],
)
def test_only_chunks_that_fit_into_a_batch_are_shared(leaf: LeafEntry, is_shared: bool) -> None:
    everywhere = NamedSharding(Mesh(devices_of(4, 1), ("x",)), PartitionSpec())
    peers: Any = SimpleNamespace(count=4, budget_bytes=1 << 30)
    broadcast = Broadcast(peers, None, MIB, None)  # type: ignore[arg-type]
    found = broadcast.groupings([leaf], [read_of(leaf, everywhere)], is_common=True)
    assert list(found) == (["a"] if is_shared else [])
    for grouping in found.values():
        # Two of them at least go into a batch; and the staging budget is that of everybody.
        assert broadcast.request_bytes(grouping, 4) == broadcast.capacity(grouping) // 2
        peers.budget_bytes = 4000
        assert broadcast.request_bytes(grouping, 4) == 1000


@pytest.mark.parametrize(("length", "is_padded"), [(8, False), (9, True)])
def test_slices_that_lie_within_each_other_may_leave_a_gap_behind_them(
    length: int, is_padded: bool
) -> None:
    """Every second element is one array's, and those between are the other's."""
    vectors = [VirtualArray.of(leaf_of((4,), (4,)), number, "a") for number in range(2)]
    pairs = concatenated([insert_axis(vector, 1) for vector in vectors], 1)
    flat = reshape(pairs, (8,))
    assert flat is not None
    made = resize(flat, (length,))
    target = ArrayTarget("numpy", np.dtype(np.uint8))
    read = ArrayRead(target, made.shape, "uint8", None, pieces=made.pieces)
    assert Destination(read, packed=False).is_padded == is_padded


def test_chunks_are_found_in_another_copy_by_number_and_digest() -> None:
    digests = [f"{number:032x}" for number in range(1, 7)]
    own = replace(leaf_of((4, 5), (2, 2), offsets=[0, 32, 64, 96, 128, 160]), digests=digests)
    chunks = plan_chunk_reads([own], [read_of(own)])
    there = replace(own, offsets=[at + 4096 for at in reversed(own.offsets)], files=[1] * 6)
    found, left = chunks_elsewhere(chunks, {"a": there})
    assert left == []
    for chunk, other in zip(chunks, found, strict=True):
        assert (other.number, other.covered, other.uses) == (
            chunk.number,
            chunk.covered,
            chunk.uses,
        )
        assert (other.file, other.start) == (1, there.offsets[chunk.number])
        assert other.end - other.start == chunk.end - chunk.start
    for other_leaf, numbers in (
        (replace(there, digests=[*digests[:2], "f" * 32, *digests[3:]]), [2]),
        (replace(there, chunks=(4, 5)), [*range(6)]),
        (replace(there, shape=(4, 6)), [*range(6)]),
    ):
        _, left = chunks_elsewhere(chunks, {"a": other_leaf})
        assert sorted(chunk.number for chunk in left) == numbers
    unknown = replace(own, digests=[UNCHECKED] * 6)
    chunks = plan_chunk_reads([unknown], [read_of(unknown)])
    assert len(chunks_elsewhere(chunks, {"a": unknown})[1]) == 6
    assert len(chunks_elsewhere(chunks, {})[1]) == 6
