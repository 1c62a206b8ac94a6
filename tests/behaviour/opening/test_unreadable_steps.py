"""Steps that cannot be read are named, and never taken for an empty root."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import pytest

import ckpt.sync
from ckpt import errors
from tests.behaviour.opening.damaged_roots import (
    flip_array,
    flip_head,
    flip_rest,
    make_root,
    state,
    warnings_of,
)
from tests.support.manifests import document_of, rewrite


def lose_manifest(step_dir: Path) -> None:
    (step_dir / "ckpt.json").unlink()


def empty_manifest(step_dir: Path) -> None:
    (step_dir / "ckpt.json").write_bytes(b"")


def cut_manifest(step_dir: Path) -> None:
    os.truncate(step_dir / "ckpt.json", (step_dir / "ckpt.json").stat().st_size - 1)


DAMAGES = [lose_manifest, flip_head, empty_manifest, cut_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_latest_step_is_named_once_and_saved_anew(
    damage: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_root(tmp_path / "run")
    assert callable(damage)
    damage(root / "3")
    lost = sorted(path.relative_to(root / "3") for path in (root / "3").rglob("*"))
    with ckpt.sync.CheckpointManager(root) as mgr:
        (warning,) = warnings_of(caplog)
        assert "step 3 is damaged and is left out" in warning
        assert str(root / "3") in warning
        assert mgr.latest_step() == 2
        assert mgr.all_steps() == [1, 2]
        assert warnings_of(caplog) == []
        # A run that goes on from step 2 comes to step 3 again.
        assert mgr.save(3, state(3.5), durable=True)
        (warning,) = warnings_of(caplog)
        assert "step 3 is saved anew" in warning
        assert str(root / "damaged" / "3") in warning
        assert mgr.all_steps() == [1, 2, 3]
        assert mgr.restore(3)["w"][0] == 3.5
        assert warnings_of(caplog) == []
    kept = root / "damaged" / "3"
    assert sorted(path.relative_to(kept) for path in kept.rglob("*")) == lost
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.all_steps() == [1, 2, 3]
        assert warnings_of(caplog) == []


def test_a_step_whose_manifest_was_changed_behind_its_head_is_listed_and_saved_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lists of steps look at heads only; who reads the step finds the damage."""
    root = make_root(tmp_path / "run")
    flip_rest(root / "3")
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.all_steps() == [1, 2, 3]
        assert mgr.latest_step() == 3
        assert mgr.best_step("loss", "min") == 3
        assert warnings_of(caplog) == []
        for call in (mgr.restore, mgr.metadata, lambda: mgr.restore(3), lambda: mgr.metadata(3)):
            with pytest.raises(errors.CorruptCheckpointError, match="changed after it") as caught:
                call()
            assert caught.value.step == 3
        assert not mgr.verify(3).ok
        with pytest.raises(errors.CorruptCheckpointError, match="changed after it"):
            ckpt.sync.load(root / "3")
        caplog.clear()
        # A run that goes on from step 2 comes to step 3 again.
        assert mgr.save(3, state(3.5), durable=True)
        (warning,) = warnings_of(caplog)
        assert "step 3 is saved anew" in warning
        assert "changed after it" in warning
        assert str(root / "damaged" / "3") in warning
        assert mgr.restore(3)["w"][0] == 3.5


def test_a_step_that_is_damaged_twice_is_kept_twice(tmp_path: Path) -> None:
    root = make_root(tmp_path / "run", (1,))
    for _ in range(2):
        flip_head(root / "1")
        with ckpt.sync.CheckpointManager(root) as mgr:
            mgr.save(1, state(1), durable=True)
    assert len(list((root / "damaged").iterdir())) == 2


def test_damage_between_two_looks_is_told_at_the_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_root(tmp_path / "run")
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        assert mgr.all_steps() == [1, 2, 3]
        assert warnings_of(caplog) == []
        flip_head(root / "1")
        assert mgr.all_steps() == [2, 3]
        (warning,) = warnings_of(caplog)
        assert "step 1 is damaged" in warning


def test_what_was_damaged_and_is_gone_is_not_told_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_root(tmp_path / "run", (7,))
    flip_head(root / "7")
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.delete(7)
        with pytest.raises(errors.StepNotFoundError, match="save one first"):
            mgr.restore()
        assert mgr.resume(state(0))[0] == 0
        mgr.save(7, state(7), durable=True)
        assert mgr.all_steps() == [7]
        caplog.clear()
        flip_head(root / "7")
        assert mgr.all_steps() == []
        assert "step 7 is damaged" in warnings_of(caplog)[0]


