"""The engine's shape: who does the work, what overlaps, what is bounded, what is reused."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import OrderedDict, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._engine.memory.arena import Arena
from ckpt._engine.plan_cache import PlanCache
from ckpt._engine.save import item_write
from ckpt._plan.save_plan import WHOLE
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.structure import describe
from tests.support.trees import assert_same, sharded

MIB = 1 << 20


def phases(events: list[ckpt.types.Event]) -> dict[str, list[ckpt.types.Event]]:
    found = defaultdict(list)
    for event in events:
        found[event.phase].append(event)
    return found


def test_copies_and_digests_are_timed_without_what_they_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crowded(*args: Any, **options: Any) -> Any:
        # No thread is free at first, and the loop is busy afterwards.
        await anyio.sleep(0.2)
        value = await run_in_thread(*args, **options)
        await anyio.sleep(0.2)
        return value

    monkeypatch.setattr(item_write, "run_in_thread", crowded)
    events: list[ckpt.types.Event] = []
    with ckpt.sync.CheckpointManager(tmp_path, observers=[events.append]) as mgr:
        mgr.save(0, {"w": jnp.ones(16)}).result()
    found = phases(events)
    for phase in ("stage", "digest"):
        (event,) = found[phase]
        assert event.ended_ns - event.began_ns < 0.2e9


def test_copies_from_the_device_overlap_writes_to_the_store(tmp_path: Path) -> None:
    events: list[ckpt.types.Event] = []
    state = {f"p{n}": jnp.full((MIB,), n, jnp.float32) for n in range(16)}
    staging = ckpt.Staging(budget_bytes=16 * MIB)
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging, observers=[events.append]) as mgr:
        mgr.save(0, state).result()
        assert_same(mgr.restore(0), state)
    found = phases(events)
    # 64 MiB through 16: the last copy cannot even begin before writes have ended.
    assert max(e.began_ns for e in found["stage"]) > min(e.ended_ns for e in found["write"])
    assert len({e.lane for e in found["write"]}) > 1
    for phase in ("stage", "digest", "write"):
        assert sum(e.nbytes for e in found[phase]) == 64 * MIB
        assert sorted(e.batch or 0 for e in found[phase]) == list(range(16))
    for phase in ("plan", "snapshot", "record", "publish"):
        assert len([e for e in found[phase] if e.operation == "save"]) == 1


def test_an_array_larger_than_the_budget_is_saved_within_it(tmp_path: Path) -> None:
    state = {"big": jnp.arange(8 * MIB, dtype=jnp.float32), "small": jnp.ones(3)}
    staging = ckpt.Staging(budget_bytes=4 * MIB)
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging) as mgr:
        mgr.save(0, state).result()
        assert_same(mgr.restore(0), state)
        arena = mgr._service.engine.arena
        assert arena.high_water <= 4 * MIB
        assert arena.used == 0


def test_the_arena_is_reused_and_given_back(tmp_path: Path) -> None:
    state = {f"p{n}": jnp.full((MIB,), n, jnp.float32) for n in range(4)}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        arena = mgr._service.engine.arena
        mgr.save(0, state).result()
        mark = arena.high_water
        for step in range(1, 6):
            mgr.save(step, state).result()
        assert arena.high_water == mark
        assert arena.used == 0


@pytest.mark.parametrize("mode", ["view", "device"])
def test_save_returns_before_a_held_array_is_copied_to_the_host(tmp_path: Path, mode: Any) -> None:
    returned = threading.Event()

    def hold(event: ckpt.types.Event) -> None:
        # The engine does not come past the first copy until save() has returned.
        if event.phase == "stage":
            assert returned.wait(60)

    state = {"w": sharded(np.arange(MIB, dtype=np.float32).reshape(1024, 1024), "data", "model")}
    staging = ckpt.Staging(mode=mode)
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging, observers=[hold]) as mgr:
        commit = mgr.save(0, state)
        assert commit.progress.staged == 0
        returned.set()
        commit.result()
        assert_same(mgr.restore(0), state)


def test_a_caller_that_blocks_its_own_loop_does_not_stall_a_commit(tmp_path: Path) -> None:
    async def main() -> None:
        state = {f"p{n}": jnp.full((MIB,), n, jnp.float32) for n in range(16)}
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            commit = await mgr.save(0, state)
            deadline = time.monotonic() + 60
            # From here the caller's loop does not run once until the step is durable.
            while not commit.done():
                assert time.monotonic() < deadline, commit
            assert commit.exception() is None

    asyncio.run(main())


class ThreadRecorder:
    """A handler that notes on which threads it is called."""

    name = "threads"

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def accepts(self, item: Any) -> bool:
        self.threads.add(threading.current_thread().name)
        return False

    async def stage(self, item: Any, writer: Any) -> Any:
        raise NotImplementedError

    async def load(self, entry: Any, like: Any, adapt: Any, reader: Any) -> Any:
        raise NotImplementedError


def test_work_is_done_on_the_engine_s_threads_only(tmp_path: Path) -> None:
    """Promise 4 by construction: the caller's loop runs nothing between call and return."""
    threads: set[str] = set()
    handler = ThreadRecorder()
    iterations = 0

    async def main() -> None:
        nonlocal iterations
        state = {f"p{n}": jnp.full((MIB,), n, jnp.float32) for n in range(16)}
        observers = [lambda event: threads.add(threading.current_thread().name)]
        async with ckpt.CheckpointManager(tmp_path, handlers=[handler], observers=observers) as mgr:
            stop = anyio.Event()

            async def heartbeat() -> None:
                nonlocal iterations
                while not stop.is_set():
                    iterations += 1
                    await anyio.lowlevel.checkpoint()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(heartbeat)
                commit = await mgr.save(0, state)
                await commit
                await mgr.restore(0)
                stop.set()

    asyncio.run(main())
    assert threads == {"ckpt-engine"}
    assert handler.threads == {"ckpt-engine"}
    # The caller's loop went round while 64 MiB were staged, written and read back.
    assert iterations > 100


