"""A save, restore or delete that is cancelled at any point happens wholly or leaves nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from tests.behaviour.saving.odd_managers import (
    LARGE,
    PATIENCE_S,
    SMALL,
    fire,
    manager,
    names,
    plain_manager,
    reached,
    run,
)
from tests.support.odd_items import Odd
from tests.support.trees import abstract, assert_same, sharded

# Staged and written in many turns where the budget is a megabyte.
MIB = ckpt.Staging(budget_bytes=1 << 20)


@pytest.mark.parametrize("stands_in", ["commit", "line"])
def test_a_cancelled_commit_leaves_nothing_and_the_next_save_works(
    tmp_path: Path, stands_in: str
) -> None:
    async def main() -> None:
        async with manager(tmp_path, staging=MIB) as mgr:
            held = Odd(LARGE, hold="commit")
            commit = await mgr.save(0, held)
            await reached(held)
            if stands_in == "line":
                behind = asyncio.create_task(mgr.save(1, SMALL))
                await asyncio.sleep(0)
            assert commit.cancel() is True
            with pytest.raises(ckpt.errors.CommitCancelledError, match="step 0"):
                await commit
            assert commit.done()
            assert commit.cancel() is False
            assert commit.stage == "failed"
            if stands_in == "line":
                await (await behind)
            else:
                assert names(tmp_path) == set()
                await (await mgr.save(1, SMALL))
            assert names(tmp_path) == {"1"}
            commit = await mgr.save(0, LARGE)
            await commit
            assert_same(await mgr.restore(0), LARGE)

    run(main)


def test_a_cancelled_commit_that_nobody_awaits_is_no_failure(tmp_path: Path) -> None:
    with plain_manager(tmp_path) as mgr:
        mgr.save(0, Odd(SMALL, hold="commit")).cancel()
    assert names(tmp_path) == set()


def test_a_commit_can_be_cancelled_from_the_library_s_own_thread(tmp_path: Path) -> None:
    gate = threading.Event()
    commits: list[ckpt.Commit] = []

    def observe(event: ckpt.types.Event) -> None:
        if event.phase == "write":
            gate.wait(PATIENCE_S)
            commits[0].cancel()

    with plain_manager(tmp_path, observers=[observe]) as mgr:
        commits.append(mgr.save(0, SMALL))
        gate.set()
        assert isinstance(commits[0].exception(PATIENCE_S), ckpt.errors.CommitCancelledError)
    assert names(tmp_path) == set()


def test_cancelling_an_awaiter_leaves_the_commit_going(tmp_path: Path) -> None:
    async def wait_for(commit: ckpt.Commit) -> None:
        await commit

    async def main() -> None:
        gate = threading.Event()
        async with manager(tmp_path) as mgr:
            commit = await mgr.save(0, Odd(SMALL, gate=gate))
            task = asyncio.create_task(wait_for(commit))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wait_for(commit), 0.001)
            assert not commit.done()
            gate.set()
            info = await commit
            assert info is not None
            assert await mgr.all_steps() == [0]

    run(main)


def test_an_awaiter_that_was_cancelled_has_not_seen_the_error(tmp_path: Path) -> None:
    async def main() -> None:
        gate = threading.Event()
        mgr = manager(tmp_path)
        commit = await mgr.save(0, Odd(SMALL, gate=gate, error=fire()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(commit), 0.001)
        gate.set()
        with pytest.raises(ckpt.CheckpointError, match="fire"):
            await mgr.close()

    run(main)


def test_a_block_that_is_cancelled_still_commits_what_it_saved(tmp_path: Path) -> None:
    async def main() -> None:
        gate = threading.Event()
        item = Odd(SMALL, gate=gate)

        async def block() -> None:
            async with manager(tmp_path) as mgr:
                await mgr.save(0, item)
                await asyncio.sleep(PATIENCE_S)

        task = asyncio.create_task(block())
        await reached(item)
        task.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert names(tmp_path) == {"0"}

    run(main)


def loop_turns() -> Iterator[int]:
    """How many turns of the loop to wait before cancelling: every small count, then fewer."""
    turns = 0.0
    while True:
        yield int(turns)
        turns = max(turns + 1, turns * 1.3)


async def cancelled_after(turns: int, call: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Cancel `call` after so many turns of the loop; return whether that came in time."""
    task = asyncio.create_task(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return False, await task
    except asyncio.CancelledError:
        return True, None


def test_a_save_cancelled_at_any_point_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with manager(tmp_path, staging=MIB) as mgr:
            kept: set[str] = set()
            done = 0
            for step, turns in enumerate(loop_turns()):
                cancelled, commit = await cancelled_after(turns, mgr.save(step, LARGE))
                if not cancelled:
                    await commit
                    done += 1
                    kept.add(str(step))
                elif str(step) in names(tmp_path):
                    # Cancelled when nothing could be stopped any more: then it is all there.
                    assert_same(await mgr.restore(step), LARGE)
                    kept.add(str(step))
                assert names(tmp_path) == kept, f"cancelled after {turns} turns"
                assert not mgr.is_saving_in_progress()
                if done == 2:
                    break
            assert step > 15
            assert await mgr.all_steps() == sorted(int(name) for name in kept)
            await (await mgr.save(step + 1, LARGE))
            assert_same(await mgr.restore(step + 1), LARGE)

    run(main)


@pytest.mark.parametrize("phase", ["plan", "stage", "write", "record", "publish"])
def test_a_save_cancelled_in_any_phase_is_whole_or_not_there(tmp_path: Path, phase: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        armed = False
        task: asyncio.Task[ckpt.Commit]

        def observe(event: ckpt.types.Event) -> None:
            nonlocal armed
            if armed and event.phase == phase:
                armed = False
                asked = threading.Event()

                def cancel() -> None:
                    task.cancel()
                    # Once the task has passed the request on.
                    loop.call_soon(loop.call_soon, asked.set)

                loop.call_soon_threadsafe(cancel)
                assert asked.wait(PATIENCE_S)

        async def save() -> ckpt.Commit:
            commit = await mgr.save(0, LARGE)
            await commit
            return commit

        async with manager(tmp_path, staging=MIB, observers=[observe]) as mgr:
            armed = True
            task = asyncio.create_task(save())
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not armed
            await mgr.wait_until_finished()
            if await mgr.all_steps() == [0]:
                assert_same(await mgr.restore(0), LARGE)
                assert names(tmp_path) == {"0"}
            else:
                assert phase != "publish"
                assert names(tmp_path) == set()
            await (await mgr.save(1, LARGE))
            assert_same(await mgr.restore(1), LARGE)

    run(main)


def test_a_one_shot_save_cancelled_at_any_point_is_whole_or_not_there(tmp_path: Path) -> None:
    async def main() -> None:
        done = 0
        kept: set[str] = set()
        for number, turns in enumerate(loop_turns()):
            path = tmp_path / f"{number}"
            cancelled, _ = await cancelled_after(turns, ckpt.save(path, LARGE, staging=MIB))
            done += not cancelled
            if path.exists():
                assert_same(await ckpt.load(path), LARGE)
                kept.add(path.name)
            else:
                assert cancelled
            assert names(tmp_path) == kept, f"cancelled after {turns} turns"
            if done == 2:
                break
        assert number > 15

    run(main)


@pytest.mark.parametrize("way", ["manager", "one-shot"])
def test_a_restore_cancelled_at_any_point_gives_its_memory_back(tmp_path: Path, way: str) -> None:
    # Saved from one device and restored by columns onto eight, every chunk passes through the
    # staging memory.
    saved = {"w": np.arange(3 << 16, dtype=np.float32).reshape(768, 256)}
    wanted = {"w": sharded(saved["w"], None, ("data", "model"))}
    target = abstract(wanted)

    async def main() -> None:
        async with manager(tmp_path, staging=MIB) as mgr:
            await (await mgr.save(0, {"w": jnp.asarray(saved["w"])}))

            def restore() -> Coroutine[Any, Any, Any]:
                if way == "manager":
                    return mgr.restore(0, target)
                return ckpt.load(tmp_path / "0", target)

            tries = done = 0
            for turns in loop_turns():
                cancelled, tree = await cancelled_after(turns, restore())
                tries += 1
                if not cancelled:
                    assert_same(tree, wanted)
                    done += 1
                    if done == 2:
                        break
            assert tries > 10
            # With a megabyte of staging memory, none of which may have been lost:
            assert_same(await mgr.restore(0, target), wanted)
            await (await mgr.save(1, LARGE))
            assert_same(await mgr.restore(1), LARGE)
        assert names(tmp_path) == {"0", "1"}

    run(main)


def test_a_delete_cancelled_at_any_point_is_whole_or_not_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with manager(tmp_path) as mgr:
            kept: set[str] = set()
            for step in range(80):
                await (await mgr.save(step, SMALL))
                await cancelled_after(int(1.12**step), mgr.delete(step))
                if step in await mgr.all_steps():
                    assert_same(await mgr.restore(step), SMALL)
                    kept.add(str(step))
                assert names(tmp_path) == kept, f"cancelled after {int(1.12**step)} turns"

    run(main)


def test_a_save_cancelled_while_it_waits_its_turn_never_begins(tmp_path: Path) -> None:
    async def main() -> None:
        gate = threading.Event()
        async with manager(tmp_path) as mgr:
            first = await mgr.save(0, Odd(SMALL, gate=gate))
            waiting = asyncio.create_task(mgr.save(1, SMALL))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not first.done()
            third = asyncio.create_task(mgr.save(2, SMALL))
            await asyncio.sleep(0)
            gate.set()
            await (await third)
            assert await mgr.all_steps() == [0, 2]

    run(main)
    assert names(tmp_path) == {"0", "2"}