def test_many_directories_that_are_no_steps_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    for step in range(100):
        (root / str(step)).mkdir(parents=True)
    caplog.set_level(logging.INFO, "ckpt")
    with ckpt.sync.CheckpointManager(root):
        first, second, third = [each.getMessage() for each in caplog.records]
        assert "it holds 24 steps of another program (76, 77, 78, ..., 92, 93," in first
        assert "76 more directories are named like steps" in second
        assert third.endswith("no steps yet")


def test_a_root_of_damaged_steps_is_not_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_root(tmp_path / "run", (7,))
    flip_head(root / "7")
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.latest_step() is None
        with pytest.raises(errors.StepNotFoundError, match="step 7 is damaged"):
            mgr.restore()
        with pytest.raises(errors.StepNotFoundError, match="step 7 is damaged"):
            mgr.resume(state(0))


def test_other_directories_with_the_names_of_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_root(tmp_path / "run", (1,))
    (root / "2024").mkdir()
    (root / "logs").mkdir()
    with ckpt.sync.CheckpointManager(root) as mgr:
        (warning,) = warnings_of(caplog)
        assert "a step of another program (2024)" in warning
        assert mgr.all_steps() == [1]
        with pytest.raises(errors.StepExistsError, match="not a checkpoint of this library"):
            mgr.save(2024, state(0))


def test_a_step_of_a_later_version_is_not_called_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_root(tmp_path / "run", (1, 2))
    rewrite(root / "2", document_of(root / "2") | {"version": 99})
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.all_steps()
        for warning in warnings_of(caplog):
            assert "damaged" not in warning
        with pytest.raises(errors.StepExistsError):
            mgr.save(2, state(0))


PROGRAM = """
import logging, os, sys
import ckpt.sync
with ckpt.sync.CheckpointManager(sys.argv[1], mode="r") as mgr:
    mgr.restore()  # everything is imported
os.setuid(65534)
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
with ckpt.sync.CheckpointManager(sys.argv[1], mode="r") as mgr:
    print(mgr.all_steps(), mgr.latest_step())
    try:
        mgr.restore(3)
    except ckpt.errors.StorageError as error:
        print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("path", ["3", "3/ckpt.json"])
def test_a_step_that_may_not_be_read_does_not_hide_the_others(path: str) -> None:
    # The folders of pytest are closed to other users, by every run of it that begins.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        check_others_are_read(Path(folder) / "run", path)


def check_others_are_read(root: Path, path: str) -> None:
    make_root(root)
    os.chmod(root / path, 0)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, root], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("step 3 cannot be read and is left out") == 1
    assert "[1, 2] 2" in ended.stdout
    assert ended.stdout.count("Permission denied") == 2


# --- Damage of arrays, which no list can see ------------------------------------------------------


def test_the_newest_whole_step_is_restored_and_each_other_one_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_root(tmp_path / "run", (1, 2, 3, 4))
    flip_head(root / "4")
    flip_array(root / "3")
    flip_array(root / "2")
    with ckpt.sync.CheckpointManager(root) as mgr:
        caplog.clear()
        with pytest.raises(errors.CorruptCheckpointError, match=r"step 3.*leaf 'w'"):
            mgr.restore()
        assert mgr.restore(fallback=True)["w"][0] == 1
        third, second = warnings_of(caplog)
        assert "step 3 is passed over" in third
        assert "step 2 is passed over" in second
        # What is asked for by number is not replaced by something else.
        with pytest.raises(errors.InvalidArgumentError, match="leave the step out"):
            mgr.restore(3, fallback=True)


def test_where_no_step_is_whole_the_error_is_that_of_the_newest(tmp_path: Path) -> None:
    root = make_root(tmp_path / "run", (1, 2))
    flip_array(root / "1")
    flip_array(root / "2")
    with (
        ckpt.sync.CheckpointManager(root) as mgr,
        pytest.raises(errors.CorruptCheckpointError, match=r"^step 2"),
    ):
        mgr.restore(fallback=True)


def test_a_mismatch_is_no_reason_to_take_an_older_step(tmp_path: Path) -> None:
    root = make_root(tmp_path / "run", (1, 2))
    with (
        ckpt.sync.CheckpointManager(root) as mgr,
        pytest.raises(errors.TargetMismatchError, match=r"^step 2"),
    ):
        mgr.restore(like={"w": jnp.zeros(3), "step": jnp.int32(0)}, fallback=True)
