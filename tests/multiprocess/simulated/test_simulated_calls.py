"""Calls of a simulated job of which one process is slow, wrong, repeated or cancelled."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import (
    CommitCancelledError,
    CoordinationTimeoutError,
    InvalidArgumentError,
    StepNotFoundError,
    StorageError,
)
from ckpt.storage._local.storage import LocalStorage
from tests.support.simulated_job import (
    FAR,
    STATE,
    closed,
    coordinators,
    kinds,
    managers,
    saved,
    steps,
    together,
)

WRONG: dict[str, Any] = {
    "metrics": {"metrics": 3},
    "metadata": {"custom_metadata": object()},
    "items": {"items": 3},
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", list(WRONG))
def test_all_hear_that_one_calls_save_with_wrong_arguments(
    name: str, index: int, tmp_path: Path
) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    right: dict[str, Any] = {"state": STATE}
    wrong = WRONG[name] if "items" in WRONG[name] else right | WRONG[name]
    pairs = [(mgr, wrong if mgr is mgrs[index] else right) for mgr in mgrs]
    found = together(*(lambda m=m, o=o: m.save(1, **o).result(100) for m, o in pairs))
    assert kinds(found) == [InvalidArgumentError] * 2
    assert f"process {index} of 2" in str(found[1 - index])
    assert steps(saved(mgrs, 1)) == [1, 1]
    closed(mgrs)


@pytest.mark.parametrize("options", [{"items": 3}, {"broadcast_bytes": 1}])
def test_all_hear_that_one_calls_restore_with_wrong_arguments(
    options: dict[str, Any], tmp_path: Path
) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    saved(mgrs, 1)
    found = together(lambda: mgrs[0].restore(1, **options), lambda: mgrs[1].restore(1))
    assert kinds(found) == [InvalidArgumentError] * 2
    assert "expected" in str(found[0])
    assert [each["b"] for each in together(*(mgr.restore for mgr in mgrs))] == [3, 3]
    closed(mgrs)


def test_a_save_that_is_cancelled_before_its_turn_keeps_nobody_waiting(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    saved(mgrs, 0)
    peers: Any = mgrs[1]._service.root.processes.peers  # type: ignore[union-attr]
    operation, cancelled = peers.operation, threading.Event()
    begun = {kind: threading.Event() for kind in ("save-0", "save-1", "save-2")}
    turn = peers.turn

    def counted(kind: str) -> int:
        found: int = turn(kind)
        begun[kind].set()
        return found

    async def held(kind: str, *args: Any) -> Any:
        if kind == "save-1":
            await anyio.to_thread.run_sync(cancelled.wait, 20.0)
        return await operation(kind, *args)

    peers.operation, peers.turn = held, counted
    with anyio.from_thread.start_blocking_portal() as portal:
        first = portal.start_task_soon(partial(anyio.to_thread.run_sync, mgrs[1].save, 1, STATE))
        assert begun["save-1"].wait(100)
        with pytest.raises(CommitCancelledError):
            cancel_second(mgrs[1], begun["save-2"])
        cancelled.set()
        infos = (mgrs[0].save(1, STATE).result(100), first.result(100).result(100))
        assert [info and info.step for info in infos] == [1, 1]
    with pytest.raises(CommitCancelledError, match="process 1 of 2"):
        mgrs[0].save(2, STATE).result(100)
    assert steps(saved(mgrs, 2)) == [2, 2]
    closed(mgrs)


def cancel_second(mgr: Any, begun: threading.Event) -> None:
    """Call a save, and cancel it while the one before it has not begun."""
    _, job, staged = mgr._service.saves.start(
        2, STATE, None, None, None, None, force=False, if_exists="error"
    )
    assert begun.wait(100)
    job.cancel()
    staged.result(100)


def test_waits_of_saves_for_an_absent_primary_do_not_add_up(tmp_path: Path) -> None:
    seconds = 4.0
    policy = {"save_when": lambda *_: True}
    mgrs = managers(tmp_path, seconds=seconds, each=[policy, policy])
    saved(mgrs, 0)
    began = time.monotonic()
    calls = [lambda s=s: mgrs[1].save(s, STATE).result(100) for s in range(1, 6)]
    found = together(*calls)
    assert kinds(found) == [CoordinationTimeoutError] * 5
    assert time.monotonic() - began < 4 * seconds
    closed(mgrs)


class SlowNumber:
    def __float__(self) -> float:
        time.sleep(1.5)
        return 1.0


def slow_policy(*_: Any) -> bool:
    time.sleep(1.5)
    return True


def test_a_primary_whose_policy_or_metrics_take_their_time_is_waited_for(tmp_path: Path) -> None:
    each = [{"save_when": slow_policy}, {"save_when": lambda *_: True}]
    mgrs = managers(tmp_path, seconds=1.0, each=each)
    assert steps(saved(mgrs, 1)) == [1, 1]
    pairs = zip(mgrs, [SlowNumber(), 1.0], strict=True)
    found = together(
        *(
            lambda m=m, n=n: m.save(2, STATE, force=True, metrics={"a": n}).result(100)
            for m, n in pairs
        )
    )
    assert steps(found) == [2, 2]
    closed(mgrs)


def test_a_save_of_one_path_waits_for_a_primary_that_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = LocalStorage.sweep

    async def slowly(*args: Any) -> Any:
        await anyio.sleep(1.5)
        return await sweep(*args)

    monkeypatch.setattr(LocalStorage, "sweep", slowly)
    jobs = coordinators(2)
    limits = ckpt.Timeouts(coordination=1.0)
    found = together(
        *(
            lambda j=j: ckpt.sync.save(tmp_path / "one", STATE, coordinator=j, timeouts=limits)
            for j in jobs
        )
    )
    assert [each.nbytes for each in found] == [found[0].nbytes] * 2
    names = jobs[0].key_values().names
    assert [each for each in names if not each.startswith(("processes/", "ckpt/opened/"))] == []


def test_what_failed_or_was_missed_leaves_nothing_behind(tmp_path: Path) -> None:
    jobs = coordinators(2)
    mgrs = managers(tmp_path, jobs=jobs)
    saved(mgrs, 1)

    async def publish(*_: Any, **__: Any) -> None:
        raise StorageError("no room")

    storage = mgrs[0]._service.storage
    whole, storage.publish = storage.publish, publish
    assert kinds(saved(mgrs, 2)) == [StorageError] * 2
    storage.publish = whole
    assert kinds(together(*(lambda m=m: m.restore(7) for m in mgrs))) == [StepNotFoundError] * 2
    assert kinds(together(*(lambda m=m: m.delete(7) for m in mgrs))) == [StepNotFoundError] * 2
    with pytest.raises(CoordinationTimeoutError):
        mgrs[1].save(3, STATE).result(100)
    assert steps(saved(mgrs, 3)) == [3, 3]
    names = jobs[0].key_values().names
    assert [each for each in names if not each.startswith(("processes/", "ckpt/opened/"))] == []
    closed(mgrs)
