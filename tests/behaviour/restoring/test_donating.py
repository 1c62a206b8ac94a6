"""The first step after a restore donates the state: jax must be able to reuse its memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import ckpt
import ckpt.sync
from ckpt._engine.restore import destinations, device_arrays
from tests.support.trees import assert_same

DEVICES = jax.devices()


def sharded(*axes: str | None) -> NamedSharding:
    mesh = jax.make_mesh((len(DEVICES),), ("data",))
    return NamedSharding(mesh, PartitionSpec(*axes))


def state(factor: float = 1) -> dict[str, Any]:
    """Arrays in one chunk and in several, small and large, on one device and on all."""
    large = jnp.arange(3 << 18, dtype=jnp.float32).reshape(3, -1) * factor
    wide = jnp.arange(len(DEVICES) * 64, dtype=jnp.float32) * factor
    return {
        "free": large,
        "small": jnp.full((5, 7), factor, jnp.bfloat16),
        "scalar": jnp.asarray(factor, jnp.float32),
        "last device": jax.device_put(large, SingleDeviceSharding(DEVICES[-1])),
        "rows": jax.device_put(wide, sharded("data")),
        "everywhere": jax.device_put(wide, sharded()),
    }


@functools.partial(jax.jit, donate_argnums=0)
def train_step(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + 1, tree)


def addresses(tree: Any) -> dict[str, set[int]]:
    return {
        jax.tree_util.keystr(path): {
            shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards
        }
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def steps(tree: dict[str, Any]) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """The addresses before and after a step on each array, which donates it."""
    before = addresses(tree)
    after = {key: train_step(leaf) for key, leaf in tree.items()}
    return before, addresses(jax.block_until_ready(after))


@pytest.mark.parametrize("like", [False, True], ids=["as saved", "like"])
def test_the_first_step_reuses_every_buffer(tmp_path: Path, like: bool) -> None:
    saved = state()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, saved).result()
        for _ in range(2):
            found = mgr.restore(like=saved if like else None)
            assert_same(found, saved)
            before, after = steps(found)
            assert before == after


def test_what_one_restore_gave_is_not_changed_by_the_next(tmp_path: Path) -> None:
    """The memory that files are read into is used again."""

    def saved(step: int) -> dict[str, Any]:
        # So many small ones that they are read into staging memory.
        small = {f"small {n}": jnp.full(1024, n + step, jnp.float32) for n in range(600)}
        return {**state(step), **small, "mine": np.arange(3000.0), "count": np.float32(3)}

    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in (1, 2, 3):
            mgr.save(step, saved(step)).result()
        found = {step: mgr.restore(step) for step in (1, 2, 3)}
        found[1]["mine"][:] = 7
        for step in (2, 3):
            assert_same(found[step], saved(step))
        assert_same(found[1], {**saved(1), "mine": np.full(3000, 7.0)})


def test_larger_arrays_may_take_over_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy would take the memory twice; their values are safe all the same."""
    monkeypatch.setattr(destinations, "_MOST_LENT", 1 << 20)
    saved = state()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, saved).result()
        kept = mgr.restore()
        for _ in range(3):
            assert_same(mgr.restore(), saved)
        assert_same(kept, saved)
        before, after = steps({key: kept[key] for key in ("small", "scalar", "rows")})
        assert before == after


def test_without_the_quick_way_jax_makes_the_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_arrays, "_runtime_put", lambda: None)
    saved = {**state(), "weak": jnp.asarray(2.0) * 1}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, saved).result()
        kept = mgr.restore()
        for _ in range(3):
            assert_same(mgr.restore(like=saved), saved)
        assert_same(kept, saved)


def test_where_the_quick_way_refuses_jax_makes_the_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(*args: Any) -> Any:
        asked.append(args)
        raise TypeError("batched_device_put(): incompatible function arguments")

    monkeypatch.setattr(device_arrays, "_runtime_put", lambda: refuse)
    saved = state()
    ckpt.sync.save(tmp_path / "x", saved)
    assert_same(ckpt.sync.load(tmp_path / "x"), saved)
    assert asked
