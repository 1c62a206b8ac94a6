"""`watch` pins a step for as long as it is in hand, and lets go of it however the loop ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import ckpt
import ckpt.sync
from ckpt._api.watch import Watch
from ckpt._steps import watcher
from tests.behaviour.managing.watched_roots import (
    BACKENDS,
    PATIENCE_S,
    QUICK,
    child,
    pinned,
    save,
    state,
)
from tests.support.forked_programs import Forked


def until_pinned(root: Path, *steps: int) -> None:
    """Wait until exactly these are pinned; what is let go of in the background takes a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while pinned(root) != set(steps):
        assert time.monotonic() < deadline, f"{pinned(root)} are pinned"


def test_the_step_in_hand_is_pinned_and_no_other(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        with ckpt.sync.watch(tmp_path, timeout=0) as watch:
            assert set(mgr.pins()) == set()
            assert next(watch).step == 1
            assert set(mgr.pins()) == {1}
            with pytest.raises(ckpt.errors.StepPinnedError, match="lease-"):
                mgr.delete(1)
            assert next(watch).step == 2
            assert set(mgr.pins()) == {2}
            mgr.delete(1)
            assert list(watch) == []
            assert set(mgr.pins()) == set()
        mgr.delete(2)


def test_without_a_pin_nothing_is_written(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = sorted(os.listdir(tmp_path)), os.stat(tmp_path).st_mtime_ns
    with ckpt.sync.watch(tmp_path, pin=False) as watch:
        assert next(watch).step == 1
        assert (sorted(os.listdir(tmp_path)), os.stat(tmp_path).st_mtime_ns) == before


def held(root: Path) -> Watch:
    return ckpt.watch(root, poll_interval=QUICK)


async def breaks_out(root: Path) -> None:
    async for _ in held(root):
        assert pinned(root) == {1}
        break


async def closes(root: Path) -> None:
    watch = held(root)
    await anext(watch)
    assert pinned(root) == {1}
    await watch.aclose()
    assert pinned(root) == set()
    await watch.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


async def leaves_the_block(root: Path) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with held(root) as watch:
            async for _ in watch:
                raise ZeroDivisionError
    assert pinned(root) == set()


async def drops_it(root: Path) -> None:
    watch = held(root)
    await anext(watch)
    cycle: list[Any] = [watch]
    cycle.append(cycle)
    del watch, cycle
    gc.collect()


async def is_cancelled_with_it_in_hand(root: Path) -> None:
    with anyio.CancelScope() as scope:
        async with held(root) as watch:
            async for _ in watch:
                scope.cancel()
                await anyio.sleep(PATIENCE_S)
    assert pinned(root) == set()


async def is_cancelled_while_it_waits(root: Path) -> None:
    watch = held(root)
    await anext(watch)
    with anyio.move_on_after(0.1) as scope:
        await anext(watch)
    assert scope.cancelled_caught
    assert pinned(root) == set()
    # And it goes on afterwards.
    await anyio.to_thread.run_sync(save, root, 2)
    assert (await anext(watch)).step == 2


async def is_closed_while_somebody_waits(root: Path) -> None:
    watch = held(root)
    await anext(watch)
    ended = []

    async def wait() -> None:
        ended.extend([info.step async for info in watch])
        ended.append(None)

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.1)
            await watch.aclose()
    assert ended == [None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "how",
    [
        breaks_out,
        closes,
        leaves_the_block,
        drops_it,
        is_cancelled_with_it_in_hand,
        is_cancelled_while_it_waits,
        is_closed_while_somebody_waits,
    ],
)
def test_a_step_is_let_go(tmp_path: Path, how: Callable[[Path], Any], backend: str) -> None:
    save(tmp_path, 1)
    # Of managers that other tests have left, some may still be there.
    before = set(threading.enumerate())
    anyio.run(how, tmp_path, backend=backend)
    gc.collect()
    until_pinned(tmp_path)
    for thread in set(threading.enumerate()) - before:
        if thread.name == "ckpt-engine":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("before", [True, False])
def test_a_watch_that_ends_while_it_pins_a_step_lets_go(
    tmp_path: Path, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    watch = ckpt.sync.watch(tmp_path)
    face, read = watch._face, watcher.open_step  # type: ignore[attr-defined]

    async def late(*args: Any, **options: Any) -> Any:
        # The lease is written by now.
        assert len(os.listdir(tmp_path / ".ckpt-pins")) == 1
        if before:
            face.stop()
            await anyio.sleep_forever()
        with anyio.CancelScope(shield=True):
            found = await read(*args, **options)
            face.stop()
            while not face.watcher._stopped:
                await anyio.lowlevel.checkpoint()
        return found

    monkeypatch.setattr(watcher, "open_step", late)
    assert list(watch) == []
    assert pinned(tmp_path) == set()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_that_blocks_stops_nobody(tmp_path: Path, backend: str) -> None:
    gate, asked = threading.Event(), threading.Event()

    def blocks() -> bool:
        asked.set()
        return gate.wait(PATIENCE_S)

    async def main() -> None:
        with anyio.fail_after(PATIENCE_S / 2):
            async with (
                ckpt.watch(tmp_path, until=blocks) as watch,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(anext, watch)
                await anyio.to_thread.run_sync(asked.wait)
                tasks.cancel_scope.cancel()
            async with ckpt.watch(tmp_path, until=blocks) as watch:
                asked.clear()

                async def close() -> None:
                    await anyio.to_thread.run_sync(asked.wait)
                    await watch.aclose()

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(close)
                    assert [info async for info in watch] == []

    try:
        anyio.run(main, backend=backend)
    finally:
        gate.set()


def test_a_plain_loop_lets_go(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for _ in ckpt.sync.watch(tmp_path):
        assert pinned(tmp_path) == {1}
        break
    until_pinned(tmp_path)
    with ckpt.sync.watch(tmp_path) as watch:
        next(watch)
        assert pinned(tmp_path) == {1}
    assert pinned(tmp_path) == set()
    with pytest.raises(StopIteration):
        next(watch)


def test_a_caller_that_blocks_its_loop_keeps_its_pin(tmp_path: Path) -> None:
    save(tmp_path, 1)
    short = ckpt.Timeouts(lease=0.6)

    async def main() -> None:
        async with ckpt.watch(tmp_path, timeouts=short) as watch:
            await anext(watch)
            (lease,) = (tmp_path / ".ckpt-pins").iterdir()
            renewed = {lease.stat().st_mtime_ns}
            deadline = time.monotonic() + PATIENCE_S
            while len(renewed) < 4:
                assert time.monotonic() < deadline
                renewed.add(lease.stat().st_mtime_ns)

    asyncio.run(main())


def line_of(process: Forked) -> str:
    return process.stdout.readline().strip()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_evaluator_can_restore_every_step_it_is_handed(tmp_path: Path) -> None:
    """The trainer keeps one step and goes on as fast as it can."""
    last = 80
    found = []
    with (
        child("save_onward", tmp_path, last + 1) as trainer,
        ckpt.sync.CheckpointManager(tmp_path, mode="r") as mgr,
        ckpt.sync.watch(tmp_path, until=last, timeout=PATIENCE_S, poll_interval=0.001) as watch,
    ):
        for info in watch:
            assert info.step is not None
            restored = mgr.restore(info.step)
            assert (restored["w"] == info.step).all()
            assert mgr.verify(info.step)
            found.append(info.step)
        assert trainer.wait(PATIENCE_S) == 0
    assert found == sorted(set(found))
    assert found[-1] == last
    assert len(found) > 5
    # What was in hand when its turn to be deleted came is deleted after the next save.
    save_one_more(tmp_path, last + 1)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.all_steps() == [last + 1]
        assert not (tmp_path / ".ckpt-pins").exists()


def save_one_more(root: Path, step: int) -> None:
    with ckpt.sync.CheckpointManager(root, keep=ckpt.keep.Latest(1)) as mgr:
        mgr.save(step, state(step))


def test_an_evaluator_that_is_killed_lets_go_when_its_lease_runs_out(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with child("watch_steps", "waits", tmp_path, 2) as evaluator:
        assert line_of(evaluator) == "step 1"
        save_one_more(tmp_path, 2)
        with ckpt.sync.CheckpointManager(tmp_path) as mgr:
            assert mgr.all_steps() == [1, 2], "the step in hand stays"
        evaluator.send_signal(signal.SIGKILL)
        evaluator.wait(PATIENCE_S)
        until_pinned(tmp_path)
    save_one_more(tmp_path, 3)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.all_steps() == [3]


def test_a_program_that_ends_or_is_interrupted_leaves_no_pin(tmp_path: Path) -> None:
    ends, waits = tmp_path / "ends", tmp_path / "waits"
    save(ends, 1)
    save(waits, 1)
    with (
        child("watch_steps", "leaves", ends, 600) as first,
        child("watch_steps", "waits", waits, 600) as second,
    ):
        # With the watch open, and a step in hand.
        assert line_of(first) == "step 1"
        assert line_of(first) == "end"
        assert first.wait(PATIENCE_S) == 0
        assert pinned(ends) == set()
        assert line_of(second) == "step 1"
        second.stdin.write("\n")
        second.stdin.flush()
        until_pinned(waits)
        # It waits for the next step now.
        second.send_signal(signal.SIGINT)
        assert second.wait(PATIENCE_S) == -signal.SIGINT
    assert pinned(waits) == set()


def test_a_program_that_leaves_the_loop_and_ends_leaves_no_pin(tmp_path: Path) -> None:
    """The iterator has gone by then; its lease may not be forgotten."""
    endings = {"break": 0, "raise": 1, "exit": 3}
    roots = {how: [tmp_path / how / "plain", tmp_path / how / "asyncio"] for how in endings}
    for root in [root for both in roots.values() for root in both]:
        save(root, 1)
    with contextlib.ExitStack() as stack:
        children = {
            how: stack.enter_context(child("watch_steps", how, tmp_path / how, 600))
            for how in endings
        }
        for how, process in children.items():
            assert line_of(process) == "step 1"
            assert line_of(process) == "step 1"
            assert process.wait(PATIENCE_S) == endings[how]
            for root in roots[how]:
                assert pinned(root) == set(), f"{how}, {root.name}"


def test_what_has_gone_leaves_no_hook_behind(tmp_path: Path) -> None:
    save(tmp_path, 1)
    # Python has no public name for them.
    hooks: list[Any] = threading._threading_atexits  # type: ignore[attr-defined]
    before = len(hooks)
    for _ in range(5):
        ckpt.sync.watch(tmp_path).close()
        ckpt.sync.CheckpointManager(tmp_path).close()
    assert len(hooks) == before


def test_who_is_called_at_exit_is_called_once_and_the_last_one_first() -> None:
    script = """
from concurrent.futures import ThreadPoolExecutor
from ckpt._runtime.threads import run_at_exit

class Named:
    def __init__(self, name):
        self.name = name
    def end(self):
        with ThreadPoolExecutor() as pool:
            pool.submit(print, self.name).result()
        try:
            run_at_exit(self.end)
        except RuntimeError:
            print("late")

names = [Named(number) for number in range(4)]
for each in names:
    run_at_exit(each.end)
run_at_exit(names[3].end)
del each, names[1]
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["3", "late", "2", "late", "0", "late"]
    assert done.stderr == ""
