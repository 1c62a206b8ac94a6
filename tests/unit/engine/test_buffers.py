"""Memory of restored arrays: used again when they are gone, and never while they are not."""

from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
import ckpt.sync
from ckpt._engine.memory.arena import Arena, Buffers
from tests.support.trees import abstract, assert_same, sharded

MIB = 1 << 20


def address(array: Any) -> int:
    return int(np.asarray(array).ctypes.data)


def test_memory_is_used_again_once_its_arrays_are_gone() -> None:
    buffers = Buffers(Arena(64 * MIB))
    first = buffers.empty((256, 1024), np.dtype(np.float32))
    place = address(first)
    view = first[3:5].T
    del first
    gc.collect()
    assert buffers.idle_bytes == 0
    assert address(buffers.empty((256, 1024), np.dtype(np.float32))) != place
    del view
    gc.collect()
    assert buffers.idle_bytes == 2 * MIB
    again = buffers.empty((1024, 512), np.dtype(np.int16))
    assert address(again) == place
    assert address(again) % 4096 == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_living_arrays_never_share_memory_and_idle_memory_is_bounded(steps: Any) -> None:
    buffers = Buffers(Arena(8 * 4096))
    alive: list[np.ndarray[Any, Any]] = []
    for size, drop in steps:
        if drop and alive:
            alive.pop(size % len(alive))
        else:
            made = buffers.empty((size * 3000,), np.dtype(np.uint8))
            made[:] = len(alive)
            alive.append(made)
        spans = sorted((address(a), address(a) + a.nbytes) for a in alive if a.nbytes)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert 0 <= buffers.idle_bytes <= 8 * 4096


def test_idle_memory_and_the_arena_stay_within_one_budget() -> None:
    async def main() -> None:
        arena = Arena(4 * MIB)
        buffers = Buffers(arena)
        for made in [buffers.empty((MIB,), np.dtype(np.uint8)) for _ in range(6)]:
            del made
        gc.collect()
        assert buffers.idle_bytes == 4 * MIB
        # Memory that saves touch is memory that nothing idle may hold.
        blocks = [await arena.allocate(MIB) for _ in range(3)]
        assert buffers.idle_bytes == MIB
        for block in blocks:
            arena.free(block)
        await arena.allocate(2 * MIB)
        assert buffers.idle_bytes == MIB
        await arena.allocate(2 * MIB)
        assert buffers.idle_bytes == 0

    anyio.run(main)


def test_warming_the_arena_frees_what_is_idle() -> None:
    async def main() -> None:
        arena = Arena(8 * MIB)
        buffers = Buffers(arena)
        first = await arena.allocate(MIB)
        for _ in range(5):
            second = await arena.allocate(MIB)
            arena.free(first)
            first = second
        for made in [buffers.empty((MIB,), np.dtype(np.uint8)) for _ in range(8)]:
            del made
        gc.collect()
        await arena.warm(lambda: True)
        assert buffers.idle_bytes + arena.high_water <= 8 * MIB

    anyio.run(main)


def test_what_was_kept_gives_way_to_newer_sizes() -> None:
    buffers = Buffers(Arena(4 * MIB))
    for size in (MIB, 2 * MIB, 3 * MIB):
        for made in [buffers.empty((size,), np.dtype(np.uint8)) for _ in range(3)]:
            del made
        gc.collect()
        assert buffers.idle_bytes <= 4 * MIB
    place = address(buffers.empty((3 * MIB,), np.dtype(np.uint8)))
    gc.collect()
    assert address(buffers.empty((3 * MIB,), np.dtype(np.uint8))) == place
    for made in [buffers.empty((5 * MIB,), np.dtype(np.uint8))]:
        del made
    gc.collect()
    assert buffers.idle_bytes <= 4 * MIB