def test_saves_commit_in_the_order_of_their_calls(tmp_path: Path) -> None:
    ended: list[int | None] = []

    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            async with anyio.create_task_group() as tasks:

                async def save(step: int) -> None:
                    commit = await mgr.save(step, {"x": jnp.full((1000,), step)})
                    commit.add_done_callback(lambda done: ended.append(done.step))

                for step in range(8):
                    tasks.start_soon(save, step)
            await mgr.wait_until_finished()
            assert await mgr.all_steps() == list(range(8))

    asyncio.run(main())
    assert ended == list(range(8))


def test_progress_and_stage_go_forward(tmp_path: Path) -> None:
    order = ["waiting", "staging", "writing", "publishing", "done"]
    seen: list[tuple[str, ckpt.types.Progress]] = []
    commits: list[ckpt.Commit] = []

    def look(event: ckpt.types.Event) -> None:
        if commits:
            seen.append((commits[0].stage, commits[0].progress))

    state = {f"p{n}": jnp.full((MIB,), n, jnp.float32) for n in range(16)}
    with ckpt.sync.CheckpointManager(tmp_path, observers=[look]) as mgr:
        commits.append(mgr.save(0, state))
        assert commits[0].progress.staged == 64 * MIB
        commits[0].result()
    final = commits[0].progress
    assert commits[0].stage == "done"
    assert (final.staged, final.written, final.total) == (64 * MIB,) * 3
    assert final.fraction == 1.0
    ranks = [order.index(stage) for stage, _ in seen]
    assert ranks == sorted(ranks)
    written = [progress.written for _, progress in seen]
    assert written == sorted(written)


