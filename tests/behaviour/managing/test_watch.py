"""`watch` hands out every step once, whole, and pinned for as long as it is in hand."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._api.watch import Watch
from ckpt._format.manifest import FILE_NAME
from ckpt._steps import watcher
from ckpt.storage._local.storage import LocalStorage
from tests.support.paths import PROGRAMS

PATIENCE_S = 60
BACKENDS = ["asyncio", "trio"]
QUICK = 0.02


def state(number: int) -> dict[str, np.ndarray]:
    return {"w": np.full(100, number)}


def save(root: Path, *steps: int, **how: Any) -> None:
    with ckpt.sync.CheckpointManager(root, step_names=how.pop("step_names", None)) as mgr:
        for step in steps:
            mgr.save(step, state(step), **how)


def delete(root: Path, step: int) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.delete(step)


def pinned(root: Path) -> set[int]:
    with ckpt.sync.CheckpointManager(root, read_only=True) as mgr:
        return set(mgr.pins())


def until_pinned(root: Path, *steps: int) -> None:
    """Wait until exactly these are pinned; what is let go of in the background takes a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while pinned(root) != set(steps):
        assert time.monotonic() < deadline, f"{pinned(root)} are pinned"


def steps_of(root: Path, **how: Any) -> list[int | None]:
    """What both kinds of watch give; they must give the same."""

    async def main() -> list[int | None]:
        return [info.step async for info in ckpt.watch(root, **how)]

    found = [info.step for info in ckpt.sync.watch(root, **how)]
    for backend in BACKENDS:
        assert anyio.run(main, backend=backend) == found
    assert pinned(root) == set()
    return found


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
        save(tmp_path, 2, overwrite=True)
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
    ckpt.sync.save(tmp_path / "5", state(5))
    assert steps_of(tmp_path, timeout=0) == [1]


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

        index.refresh = look  # type: ignore[method-assign]
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


# The step in hand.


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
    face, read = watch._face, watcher.read_manifest

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

    monkeypatch.setattr(watcher, "read_manifest", late)
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

                face.watcher.advance = and_cancel  # type: ignore[method-assign]
                await anext(watch)
            assert scope.cancelled_caught
            assert pinned(tmp_path) == set()
            face.watcher.advance = advance  # type: ignore[method-assign]
            assert [info.step async for info in watch] == [1]

    asyncio.run(main())


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


def test_a_lease_that_was_lost_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    with ckpt.sync.watch(tmp_path, timeouts=ckpt.Timeouts(lease=0.3)) as watch:
        next(watch)
        for note in (tmp_path / ".ckpt-pins").iterdir():
            note.unlink()
        deadline = time.monotonic() + PATIENCE_S
        while "the lease of step 1 ran out" not in caplog.text:
            assert time.monotonic() < deadline


# What goes wrong.


def refusing(storage: LocalStorage, method: str, errors: Iterator[OSError | None]) -> None:
    """Let a method of a root fail as `errors` says."""
    real = getattr(storage, method)

    async def maybe(*args: Any, **options: Any) -> Any:
        error = next(errors)
        if error is not None:
            raise error
        return await real(*args, **options)

    setattr(storage, method, maybe)


def storage_of(watch: Any) -> LocalStorage:
    return watch._face.watcher._storage


def io_error() -> OSError:
    return ckpt.errors.StorageError("a bad day", errno=errno.EIO)


@pytest.mark.parametrize("method", ["step_dirs", "put_note", "read"])
def test_a_store_that_fails_for_a_moment_is_asked_again(tmp_path: Path, method: str) -> None:
    save(tmp_path, 1)
    with ckpt.sync.watch(tmp_path, poll_interval=QUICK) as watch:
        bad = [io_error() for _ in range(5)]
        refusing(storage_of(watch), method, iter([*bad, *[None] * 100]))
        assert next(watch).step == 1
        assert pinned(tmp_path) == {1}
    with ckpt.sync.watch(tmp_path, poll_interval=QUICK) as watch:
        bad = [io_error() for _ in range(6)]
        refusing(storage_of(watch), method, iter([*bad, *[None] * 100]))
        with pytest.raises(ckpt.errors.StorageError, match="a bad day"):
            next(watch)
        assert pinned(tmp_path) == set()
        assert next(watch).step == 1


