"""`watch` hands out every committed step once, in order."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._format.manifest_head import FILE_NAME
from tests.behaviour.managing.watched_roots import (
    BACKENDS,
    PATIENCE_S,
    QUICK,
    child,
    pinned,
    save,
    state,
    steps_of,
)


def delete(root: Path, step: int) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.delete(step)


def test_the_steps_that_are_there_come_first_and_ascending(tmp_path: Path) -> None:
    save(tmp_path, 30, 7, 100, metrics={"loss": 0.5})
    assert steps_of(tmp_path, timeout=0) == [7, 30, 100]
    assert steps_of(tmp_path, timeout=0, after=7) == [30, 100]
    assert steps_of(tmp_path, timeout=0, after=100) == []
    assert steps_of(tmp_path, timeout=0, only_latest=True) == [100]
    assert steps_of(tmp_path, timeout=0, pin=False) == [7, 30, 100]
    assert steps_of(tmp_path, until=7) == [7]
    assert steps_of(tmp_path, until=8) == [7, 30]
    assert steps_of(tmp_path, until=lambda: True) == [7, 30, 100]
    info = next(ckpt.sync.watch(tmp_path))
    assert (info.step, info.path) == (7, f"{tmp_path}/7")
    assert info.metrics == {"loss": 0.5}
    assert info.nbytes == 800


def test_a_root_that_is_not_there_yet_is_waited_for_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    assert list(ckpt.sync.watch(root, timeout=0)) == []
    watch = ckpt.sync.watch(root, poll_interval=QUICK)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(next, watch)
        save(root, 4)
        assert first.result(PATIENCE_S).step == 4
    watch.close()
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_a_manager_watches_its_own_root_under_its_own_names(tmp_path: Path) -> None:
    names = ckpt.step_names.Standard("at", 4)
    with ckpt.sync.CheckpointManager(tmp_path, step_names=names) as trainer:
        for step in (3, 6):
            trainer.save(step, state(step), durable=True)
        with ckpt.sync.CheckpointManager(tmp_path, step_names=names, mode="r") as mgr:
            found = []
            for info in mgr.watch(until=6, poll_interval=QUICK):
                found.append(info.step)
                assert set(trainer.pins()) == {info.step}
                mgr.restore(info.step)
            assert found == [3, 6]
            assert trainer.pins() == {}
            # Closing the manager is no end of the watch, which has a thread of its own.
            later = mgr.watch(timeout=0, after=3)
        assert [info.step for info in later] == [6]

        async def main() -> list[int | None]:
            async with (
                ckpt.CheckpointManager(tmp_path, step_names=names, mode="r") as reader,
                reader.watch(timeout=0) as steps,
            ):
                return [info.step async for info in steps]

        assert anyio.run(main) == [3, 6]


def test_steps_under_names_of_another_kind(tmp_path: Path) -> None:
    names = ckpt.step_names.Standard("ckpt", 4)
    save(tmp_path, 1, 20, step_names=names)
    assert steps_of(tmp_path, timeout=0, step_names=names) == [1, 20]
    assert steps_of(tmp_path, timeout=0) == []
    with ckpt.sync.watch(tmp_path, step_names=names) as watch:
        assert next(watch).path == f"{tmp_path}/ckpt_0001"
        assert pinned(tmp_path) == {1}


def test_each_new_step_is_given_once(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    with ckpt.sync.watch(tmp_path, timeout=0) as watch:
        assert [next(watch).step, next(watch).step] == [1, 2]
        save(tmp_path, 3)
        assert next(watch).step == 3
        # Overwritten, or deleted and saved again: a new one.
        save(tmp_path, 2, if_exists="replace")
        assert next(watch).step == 2
        delete(tmp_path, 1)
        save(tmp_path, 1, 4)
        assert [info.step for info in watch] == [1, 4]
        save(tmp_path, 5)
        assert list(watch) == [], "it has ended"


def test_a_step_deleted_before_its_turn_is_left_out(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    with ckpt.sync.watch(tmp_path, timeout=0) as watch:
        assert next(watch).step == 1
        delete(tmp_path, 2)
        delete(tmp_path, 3)
        assert next(watch).step == 4


def test_only_the_latest_of_the_new_ones(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    with ckpt.sync.watch(tmp_path, timeout=0, only_latest=True) as watch:
        assert next(watch).step == 2
        save(tmp_path, 3, 4, 5)
        assert next(watch).step == 5
        assert list(watch) == []


def test_what_is_no_committed_step_is_not_given(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    (tmp_path / "2" / FILE_NAME).write_bytes((tmp_path / "2" / FILE_NAME).read_bytes()[:-30])
    (tmp_path / "3" / FILE_NAME).unlink()
    os.rename(tmp_path / "4", tmp_path / "40")
    # One by itself is the step that its directory is named as.
    ckpt.sync.save(tmp_path / "5", state(5))
    assert steps_of(tmp_path, timeout=0) == [1, 5]


def test_a_root_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "a"
    assert steps_of(tmp_path, timeout=0) == []
    with ckpt.sync.watch(root, poll_interval=QUICK) as watch:
        thread = threading.Timer(0.2, save, (root, 8))
        thread.start()
        assert next(watch).step == 8
        thread.join()


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_steps_come_while_it_waits(tmp_path: Path, backend: str) -> None:
    async def main() -> None:
        found = []
        async with (
            anyio.create_task_group() as tasks,
            ckpt.watch(tmp_path, until=3, poll_interval=QUICK) as watch,
        ):
            tasks.start_soon(anyio.to_thread.run_sync, save, tmp_path, 1, 2, 3)
            async for info in watch:
                found.append(info.step)
                # The caller's loop is not blocked meanwhile.
                await anyio.lowlevel.checkpoint()
        assert found == [1, 2, 3]

    anyio.run(main, backend=backend)
    assert pinned(tmp_path) == set()


def test_the_time_limit_begins_anew_with_each_step(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with ckpt.sync.watch(tmp_path, timeout=0.4, poll_interval=QUICK) as watch:
        assert next(watch).step == 1
        # Longer than the limit: it is one for waiting, not for the caller.
        threading.Event().wait(0.5)
        save(tmp_path, 2)
        assert next(watch).step == 2
        began = time.monotonic()
        assert list(watch) == []
        assert time.monotonic() - began > 0.35


def test_no_two_steps_come_sooner_than_they_may(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    began = time.monotonic()
    # The time limit does not count what has to be waited anyway.
    assert [info.step for info in ckpt.sync.watch(tmp_path, min_interval=0.3, timeout=0.1)] == [
        1,
        2,
        3,
    ]
    assert time.monotonic() - began >= 0.6
    with ckpt.sync.watch(tmp_path, min_interval=0.3, only_latest=True) as watch:
        assert next(watch).step == 3
        given = time.monotonic()
        index = watch._face.watcher._index
        refresh, looked = index.refresh, []

        async def look() -> Any:
            looked.append(time.monotonic())
            assert not (tmp_path / ".ckpt-pins").exists()
            return await refresh()

        index.refresh = look
        save(tmp_path, 4)
        assert next(watch).step == 4
        # What is new is decided when the time has come, and nothing is pinned until then.
        assert looked[0] - given > 0.25


def test_what_was_saved_before_the_end_was_told_is_given(tmp_path: Path) -> None:
    asked = []

    def is_over() -> bool:
        asked.append(threading.current_thread())
        if len(asked) == 3:
            save(tmp_path, 2)
        return len(asked) >= 3

    save(tmp_path, 1)
    found = [info.step for info in ckpt.sync.watch(tmp_path, until=is_over, poll_interval=QUICK)]
    assert found == [1, 2]
    assert len(asked) == 4
    assert threading.main_thread() not in asked


def test_an_error_of_the_function_is_raised(tmp_path: Path) -> None:
    def fails() -> bool:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        next(ckpt.sync.watch(tmp_path, until=fails))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_call_loses_no_step(tmp_path: Path, backend: str) -> None:
    """Cancelled at many moments, some of them between the step and the caller."""
    save(tmp_path, 0, 1, 2)

    async def main() -> list[int | None]:
        found: list[int | None] = []
        delay = 0.0
        async with ckpt.watch(tmp_path, until=2) as watch:
            while True:
                with anyio.move_on_after(delay):
                    try:
                        found.append((await anext(watch)).step)
                    except StopAsyncIteration:
                        return found
                    delay = 0.0
                    continue
                assert not (tmp_path / ".ckpt-pins").exists()
                delay += 0.0002

    assert anyio.run(main, backend=backend) == [0, 1, 2]


def test_a_step_that_nobody_saw_is_given_again(tmp_path: Path) -> None:
    """The cancellation comes when the step has been taken, before the caller has it."""
    save(tmp_path, 1, 2)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with ckpt.watch(tmp_path, until=1) as watch:
            face = watch._face
            advance = face.watcher.advance
            with anyio.CancelScope() as scope:

                async def and_cancel() -> ckpt.StepInfo | None:
                    info = await advance()
                    assert pinned(tmp_path) == {1}
                    loop.call_soon_threadsafe(scope.cancel)
                    return info

                face.watcher.advance = and_cancel
                await anext(watch)
            assert scope.cancelled_caught
            assert pinned(tmp_path) == set()
            face.watcher.advance = advance
            assert [info.step async for info in watch] == [1]

    asyncio.run(main())


def test_an_answer_that_has_to_be_awaited_is_refused(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    answers: list[Callable[[], Any]] = [lambda: over(), lambda: asyncio.Future(loop=loop)]
    for until in answers:
        with (
            ckpt.sync.watch(tmp_path, until=until) as watch,
            pytest.raises(
                ckpt.errors.InvalidArgumentError, match=r"until=.* returned an awaitable"
            ),
        ):
            next(watch)
    loop.close()
    # Python would warn of one that was never awaited.
    gc.collect()


async def over() -> bool:
    return False


class Over:
    async def __call__(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("timeout", [-1, "1", True, float("nan"), float("inf"), 10**5000]),
        ("min_interval", [-1, None, "1"]),
        ("poll_interval", [0, 0.0, -1, None]),
        ("until", [-1, 1.5, "10", True, [], 10**5000]),
        ("until", [over, functools.partial(over), Over(), Over, Over().__call__]),
        ("after", [-1, 1.5, "10", True, [], 10**19, 10**5000]),
        ("only_latest", ["no", 1, 0, None, 10**5000]),
        ("pin", ["no", 1, 0, None]),
        ("step_names", ["ckpt", 5]),
        ("timeouts", [5, 0, 600.0, "1", {"lease": 5}, ckpt.Timeouts]),
    ],
)
def test_wrong_arguments(tmp_path: Path, argument: str, values: list[Any]) -> None:
    for value in values:
        for call in (ckpt.watch, ckpt.sync.watch):
            with pytest.raises(ckpt.errors.InvalidArgumentError, match=argument):
                call(tmp_path, **{argument: value})
    with pytest.raises(ckpt.errors.InvalidArgumentError, match="path="):
        ckpt.watch(5)  # type: ignore[arg-type]


def test_numpy_numbers_are_steps(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    assert steps_of(tmp_path, until=np.int64(2), after=np.int32(1)) == [2]


def test_only_one_may_wait_for_the_next_step(tmp_path: Path) -> None:
    async def main() -> None:
        async with ckpt.watch(tmp_path) as watch, anyio.create_task_group() as tasks:
            tasks.start_soon(anext, watch)
            await anyio.sleep(0.05)
            with pytest.raises(ckpt.errors.InvalidArgumentError, match="another call is waiting"):
                await anext(watch)
            tasks.cancel_scope.cancel()

    asyncio.run(main())


def test_a_trainer_that_is_killed_ends_the_watch_after_its_time_limit(tmp_path: Path) -> None:
    found = []
    with child("save_onward", tmp_path, 10**6) as trainer:
        for info in ckpt.sync.watch(tmp_path, timeout=30, poll_interval=0.01):
            found.append(info.step)
            if len(found) == 3:
                break
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(PATIENCE_S)
    with ckpt.sync.CheckpointManager(tmp_path, mode="r") as mgr:
        left = mgr.all_steps()
        after = found[-1]
        rest = []
        for info in ckpt.sync.watch(tmp_path, timeout=0.3, poll_interval=0.01, after=after):
            assert mgr.restore(info.step)["w"][0] == info.step
            rest.append(info.step)
    assert rest == [step for step in left if after is None or step > after]
