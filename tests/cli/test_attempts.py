"""Saves under way and saves of dead processes, as `ckpt ls` shows them."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cli.savers import saving, without_sizes
from tests.support.command import check_golden, ckpt_command, settled


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
