"""Simulated jobs with a disk per process, of which one is slow, fails or gives up."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import ckpt
from ckpt.coordination import OwnDisks
from ckpt.errors import (
    CommitCancelledError,
    CoordinationTimeoutError,
    SaveSkippedError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
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


def slow(owner: Any, name: str, seconds: float) -> None:
    function = getattr(owner, name)

    async def slowly(*args: Any, **options: Any) -> Any:
        await anyio.sleep(seconds)
        return await function(*args, **options)

    setattr(owner, name, slowly)


async def no_luck(*_: Any, **__: Any) -> None:
    raise StorageError("no luck")


def test_a_policy_decides_for_all(tmp_path: Path) -> None:
    """They look at their disks together: the primary says yes or no before."""
    mgrs = managers(tmp_path, own_disks=True, seconds=10.0, save_when=ckpt.save_when.EverySteps(2))
    assert steps(saved(mgrs, 2, STATE)) == [2, 2]
    skipped = saved(mgrs, 3, STATE)
    assert kinds(skipped) == [SaveSkippedError] * 2
    assert steps(saved(mgrs, 4, STATE)) == [4, 4]
    closed(mgrs)


def test_roots_with_names_are_opened_in_any_order(tmp_path: Path) -> None:
    jobs = coordinators(2)
    values = jobs[0].key_values()
    opened = [threading.Event() for _ in range(4)]
    add = values.add

    async def counted(key: str) -> int:
        found: int = await add(key)
        if "/opened/" in key:
            next(event for event in opened if not event.is_set()).set()
        return found

    values.add = counted
    roots = {
        name: managers(
            tmp_path / name, jobs=[OwnDisks(job, name) for job in jobs], own_disks=True, seconds=FAR
        )
        for name in ("one", "two")
    }

    def save(name: str, index: int, after: int) -> int:
        # Once so many have come.
        assert not after or opened[after - 1].wait(20)
        info = roots[name][index].save(1, STATE).result(100)
        assert info is not None
        assert info.step is not None
        return info.step

    first = [lambda: save("one", 0, 0), lambda: save("two", 1, 1)]
    assert together(*first, lambda: save("two", 0, 2), lambda: save("one", 1, 2)) == [1] * 4
    for mgrs in roots.values():
        # What is of different saves is no step.
        assert together(*(mgr.all_steps for mgr in mgrs)) == [[1]] * 2
        closed(mgrs)


def test_a_call_too_many_harms_no_later_save_of_the_step(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, own_disks=True)
    saved(mgrs, 1)
    with pytest.raises(CoordinationTimeoutError):
        mgrs[1].save(5, STATE).result(100)
    assert steps(saved(mgrs, 5)) == [5, 5]
    assert kinds(saved(mgrs, 5)) == [StepExistsError] * 2
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[1, 5]] * 2
    closed(mgrs)


def test_policies_count_only_what_all_disks_have(tmp_path: Path) -> None:
    latest = ckpt.keep.Latest(2)
    mgrs = managers(tmp_path, own_disks=True, seconds=FAR, keep=latest)
    for step in (3, 4):
        assert steps(saved(mgrs, step)) == [step, step]
    for failing, step in ((1, 5), (0, 6)):
        storage = storage_of(mgrs[failing])
        publish, storage.publish = storage.publish, no_luck
        assert kinds(saved(mgrs, step)) == [StorageError] * 2
        storage.publish = publish
        # So each disk has a step of its own.
        assert (tmp_path / str(1 - failing) / str(step)).exists()
    assert steps(saved(mgrs, 7)) == [7, 7]
    together(*(mgr.wait_until_finished for mgr in mgrs))
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[4, 7]] * 2
    assert not (tmp_path / "0" / "3").exists()
    closed(mgrs)


def test_what_one_process_keeps_all_keep(tmp_path: Path) -> None:
    best = ckpt.keep.Best(1, "loss", "min")
    mgrs = managers(tmp_path, own_disks=True, seconds=FAR, keep=best)
    for step, losses in enumerate([(1.0, 5.0), (2.0, 4.0), (3.0, 3.0), (4.0, 2.0), (0.5, 9.0)]):
        pairs = list(zip(mgrs, losses, strict=True))
        assert steps(
            together(
                *(
                    lambda m=m, v=v, s=step: m.save(s, STATE, metrics={"loss": v}).result(100)
                    for m, v in pairs
                )
            )
        )
    together(*(mgr.wait_until_finished for mgr in mgrs))
    # The best of process 0 is the last one, that of process 1 the one before.
    found = together(*(mgr.all_steps for mgr in mgrs))
    assert found == [[3, 4]] * 2
    closed(mgrs)


SLOW: dict[str, Callable[[list[Any]], list[Any]]] = {
    "publish": lambda mgrs: saved(mgrs, 2),
    "sweep": lambda mgrs: saved(mgrs, 2),
    "remove": lambda mgrs: together(*(lambda m=m: m.delete(1) for m in mgrs)),
    "step_dirs": lambda mgrs: together(*(mgr.all_steps for mgr in mgrs)),
}


@pytest.mark.parametrize(("name", "index"), [("publish", 0), *((name, 1) for name in SLOW)])
def test_a_slow_disk_is_waited_for(name: str, index: int, tmp_path: Path) -> None:
    mgrs = managers(tmp_path, own_disks=True)
    if name != "sweep":
        assert steps(saved(mgrs, 1)) == [1, 1]
    slow(storage_of(mgrs[index]), name, 2.5)
    found = SLOW[name](mgrs)
    assert not [each for each in found if isinstance(each, Exception)]
    closed(mgrs)


@pytest.mark.parametrize("own_disks", [False, True])
def test_who_publishes_slowly_is_waited_for_also_once_it_is_cancelled(
    own_disks: bool, tmp_path: Path
) -> None:
    mgrs = managers(tmp_path, own_disks=own_disks)
    storage, publishing = storage_of(mgrs[0]), threading.Event()
    publish = storage.publish

    async def slowly(*args: Any, **options: Any) -> None:
        publishing.set()
        await anyio.sleep(2.5)
        await publish(*args, **options)

    storage.publish = slowly

    def cancelled() -> Any:
        commit = mgrs[0].save(1, STATE)
        assert publishing.wait(20)
        commit.cancel()
        return commit.result(100)

    assert steps(together(cancelled, lambda: mgrs[1].save(1, STATE).result(100))) == [1, 1]
    closed(mgrs)


def test_who_is_cancelled_before_it_hears_that_all_publish_keeps_nobody_waiting(
    tmp_path: Path,
) -> None:
    jobs = coordinators(2, own_disks=True)
    values: Any = jobs[0].key_values()
    mgrs = managers(tmp_path, jobs=jobs, own_disks=True, seconds=FAR)
    saved(mgrs, 1)
    hit, wait = threading.Event(), values.wait

    async def held(key: str, seconds: float) -> Any:
        found = await wait(key, seconds)
        if key.endswith("save-2/0/outcome") and found is not None:
            hit.set()
            await anyio.sleep_forever()
        return found

    values.wait = held

    def cancelled() -> Any:
        commit = mgrs[1].save(2, STATE)
        assert hit.wait(20)
        commit.cancel()
        return commit.result(100)

    found = together(lambda: mgrs[0].save(2, STATE).result(100), cancelled)
    assert kinds(found) == [CommitCancelledError] * 2
    values.wait = wait
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[1]] * 2
    assert steps(saved(mgrs, 2)) == [2, 2]
    closed(mgrs)


def test_all_hear_that_one_disk_cannot_be_listed(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, own_disks=True, seconds=FAR)
    saved(mgrs, 1)
    index = mgrs[1]._service.root.index
    refresh, index.refresh = index.refresh, no_luck  # type: ignore[assignment]
    assert kinds(together(*(mgr.all_steps for mgr in mgrs))) == [StorageError] * 2
    index.refresh = refresh
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[1]] * 2
    closed(mgrs)


def test_what_some_disks_have_is_neither_pinned_nor_the_latest(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, own_disks=True, seconds=FAR)
    for step in (1, 2):
        saved(mgrs, step)
    shutil.rmtree(tmp_path / "1" / "2")
    found = together(*(lambda m=m: m.pin(2, "best") for m in mgrs))
    assert kinds(found) == [StepNotFoundError] * 2
    assert [mgr.pins() for mgr in mgrs] == [{}, {}]
    assert [each.info.step for each in together(*(mgr.metadata for mgr in mgrs))] == [1, 1]
    closed(mgrs)


def test_what_failed_leaves_nothing_behind_either(tmp_path: Path) -> None:
    jobs = coordinators(2, own_disks=True)
    mgrs = managers(tmp_path, jobs=jobs, own_disks=True, seconds=FAR)
    saved(mgrs, 1)
    storage_of(mgrs[0]).publish = no_luck
    assert kinds(saved(mgrs, 2)) == [StorageError] * 2
    assert kinds(together(*(lambda m=m: m.restore(7) for m in mgrs))) == [StepNotFoundError] * 2
    assert kinds(together(*(lambda m=m: m.delete(7) for m in mgrs))) == [StepNotFoundError] * 2
    names = jobs[0].key_values().names
    assert [each for each in names if not each.startswith(("processes/", "ckpt/opened/"))] == []
    closed(mgrs)
