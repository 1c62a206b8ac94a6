"""The way of arrays from accelerators, on CPU devices that are taken for some.

CPU devices list `pinned_host` memory too, so everything but the speed is the same: slices are taken
on the device, move to page-locked memory, and are copied from there.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._engine.memory import staging
from ckpt._engine.save import item_write
from tests.support.trees import assert_same, sharded

MIB = 1 << 20


@pytest.fixture(autouse=True)
def remote(monkeypatch: pytest.MonkeyPatch) -> list[jax.Array]:
    """Take every device for an accelerator; return what moves to page-locked memory."""
    moved: list[jax.Array] = []
    move = staging.to_page_locked

    def watch(array: jax.Array) -> jax.Array:
        moved.append(array)
        return move(array)

    monkeypatch.setattr(staging, "_is_host", lambda sharding: False)
    monkeypatch.setattr(staging, "to_page_locked", watch)
    return moved


def state() -> dict[str, Any]:
    base = jnp.arange(1 << 20, dtype=jnp.float32).reshape(1024, 1024)
    return {
        "one": base,
        "rows": sharded(base + 1, "data", None),
        "both": sharded((base + 2).astype(jnp.bfloat16), "data", "model"),
        "replicated": sharded(base + 3),
        "odd": sharded(np.arange(8 * 100_003, dtype=np.int32), ("data", "model")),
        "bools": base % 3 == 0,
        "small": [sharded(np.arange(16, dtype=np.int8), "data"), jnp.float32(3), np.arange(5)],
        "host": np.arange(1 << 18),
        "scalar": 7,
    }


@pytest.mark.parametrize("mode", ["auto", "copy", "view", "device"])
@pytest.mark.parametrize("budget", [MIB, 64 * MIB])
def test_arrays_come_back_bit_for_bit(
    tmp_path: Path, mode: Any, budget: int, remote: list[jax.Array]
) -> None:
    tree = state()
    with ckpt.sync.CheckpointManager(tmp_path, staging=ckpt.Staging(budget, mode)) as mgr:
        commit = mgr.save(0, tree)
        wanted = jax.tree.map(lambda x: np.array(x) if isinstance(x, jax.Array) else x, tree)
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        commit.result()
        found = mgr.restore(0)
        assert_same(
            jax.tree.map(lambda x: np.asarray(x) if hasattr(x, "dtype") else x, found), wanted
        )
        arena = mgr._service.engine.arena
        assert arena.high_water <= budget
        assert arena.used == 0
    assert remote


def test_what_moves_is_a_chunk_and_not_its_shard(tmp_path: Path, remote: list[jax.Array]) -> None:
    """Page-locked memory is bounded by batches, also for an array larger than the budget."""
    array = jnp.arange(2 * MIB, dtype=jnp.float32)
    with ckpt.sync.CheckpointManager(tmp_path, staging=ckpt.Staging(2 * MIB)) as mgr:
        mgr.save(0, {"x": array}).result()
    assert sum(moved.nbytes for moved in remote) == array.nbytes
    assert max(moved.nbytes for moved in remote) <= 2 * MIB // 4


def test_the_call_waits_for_no_copy_of_what_has_room_in_page_locked_memory(
    tmp_path: Path, remote: list[jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns when the transfers are under way; the device starts a step that donates later."""
    returned = threading.Event()
    copy = staging.copy_batch

    def copy_afterwards(batch: Any, *args: Any) -> None:
        assert batch.packed or returned.wait(60), "the call waits for a copy"
        copy(batch, *args)

    monkeypatch.setattr(item_write, "copy_batch", copy_afterwards)
    tree = {name: leaf for name, leaf in state().items() if name != "host"}
    with ckpt.sync.CheckpointManager(tmp_path, staging=ckpt.Staging(256 * MIB)) as mgr:
        commit = mgr.save(0, tree)
        shards = [
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            if isinstance(leaf, jax.Array) and leaf.nbytes > MIB // 4
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        ]
        assert sorted(moved.nbytes for moved in remote) == sorted(shards)
        returned.set()
        commit.result()
        assert len(remote) == len(shards)
        assert_same(mgr.restore(0), tree)


def test_nothing_counts_as_memory_any_more_when_a_save_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ckpt.errors.CheckpointError("planned")

    monkeypatch.setattr(item_write, "copy_batch", fail)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        with pytest.raises(ckpt.errors.CheckpointError, match="planned"):
            mgr.save(0, {"x": jnp.arange(MIB, dtype=jnp.float32)}).result()
        assert mgr._service.engine.arena.used == 0


def test_no_host_copy_stays_on_an_array(tmp_path: Path) -> None:
    tree = state()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, tree).result()
    for leaf in jax.tree.leaves(tree):
        assert getattr(leaf, "_npy_value", None) is None


def test_a_device_without_room_leaves_the_copy_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(array: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    monkeypatch.setattr(jnp, "copy", full)
    tree = state()
    with ckpt.sync.CheckpointManager(tmp_path, staging=ckpt.Staging(mode="device")) as mgr:
        commit = mgr.save(0, tree)
        assert commit.progress.staged == commit.progress.total
        commit.result()
        assert_same(mgr.restore(0), tree)


def test_small_leaves_of_one_kind_move_together(tmp_path: Path, remote: list[jax.Array]) -> None:
    """Thousands of small transfers would block the call for seconds."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, (300, 7), np.uint32)
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    # Among them are NaN of all kinds, which stay as they are, also where jax looks for NaN.
    bits[::3, 0] = 0x7F800001 + np.arange(100)
    tree: dict[str, Any] = {
        **{f"f{n}": jax.device_put(row.view(np.float32)) for n, row in enumerate(bits)},
        **{f"r{n}": sharded(row.astype(np.int32)) for n, row in enumerate(bits)},
        **{f"b{n}": jnp.asarray(row % 2 == 0) for n, row in enumerate(bits)},
        **{f"few{n}": jnp.full((2,), n, jnp.bfloat16) for n in range(20)},
        # Programs on arrays in host memory may be slow, or not possible.
        **{f"p{n}": jax.device_put(row.view(np.float32), pinned) for n, row in enumerate(bits)},
    }
    wanted = jax.tree.map(lambda leaf: np.array(leaf).tobytes(), tree)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        jax.config.update("jax_debug_nans", True)
        try:
            commit = mgr.save(0, tree)
        finally:
            jax.config.update("jax_debug_nans", False)
        for leaf in tree.values():
            leaf.delete()
        commit.result()
        found = mgr.restore(0)
    assert jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), found) == wanted
    # 18 stacks and 12 arrays of each of two kinds; others move one by one.
    assert [moved.shape for moved in remote].count((16, 7)) == 36