def test_a_small_leaf_that_lives_on_keeps_no_other_memory_alive(tmp_path: Path) -> None:
    state = {f"b{n}": np.full((50_000,), n, np.int32) for n in range(60)}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, state).result()
        restored = mgr.restore(0)
        assert mgr._service.engine.arena.used == 0
        for name, array in restored.items():
            memory = array
            while isinstance(memory.base, np.ndarray):
                memory = memory.base
            assert memory.nbytes == array.nbytes
            assert memory.base is None
            assert (array == state[name]).all()


def test_arrays_may_be_dropped_in_any_thread() -> None:
    buffers = Buffers(Arena(64 * MIB))
    made = [[buffers.empty((4096,), np.dtype(np.uint8)) for _ in range(200)] for _ in range(4)]
    threads = [threading.Thread(target=batch.clear) for batch in made]
    for thread in threads:
        thread.start()
    taken = [buffers.empty((4096,), np.dtype(np.uint8)) for _ in range(200)]
    for thread in threads:
        thread.join()
    assert len({address(a) for a in taken}) == 200
    del taken
    gc.collect()
    regions = [region for same in buffers._idle.values() for region in same]
    assert len({id(region) for region in regions}) == len(regions)
    assert buffers.idle_bytes == 4096 * len(regions)


@pytest.mark.parametrize("target", ["saved", "like", "numpy"])
def test_a_restored_state_is_not_changed_by_later_restores(tmp_path: Path, target: str) -> None:
    def state(seed: int) -> dict[str, Any]:
        base = np.arange(1 << 18, dtype=np.float32).reshape(256, 1024) + seed
        return {
            "one": jnp.asarray(base),
            "sharded": sharded(base * 2, "data", "model"),
            "small": {f"s{n}": jnp.full((64,), seed + n) for n in range(20)},
            "host": base * 3,
        }

    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in range(3):
            mgr.save(step, state(step)).result()
        like = None
        if target == "like":
            like = abstract(state(0))
        elif target == "numpy":
            like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), state(0))
        kept = []
        for turn in range(9):
            restored = mgr.restore(turn % 3, like=like)
            if turn in (1, 5):
                kept.append((turn % 3, restored))
            # All else is dropped, and its memory taken for the next one.
            del restored
            gc.collect()
        for step, restored in kept:
            found, wanted = jax.tree.map(np.array, restored), jax.tree.map(np.array, state(step))
            assert_same(found, wanted)


def test_a_restored_state_outlives_its_manager_and_donation(tmp_path: Path) -> None:
    array = np.arange(1 << 19, dtype=np.float32)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, {"x": jnp.asarray(array)}).result()
        x = mgr.restore(0)["x"]
        double = jax.jit(lambda x: x * 2, donate_argnums=0)
        y = double(mgr.restore(0)["x"])
        mgr.restore(0)
    del mgr
    gc.collect()
    np.testing.assert_array_equal(x, array)
    np.testing.assert_array_equal(y, array * 2)


def test_an_arena_is_warmed_as_far_as_a_save_wanted_at_once() -> None:
    async def main() -> None:
        arena = Arena(64 * MIB)
        await arena.warm(lambda: True)
        assert arena.high_water == 0
        # Eight blocks were wanted, two of them at a time.
        first = await arena.allocate(MIB)
        for _ in range(7):
            second = await arena.allocate(MIB)
            second.memory[:] = 7
            arena.free(first)
            first = second
        assert arena.high_water <= 3 * MIB
        await arena.warm(lambda: False)
        assert arena.high_water <= 3 * MIB
        await arena.warm(lambda: True)
        assert arena.high_water in (8 * MIB, 3 * MIB)  # the latter where the system cannot
        assert (first.memory == 7).all()
        arena.free(first)

    anyio.run(main)


def test_a_one_shot_save_gives_its_memory_back_without_a_garbage_collection(tmp_path: Path) -> None:
    def arenas() -> int:
        return sum(isinstance(each, Arena) for each in gc.get_objects())

    gc.collect()
    before = arenas()
    gc.disable()
    try:
        ckpt.sync.save(tmp_path / "x", {"w": np.ones(1 << 20)})
        ckpt.sync.load(tmp_path / "x")
        assert arenas() == before
    finally:
        gc.enable()
