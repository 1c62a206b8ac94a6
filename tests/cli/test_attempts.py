"""Saves under way and saves of dead processes, as `ckpt ls` shows them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import ckpt.sync
from ckpt._inspection import locations
from ckpt._steps.opened import open_step
from ckpt.step_names import Standard
from tests.cli.savers import saving, without_sizes
from tests.support.command import check_golden, ckpt_command, settled
from tests.support.gated_item import PATIENCE_S, Gate, GateHandler


def test_a_save_that_another_process_is_making_is_listed(run_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    shutil.copytree(run_root, root)
    with saving(root, 40) as child:
        [attempt] = ckpt_command("ls", root, "--json").json["attempts"]
        assert (attempt["step"], attempt["state"]) == (40, "saving")
        assert attempt["owner"].endswith(f"process {child.pid}")
        assert attempt["nbytes"] > 0
        assert 0 <= attempt["age_seconds"] < 60
        shown = ckpt_command("ls", root)
        check_golden("ls_saving", without_sizes(settled(shown.out, root=root)))
        child.kill()
        child.wait(60)
        [attempt] = ckpt_command("ls", root, "--json").json["attempts"]
        assert (attempt["step"], attempt["state"]) == (40, "dead")
        shown = ckpt_command("ls", root)
        check_golden("ls_dead", without_sizes(settled(shown.out, root=root)))


def test_looking_disturbs_no_save(tmp_path: Path) -> None:
    with saving(tmp_path, 1) as child:
        for _ in range(3):
            assert ckpt_command("ls", tmp_path, "--json").json["attempts"]
        child.communicate("go on\n", timeout=60)
        assert child.returncode == 0
    found = ckpt_command("ls", tmp_path, "--json").json
    assert [each["step"] for each in found["steps"]] == [1]
    assert found["attempts"] == []


@pytest.mark.parametrize("names", [Standard(), Standard("step"), Standard("run", 6, "-")], ids=str)
def test_the_first_save_of_a_run_is_listed(tmp_path: Path, names: Standard) -> None:
    gate = Gate()
    with ckpt.sync.CheckpointManager(tmp_path, handlers=[GateHandler()], step_names=names) as mgr:
        commit = mgr.save(3, items={"state": {"w": np.ones(9)}, "gate": gate})
        assert gate.reached.wait(PATIENCE_S)
        listed = ckpt_command("ls", tmp_path, "--json")
        gate.open()
        commit.result()
    [attempt] = listed.json["attempts"]
    assert (attempt["step"], attempt["state"]) == (3, "saving")


def test_a_save_that_begins_while_its_root_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    (tmp_path / "notes.txt").write_text("not empty")
    with ckpt.sync.CheckpointManager(tmp_path, handlers=[GateHandler()]) as mgr:

        async def begun(*args: Any) -> Any:
            commits.append(mgr.save(3, items={"state": {"w": np.ones(9)}, "gate": gate}))
            assert gate.reached.wait(PATIENCE_S)
            return await open_step(*args)

        commits: list[Any] = []
        monkeypatch.setattr("ckpt._inspection.locations.open_step", begun)
        found = anyio.run(locations.locate, str(tmp_path))
        gate.open()
        commits[0].result()
    assert isinstance(found, locations.RunRoot)