def test_a_root_that_may_not_be_written_to_says_what_to_do(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with ckpt.sync.watch(tmp_path) as watch:
        denied = ckpt.errors.StorageError("read-only file system", errno=errno.EROFS)
        refusing(storage_of(watch), "put_note", iter([denied]))
        with pytest.raises(ckpt.errors.StorageError, match=r"step 1: .*pin=False") as caught:
            next(watch)
        assert caught.value.errno == errno.EROFS


def test_a_damaged_manifest_is_told_once(tmp_path: Path) -> None:
    """It is whole, and contradicts itself."""
    from ckpt._format.manifest import decode, encode

    save(tmp_path, 1, 2)
    path = tmp_path / "1" / FILE_NAME
    manifest = decode(path.read_bytes(), where="")
    path.write_bytes(encode(manifest.model_copy(update={"unnamed": True, "items": {}})))
    with ckpt.sync.watch(tmp_path, timeout=0) as watch:
        with pytest.raises(ckpt.errors.CorruptCheckpointError, match="step 1"):
            next(watch)
        assert pinned(tmp_path) == set()
        assert next(watch).step == 2


def test_a_store_that_fails_until_the_time_is_over_is_told(tmp_path: Path) -> None:
    """Otherwise a wrong path looks like a root without steps."""
    file = tmp_path / "file"
    file.touch()
    root = tmp_path / "root"
    save(root, 1)
    for timeout in (0, 0.1):
        with pytest.raises(ckpt.errors.StorageError):
            steps_of(file, timeout=timeout, poll_interval=QUICK * 2)
        with ckpt.sync.watch(root, timeout=timeout, poll_interval=10) as watch:
            refusing(storage_of(watch), "step_dirs", iter([io_error() for _ in range(5)]))
            with pytest.raises(ckpt.errors.StorageError, match="a bad day"):
                next(watch)
    # When the time is over, it works: nothing new is there, and that is known.
    with ckpt.sync.watch(root, after=1, timeout=0.2, poll_interval=10) as watch:
        refusing(storage_of(watch), "step_dirs", iter([io_error(), *[None] * 100]))
        assert list(watch) == []


def not_renewing(watch: Any) -> Any:
    """Let the renewing of the lease end by what nobody expects."""

    async def touch_note(name: str) -> bool:
        raise MemoryError("none left")

    storage_of(watch).touch_note = touch_note  # type: ignore[method-assign]
    return watch


@pytest.mark.parametrize("waits", [True, False])
def test_what_ends_the_renewing_of_the_lease_is_told(tmp_path: Path, waits: bool) -> None:
    """The watch must not look as if no more steps came."""
    save(tmp_path, 1, 2)
    with not_renewing(ckpt.sync.watch(tmp_path, timeouts=ckpt.Timeouts(lease=0.3))) as watch:
        keeper = watch._face.watcher
        if waits:
            take = keeper._next

            async def and_wait() -> Any:
                await take()
                await anyio.sleep_forever()

            keeper._next = and_wait
        else:
            assert next(watch).step == 1
            deadline = time.monotonic() + PATIENCE_S
            while not keeper._stopped:
                assert time.monotonic() < deadline
        with pytest.raises(MemoryError, match="none left"):
            next(watch)
        assert list(watch) == []
    assert pinned(tmp_path) == set()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_ends_the_renewing_is_told_to_async_for(tmp_path: Path, backend: str) -> None:
    save(tmp_path, 1, 2)

    async def main() -> None:
        brief = ckpt.Timeouts(lease=0.3)
        async with not_renewing(ckpt.watch(tmp_path, timeouts=brief)) as watch:
            assert (await anext(watch)).step == 1
            with anyio.fail_after(PATIENCE_S):
                while not watch._face.watcher._stopped:
                    await anyio.lowlevel.checkpoint()
            with pytest.raises(MemoryError, match="none left"):
                await anext(watch)
            assert [info async for info in watch] == []

    anyio.run(main, backend=backend)


def test_an_answer_that_has_to_be_awaited_is_refused(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    for until in (lambda: over(), lambda: asyncio.Future(loop=loop)):
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


# Real trainers and evaluators.


@contextlib.contextmanager
def child(name: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, PROGRAMS / f"{name}.py", *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.timeout(120)
def test_an_evaluator_can_restore_every_step_it_is_handed(tmp_path: Path) -> None:
    """The trainer keeps one step and goes on as fast as it can."""
    last = 80
    found = []
    with (
        child("onward", tmp_path, last + 1) as trainer,
        ckpt.sync.CheckpointManager(tmp_path, read_only=True) as mgr,
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
    with ckpt.sync.CheckpointManager(root, preservation=ckpt.policies.LatestN(1)) as mgr:
        mgr.save(step, state(step))


def test_an_evaluator_that_is_killed_lets_go_when_its_lease_runs_out(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with child("evaluator", "waits", tmp_path, 2) as evaluator:
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
        child("evaluator", "leaves", ends, 600) as first,
        child("evaluator", "waits", waits, 600) as second,
    ):
        # With the watch open, and a step in hand.
        assert line_of(first) == "step 1"
        assert line_of(first) == "end"
        assert first.wait(PATIENCE_S) == 0
        assert pinned(ends) == set()
        assert line_of(second) == "step 1"
        assert second.stdin is not None
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
            how: stack.enter_context(child("evaluator", how, tmp_path / how, 600))
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
from ckpt._runtime.exit import run_at_exit

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


def test_a_trainer_that_is_killed_ends_the_watch_after_its_time_limit(tmp_path: Path) -> None:
    found = []
    with child("onward", tmp_path, 10**6) as trainer:
        for info in ckpt.sync.watch(tmp_path, timeout=30, poll_interval=0.01):
            found.append(info.step)
            if len(found) == 3:
                break
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(PATIENCE_S)
    with ckpt.sync.CheckpointManager(tmp_path, read_only=True) as mgr:
        left = mgr.all_steps()
        after = found[-1]
        rest = []
        for info in ckpt.sync.watch(tmp_path, timeout=0.3, poll_interval=0.01, after=after):
            assert mgr.restore(info.step)["w"][0] == info.step
            rest.append(info.step)
    assert rest == [step for step in left if step > after]
