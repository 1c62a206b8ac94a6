"""Promise 2: whatever the caller does to its buffers after save() returned, the committed bytes
are those of the moment of the call."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from tests.support.conditions import until
from tests.support.trees import P, assert_same, mesh, sharded

STAGINGS = {
    "auto": ckpt.Staging(),
    "copy": ckpt.Staging(mode="copy"),
    "view": ckpt.Staging(mode="view"),
    "device": ckpt.Staging(mode="device"),
    "small-budget": ckpt.Staging(budget_bytes=1 << 20),
}


def make_state(seed: int) -> dict[str, Any]:
    base = jnp.arange(1 << 19, dtype=jnp.float32).reshape(1024, 512) + seed
    return {
        "by_rows": sharded(base, "data", None),
        "by_both": sharded(base * 2, "data", "model"),
        "replicated": sharded(base[:64] * 3),
        "one_device": base * 5,
        "small": jnp.float32(seed),
    }


@jax.jit
def checksum(state: dict[str, Any]) -> Any:
    return jax.tree.map(jnp.sum, state)


def train(state: dict[str, Any]) -> dict[str, Any]:
    """A step that donates its input and writes other values into its buffers."""
    return {name: advance(leaf) for name, leaf in state.items()}


advance = jax.jit(lambda leaf: leaf * -7 + 1, donate_argnums=0)


@pytest.mark.parametrize("staging", STAGINGS.values(), ids=STAGINGS)
def test_donating_right_after_save_does_not_change_what_is_committed(
    tmp_path: Path, staging: ckpt.Staging
) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging) as mgr:
        state = make_state(0)
        wanted = []
        for step in range(4):
            wanted.append(jax.tree.map(lambda x: np.array(x), state))
            mgr.save(step, state)
            state = train(state)
            jax.block_until_ready(state)
        mgr.wait_until_finished()
        for step in range(4):
            found = jax.tree.map(np.asarray, mgr.restore(step))
            assert_same(found, wanted[step])


@pytest.mark.parametrize("staging", STAGINGS.values(), ids=STAGINGS)
def test_deleting_right_after_save_is_safe(tmp_path: Path, staging: ckpt.Staging) -> None:
    state = make_state(3)
    wanted = jax.tree.map(lambda x: np.array(x), state)
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging) as mgr:
        commit = mgr.save(0, state)
        jax.tree.map(lambda x: x.delete(), state)
        commit.result()
        assert_same(jax.tree.map(np.asarray, mgr.restore(0)), wanted)


@pytest.mark.parametrize("staging", STAGINGS.values(), ids=STAGINGS)
def test_numpy_arrays_may_be_changed_in_place_after_save(
    tmp_path: Path, staging: ckpt.Staging
) -> None:
    state: dict[str, Any] = {
        "large": np.arange(1 << 18, dtype=np.float64),
        "small": np.arange(3),
        "fortran": np.asfortranarray(np.arange(1 << 16, dtype=np.int64).reshape(256, 256)),
        "strided": np.arange(1 << 17, dtype=np.int32)[::2],
    }
    wanted = {name: array.copy() for name, array in state.items()}
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging) as mgr:
        commit = mgr.save(0, state)
        for array in state.values():
            array[...] = -1
        commit.result()
        assert_same(mgr.restore(0), wanted)


def test_a_copied_snapshot_leaves_donation_at_full_speed(tmp_path: Path) -> None:
    """A live view would make the runtime copy inside the next step, and keep the input alive."""
    state = make_state(1)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, state)
        train(state)
        assert all(leaf.is_deleted() for leaf in state.values())


def test_saving_leaves_no_host_copy_on_the_arrays(tmp_path: Path) -> None:
    state = make_state(1)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, state).result()
        mgr.restore(0)
    held = [name for name, leaf in state.items() if getattr(leaf, "_npy_value", None) is not None]
    assert not held


def test_a_save_under_way_does_not_keep_the_caller_s_arrays_alive(tmp_path: Path) -> None:
    """A state that is dropped instead of donated gives its memory back at once."""
    recorded, checked = threading.Event(), threading.Event()

    def hold(event: ckpt.types.Event) -> None:
        if event.phase == "record":
            recorded.set()
            assert checked.wait(60)

    staging = ckpt.Staging(budget_bytes=4 << 20)
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging, observers=[hold]) as mgr:
        state = make_state(1)
        alive = [weakref.ref(leaf) for leaf in state.values()]
        commit = mgr.save(0, state)
        del state
        assert recorded.wait(60)
        # A thread that has copied one may not have ended its call yet.
        until(lambda: gc.collect() >= 0 and [ref() for ref in alive] == [None] * len(alive))
        assert not commit.done()
        checked.set()
        commit.result()


def test_a_pending_computation_is_saved_with_its_result(tmp_path: Path) -> None:
    x = jnp.ones((512, 512))
    for _ in range(20):
        x = x @ x / 512
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, {"x": x}).result()
        np.testing.assert_array_equal(mgr.restore(0)["x"], x)


def test_a_deleted_array_is_named(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "params": {"w": sharded(np.ones((8, 8)), P("data")[0])},
        "ok": jnp.ones(3),
    }
    state["params"]["w"].delete()
    assert mesh().size == 8
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        with pytest.raises(ckpt.errors.UnsupportedLeafError, match=r"params\.w.*donated"):
            mgr.save(0, state)
        assert mgr.all_steps() == []
