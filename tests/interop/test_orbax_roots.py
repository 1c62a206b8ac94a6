"""A manager on a root that Orbax wrote: it lists, restores, saves beside, and deletes nothing."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp0
import pytest
from orbax.checkpoint import v1 as ocp

import ckpt
from ckpt import errors
from ckpt._settings import IfExists
from ckpt.sync import CheckpointManager
from tests.support.simulated_job import FAR, closed, managers, saved, steps, together

STEPS = (10, 20, 30)
LOSSES = {10: 0.5, 20: 0.1, 30: 0.4, 40: 0.01}


def state_of(number: int) -> dict[str, Any]:
    return {"w": jnp.arange(8.0) + number, "opt": (jnp.full(3, number), {"mu": jnp.ones((2, 2))})}


def number_of(state: Any) -> int:
    assert [each.shape for each in jax.tree.leaves(state)] == [(3,), (2, 2), (8,)]
    assert np.array_equal(state["w"] - state["w"][0], np.arange(8.0))
    return int(state["w"][0])


def save_with_manager(root: Path, *steps: int) -> None:
    options = ocp0.CheckpointManagerOptions(best_fn=lambda each: each["loss"], best_mode="min")
    with ocp0.CheckpointManager(root, options=options) as manager:
        for step in steps:
            metrics = {"loss": LOSSES.get(step, 1.0)}
            manager.save(step, args=ocp0.args.StandardSave(state_of(step)), metrics=metrics)
        manager.wait_until_finished()


def save_with_v1(root: Path, *steps: int) -> None:
    with ocp.training.Checkpointer(root) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step), metrics={"loss": LOSSES.get(step, 1.0)})


def save_as_years_ago(root: Path, *steps: int) -> None:
    """Without the files that only later versions write."""
    save_with_manager(root, *steps)
    for step in steps:
        for name in ("_CHECKPOINT_METADATA", "commit_success.txt", "default/commit_success.txt"):
            (root / str(step) / name).unlink(missing_ok=True)


WRITERS = {"v0": save_with_manager, "v1": save_with_v1, "years-ago": save_as_years_ago}
Writer = Callable[..., None]


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Writer:
    return WRITERS[request.param]


@pytest.fixture
def root(tmp_path: Path, write: Writer) -> Path:
    write(tmp_path / "run", *STEPS)
    return tmp_path / "run"


@contextmanager
def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    caplog.clear()
    caplog.set_level(logging.WARNING, logger="ckpt")
    found: list[str] = []
    yield found
    found += [each.getMessage() for each in caplog.records if each.name == "ckpt"]


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()
    }


def test_steps_are_listed_and_restored(root: Path) -> None:
    with CheckpointManager(root) as mgr:
        assert mgr.all_steps() == list(STEPS)
        assert mgr.latest_step() == 30
        assert [number_of(mgr.restore(step)) for step in STEPS] == list(STEPS)
        found = mgr.restore(like=state_of(0))
        assert number_of(found) == 30
        assert type(found["opt"]) is tuple
        assert mgr.metadata(20).tree["w"].shape == (8,)
        assert mgr.metadata(20).info.step == 20
        with pytest.raises(errors.StepNotFoundError, match="steps 10, 20, 30"):
            mgr.restore(15)


def test_metrics_count_for_the_best_step(root: Path, write: Writer) -> None:
    with CheckpointManager(root) as mgr:
        assert mgr.best_step("loss", "min") == 20
        assert mgr.metadata(10).info.metrics == {"loss": 0.5}


def test_a_run_goes_on_where_orbax_stopped(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = contents(root)
    with warnings_of(caplog) as said, CheckpointManager(root) as mgr:
        start, state = mgr.resume(state_of(0))
        assert (start, number_of(state)) == (31, 30)
        mgr.save(31, state_of(31), durable=True)
        assert mgr.all_steps() == [10, 20, 30, 31]
        assert number_of(mgr.restore()) == 31
    assert not said
    assert before.items() <= contents(root).items()


def test_a_read_only_manager_and_asyncio(root: Path) -> None:
    import asyncio

    async def latest() -> int:
        async with ckpt.CheckpointManager(root, mode="r") as mgr:
            return number_of(await mgr.restore())

    before = contents(root)
    assert asyncio.run(latest()) == 30
    assert contents(root) == before


def test_both_libraries_take_turns_in_one_root(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for turn in range(3):
        with ocp0.CheckpointManager(root) as manager:
            latest = manager.latest_step()
            number = 0
            if latest is not None:
                target = ocp0.args.StandardRestore(jax.eval_shape(lambda: state_of(0)))
                number = number_of(manager.restore(latest, args=target))
                assert number == latest
            manager.save(number + 1, args=ocp0.args.StandardSave(state_of(number + 1)))
            manager.wait_until_finished()
        with CheckpointManager(root) as mgr:
            start, state = mgr.resume(state_of(0))
            assert number_of(state) == start - 1 == 2 * turn + 1
            mgr.save(start, state_of(start), durable=True)
    with CheckpointManager(root) as mgr, ocp0.CheckpointManager(root) as manager:
        assert mgr.all_steps() == list(manager.all_steps()) == [1, 2, 3, 4, 5, 6]
        for step in mgr.all_steps():
            assert number_of(mgr.restore(step)) == number_of(manager.restore(step)) == step


def test_both_libraries_take_turns_with_the_newer_interface(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for turn in range(3):
        with ocp.training.Checkpointer(root) as checkpointer:
            number = number_of(checkpointer.load()) if checkpointer.latest else 0
            checkpointer.save(number + 1, state_of(number + 1))
        with CheckpointManager(root) as mgr:
            # Orbax calls the one object of its steps so.
            start, found = mgr.resume(state_of(0))
            assert number_of(found) == start - 1 == 2 * turn + 1
            mgr.save(start, items={"state": state_of(start)}, durable=True)
    with ocp.training.Checkpointer(root) as checkpointer:
        assert [each.step for each in checkpointer.checkpoints] == [1, 2, 3, 4, 5, 6]
        assert [number_of(checkpointer.load(step)) for step in range(1, 7)] == [1, 2, 3, 4, 5, 6]


def test_a_watch_gives_the_steps_of_both(root: Path) -> None:
    with CheckpointManager(root) as mgr:
        mgr.save(40, state_of(40), durable=True)
    given = [
        (info.step, number_of(ckpt.sync.load(info.path)))
        for info in ckpt.sync.watch(root, until=40, timeout=60)
    ]
    assert given == [(step, step) for step in (10, 20, 30, 40)]


def test_a_watch_pins_a_step_against_deletion(root: Path) -> None:
    deletion = ckpt.keep.Deletion(orbax_steps=True)
    with CheckpointManager(root, keep=ckpt.keep.Latest(1), trash=deletion) as mgr:
        for info in ckpt.sync.watch(root, until=10, timeout=60):
            mgr.save(40, state_of(40))
            mgr.wait_until_finished()
            assert mgr.all_steps() == [10, 40]
            assert number_of(ckpt.sync.load(info.path)) == 10


def test_the_processes_of_a_job_restore_the_same_step(root: Path) -> None:
    job = managers(root, 2, seconds=FAR)
    found = together(*(lambda each=each: each.resume(state_of(0)) for each in job))
    assert [(start, number_of(state)) for start, state in found] == [(31, 30), (31, 30)]
    assert steps(saved(job, 31, jax.tree.map(np.asarray, state_of(31)))) == [31, 31]
    assert together(*(lambda each=each: each.all_steps() for each in job)) == [[10, 20, 30, 31]] * 2
    closed(job)


def test_steps_of_orbax_on_disks_of_their_own_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_with_manager(tmp_path / "0", 10)
    save_with_manager(tmp_path / "1", 10)
    with warnings_of(caplog) as said:
        job = managers(tmp_path, 2, own_disks=True, seconds=FAR)
        for _ in range(2):
            assert together(*(lambda each=each: each.all_steps() for each in job)) == [[], []]
        closed(job)
    assert sum("another library wrote are left out" in text for text in said) == 2


# --- What stays and what goes ---------------------------------------------------------------------


def test_retention_counts_steps_of_orbax_and_leaves_them(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = contents(root)
    keep = ckpt.keep.Latest(2)
    with warnings_of(caplog) as said, CheckpointManager(root, keep=keep) as mgr:
        for step in (31, 32, 33):
            mgr.save(step, state_of(step))
        mgr.wait_until_finished()
        assert mgr.all_steps() == [10, 20, 30, 32, 33]
    assert before.items() <= contents(root).items()
    (text,) = said
    assert "steps that another library wrote stay" in text
    assert "orbax_steps=True" in text


def test_retention_by_item_leaves_them_whole(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = contents(root)
    deletion = ckpt.keep.Deletion(orbax_steps=True)
    keep = {"default": ckpt.keep.Latest(2)}
    with (
        warnings_of(caplog) as said,
        CheckpointManager(root, keep=keep, trash=deletion) as mgr,
    ):
        for step in (31, 32, 33):
            mgr.save(step, state_of(step))
        mgr.wait_until_finished()
        assert mgr.all_steps() == [10, 20, 30, 32, 33]
    assert before.items() <= contents(root).items()
    (text,) = said
    assert "steps that another library wrote stay whole" in text
    assert ": 10, 20, 30. delete(step)" in text


def test_orbax_reads_what_retention_by_item_has_left(tmp_path: Path) -> None:
    keep: dict[str, Any] = {"params": ckpt.keep.All(), "*": ckpt.keep.Latest(1)}
    with CheckpointManager(tmp_path, keep=keep) as mgr:
        for step in (1, 2):
            mgr.save(step, items={"params": state_of(step), "opt_state": {"mu": jnp.ones(9)}})
        mgr.wait_until_finished()
        assert mgr.metadata(1).info.items == ("params",)
    assert set(ocp.checkpointables_metadata(tmp_path / "1").metadata) == {"params"}
    found = ocp.load(tmp_path / "1", checkpointable_name="params")
    assert np.array_equal(found["w"], np.arange(8.0) + 1)
    with ocp0.CheckpointManager(tmp_path) as orbax:
        assert orbax.all_steps() == [1, 2]
        assert set(orbax.item_metadata(1).keys()) == {"params"}


@pytest.mark.parametrize("trash", [None, "trash"])
def test_retention_deletes_them_where_that_is_asked_for(root: Path, trash: str | None) -> None:
    deletion = ckpt.keep.Deletion(orbax_steps=True, trash=trash)
    keep = ckpt.keep.Latest(2)
    with CheckpointManager(root, keep=keep, trash=deletion) as mgr:
        mgr.pin(10, "paper")
        mgr.save(31, state_of(31))
        mgr.wait_until_finished()
        assert mgr.all_steps() == [10, 30, 31]
    if trash is not None:
        (kept,) = (root / trash).iterdir()
        assert number_of(ckpt.sync.load(kept)) == 20


def test_a_step_of_orbax_is_deleted_when_it_is_named(root: Path) -> None:
    with CheckpointManager(root) as mgr:
        mgr.pin(20, "paper")
        with pytest.raises(errors.StepPinnedError):
            mgr.delete(20)
        mgr.delete(10)
        assert mgr.all_steps() == [20, 30]
        with pytest.raises(errors.InvalidArgumentError, match="Orbax wrote this step"):
            mgr.delete(30, item="default")
    with ocp0.CheckpointManager(root) as manager:
        assert sorted(manager.all_steps()) == [20, 30]


def test_a_step_of_orbax_is_never_replaced(root: Path) -> None:
    before = contents(root)
    with CheckpointManager(root) as mgr:
        for if_exists in get_args(IfExists):
            with pytest.raises(errors.StepExistsError, match=r"20.*not a checkpoint of this"):
                mgr.save(20, state_of(1), if_exists=if_exists, durable=True)
        with pytest.raises(errors.NotACheckpointError, match=r"step 20: .*without digests"):
            mgr.verify(20)
    assert before.items() <= contents(root).items()


# --- What is not a step ---------------------------------------------------------------------------


def test_what_orbax_has_not_finished_is_no_step(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_with_manager(root, *STEPS)
    os.rename(root / "30", root / "30.orbax-checkpoint-tmp")
    with CheckpointManager(root) as mgr:
        assert mgr.all_steps() == [10, 20]
        assert mgr.resume(state_of(0))[0] == 21
    assert (root / "30.orbax-checkpoint-tmp").is_dir()


def test_an_item_that_orbax_has_not_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    save_as_years_ago(root, *STEPS)
    os.rename(root / "30/default", root / "30/default.orbax-checkpoint-tmp")
    with warnings_of(caplog) as said, CheckpointManager(root) as mgr:
        assert mgr.all_steps() == [10, 20]
        with pytest.raises(errors.NotACheckpointError, match=r"step 30: .*never finished"):
            mgr.restore(30)
    assert sum("30" in text for text in said) == 1


def test_a_step_whose_metadata_is_damaged_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    save_with_manager(root, *STEPS)
    (root / "30/_CHECKPOINT_METADATA").write_text("{")
    with warnings_of(caplog) as said, CheckpointManager(root) as mgr:
        assert mgr.latest_step() == 20
        assert mgr.all_steps() == [10, 20]
        with pytest.raises(errors.CorruptCheckpointError, match="_CHECKPOINT_METADATA is damaged"):
            mgr.restore(30)
    (text,) = said
    assert "step 30 cannot be read and is left out" in text


def test_a_damaged_step_is_passed_over_and_then_moved_aside(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_with_manager(root, *STEPS)
    (root / "30/default/manifest.ocdbt").write_bytes(b"damaged")
    with CheckpointManager(root) as mgr:
        with pytest.raises(errors.CorruptCheckpointError) as caught:
            mgr.restore()
        assert (caught.value.step, caught.value.item) == (30, "default")
        start, state = mgr.resume(state_of(0), fallback=True)
        assert (start, number_of(state)) == (21, 20)
        mgr.save(30, state_of(31), durable=True)
        assert number_of(mgr.restore(30)) == 31
    (kept,) = (root / "damaged").iterdir()
    assert (kept / "default/manifest.ocdbt").read_bytes() == b"damaged"


def test_a_step_of_this_library_without_its_manifest_is_no_step_of_orbax(tmp_path: Path) -> None:
    """Also while it is copied, when the files that Orbax needs may come first."""
    with CheckpointManager(tmp_path / "own") as mgr:
        mgr.save(5, state_of(5), durable=True)
    for missing in (("ckpt.json",), ("ckpt.json", "commit_success.txt")):
        root = tmp_path / f"run{len(missing)}"
        shutil.copytree(tmp_path / "own/5", root / "5", ignore=shutil.ignore_patterns(*missing))
        with CheckpointManager(root) as mgr:
            assert mgr.all_steps() == []
            with pytest.raises(errors.StepNotFoundError):
                mgr.restore(5)


def test_a_step_that_orbax_replaces_is_read_anew(root: Path, write: Writer, tmp_path: Path) -> None:
    write(tmp_path / "other", 40)
    with CheckpointManager(root) as mgr:
        assert number_of(mgr.restore()) == 30
        assert mgr.best_step("loss", "min") == 20
        # Between two looks, so that the name is there all the time.
        shutil.rmtree(root / "30")
        os.rename(tmp_path / "other/40", root / "30")
        assert mgr.best_step("loss", "min") == 30
        assert number_of(mgr.restore(30)) == 40


def test_steps_are_listed_without_being_opened(root: Path) -> None:
    """However many arrays they have: what describes the arrays is not looked at."""
    for path in root.rglob("_METADATA"):
        path.write_bytes(b"x" * 100)
    with CheckpointManager(root, mode="r") as mgr:
        assert mgr.all_steps() == list(STEPS)
        with pytest.raises(errors.CorruptCheckpointError, match="_METADATA"):
            mgr.restore()


def test_names_with_a_prefix(tmp_path: Path) -> None:
    options = ocp0.CheckpointManagerOptions(step_prefix="ckpt", step_format_fixed_length=8)
    with ocp0.CheckpointManager(tmp_path / "run", options=options) as manager:
        manager.save(7, args=ocp0.args.StandardSave(state_of(7)))
        manager.wait_until_finished()
    names = ckpt.step_names.Standard("ckpt", 8)
    with CheckpointManager(tmp_path / "run", step_names=names) as mgr:
        assert mgr.resume(state_of(0))[0] == 8
        assert number_of(mgr.restore(7)) == 7


def test_times_of_orbax_count_for_policies(tmp_path: Path) -> None:
    save_with_manager(tmp_path / "run", 10)
    about = json.loads((tmp_path / "run/10/_CHECKPOINT_METADATA").read_text())
    with CheckpointManager(tmp_path / "run") as mgr:
        info = mgr.metadata(10).info
        assert abs(info.committed.timestamp() - about["commit_timestamp_nsecs"] / 1e9) < 1e-3
        assert abs(info.created.timestamp() - about["init_timestamp_nsecs"] / 1e9) < 1e-3


def test_a_loop_that_saves_at_its_top_goes_on_with_a_run_of_orbax(tmp_path: Path) -> None:
    """The step is Orbax's, has no digests, and stays as it is: the arrays came from it."""
    with ocp0.CheckpointManager(tmp_path) as theirs:
        theirs.save(7, args=ocp0.args.StandardSave(state_of(7)))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with CheckpointManager(tmp_path) as mgr:
        start, state = mgr.resume(state_of(0))
        commit = mgr.save(start - 1, state)
        assert not commit
        assert "restored from" in str(commit.skipped)
        with pytest.raises(errors.StepExistsError, match="not a checkpoint of this"):
            mgr.save(start - 1, state_of(8))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "7").rglob("*")} == {
        path: when for path, when in before.items() if (tmp_path / "7") in path.parents
    }


