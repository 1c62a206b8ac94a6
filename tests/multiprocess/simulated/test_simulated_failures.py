"""Failures of one process of a simulated job."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import ckpt.sync
from ckpt._events import Event
from ckpt.coordination._jobs import SingleProcess
from ckpt.errors import (
    CommitCancelledError,
    CoordinationError,
    CoordinationTimeoutError,
    StepDeletedError,
    StorageError,
    TargetMismatchError,
)
from tests.support.simulated_job import (
    FAR,
    STATE,
    closed,
    coordinators,
    kinds,
    managers,
    saved,
    steps,
    storage_of,
    together,
)


def before(owner: Any, name: str, act: Callable[..., Awaitable[Any]], path: str = "") -> None:
    """Await `act` before `owner.name` does what it did, if one of its arguments is `path`."""
    function = getattr(owner, name)

    async def run(*args: Any, **options: Any) -> Any:
        if not path or path in args:
            await act(*args)
        return await function(*args, **options)

    setattr(owner, name, run)


async def happened(event: threading.Event) -> None:
    # In a thread that is left behind where this is cancelled.
    await anyio.to_thread.run_sync(event.wait, 20.0, abandon_on_cancel=True)


async def no_luck(*_: Any) -> None:
    raise StorageError("no luck")


def steps_in(root: Path) -> list[str]:
    return sorted(each.parent.name for each in root.rglob("ckpt.json"))


def names(root: Path) -> list[str]:
    return sorted(each.name for each in root.iterdir())


@pytest.mark.parametrize("index", [0, 1])
def test_who_fails_stops_who_works_and_all_say_what_it_met(index: int, tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    saved(mgrs, 1)
    left = names(tmp_path)
    gone = threading.Event()

    async def once_it_is_gone(*_: Any) -> None:
        await happened(gone)
        raise StorageError("the attempt is gone")

    async def discarded(*_: Any) -> None:
        gone.set()
        # What others meet now they would say before.
        await anyio.sleep(0.2)

    if index:
        before(storage_of(mgrs[0]), "write", lambda *_: anyio.sleep_forever())
        before(storage_of(mgrs[0]), "write_block", lambda *_: anyio.sleep_forever())
        before(storage_of(mgrs[1]), "join", no_luck)
    else:
        before(storage_of(mgrs[0]), "write_block", no_luck)
        before(storage_of(mgrs[0]), "discard", discarded)
        before(storage_of(mgrs[1]), "join", once_it_is_gone)
    found = saved(mgrs, 2)
    assert kinds(found) == [StorageError] * 2
    assert found[index].message == "no luck"
    assert found[1 - index].message.startswith(f"process {index} of 2 (host ")
    assert found[1 - index].message.endswith("no luck")
    assert names(tmp_path) == left
    closed(mgrs)


@pytest.mark.parametrize("index", [0, 1])
def test_who_cancels_a_save_ends_it_everywhere(index: int, tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    writing = threading.Event()

    async def write(*_: Any) -> None:
        writing.set()
        await anyio.sleep_forever()

    before(storage_of(mgrs[0]), "write_block", write)

    def save(mgr: Any) -> Any:
        commit = mgr.save(1, STATE)
        if mgr is mgrs[index]:
            assert writing.wait(20)
            commit.cancel()
        return commit.result(100)

    found = together(*(lambda m=m: save(m) for m in mgrs))
    assert kinds(found) == [CommitCancelledError] * 2
    assert "nothing of it is left" in str(found[index])
    assert f"process {index} of 2" in str(found[1 - index])
    # Who has cancelled it knows.
    mgrs[index].wait_until_finished()
    assert steps_in(tmp_path) == []
    closed(mgrs)


def test_who_has_cancelled_a_save_has_cancelled_it_also_where_another_fails(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    joining, cancelled, failed = (threading.Event() for _ in range(3))

    async def joins(*_: Any) -> None:
        joining.set()
        with anyio.CancelScope(shield=True):
            await happened(failed)

    async def fails(*_: Any) -> None:
        await happened(cancelled)
        raise StorageError("no luck")

    async def discards(*_: Any) -> None:
        failed.set()

    before(storage_of(mgrs[1]), "join", joins)
    before(storage_of(mgrs[0]), "write_block", fails)
    before(storage_of(mgrs[0]), "discard", discards)

    def cancel() -> Any:
        commit = mgrs[1].save(1, STATE)
        assert joining.wait(20)
        commit.cancel()
        cancelled.set()
        return commit.result(100)

    found = together(lambda: mgrs[0].save(1, STATE).result(100), cancel)
    assert kinds(found) == [StorageError, CommitCancelledError]
    assert found[0].message == "no luck"
    mgrs[1].wait_until_finished()
    closed(mgrs)


@pytest.mark.parametrize("own_disks", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_a_step_that_is_being_published_is_not_cancelled(
    index: int, own_disks: bool, tmp_path: Path
) -> None:
    mgrs = managers(tmp_path, seconds=FAR, own_disks=own_disks)
    publishing, cancelled = threading.Event(), threading.Event()

    async def publish(*_: Any) -> None:
        publishing.set()
        await happened(cancelled)
        # The cancellation is under way.
        await anyio.sleep(0.2)

    before(storage_of(mgrs[index if own_disks else 0]), "publish", publish)

    def save(mgr: Any) -> Any:
        commit = mgr.save(1, STATE)
        if mgr is mgrs[index]:
            assert publishing.wait(20)
            commit.cancel()
            cancelled.set()
        return commit.result(100)

    found = together(*(lambda m=m: save(m) for m in mgrs))
    assert steps(found) == [1, 1]
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[1], [1]]
    closed(mgrs)


def test_what_is_shared_is_lost_while_a_step_is_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = coordinators(2)
    mgrs = managers(tmp_path, jobs=jobs, seconds=FAR)
    values = jobs[0].key_values()

    async def lose(*_: Any) -> None:
        values.broken = OSError("connection reset")
        # Whoever watches has noticed.
        await anyio.sleep(0.3)

    before(storage_of(mgrs[0]), "publish", lose)
    own, other = saved(mgrs, 1)
    assert steps([own]) == [1]
    assert type(other) is CoordinationError
    assert "connection reset" in str(other)
    assert "is saved, and the others do not know" in caplog.text
    values.broken = None
    closed(mgrs)
    assert steps_in(tmp_path) == ["1"]


def test_what_is_shared_is_lost_while_a_step_is_written(tmp_path: Path) -> None:
    jobs = coordinators(2)
    mgrs = managers(tmp_path, jobs=jobs, seconds=FAR)
    values = jobs[0].key_values()

    async def lose(*_: Any) -> None:
        values.broken = OSError("connection reset")
        await anyio.sleep_forever()

    before(storage_of(mgrs[0]), "write_block", lose)
    found = saved(mgrs, 1)
    assert kinds(found) == [CoordinationError] * 2
    assert all("connection reset" in str(each) for each in found)
    values.broken = None
    closed(mgrs)
    assert names(tmp_path) == []


def test_a_primary_that_goes_silent_while_it_publishes_may_have_saved_the_step(
    tmp_path: Path,
) -> None:
    mgrs = managers(tmp_path, seconds=3.0)
    missed = threading.Event()

    async def hang(*_: Any) -> None:
        # Its loop stands still, so it gives no sign of life.
        assert missed.wait(100)

    before(storage_of(mgrs[0]), "publish", hang)

    def save() -> Any:
        try:
            return mgrs[1].save(1, STATE).result(100)
        finally:
            missed.set()

    own, other = together(lambda: mgrs[0].save(1, STATE).result(100), save)
    assert steps([own]) == [1]
    assert type(other) is CoordinationTimeoutError
    assert other.missing == (0,)
    assert any("look for it after a restart" in note for note in other.__notes__)
    closed(mgrs)


def test_a_restore_that_moves_is_waited_for(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=2.0)
    saved(mgrs, 1)

    async def slowly(*_: Any) -> None:
        # As a large step is read, in parts.
        for _part in range(6):
            await anyio.sleep(0.5)
            for observe in mgrs[1]._service.root.processes.observers:
                observe(Event("restore", "read", 1, 0, 1, nbytes=8))

    before(storage_of(mgrs[1]), "read_block", slowly)
    assert [each["b"] for each in together(*(mgr.restore for mgr in mgrs))] == [3, 3]
    closed(mgrs)


def test_an_opening_or_save_that_failed_harms_no_later_manager(tmp_path: Path) -> None:
    jobs = coordinators(2)
    mgrs = managers(tmp_path, jobs=jobs, seconds=FAR)
    before(storage_of(mgrs[0]), "write_block", no_luck)
    assert kinds(saved(mgrs, 1)) == [StorageError] * 2
    closed(mgrs)
    mgrs = managers(tmp_path, jobs=jobs, seconds=FAR)
    assert steps(saved(mgrs, 1)) == [1, 1]
    closed(mgrs)


def test_who_cannot_restore_makes_the_others_fail(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    saved(mgrs, 1)
    like = {"a": np.zeros(11, np.int32), "b": 0}
    for index in (0, 1):
        calls = [mgrs[index].restore, mgrs[1 - index].restore]
        found = together(partial(mgrs[index].restore, like=like), calls[1])
        assert kinds(found) == [TargetMismatchError] * 2
        assert f"process {index} of 2" in str(found[1])
    closed(mgrs)


@pytest.mark.parametrize("own_disks", [False, True])
def test_processes_that_restore_different_steps_all_hear_of_it(
    own_disks: bool, tmp_path: Path
) -> None:
    mgrs = managers(tmp_path, own_disks=own_disks, seconds=FAR)
    for step in (1, 2):
        saved(mgrs, step)
    found = together(lambda: mgrs[0].restore(1), lambda: mgrs[1].restore(2))
    assert kinds(found) == [CoordinationError] * 2
    assert all("must restore the same step" in str(each) for each in found)
    closed(mgrs)


def stepped(step: int) -> dict[str, Any]:
    return {"a": np.full(10, step, np.int32), "b": step}


def after_finding(mgr: Any, act: Callable[[], Any]) -> None:
    """Let something happen when the primary has found a step first, which it does not load."""
    index, storage = mgr._service.root.index, storage_of(mgr)
    found = index.found
    times = [0]

    async def find(step: int | None) -> Any:
        result = await found(step)
        times[0] += 1
        if times[0] == 1:
            await anyio.to_thread.run_sync(act)
        return result

    async def loads(*_: Any) -> None:
        if times[0] == 1:
            await anyio.sleep(3.0)
            raise StorageError("the others have taken another step for it")

    index.found = find
    before(storage, "read_block", loads)


def test_all_restore_the_step_that_the_primary_has_found(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    for step in (1, 2):
        saved(mgrs, step, *[stepped(step)] * 2)
    index = mgrs[0]._service.root.index
    found = index.found
    # As if it had looked a moment before the second one was there.
    index.found = lambda _: found(1)  # type: ignore[assignment]
    assert [each["b"] for each in together(*(mgr.restore for mgr in mgrs))] == [1, 1]
    closed(mgrs)


@pytest.mark.parametrize("asked", [None, 2])
def test_a_step_that_goes_away_after_the_primary_has_found_it(
    asked: int | None, tmp_path: Path
) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    for step in (1, 2):
        saved(mgrs, step, *[stepped(step)] * 2)
    after_finding(mgrs[0], lambda: shutil.rmtree(tmp_path / "2"))
    found = together(*(lambda m=m: m.restore(asked) for m in mgrs))
    if asked is None:
        assert [each["b"] for each in found] == [1, 1]
    else:
        assert kinds(found) == [StepDeletedError] * 2
        assert all("or process 1 sees another root" in str(each) for each in found)
    closed(mgrs)


def test_a_step_that_is_replaced_after_the_primary_has_found_it(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    saved(mgrs, 2)

    def replace() -> None:
        with ckpt.sync.CheckpointManager(tmp_path, coordinator=SingleProcess()) as mgr:
            mgr.save(2, stepped(7), if_exists="replace").result(30)

    after_finding(mgrs[0], replace)
    began = time.monotonic()
    assert [each["b"] for each in together(*(mgr.restore for mgr in mgrs))] == [7, 7]
    assert time.monotonic() - began < FAR
    closed(mgrs)
