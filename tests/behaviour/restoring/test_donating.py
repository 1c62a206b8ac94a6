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
from ckpt._engine.restore import destinations, placement
from ckpt._engine.restore.destinations import uninitialized_arrays
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
        "truth": jnp.arange(3 << 18).reshape(3, -1) % 3 == factor,
        "large rows": jax.device_put(large.reshape(len(DEVICES), -1), sharded("data")),
        "large everywhere": jax.device_put(large, sharded()),
        "small": jnp.full((5, 7), factor, jnp.bfloat16),
        "scalar": jnp.asarray(factor, jnp.float32),
        "last device": jax.device_put(large, SingleDeviceSharding(DEVICES[-1])),
        "rows": jax.device_put(wide, sharded("data")),
        "everywhere": jax.device_put(wide, sharded()),
    }


@pytest.fixture(params=["blank", "copied"], autouse=True)
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Large arrays are read in place, or copied. What jax made blank, of the former."""
    found: list[Any] = []
    least = 0 if request.param == "blank" else 1 << 62
    monkeypatch.setattr(destinations, "LEAST_BLANK", least)

    def blank(*args: Any) -> Any:
        arrays = uninitialized_arrays(*args)
        assert arrays is not None
        found.extend(array for parts in arrays for array in parts)
        return arrays

    monkeypatch.setattr(destinations, "uninitialized_arrays", blank)
    return found


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
            truth = found.pop("truth")
            before, after = steps(found)
            assert before == after
            assert (
                truth.unsafe_buffer_pointer()
                == jax.jit(jnp.logical_not, donate_argnums=0)(truth).unsafe_buffer_pointer()
            )


def test_large_arrays_are_read_in_place(
    tmp_path: Path, made: list[Any], request: pytest.FixtureRequest
) -> None:
    saved = state()
    ckpt.sync.save(tmp_path / "x", saved)
    found = ckpt.sync.load(tmp_path / "x", like=saved)
    blank = {array.unsafe_buffer_pointer() for array in made}
    in_place = {name for name, places in addresses(found).items() if places <= blank}
    if "blank" in request.node.name:
        large = {"free", "truth", "large rows", "large everywhere", "last device"}
        assert in_place == {f"['{name}']" for name in large}
    else:
        assert not made


def test_cut_and_padded_arrays_are_read_in_place(tmp_path: Path) -> None:
    saved = jnp.arange(3 << 18, dtype=jnp.float32).reshape(3, -1)
    ckpt.sync.save(tmp_path / "x", {"a": saved})
    for shape in ((2, 1 << 18), (4, (1 << 18) + 5)):
        like = {"a": jax.ShapeDtypeStruct(shape, jnp.float32)}
        adapt = ckpt.Adapt(resize="both")
        found: Any = ckpt.sync.load(tmp_path / "x", like=like, adapt=adapt)["a"]
        wanted = np.zeros(shape, np.float32)
        wanted[:3, : 1 << 18] = saved[: shape[0]]
        np.testing.assert_array_equal(found, wanted)
        before: Any = found.unsafe_buffer_pointer()
        assert train_step(found).unsafe_buffer_pointer() == before


def test_damage_is_found_in_what_is_read_in_place(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"a": jnp.ones(1 << 20)})
    (file,) = (each for each in (tmp_path / "x").rglob("*") if each.stat().st_size >= 4 << 20)
    data = bytearray(file.read_bytes())
    data[1 << 20] ^= 1
    file.write_bytes(data)
    with pytest.raises(ckpt.errors.CorruptCheckpointError, match="chunk 0 of 1"):
        ckpt.sync.load(tmp_path / "x")


@pytest.mark.parametrize("option", ["jax_debug_nans", "jax_disable_jit"])
def test_options_that_look_at_the_content_of_arrays(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a blank array may hold anything, and nobody looks at it."""
    made: list[Any] = []

    def blank(*args: Any) -> Any:
        made.append(uninitialized_arrays(*args))
        return made[-1]

    monkeypatch.setattr(destinations, "uninitialized_arrays", blank)
    monkeypatch.setattr(destinations, "LEAST_BLANK", 0)
    saved = state()
    ckpt.sync.save(tmp_path / "x", saved)
    jax.config.update(option, True)
    try:
        found = ckpt.sync.load(tmp_path / "x", like=saved)
    finally:
        jax.config.update(option, False)
    assert_same(found, saved)
    assert all(made)


def test_where_jax_makes_no_blank_arrays_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no such custom call")

    monkeypatch.setattr(destinations, "uninitialized_arrays", uninitialized_arrays)
    monkeypatch.setattr(destinations, "_program", refuse)
    saved = state()
    ckpt.sync.save(tmp_path / "x", saved)
    assert_same(ckpt.sync.load(tmp_path / "x", like=saved), saved)


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
    monkeypatch.setattr(destinations, "MOST_LENT", 1 << 20)
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
    monkeypatch.setattr(placement, "_runtime_put", lambda: None)
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

    monkeypatch.setattr(placement, "_runtime_put", lambda: refuse)
    saved = state()
    ckpt.sync.save(tmp_path / "x", saved)
    assert_same(ckpt.sync.load(tmp_path / "x"), saved)
    assert asked
