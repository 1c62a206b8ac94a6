"""What a path means as a root, and what is said when one is opened."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import anyio
import jax.numpy as jnp
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from tests.behaviour.opening.damaged_roots import make_root, state, warnings_of


def test_a_relative_root_stays_where_it_was_when_the_program_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with ckpt.sync.CheckpointManager("run") as mgr:
        mgr.save(1, state(1), durable=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
        info = mgr.save(2, state(2)).result()
        assert mgr.all_steps() == [1, 2]
    assert mgr.directory == tmp_path / "run"
    assert info.path == str(tmp_path / "run" / "2")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_relative_root_in_a_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(errors.InvalidArgumentError, match="working directory was deleted"):
        ckpt.sync.CheckpointManager("run")
    with ckpt.sync.CheckpointManager(tmp_path / "run"):
        pass


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    ckpt.sync.save("~/final", state(1))
    assert (tmp_path / "home" / "final" / "ckpt.json").exists()
    ckpt.sync.save("./~", state(1))
    assert sorted(os.listdir(tmp_path)) == ["home", "~"]
    with pytest.raises(errors.InvalidArgumentError, match="no user of that name"):
        ckpt.sync.CheckpointManager("~a-user-that-nobody-has/run")


@pytest.mark.parametrize("use", ["latest_step", "save", "enter", "watch"])
def test_a_step_is_refused_as_a_root(use: str, tmp_path: Path) -> None:
    root = make_root(tmp_path / "run", (1,))
    before = sorted(root.rglob("*"))

    def act() -> None:
        if use == "watch":
            next(ckpt.sync.watch(root / "1", timeout=0))
        mgr = ckpt.sync.CheckpointManager(root / "1")
        if use == "enter":
            with mgr:
                pass
        elif use == "save":
            mgr.save(5, state(5))
        else:
            mgr.latest_step()

    with pytest.raises(errors.InvalidArgumentError, match="is itself a checkpoint"):
        act()
    after = [path for path in sorted(root.rglob("*")) if "metadata" not in path.parts]
    assert after == [path for path in before if "metadata" not in path.parts]


def test_a_step_in_a_store_is_refused_as_a_root() -> None:
    with ckpt.sync.CheckpointManager("memory://roots/run") as mgr:
        mgr.save(1, state(1), durable=True)
    with pytest.raises(errors.InvalidArgumentError, match="is itself a checkpoint"):
        ckpt.sync.CheckpointManager("memory://roots/run/1").latest_step()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format":"ckpt"}', b"\0" * 100])
def test_a_root_may_have_another_file_of_the_name_of_manifests(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "ckpt.json").write_bytes(content)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.latest_step() is None
        mgr.save(1, state(1)).result()
    assert (tmp_path / "ckpt.json").read_bytes() == content


def test_a_reader_of_a_root_that_is_not_there_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        assert mgr.latest_step() is None
        assert mgr.all_steps() == []
        with pytest.raises(errors.StepNotFoundError, match="there is no directory"):
            mgr.restore()
        (warning,) = warnings_of(caplog)
        assert f"there is no directory {root}" in warning
        assert not root.exists()
        # An evaluator may be there before the trainer.
        make_root(root, (4,))
        assert mgr.latest_step() == 4
    with (
        pytest.raises(errors.StorageError, match=r"may not be made here \(mode='r\+'\)"),
        ckpt.sync.CheckpointManager(tmp_path / "no", mode="r+"),
    ):
        pass


def test_opening_a_root_says_what_is_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    root = tmp_path / "run"
    said = []
    for step in (3, 6, 9):
        with ckpt.sync.CheckpointManager(root) as mgr:
            said.append(caplog.records[-1].getMessage())
            mgr.save(step, state(step))
            mgr.wait_until_finished()
            last = caplog.records[-1].getMessage()
            assert last.startswith(f"saved step {step} of {root}: 16 KiB in ")
            assert "(blocked " in last
    assert said == [f"{root}: no steps yet", f"{root}: 1 step: 3", f"{root}: 2 steps, the latest 6"]


def test_a_manager_shows_what_it_knows(tmp_path: Path) -> None:
    root = make_root(tmp_path / "run")

    async def main() -> str:
        async with ckpt.CheckpointManager(root) as mgr:
            await mgr.all_steps()
            return repr(mgr)

    shown = anyio.run(main)
    assert shown == f"<CheckpointManager {str(root)!r}, 3 steps, the latest 3>"
    mgr = ckpt.sync.CheckpointManager(root)
    assert repr(mgr) == f"<CheckpointManager {str(root)!r}>"


def test_steps_and_reports_are_shown_in_one_line(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        info = mgr.save(1, {"w": jnp.ones(1000)}, metrics={"loss": 0.5}).result()
        text = repr(info)
        assert text.startswith("StepInfo(step 1, 3.91 KiB, loss=0.5, 20")
        assert text.endswith(f" UTC, {info.path!r})")
        report = mgr.verify(1)
        assert repr(report) == str(report)
        assert "is whole" in repr(report)
        assert "loss=0.5" in str(mgr.metadata(1))


def test_the_version_is_known_where_the_package_is_only_on_the_path() -> None:
    # Without site packages, nothing is installed.
    ran = subprocess.run(
        [sys.executable, "-S", "-c", "import ckpt; print(ckpt.__version__)"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(ckpt.__file__).parents[1])},
    )
    assert ran.stdout == f"{ckpt.__version__}\n", ran.stderr


def test_a_misspelled_metric_is_an_error_that_names_the_others(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        assert mgr.best_step("loss", "min") is None
        mgr.save(1, state(1), metrics={"nan": float("nan")}, durable=True)
        with pytest.raises(errors.InvalidArgumentError, match="only NaN"):
            mgr.best_step("nan", "min")
        mgr.save(2, state(2), metrics={"loss": 1.0}, durable=True)
        mgr.save(3, state(3), durable=True)
        with pytest.raises(errors.InvalidArgumentError, match=r"'los'.*is it 'loss'\?"):
            mgr.best_step("los", "max")
        with pytest.raises(errors.InvalidArgumentError, match="no number for any"):
            mgr.best_step(lambda metrics: None, "max")
        assert mgr.best_step("loss", "max") == 2