def test_a_tree_of_the_same_structure_is_planned_once() -> None:
    cache = PlanCache()

    def planned(tree: Any) -> Any:
        return cache.plan("state", describe(tree), 1 << 30, WHOLE)

    base = {"a": jnp.zeros((1000, 1000)), "b": {"n": 7, "big": 1}}
    first = planned(base)
    # Other values, other arrays: the same structure.
    assert planned({"a": jnp.ones((1000, 1000)), "b": {"n": 8, "big": 2}}) is first
    for other in (
        base | {"a": jnp.zeros((1000, 999))},
        base | {"a": jnp.zeros((1000, 1000), jnp.int32)},
        base | {"a": sharded(np.zeros((1000, 1000), np.float32), "data")},
        base | {"a": np.zeros((1000, 1000), np.float32)},
        base | {"b": {"n": 7, "bag": 1}},
        base | {"b": {"n": 7.0, "big": 1}},
        # Not representable by the array that stands for a small one.
        base | {"b": {"n": 7, "big": 1 << 70}},
        # Same names and leaves, another container; the same keys in another order.
        base | {"b": OrderedDict(big=1, n=7)},
        {"b": base["b"], "a": base["a"]},
    ):
        planned(base)
        assert planned(other) is not planned(base)


def test_an_observer_that_fails_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: ckpt.types.Event) -> None:
        raise RuntimeError("from the observer")

    with ckpt.sync.CheckpointManager(tmp_path, observers=[broken]) as mgr:
        mgr.save(0, {"x": jnp.ones(3)}).result()
    assert "from the observer" in caplog.text


def test_one_info_line_per_opening_save_and_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="ckpt")
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, {"x": jnp.ones(3)}).result()
        mgr.restore(0)
    lines = [record for record in caplog.records if record.name.startswith("ckpt")]
    assert [record.levelname for record in lines] == ["INFO", "INFO", "INFO"]
    assert "no steps yet" in lines[0].getMessage()
    assert "saved step 0" in lines[1].getMessage()
    assert "restored step 0" in lines[2].getMessage()


# The arena by itself.


def test_blocks_never_overlap_and_come_back() -> None:
    async def main() -> None:
        arena = Arena(64 * 4096)
        held: list[Any] = []
        random = np.random.default_rng(0)
        for _ in range(500):
            if held and (random.random() < 0.5 or arena.used > 40 * 4096):
                arena.free(held.pop(int(random.integers(len(held)))))
            else:
                held.append(await arena.allocate(int(random.integers(1, 8 * 4096))))
            spans = sorted((b.offset, b.offset + b.nbytes) for b in held)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
            assert all(b.memory.ctypes.data % 4096 == 0 for b in held)
        for block in held:
            arena.free(block)
        assert arena.used == 0
        whole = await arena.allocate(arena.capacity)
        assert whole.nbytes == arena.capacity

    anyio.run(main)


def test_waiting_requests_are_served_in_order_and_cancelled_ones_vanish() -> None:
    async def main() -> None:
        arena = Arena(4 * 4096)
        first = await arena.allocate(4 * 4096)
        got: list[str] = []

        async def want(name: str, pages: int) -> None:
            block = await arena.allocate(pages * 4096)
            got.append(name)
            arena.free(block)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(want, "large", 4)
            await anyio.wait_all_tasks_blocked()
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as cancelled:
                    cancelled.start_soon(want, "cancelled", 1)
                    await anyio.wait_all_tasks_blocked()
                    scope.cancel()
            tasks.start_soon(want, "small", 1)
            await anyio.wait_all_tasks_blocked()
            assert got == []
            arena.free(first)
        assert got == ["large", "small"]
        assert arena.used == 0

    anyio.run(main)


