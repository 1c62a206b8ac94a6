"""Stored shardings, true ones and any others, are placed as a restore places them."""

from __future__ import annotations

from typing import Any

import anyio
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import ckpt
from ckpt._format.leaf_table import LeafTable
from ckpt._format.manifest import ShardingEntry
from ckpt._format.places import rebuild_sharding
from ckpt._format.regions import Region, addressable_regions
from ckpt._inspection.locations import Checkpoint, checkpoint_at
from ckpt._inspection.restores.explanation import explain_restore
from ckpt._inspection.restores.placements import AsSaved, TargetMesh
from ckpt.errors import CheckpointError, InvalidArgumentError

SHAPE = (8, 24)
NAMES = st.sampled_from(["a", "b", "c"])
PARTS = st.one_of(st.none(), NAMES, st.lists(NAMES, max_size=3))


@st.composite
def entries(draw: st.DrawFn) -> ShardingEntry:
    """Entries of which some contradict themselves."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), max_size=3))
    count = int(np.prod(sizes))
    ids = draw(st.permutations(range(8)))[:count]
    if draw(st.integers(0, 9)) == 0:
        ids = draw(st.lists(st.integers(0, 7), max_size=8))
        sizes = draw(st.lists(st.integers(-1, 1 << 40), max_size=3))
    names = draw(st.permutations("abc"))[: len(sizes)]
    return ShardingEntry(
        kind=draw(st.sampled_from(["named", "named", "named", "single", "other"])),
        platform="cpu",
        device_ids=list(ids),
        axis_names=draw(st.sampled_from([names, names, ["a"], []])),
        axis_sizes=sizes,
        axis_types=["Auto"] * len(sizes),
        spec=draw(st.lists(PARTS, max_size=3)),
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("stored") / "x"
    ckpt.sync.save(path, {"w": jax.numpy.ones(SHAPE)})
    return anyio.run(checkpoint_at, str(path))


def with_sharding(checkpoint: Checkpoint, entry: ShardingEntry, processes: int = 1) -> Checkpoint:
    manifest = checkpoint.opened.manifest
    item = manifest.items["default"]
    leaf = replace(item.leaves[0], sharding=0, committed=True)
    changed = replace(item, leaves=LeafTable.of([leaf]), shardings=[entry])
    manifest = replace(manifest, items={"default": changed}, process_count=processes)
    return replace(checkpoint, opened=replace(checkpoint.opened, manifest=manifest))


def regions_after_a_restore(entry: ShardingEntry) -> set[Region] | None:
    """Return what the devices of this process would hold; None where a restore is refused."""
    sharding: Any = rebuild_sharding(entry)
    if sharding is None:
        return {Region((0, 0), SHAPE)}
    try:
        # What a restore asks, and what jax asks of its result.
        sharding.shard_shape(SHAPE)
        sharding.check_compatible_aval(SHAPE)
    except (ValueError, IndexError):
        return None
    return {region for region, _ in addressable_regions(sharding, SHAPE)}


@given(entry=entries())
def test_a_stored_sharding_is_placed_as_by_a_restore(
    checkpoint: Checkpoint, entry: ShardingEntry
) -> None:
    manifest = with_sharding(checkpoint, entry).opened.manifest
    placements = AsSaved(manifest, 1)
    held = placements.of("default", "w", manifest.items["default"].leaves[0])
    expected = regions_after_a_restore(entry)
    assert (expected is None) == bool(placements.problems)
    if expected is not None:
        assert set(held.parts[0].regions) == expected


@given(entry=entries(), processes=st.integers(1, 5), onto=st.booleans())
def test_whatever_is_stored_is_explained_or_refused(
    checkpoint: Checkpoint, entry: ShardingEntry, processes: int, onto: bool
) -> None:
    mesh = TargetMesh({"a": 2 * processes, "b": 2}) if onto else None
    changed = with_sharding(checkpoint, entry, processes)
    try:
        found = explain_restore(changed, mesh, processes=processes)
    except CheckpointError:
        return
    assert len(found.processes) == processes
    # A packed leaf is read whole by everybody.
    assert {process.requests for process in found.processes} == {1}


@pytest.mark.parametrize("count", [0, -1, 1 << 40])
def test_a_number_of_processes_that_cannot_be(checkpoint: Checkpoint, count: int) -> None:
    entry = ShardingEntry(kind="single", platform="cpu", device_ids=[0])
    with pytest.raises(InvalidArgumentError, match="processes; expected 1 to"):
        explain_restore(with_sharding(checkpoint, entry, count))
