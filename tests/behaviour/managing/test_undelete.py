"""Steps that were deleted come back from the trash, on disks and in stores, or go for good."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt.testing.clock import set_clock
from tests.support.simulated_job import FAR, closed, managers, saved, together

TRASH = "trash"


@pytest.fixture(params=["disk", "elsewhere", "store"])
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """How a manager is opened whose steps go to a trash."""
    if request.param == "store":
        return {"root": f"memory://{uuid.uuid4().hex}/run", "trash": TRASH}
    trash = TRASH if request.param == "disk" else tmp_path / "bin"
    return {"root": tmp_path / "run", "trash": trash}


def state(step: int, seed: int = 0) -> dict[str, Any]:
    return {"w": np.arange(1000) + step, "seed": seed}


def save(mgr: ckpt.sync.CheckpointManager, *steps: int, seed: int = 0) -> None:
    for step in steps:
        mgr.save(step, state(step, seed), metrics={"loss": float(step)}, durable=True)


def test_a_step_comes_back_as_it_was(opening: dict[str, Any]) -> None:
    before = datetime.now(UTC)
    with ckpt.sync.CheckpointManager(**opening) as mgr:
        save(mgr, 1, 2, 3)
        mgr.delete(2)
        assert mgr.all_steps() == [1, 3]
        (trashed,) = mgr.trash.steps()
        assert trashed.step == 2
        assert before <= trashed.deleted <= datetime.now(UTC)
        mgr.trash.undelete(2)
        assert mgr.trash.steps() == []
        assert mgr.all_steps() == [1, 2, 3]
        assert mgr.verify(2).ok
        assert mgr.metrics(2) == {"loss": 2.0}
    with ckpt.sync.CheckpointManager(opening["root"], mode="r") as other:
        assert other.all_steps() == [1, 2, 3]
        assert np.array_equal(other.restore(2)["w"], np.arange(1000) + 2)


def test_with_asyncio(opening: dict[str, Any]) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(**opening) as mgr:
            await mgr.save(4, state(4), durable=True)
            await mgr.delete(4)
            assert [each.step for each in await mgr.trash.steps()] == [4]
            await mgr.trash.undelete(4)
            await mgr.delete(4)
            assert await mgr.trash.empty() == [4]
            assert await mgr.trash.steps() == []

    asyncio.run(main())


def test_what_a_policy_deleted_comes_back(opening: dict[str, Any]) -> None:
    with ckpt.sync.CheckpointManager(**opening, keep=ckpt.keep.Latest(1)) as mgr:
        save(mgr, 1, 2, 3)
        mgr.wait_until_finished()
        assert [each.step for each in mgr.trash.steps()] == [1, 2]
        mgr.trash.undelete(1)
        mgr.pin(1, "keep")
        save(mgr, 4)
        mgr.wait_until_finished()
        assert mgr.all_steps() == [1, 4]
        assert [each.step for each in mgr.trash.steps()] == [2, 3]


def test_of_several_the_one_that_was_deleted_last_comes_back(opening: dict[str, Any]) -> None:
    with ckpt.sync.CheckpointManager(**opening) as mgr:
        for seed in (1, 2):
            save(mgr, 5, seed=seed)
            mgr.delete(5)
        assert [each.step for each in mgr.trash.steps()] == [5, 5]
        mgr.trash.undelete(5)
        assert mgr.restore(5)["seed"] == 2
        assert [each.step for each in mgr.trash.steps()] == [5]
        mgr.delete(5)
        assert mgr.trash.empty() == [5, 5]


def test_nothing_takes_the_place_of_a_step(opening: dict[str, Any]) -> None:
    with ckpt.sync.CheckpointManager(**opening) as mgr:
        save(mgr, 5, seed=1)
        mgr.delete(5)
        save(mgr, 5, seed=2)
        with pytest.raises(
            errors.StepExistsError, match=r"step 5: .* exists, so it was not undele"
        ):
            mgr.trash.undelete(5)
        assert mgr.restore(5)["seed"] == 2
        assert [each.step for each in mgr.trash.steps()] == [5]
        # What is emptied then does not harm the step.
        assert mgr.trash.empty() == [5]
        assert mgr.verify(5).ok
        assert mgr.restore(5)["seed"] == 2


def test_only_what_is_old_enough_goes(opening: dict[str, Any]) -> None:
    now = time.time()
    with set_clock(lambda: now), ckpt.sync.CheckpointManager(**opening) as mgr:
        save(mgr, 1, 2)
        mgr.delete(1)
        mgr.delete(2)
        assert mgr.trash.empty(older_than=3600) == []
        now += 3601
        assert mgr.trash.empty(older_than=3600) == [1, 2]
        assert mgr.trash.steps() == []


def test_nothing_of_an_emptied_trash_is_left_on_a_disk(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, trash=TRASH) as mgr:
        save(mgr, 1)
        mgr.delete(1)
        (tmp_path / "trash" / "notes.txt").write_text("mine")
        mgr.trash.empty()
    assert [each.name for each in (tmp_path / "trash").iterdir()] == ["notes.txt"]
    assert list((tmp_path / ".ckpt-trash").iterdir()) == []
    (tmp_path / ".ckpt-trash").rmdir()
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"trash", ".ckpt-run"}


def test_a_step_that_is_not_there_is_named(opening: dict[str, Any]) -> None:
    with ckpt.sync.CheckpointManager(**opening) as mgr:
        with pytest.raises(errors.StepNotFoundError, match=r"step 9: .*trash.*holds no step"):
            mgr.trash.undelete(9)
        save(mgr, 1, 2)
        mgr.delete(1)
        mgr.delete(2)
        with pytest.raises(errors.StepNotFoundError, match=r"step 9: .*trash.*holds 1, 2"):
            mgr.trash.undelete(9)


def test_without_a_trash_the_calls_say_what_to_do(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for call in (mgr.trash.steps, lambda: mgr.trash.undelete(1), mgr.trash.empty):
            with pytest.raises(errors.InvalidArgumentError, match='trash="trash"'):
                call()


@pytest.mark.parametrize("age", [-1, float("nan"), float("inf"), "a day", True, None])
def test_an_age_is_a_number_of_seconds(age: Any, tmp_path: Path) -> None:
    with (
        ckpt.sync.CheckpointManager(tmp_path, trash=TRASH) as mgr,
        pytest.raises(errors.InvalidArgumentError, match="older_than"),
    ):
        mgr.trash.empty(older_than=age)


def test_a_read_only_manager_only_looks(opening: dict[str, Any]) -> None:
    with ckpt.sync.CheckpointManager(**opening) as mgr:
        save(mgr, 1, 2)
        mgr.delete(1)
    with ckpt.sync.CheckpointManager(**opening, mode="r") as mgr:
        assert [each.step for each in mgr.trash.steps()] == [1]
        with pytest.raises(errors.ReadOnlyError):
            mgr.trash.undelete(1)
        with pytest.raises(errors.ReadOnlyError):
            mgr.trash.empty()


@pytest.mark.parametrize("trash", ["/tmp/bin", Path("/tmp/bin")])
def test_a_path_is_no_trash_of_a_store(trash: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="expected a plain name"):
        ckpt.sync.CheckpointManager("memory://a/b", trash=trash)


def test_names_with_a_prefix(tmp_path: Path) -> None:
    names = ckpt.step_names.Standard("run", 4)
    with ckpt.sync.CheckpointManager(tmp_path, trash=TRASH, step_names=names) as mgr:
        for seed in (1, 2):
            save(mgr, 7, seed=seed)
            mgr.delete(7)
        mgr.trash.undelete(7)
        assert mgr.restore(7)["seed"] == 2
        assert (tmp_path / "run_0007").is_dir()


@pytest.mark.parametrize("own_disks", [False, True])
def test_all_processes_of_a_job_take_a_step_back(own_disks: bool, tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR, own_disks=own_disks, trash=TRASH)
    saved(mgrs, 3)
    saved(mgrs, 4)
    together(*(lambda m=m: m.delete(3) for m in mgrs))
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[4]] * 2
    assert together(*(lambda m=m: m.trash.undelete(3) for m in mgrs)) == [None] * 2
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[3, 4]] * 2
    together(*(lambda m=m: m.delete(3) for m in mgrs))
    assert together(*(mgr.trash.empty for mgr in mgrs)) == [[3]] * 2
    closed(mgrs)


def test_it_is_logged(opening: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    with ckpt.sync.CheckpointManager(**opening) as mgr:
        save(mgr, 1, 2)
        mgr.delete(1)
        mgr.trash.undelete(1)
        mgr.delete(2)
        mgr.trash.empty()
    texts = [each.getMessage() for each in caplog.records]
    assert any("step 1 of" in text and "undeleted" in text for text in texts)
    assert any("removed from the trash: 2 " in text for text in texts)


def test_roots_that_share_a_trash_keep_their_own_steps(tmp_path: Path) -> None:
    shared = ckpt.keep.Deletion(trash=tmp_path / "bin")
    with (
        ckpt.sync.CheckpointManager(tmp_path / "a", trash=shared) as a,
        ckpt.sync.CheckpointManager(tmp_path / "b", trash=shared) as b,
    ):
        for mgr, seed in ((a, 1), (b, 2)):
            save(mgr, 100, seed=seed)
            mgr.delete(100)
        assert b.trash.empty() == [100]
        a.trash.undelete(100)
        assert a.restore(100)["seed"] == 1
        assert b.trash.steps() == []


def test_what_others_put_into_the_folder_is_left_alone(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, trash=TRASH) as mgr:
        save(mgr, 1, 2)
        mgr.delete(1)
        photos = tmp_path / "trash" / "2024"
        photos.mkdir()
        (photos / "photo.jpg").write_bytes(b"x")
        # Somebody has taken the step out by hand, and put something else in its place.
        (tmp_path / "trash" / "1").rename(tmp_path / "trash" / "mine")
        (tmp_path / "trash" / "1").mkdir()
        assert mgr.trash.steps() == []
        assert mgr.trash.empty() == []
        with pytest.raises(errors.StepNotFoundError):
            mgr.trash.undelete(2024)
        assert sorted(each.name for each in (tmp_path / "trash").iterdir()) == ["1", "2024", "mine"]


def test_files_of_others_in_a_step_are_never_removed(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, trash=TRASH) as mgr:
        save(mgr, 1)
        (tmp_path / "1" / "notes.txt").write_text("mine")
        mgr.delete(1)
        mgr.trash.empty()
    assert (tmp_path / "1.others" / "notes.txt").read_text() == "mine"


def test_when_it_was_deleted_does_not_change(opening: dict[str, Any]) -> None:
    with ckpt.sync.CheckpointManager(**opening) as mgr:
        save(mgr, 5, seed=1)
        mgr.delete(5)
        (first,) = mgr.trash.steps()
        if not str(opening["root"]).startswith("memory"):
            Path(first.path).chmod(0o700)
        save(mgr, 5, seed=2)
        mgr.delete(5)
        assert mgr.trash.steps()[0] == first
        mgr.trash.undelete(5)
        assert mgr.restore(5)["seed"] == 2


def test_a_step_under_another_of_its_names_is_in_the_way(tmp_path: Path) -> None:
    plain, padded = ckpt.step_names.Standard(), ckpt.step_names.Standard("ckpt", 8)
    with ckpt.sync.CheckpointManager(tmp_path, trash=TRASH) as mgr:
        save(mgr, 5, seed=1)
        mgr.delete(5)
    both = ckpt.step_names.Composite(padded, plain)
    with ckpt.sync.CheckpointManager(tmp_path, trash=TRASH, step_names=both) as mgr:
        save(mgr, 5, seed=2)
        with pytest.raises(errors.StepExistsError, match="ckpt_00000005 exists"):
            mgr.trash.undelete(5)
        assert [each.step for each in mgr.trash.steps()] == [5]


def test_a_very_old_age_empties_nothing(opening: dict[str, Any]) -> None:
    with ckpt.sync.CheckpointManager(**opening) as mgr:
        save(mgr, 1)
        mgr.delete(1)
        assert mgr.trash.empty(older_than=1e300) == []


def test_where_every_process_has_its_disk_only_the_same_save_comes_back(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR, own_disks=True, trash=TRASH)
    for _ in range(2):
        saved(mgrs, 3)
        together(*(lambda m=m: m.delete(3) for m in mgrs))
    # One disk has lost the later one, so the earlier one comes back everywhere.
    later = mgrs[0].trash.steps()[-1]
    shutil.rmtree(later.path)
    assert together(*(lambda m=m: m.trash.undelete(3) for m in mgrs)) == [None] * 2
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[3]] * 2
    assert together(*(mgr.restore for mgr in mgrs))[0] is not None
    together(*(lambda m=m: m.delete(3) for m in mgrs))
    # One has none, so nothing is done anywhere.
    for each in mgrs[0].trash.steps():
        shutil.rmtree(each.path)
    before = mgrs[1].trash.steps()
    found = together(*(lambda m=m: m.trash.undelete(3) for m in mgrs))
    assert [type(each) for each in found] == [errors.StepNotFoundError] * 2
    assert mgrs[1].trash.steps() == before
    closed(mgrs)