def test_metrics_are_kept_as_they_were_passed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lists and texts, too: a metric function gets what Orbax gave to a `best_fn`."""
    root = tmp_path / "run"
    options = ocp0.CheckpointManagerOptions(best_fn=lambda each: each["eval"]["loss"])
    metrics = {1: (0.5, "valid"), 2: (0.25, "test")}
    with ocp0.CheckpointManager(root, options=options) as manager:
        for step, (loss, split) in metrics.items():
            given = {"eval": {"loss": loss, "curve": [1, 2]}, "split": split, "ok": True}
            manager.save(step, args=ocp0.args.StandardSave(state_of(step)), metrics=given)
        manager.wait_until_finished()
    with warnings_of(caplog) as said, CheckpointManager(root) as mgr:
        assert mgr.metrics(1) == {"eval/loss": 0.5}
        assert mgr.best_step("eval/loss", "min") == 2
        assert mgr.best_step(lambda each: each["eval"]["loss"], "max") == 1
        assert mgr.best_step(lambda each: len(each["eval"]["curve"]) + each["ok"], "max") == 2
        assert mgr.best_step(lambda each: float(each["split"] == "valid"), "max") == 1
    assert not said
    with warnings_of(caplog) as said:
        ckpt.sync.convert(root / "1", tmp_path / "ours" / "1", step=None)
        ckpt.sync.adopt(root / "1", tmp_path / "adopted" / "1")
    assert said == []
    for name in ("ours", "adopted"):
        document = json.loads((tmp_path / name / "1" / "ckpt.json").read_text())
        assert document["metrics"]["eval"] == {"loss": 0.5, "curve": [1, 2]}
        assert document["metrics"]["split"] == "valid"
    path = root / "1" / "metrics" / "metrics"
    path.write_text(json.dumps({"eval": {"loss": 0.5, "none": None}}))
    with warnings_of(caplog) as said:
        ckpt.sync.convert(root / "1", tmp_path / "again")
    assert ["eval/none" in each for each in said] == [True]
    assert ckpt.sync.metadata(tmp_path / "again").info.metrics == {"eval/loss": 0.5}


def test_metrics_that_are_damaged_do_not_hide_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_with_manager(tmp_path / "run", 10)
    (tmp_path / "run" / "10" / "metrics" / "metrics").write_text("{")
    with warnings_of(caplog) as said:
        assert number_of(ckpt.sync.load(tmp_path / "run" / "10")) == 10
    [each] = said
    assert "metrics/metrics is damaged" in each


@pytest.mark.parametrize("mark", [b"", b"done\n", b"Saved by a program"])
def test_a_mark_that_is_nobodys_makes_no_step_ours(
    root: Path, mark: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "30" / "commit_success.txt").write_bytes(mark)
    with warnings_of(caplog) as said, CheckpointManager(root) as mgr:
        assert mgr.all_steps() == list(STEPS)
        assert number_of(mgr.restore()) == 30
    assert not said
    assert number_of(ckpt.sync.load(root / "30")) == 30


@pytest.mark.parametrize("mark", [b"", b"Checkpoint commit was successful to 5"])
def test_a_step_of_ours_with_a_cut_mark_is_not_read_as_one_of_orbax(
    tmp_path: Path, mark: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing would be compared with digests."""
    with CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(5, state_of(5), durable=True)
    (tmp_path / "run" / "5" / "ckpt.json").unlink()
    (tmp_path / "run" / "5" / "commit_success.txt").write_bytes(mark)
    with pytest.raises(errors.NotACheckpointError):
        ckpt.sync.load(tmp_path / "run" / "5")
    with warnings_of(caplog) as said, CheckpointManager(tmp_path / "run") as mgr:
        assert mgr.all_steps() == []
    assert said