def test_memory_elsewhere_counts_and_leaves_half_to_blocks() -> None:
    async def main() -> None:
        arena = Arena(8 * 4096)
        assert arena.count_elsewhere(3 * 4096) == 3 * 4096
        assert arena.count_elsewhere(3 * 4096) == 4096
        assert arena.count_elsewhere(4096) == 0
        assert arena.used == 4 * 4096
        assert arena.has_room(4 * 4096)
        assert not arena.has_room(4 * 4096 + 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(arena.allocate, 6 * 4096)
            await anyio.wait_all_tasks_blocked()
            arena.uncount(4096)
            await anyio.wait_all_tasks_blocked()
            assert arena.used == 3 * 4096
            arena.uncount(4096)
        assert arena.used == 8 * 4096

    anyio.run(main)


def test_copies_of_memory_elsewhere_go_before_requests_that_wait_for_it() -> None:
    async def main() -> None:
        arena = Arena(4 * 4096)
        counted = arena.count_elsewhere(2 * 4096)
        got: list[str] = []

        async def want(name: str, pages: int, *, held: bool) -> None:
            block = await arena.allocate(pages * 4096, held=held)
            got.append(name)
            await anyio.lowlevel.checkpoint()
            arena.free(block)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(want, "whole", 4, held=False))
                tasks.start_soon(partial(want, "later", 1, held=False))
                await anyio.wait_all_tasks_blocked()
                async with anyio.create_task_group() as copies:
                    for number in range(3):
                        copies.start_soon(partial(want, f"copy {number}", 2, held=True))
                assert sorted(got) == ["copy 0", "copy 1", "copy 2"]
                arena.uncount(counted)
        assert got[3:] == ["whole", "later"]
        assert arena.used == 0

    anyio.run(main)


def test_copies_of_memory_elsewhere_go_before_no_request_that_has_room_beside_it() -> None:
    """Otherwise a call would wait until all that is held is written."""

    async def main() -> None:
        arena = Arena(4 * 4096)
        arena.count_elsewhere(2 * 4096)
        block = await arena.allocate(2 * 4096)
        got: list[str] = []

        async def want(name: str, *, held: bool) -> None:
            taken = await arena.allocate(2 * 4096, held=held)
            got.append(name)
            arena.free(taken)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(want, "call", held=False))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(partial(want, "copy", held=True))
            await anyio.wait_all_tasks_blocked()
            arena.free(block)
        assert got == ["call", "copy"]

    anyio.run(main)


def test_a_request_that_was_called_keeps_its_room() -> None:
    async def main() -> None:
        arena = Arena(4 * 4096)
        block = await arena.allocate(4 * 4096)
        blocks: list[Any] = []

        async def want(pages: int, *, held: bool) -> None:
            blocks.append(await arena.allocate(pages * 4096, held=held))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(want, 4, held=False))
            await anyio.wait_all_tasks_blocked()
            arena.free(block)
            # Its task has not run yet.
            tasks.start_soon(partial(want, 2, held=True))
            await anyio.wait_all_tasks_blocked()
            assert [each.nbytes for each in blocks] == [4 * 4096]
            arena.free(blocks[0])
        assert [each.nbytes for each in blocks] == [4 * 4096, 2 * 4096]

    anyio.run(main)


def test_a_block_larger_than_the_arena_is_refused() -> None:
    async def main() -> None:
        arena = Arena(4096)
        with pytest.raises(ValueError, match="arena of 4096"):
            await arena.allocate(4097)

    anyio.run(main)


def test_a_state_of_many_small_leaves_and_items(tmp_path: Path) -> None:
    items = {
        "params": {f"p{n}": jnp.full((16,), n) for n in range(500)},
        "config": {"lr": 1e-3, "name": "adam", "layers": [1, 2, 3]},
        "empty": {},
    }
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, items=items).result()
        assert_same(mgr.restore(0), items)
        assert_same(mgr.restore(0, items=["config"]), {"config": items["config"]})
        like = {"params": jax.tree.map(lambda x: x, items["params"])}
        assert_same(mgr.restore(0, like=like), {"params": items["params"]})
        assert mgr.metadata(0).info.items == ("params", "config", "empty")
