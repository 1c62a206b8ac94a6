"""What is read at once where processes share reads, and what is too large to be shared."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.fake_devices import devices_of
from ckpt._engine.restore.chunk_sources import DataFiles
from ckpt._engine.restore.read_units import extents_of, lots_of, sorted_out
from ckpt._engine.restore.shared_reads import Broadcast
from ckpt._format.manifest import ItemEntry, LeafEntry
from ckpt._format.regions import whole
from ckpt._plan.chunk_reads import plan_chunk_reads
from ckpt._plan.targets import ArrayRead, ArrayTarget
from ckpt._plan.virtual_arrays import ArraySlice

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
    chunks = plan_chunk_reads([leaf], [(0, read_of(leaf))])
    (units,) = lots_of([], chunks, {}, {None: 50_000}).values()
    entry = ItemEntry(handler="pytree", data_files=["d/a"])
    files = DataFiles(_nothing, entry, None)  # type: ignore[arg-type]
    sizes = [sum(each.end - each.start for each in extents_of(unit, files)) for unit in units]
    assert sum(sizes) >= 100 * 9_901
    assert max(sizes) <= 50_000


async def _nothing(path: str, offset: int, target: memoryview) -> None:
    """Read nothing."""


def test_packed_leaves_that_are_wanted_twice_are_not_read_in_runs() -> None:
    leaf = leaf_of((8,), (8,), packed=True)
    once, part = read_of(leaf), ArraySlice(0, whole((8,)), whole((8,)))
    packed, others = sorted_out([leaf], [once])
    assert ([each.number for each in packed], others) == ([0], [])
    for reads in ([once, once], [once, replace(once, leaf=None, pieces=(part,))]):
        packed, others = sorted_out([leaf], reads)
        assert (packed, [number for number, _ in others]) == ([], [0, 1])


@pytest.mark.parametrize(
    ("leaf", "is_shared"),
    [
        (leaf_of((8, MIB // 2), (1, MIB // 2)), True),
        # A batch is two thirds of the memory here.
        (leaf_of((8, MIB * 3 // 4), (1, MIB * 3 // 4)), False),
        (leaf_of((8, MIB), (1, MIB), codec="zstd", lengths=[MIB // 2] * 8), True),
        (leaf_of((8, MIB), (1, MIB), codec="zstd", lengths=[*[9] * 7, MIB * 3 // 4]), False),
        (leaf_of((8, 8), (8, 8), offsets=[]), False),
    ],
)
def test_only_chunks_that_fit_into_a_batch_are_shared(leaf: LeafEntry, is_shared: bool) -> None:
    everywhere = NamedSharding(Mesh(devices_of(4, 1), ("x",)), PartitionSpec())
    peers: Any = SimpleNamespace(count=4, budget_bytes=1 << 30)
    broadcast = Broadcast(peers, None, MIB, None)  # type: ignore[arg-type]
    found = broadcast.groupings([leaf], [read_of(leaf, everywhere)])
    assert list(found) == (["a"] if is_shared else [])
    for grouping in found.values():
        # Two of them at least go into a batch; and the staging budget is that of everybody.
        assert broadcast.unit_bytes(grouping, 4) == broadcast.capacity(grouping) // 2
        peers.budget_bytes = 4000
        assert broadcast.unit_bytes(grouping, 4) == 1000
