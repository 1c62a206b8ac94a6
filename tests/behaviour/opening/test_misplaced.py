"""A root that has checkpoints under other names, or further down, is not taken for an empty one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import flax.serialization
import flax.training.checkpoints
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import NotACheckpointError, StepNotFoundError
from ckpt.step_names import Standard
from tests.support.simulated_job import closed, managers, together

STATE = {"w": np.arange(4.0)}
FRESH = {"w": np.zeros(4)}


def one_shots(root: Path, pattern: str) -> None:
    for step in (1, 20):
        ckpt.sync.save(root / pattern.format(step), STATE)


def managed(root: Path, names: Standard) -> None:
    with ckpt.sync.CheckpointManager(root, step_names=names) as mgr:
        mgr.save(1, STATE)
        mgr.save(20, STATE)


def of_orbax(root: Path) -> None:
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt", step_format_fixed_length=8)
    with ocp.CheckpointManager(root, options=options) as mgr:
        for step in (1, 20):
            mgr.save(step, args=ocp.args.StandardSave(STATE))


def of_flax(root: Path) -> None:
    for step in (1, 20):
        flax.training.checkpoints.save_checkpoint(str(root), STATE, step, keep=9)


def of_old_orbax(root: Path) -> None:
    for step in (1, 20):
        ocp.PyTreeCheckpointer().save(root / f"checkpoint_{step}", STATE)


# Who made it, the names that read it, and how the message writes them.
ROOTS: dict[str, tuple[Callable[[Path], None], Standard, str]] = {
    "one-shot saves": (lambda root: one_shots(root, "step_{}"), Standard("step"), "'step'"),
    "as levanter names": (
        lambda root: one_shots(root, "step-{}"),
        Standard("step", separator="-"),
        "'step', separator='-'",
    ),
    "a manager with names": (
        lambda root: managed(root, Standard("ckpt", 8)),
        Standard("ckpt", 8),
        "'ckpt', digits=8",
    ),
    "padded": (lambda root: managed(root, Standard("", 6)), Standard("", 6), "digits=6"),
    "Orbax with a prefix": (of_orbax, Standard("ckpt", 8), "'ckpt', digits=8"),
    "Orbax without a manager": (of_old_orbax, Standard("checkpoint"), "'checkpoint'"),
    "Flax": (of_flax, Standard("checkpoint"), "'checkpoint'"),
}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if each.name == "ckpt" and each.levelno == logging.WARNING
    ]


@pytest.mark.parametrize("kind", ROOTS)
def test_opening_and_resuming_name_what_is_there_and_how_to_read_it(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, names, written = ROOTS[kind]
    root = tmp_path / "run"
    make(root)
    caplog.clear()
    with ckpt.sync.CheckpointManager(root) as mgr:
        (said,) = warnings(caplog)
        assert str(root) in said
        assert "2 checkpoints" in said
        assert names.name(20) in said
        assert f"step_names=ckpt.step_names.Standard({written})" in said
        assert mgr.resume(FRESH)[0] == 0
        with pytest.raises(StepNotFoundError, match="2 checkpoints"):
            mgr.restore()
    # Said once, also by a manager that was not opened before.
    assert warnings(caplog) == [said]
    caplog.clear()
    mgr = ckpt.sync.CheckpointManager(root)
    assert mgr.resume(FRESH)[0] == 0
    mgr.close()
    assert warnings(caplog) == [said]
    # What it says is true.
    with ckpt.sync.CheckpointManager(root, step_names=names) as mgr:
        start, state = mgr.resume(FRESH)
        assert start == 21
        assert np.asarray(state["w"]).tolist() == [0, 1, 2, 3]
        mgr.save(start, state, durable=True)
        assert mgr.all_steps() == [1, 20, 21]


@pytest.mark.parametrize("kind", ROOTS)
def test_without_create_such_a_root_is_refused(kind: str, tmp_path: Path) -> None:
    make, names, written = ROOTS[kind]
    make(tmp_path / "run")
    with (
        pytest.raises(StepNotFoundError, match=r"step_names=ckpt\.step_names") as caught,
        ckpt.sync.CheckpointManager(tmp_path / "run", mode="r+"),
    ):
        pass
    assert written in str(caught.value)
    with ckpt.sync.CheckpointManager(tmp_path / "run", mode="r+", step_names=names) as mgr:
        assert mgr.latest_step() == 20


@pytest.mark.parametrize("kind", ROOTS)
def test_it_is_not_loaded_as_one_checkpoint(kind: str, tmp_path: Path) -> None:
    make, names, _ = ROOTS[kind]
    root = tmp_path / "run"
    make(root)
    with pytest.raises(NotACheckpointError, match="2 checkpoints") as caught:
        ckpt.sync.load(root)
    assert names.name(20) in str(caught.value)
    assert ckpt.sync.load(root / names.name(20)) is not None


def test_plain_steps_are_named_to_a_manager_with_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    managed(tmp_path, Standard())
    caplog.clear()
    with ckpt.sync.CheckpointManager(tmp_path, step_names=Standard("ckpt", 8)):
        (said,) = warnings(caplog)
    assert "2 checkpoints, such as '20'" in said
    assert "leave step_names out" in said


def test_a_folder_too_high_names_the_roots_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    managed(tmp_path / "a", Standard())
    managed(tmp_path / "b", Standard())
    (tmp_path / "logs").mkdir()
    caplog.clear()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.latest_step() is None
    (said,) = warnings(caplog)
    assert "'a' with 1, 20; 'b' with 1, 20" in said
    with (
        pytest.raises(StepNotFoundError, match="'a' with 1, 20"),
        ckpt.sync.CheckpointManager(tmp_path, mode="r+"),
    ):
        pass
    with pytest.raises(NotACheckpointError, match="'a' with 1, 20"):
        ckpt.sync.load(tmp_path)


def test_files_of_flax_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 20):
        (tmp_path / f"checkpoint_{step}").write_bytes(flax.serialization.to_bytes(STATE))
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        (said,) = warnings(caplog)
        assert "2 checkpoints, such as 'checkpoint_20'" in said
        assert "pass step_names=ckpt.step_names.Standard('checkpoint')" in said
        start, state = mgr.resume(FRESH, source=tmp_path / "checkpoint_20")
        assert start == 0
        assert state["w"].tolist() == [0, 1, 2, 3]


def test_what_is_not_read_is_named_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "step-100").mkdir()
    (tmp_path / "step-100" / "metadata.json").write_text("{}")
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.resume(FRESH)[0] == 0
    (said,) = warnings(caplog)
    assert "'step-100'" in said
    assert "no checkpoint that is read here" in said


def test_nothing_is_said_of_other_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("logs", "events_1", "profile-2"):
        (tmp_path / name).mkdir()
    with ckpt.sync.CheckpointManager(tmp_path, mode="r+") as mgr:
        assert mgr.resume(FRESH)[0] == 0
        mgr.save(0, STATE)
    ckpt.sync.save(tmp_path / "final", STATE)
    assert warnings(caplog) == []


def test_nothing_is_said_beside_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    managed(tmp_path, Standard())
    ckpt.sync.save(tmp_path / "export_20", STATE)
    caplog.clear()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.resume(FRESH)[0] == 21
    assert warnings(caplog) == []


def test_the_processes_of_a_job_begin_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one_shots(tmp_path, "step_{}")
    caplog.clear()
    mgrs = managers(tmp_path, 2)
    assert [each[0] for each in together(*(lambda m=m: m.resume(FRESH) for m in mgrs))] == [0, 0]
    closed(mgrs)
    assert len(warnings(caplog)) == 1


def test_a_checkpoint_by_itself_is_the_step_that_its_directory_is_named_as(
    tmp_path: Path,
) -> None:
    ckpt.sync.save(tmp_path / "7", STATE, metrics={"loss": 0.5})
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.all_steps() == [7]
        assert mgr.metadata(7).info.step == 7
        assert mgr.verify(7).ok
        assert mgr.best_step("loss", "min") == 7
        assert mgr.resume(FRESH)[0] == 8
        mgr.save(8, STATE, durable=True)
        mgr.delete(7)
        assert mgr.all_steps() == [8]
    (tmp_path / "8").rename(tmp_path / "9")
    # One that has a number has that one.
    with ckpt.sync.CheckpointManager(tmp_path) as mgr, pytest.raises(StepNotFoundError):
        mgr.restore()
