"""Back-to-back saves: what a save does while another one is under way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._format.manifest import ItemEntry
from ckpt._runtime.futures import settled_here
from ckpt.handlers._base import Deferred
from tests.support.conditions import until
from tests.support.gated_item import PATIENCE_S, Gate, GateHandler
from tests.support.trees import assert_same


def plain(root: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, handlers=[GateHandler()], **options)


def state(seed: int) -> dict[str, Any]:
    return {
        "w": jnp.full((1 << 18,), seed, jnp.float32),
        "host": np.full(1 << 18, seed, np.float64),
        "small": jnp.float32(seed),
        "step": seed,
    }


def gated(seed: int, gate: Gate) -> dict[str, Any]:
    return {"state": state(seed), "gate": gate}


def restored(mgr: ckpt.sync.CheckpointManager, step: int) -> Any:
    return mgr.restore(step, items=["state"])["state"]


def names(root: Path) -> set[str]:
    return set(os.listdir(root)) - {".ckpt-run"}


@pytest.mark.parametrize("mode", ["copy", "view", "device"])
def test_a_save_takes_its_snapshot_while_another_is_written(tmp_path: Path, mode: Any) -> None:
    gate = Gate()
    with plain(tmp_path, staging=ckpt.Staging(mode=mode)) as mgr:
        first = mgr.save(0, items=gated(0, gate))
        later = state(1)
        second = mgr.save(1, items={"state": later})
        # The call has returned, so this is the caller's again.
        later["host"][...] = -1
        later["w"].delete()
        assert not first.done()
        assert not second.done()
        assert names(tmp_path) & {"0", "1"} == set()
        gate.open()
        second.result(PATIENCE_S)
        assert first.done()
        assert_same(restored(mgr, 0), state(0))
        assert_same(restored(mgr, 1), state(1))


def test_a_third_save_waits_for_the_first(tmp_path: Path) -> None:
    gates = [Gate() for _ in range(3)]
    ended: list[int | None] = []
    with plain(tmp_path) as mgr, ThreadPoolExecutor(1) as thread:
        commits = [mgr.save(step, items=gated(step, gates[step])) for step in range(2)]
        third = thread.submit(mgr.save, 2, items=gated(2, gates[2]))
        queue = mgr._service.saves._backlog
        assert queue is not None
        while len(queue._queue) < 3:
            os.sched_yield()
        admitted = [save.step for save in queue._queue if save.commit.stage != "waiting"]
        assert admitted == [0, 1]
        assert not third.done()
        gates[0].open()
        commits.append(third.result(PATIENCE_S))
        for commit in commits:
            commit.add_done_callback(lambda done: ended.append(done.step))
        gates[2].open()
        assert not commits[1].done()
        gates[1].open()
        commits[2].result(PATIENCE_S)
    assert ended == [0, 1, 2]


class SlowToStage(Gate):
    """An item that is staged when the gate is opened, and durable at once."""


class SlowHandler(GateHandler):
    name = "slow"

    def accepts(self, item: Any) -> bool:
        return isinstance(item, SlowToStage)

    async def stage(self, item: Gate, writer: Any) -> Awaitable[ItemEntry]:
        entry = await (await super().stage(item, writer))

        async def commit() -> ItemEntry:
            return entry

        return Deferred(commit)


def test_a_save_stages_only_when_the_one_before_needs_no_more_memory(tmp_path: Path) -> None:
    gate = SlowToStage()
    handlers = [SlowHandler()]
    with (
        ckpt.sync.CheckpointManager(tmp_path, handlers=handlers) as mgr,
        ThreadPoolExecutor(2) as threads,
    ):
        first = threads.submit(mgr.save, 1, items={"slow": gate})
        gate.reached.wait(PATIENCE_S)
        second = threads.submit(mgr.save, 2, state(2))
        queue = mgr._service.saves._backlog
        assert queue is not None
        until(lambda: len(queue._queue) == 2)
        may_stage = queue._may_stage(queue._queue[1])
        gate.open()
        first.result(PATIENCE_S).result(PATIENCE_S)
        second.result(PATIENCE_S).result(PATIENCE_S)
    assert not may_stage
    assert names(tmp_path) == {"1", "2"}


def test_skip_saves_nothing_and_says_why(tmp_path: Path) -> None:
    gate = Gate()
    with plain(tmp_path, staging=ckpt.Staging(backlog="skip")) as mgr:
        first = mgr.save(0, items=gated(0, gate))
        skipped = mgr.save(1, state(1))
        assert not skipped
        assert skipped.done()
        with pytest.raises(errors.SaveSkippedError):
            skipped.result()
        assert "step 0 is still being saved" in (skipped.skipped or "")
        forced = mgr.save(2, state(2), force=True)
        assert forced
        gate.open()
        forced.result(PATIENCE_S)
        assert mgr.save(3, state(3))
    assert first
    assert names(tmp_path) == {"0", "2", "3"}


def test_supersede_gives_up_what_has_not_begun_to_write(tmp_path: Path) -> None:
    gate = Gate()
    with plain(tmp_path, staging=ckpt.Staging(backlog="supersede")) as mgr:
        arena = mgr._service.engine.arena
        first = mgr.save(0, items=gated(0, gate))
        old = mgr.save(1, state(1))
        assert old
        new = mgr.save(2, state(2))
        with pytest.raises(errors.SaveSkippedError):
            old.result(PATIENCE_S)
        assert not old
        assert "superseded by step 2" in (old.skipped or "")
        newest = mgr.save(3, state(3))
        with pytest.raises(errors.SaveSkippedError):
            new.result(PATIENCE_S)
        # The first is being written: it is never given up, so the queue goes on.
        assert not first.done()
        gate.open()
        newest.result(PATIENCE_S)
        assert mgr.all_steps() == [0, 3]
        assert_same(mgr.restore(3), state(3))
        assert arena.used == 0
    assert names(tmp_path) == {"0", "3"}


@pytest.mark.parametrize("mode", ["copy", "view", "device"])
def test_two_saves_share_a_budget_too_small_for_both(tmp_path: Path, mode: Any) -> None:
    staging = ckpt.Staging(budget_bytes=1 << 20, mode=mode)
    with plain(tmp_path, staging=staging) as mgr:
        commits = [mgr.save(step, state(step)) for step in range(6)]
        for commit in commits:
            commit.result(PATIENCE_S)
        assert mgr._service.engine.arena.high_water <= 1 << 20
        for step in range(6):
            assert_same(mgr.restore(step), state(step))


def test_a_step_that_is_being_saved_exists(tmp_path: Path) -> None:
    gate = Gate()
    with plain(tmp_path) as mgr:
        first = mgr.save(0, items=gated(0, gate))
        with pytest.raises(errors.StepExistsError, match="being saved"):
            mgr.save(0, state(1), if_exists="error")
        again = mgr.save(0, items={"state": state(2)}, if_exists="replace")
        gate.open()
        again.result(PATIENCE_S)
        assert first.exception() is None
        assert_same(restored(mgr, 0), state(2))
    assert names(tmp_path) == {"0"}


def test_a_save_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    gate = Gate()
    with plain(tmp_path) as mgr:
        first = mgr.save(0, items=gated(0, gate))
        second = mgr.save(1, state(1))
        second.cancel()
        assert isinstance(second.exception(PATIENCE_S), errors.CommitCancelledError)
        assert not first.done()
        gate.open()
        third = mgr.save(2, state(2))
        third.result(PATIENCE_S)
    assert names(tmp_path) == {"0", "2"}


def test_a_failure_does_not_reach_the_save_that_waits(tmp_path: Path) -> None:
    gate = Gate()
    with plain(tmp_path) as mgr:
        first = mgr.save(0, items=gated(0, gate))
        second = mgr.save(1, state(1))
        first.cancel()
        assert isinstance(first.exception(PATIENCE_S), errors.CommitCancelledError)
        second.result(PATIENCE_S)
        assert_same(mgr.restore(1), state(1))


def test_a_policy_sees_what_is_being_saved(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Look:
        def refusal(
            self, step: int, previous: Any, context: ckpt.save_when.SaveContext
        ) -> str | None:
            seen.append([each.step for each in context.saving])
            return None

    gate = Gate()
    with plain(tmp_path, save_when=Look()) as mgr:
        mgr.save(3, items=gated(3, gate))
        mgr.save(7, state(7))
        gate.open()
    assert seen == [[], [3]]


def test_an_asyncio_caller_is_blocked_for_the_copy_only(tmp_path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with ckpt.CheckpointManager(tmp_path, handlers=[GateHandler()]) as mgr:
            first = await mgr.save(0, items=gated(0, gate))
            donate = jax.jit(lambda x: x + 1, donate_argnums=0)
            array = jnp.zeros((1 << 16,))
            second = await mgr.save(1, {"x": array})
            donate(array).block_until_ready()
            assert not first.done()
            gate.open()
            await second
            found = await mgr.restore(1)
            assert not np.asarray(found["x"]).any()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="'wait', 'skip', 'supersede'"):
        ckpt.Staging(backlog="queue")  # type: ignore[arg-type]


def test_the_gate_holds(tmp_path: Path) -> None:
    """What the tests above rest on: a gated save does not commit by itself."""
    gate = Gate()
    with plain(tmp_path) as mgr:
        commit = mgr.save(0, items=gated(0, gate))
        assert not settled_here(commit._future, 0.05)
        gate.open()
        commit.result(PATIENCE_S)
