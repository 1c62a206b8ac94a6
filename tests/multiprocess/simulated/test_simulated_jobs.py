"""Orders of events in simulated jobs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

import ckpt
from ckpt._format.manifest import ItemEntry
from ckpt._format.manifest_head import FileEntry
from ckpt._job.multihost_save import MultihostSave
from ckpt._job.process_reports import SaveReport, decode_report, encode_report, same_items
from ckpt.errors import CoordinationError, InvalidArgumentError, StepNotFoundError, StorageError
from tests.support.simulated_job import (
    STATE,
    closed,
    coordinators,
    managers,
    saved,
    steps,
    together,
)


def test_who_cannot_write_to_the_attempt_fails_the_save_also_with_nothing_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mgrs = managers(tmp_path)

    async def join(step_dir: str, attempt: str) -> Any:
        await anyio.sleep(0.1)
        raise StorageError("no such attempt here")

    monkeypatch.setattr(mgrs[1]._service.storage, "join", join)
    found = saved(mgrs, 1)
    assert [type(each) for each in found] == [StorageError, StorageError]
    assert all("no such attempt here" in str(each) for each in found)
    monkeypatch.undo()
    assert mgrs[0].all_steps() == []
    assert steps(saved(mgrs, 1)) == [1, 1]
    closed(mgrs)


def test_saves_of_several_tasks_keep_the_order_of_their_calls(tmp_path: Path) -> None:
    jobs = coordinators(2)

    async def run(job: Any) -> None:
        timeouts = ckpt.Timeouts(coordination=60.0)
        async with ckpt.CheckpointManager(tmp_path, coordinator=job, timeouts=timeouts) as mgr:
            for first in range(0, 9, 3):
                async with anyio.create_task_group() as tasks:
                    for step in range(first, first + 3):
                        tasks.start_soon(mgr.save, step, STATE)

    assert together(*(lambda j=j: anyio.run(run, j) for j in jobs)) == [None, None]
    assert sorted(int(path.name) for path in tmp_path.glob("[0-9]*")) == list(range(9))


def test_saves_are_queued_in_the_order_of_their_calls_whatever_they_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one of process 1 hears of earlier saves before the first one does."""
    heed, heard = MultihostSave.heed, [anyio.Event()]

    async def late(self: MultihostSave, *given: Any, **options: Any) -> None:
        await heed(self, *given, **options)
        if self.group.index:
            if "step 0" in self._what:
                await heard[0].wait()
            heard[0].set()

    monkeypatch.setattr(MultihostSave, "heed", late)
    jobs = coordinators(2)

    async def run(job: Any) -> None:
        timeouts = ckpt.Timeouts(coordination=10.0)
        async with (
            ckpt.CheckpointManager(tmp_path, coordinator=job, timeouts=timeouts) as mgr,
            anyio.create_task_group() as tasks,
        ):
            for step in range(2):
                tasks.start_soon(mgr.save, step, STATE)

    assert together(*(lambda j=j: anyio.run(run, j) for j in jobs)) == [None, None]


def test_one_restore_too_many_harms_no_later_one(tmp_path: Path) -> None:
    mgrs = managers(tmp_path)
    saved(mgrs, 1)
    with pytest.raises(ckpt.errors.CoordinationTimeoutError):
        mgrs[1].restore()
    for _ in range(2):
        found = together(*(mgr.restore for mgr in mgrs))
        assert [each["b"] for each in found] == [3, 3]
    closed(mgrs)


def test_the_others_hear_why_the_primary_cannot_open_the_root(tmp_path: Path) -> None:
    # Far above what telling takes, and far below what the test may take.
    mgrs = managers(tmp_path / "none", seconds=60.0, mode="r+")
    opened, told = together(mgrs[0].__enter__, lambda: mgrs[1].save(1, STATE))
    assert isinstance(opened, StorageError)
    assert isinstance(told, StorageError)
    assert "mode='r+'" in str(told)
    closed(mgrs)


def test_a_primary_that_takes_its_time_to_publish_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mgrs = managers(tmp_path, seconds=2.0)
    storage = mgrs[0]._service.storage
    publish = storage.publish

    async def slowly(*args: Any, **options: Any) -> None:
        await anyio.sleep(3.0)
        await publish(*args, **options)

    monkeypatch.setattr(storage, "publish", slowly)
    assert steps(saved(mgrs, 1)) == [1, 1]
    closed(mgrs)


def test_a_step_that_only_some_disks_have_is_none(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, own_disks=True, seconds=60.0)
    assert steps(saved(mgrs, 1) + saved(mgrs, 2)) == [1, 1, 2, 2]
    # As a crash between two publications leaves it.
    shutil.rmtree(tmp_path / "1" / "2")
    assert together(*(mgr.latest_step for mgr in mgrs)) == [1, 1]
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[1], [1]]
    assert steps(saved(mgrs, 2)) == [2, 2]
    assert together(*(mgr.latest_step for mgr in mgrs)) == [2, 2]
    shutil.rmtree(tmp_path / "0" / "2")
    assert together(*(lambda m=m: m.delete(2) for m in mgrs)) == [None, None]
    assert not (tmp_path / "1" / "2").exists()
    missing = together(*(lambda m=m: m.delete(2) for m in mgrs))
    assert [type(each) for each in missing] == [StepNotFoundError] * 2
    refused = saved(mgrs, 1, if_exists="replace")
    assert [type(each) for each in refused] == [InvalidArgumentError] * 2
    assert together(*(mgr.latest_step for mgr in mgrs)) == [1, 1]
    closed(mgrs)


def test_what_ended_leaves_nothing_behind_and_what_failed_no_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = coordinators(2)
    mgrs = managers(tmp_path, jobs=jobs)
    assert steps(saved(mgrs, 1)) == [1, 1]
    together(*(mgr.restore for mgr in mgrs))
    together(*(lambda m=m: m.delete(1) for m in mgrs))
    values = jobs[0].key_values()
    # Who and where the processes are, and how many managers they have opened.
    left = [each for each in values.names if not each.startswith(("processes/", "ckpt/opened/"))]
    assert left == []

    async def publish(*args: Any, **options: Any) -> None:
        raise StorageError("no room")

    monkeypatch.setattr(mgrs[0]._service.storage, "publish", publish)
    assert [type(each) for each in saved(mgrs, 2)] == [StorageError] * 2
    assert [each for each in values.names if "/report/" in each] == []
    closed(mgrs)


def test_what_a_process_tells_of_its_save_is_understood_or_refused() -> None:
    told = encode_report(
        SaveReport({"a": ItemEntry(handler="json")}, {}, {"a/f": FileEntry(size=1, digest="")})
    )
    assert decode_report(told).files["a/f"].size == 1
    for wrong in (b"", told[:20], told.replace(b"entries", b"entires"), told.replace(b"1", b"x")):
        with pytest.raises(CoordinationError, match="same version"):
            decode_report(wrong)
    tree = SaveReport({"a": ItemEntry(handler="json")}, {"a": None})  # type: ignore[dict-item]
    with pytest.raises(CoordinationError, match="a tree"):
        same_items([tree, decode_report(told)])
