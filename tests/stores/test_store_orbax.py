"""Steps of Orbax that lie in a bucket are listed, restored and left alone there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt
from ckpt import errors
from tests.stores.places import Place

STEPS = (1, 2, 3)


def state_of(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(100_000) + step, "opt": (jnp.ones(3), {"step": jnp.int32(step)})}


def assert_step(found: Any, step: int) -> None:
    assert np.array_equal(found["w"], np.arange(100_000) + step)
    assert int(found["opt"][1]["step"]) == step


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("orbax") / "run"
    options = ocp.CheckpointManagerOptions(best_fn=lambda each: each["loss"], best_mode="min")
    with ocp.CheckpointManager(root, options=options) as manager:
        for step in STEPS:
            args = ocp.args.StandardSave(state_of(step))
            manager.save(step, args=args, metrics={"loss": (step - 2) ** 2})
        manager.wait_until_finished()
    return root


@pytest.fixture
def run(bucket: Place, written: Path) -> Place:
    bucket.upload(written, "run")
    return bucket


def opened(place: Place, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(place.root("run"), **options)


def test_they_are_listed_restored_and_gone_on_from(run: Place) -> None:
    before = run.objects()
    with opened(run) as mgr:
        assert mgr.all_steps() == [1, 2, 3]
        assert mgr.best_step("loss", "min") == 2
        assert_step(mgr.restore(1), 1)
        start, found = mgr.resume(state_of(0))
        assert start == 4
        assert_step(found, 3)
        mgr.save(4, state_of(4)).result()
        assert mgr.all_steps() == [1, 2, 3, 4]
        assert_step(mgr.restore(like=state_of(0)), 4)
    assert before.items() <= run.objects().items()


def test_each_is_a_checkpoint_by_itself(run: Place) -> None:
    found = ckpt.sync.load(run.root("run/2"), like=state_of(0))
    assert_step(found, 2)
    assert ckpt.sync.metadata(run.root("run/2")).info.metrics == {"loss": 0}


def test_what_orbax_has_not_finished_is_no_step(
    bucket: Place, written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a bucket its directory has its final name all the time; these two files tell."""
    bucket.upload(written, "run")
    about = bucket.objects()["run/3/_CHECKPOINT_METADATA"]
    bucket.drop("run/3/commit_success.txt")
    # It was copied from a disk where an older version wrote it: the time of its commit tells.
    with opened(bucket) as mgr:
        assert mgr.all_steps() == [1, 2, 3]
    start = about.index(b'"commit_timestamp_nsecs"')
    bucket.put("run/3/_CHECKPOINT_METADATA", about[:start] + b'"custom_metadata": {}}')
    caplog.set_level(logging.WARNING, logger="ckpt")
    with opened(bucket) as mgr:
        assert mgr.all_steps() == [1, 2]
        with pytest.raises(errors.NotACheckpointError, match=r"step 3: .*never finished"):
            mgr.restore(3)
        assert mgr.resume(state_of(0))[0] == 3
    (said,) = [each.getMessage() for each in caplog.records if each.name == "ckpt"]
    assert "step 3 cannot be read and is left out: Orbax never finished" in said


def test_they_stay_until_their_deletion_is_asked_for(run: Place) -> None:
    before = run.objects()
    with opened(run, keep=ckpt.keep.Latest(1)) as mgr:
        mgr.save(4, state_of(4)).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [1, 2, 3, 4]
        with pytest.raises(errors.StepExistsError):
            mgr.save(3, state_of(3), if_exists="replace").result()
        assert before.items() <= run.objects().items()
        mgr.delete(2)
        assert mgr.all_steps() == [1, 3, 4]
    assert not [key for key in run.objects() if key.startswith("run/2/")]
    deletion = ckpt.keep.Deletion(orbax_steps=True)
    with opened(run, keep=ckpt.keep.Latest(1), trash=deletion) as mgr:
        mgr.save(5, state_of(5)).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [5]
    assert not [key for key in run.objects() if key.startswith(("run/1/", "run/3/"))]


def test_a_step_of_this_library_that_lost_its_manifest_is_not_removed_as_one(
    bucket: Place, tmp_path: Path
) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(7, state_of(7)).result()
    (tmp_path / "run/7/ckpt.json").unlink()
    bucket.upload(tmp_path / "run/7", "run/7")
    before = bucket.objects()
    with opened(bucket) as mgr:
        assert mgr.all_steps() == []
        with pytest.raises(errors.StepNotFoundError):
            mgr.delete(7)
    assert before.items() <= bucket.objects().items()
