"""Jobs of several processes save one step together, and restore it, also with another count."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckpt
import ckpt.sync
from tests.support.real_jobs import run_processes

FIGURES = {1: 4, 2: 2, 4: 1}


def run(count: int, *args: object, **options: object) -> list[dict[str, object]]:
    children = run_processes(
        count, "save_in_job.py", *args, devices_per_process=FIGURES[count], **options
    )
    return [child.value for child in children]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_what_a_job_has_saved_is_what_a_job_of_any_size_restores(
    count: int, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    for told in run(count, "roundtrip", root):
        assert told["steps"] == [2, 3]
        assert told["problems"] == []
    manifest = json.loads((root / "3" / "ckpt.json").read_text())
    assert manifest["process_count"] == count
    others = [each for each in FIGURES if each != count]
    for other in others:
        for told in run(other, "restored", root, 3):
            assert told == {"problems": [], "ok": True, "damage": []}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_each_process_shares_the_files_of_what_did_not_change(count: int, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for told in run(count, "shared", root):
        assert told == {"problems": []}
    for step in (1, 2, 3):
        files = json.loads((root / str(step) / "ckpt.json").read_text())["files"]
        data = [each for path, each in files.items() if "/d/" in path]
        shared = sum(each["size"] for each in data if each.get("shared"))
        written = sum(each["size"] for each in data if not each.get("shared"))
        assert (shared > 10 << 20, written < 1 << 20) == (step > 1, step > 1)
    shutil.rmtree(root / "1")
    for step in (2, 3):
        assert ckpt.sync.verify(root / str(step)).ok


# What processes do not do alike, and what each of them hears.
UNLIKE = {
    "step": "which came to the save of step [12] last",
    "structure": "different trees",
    "shape": "different trees",
    "value": "leaf .count. has one value for all processes",
    "items": "same items",
    "root": "last\\) never came to it",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """Where a job has tried all of that, and what each of its processes told, one by one."""
    root = tmp_path_factory.mktemp("refused")
    children = run_processes(
        2, "save_in_job.py", "refused", root, *UNLIKE, devices_per_process=FIGURES[2]
    )
    return root, [child.values for child in children]


@pytest.mark.parametrize("kind", UNLIKE)
def test_processes_that_do_not_agree_all_hear_of_it(
    kind: str, refused: tuple[Path, list[list[Any]]]
) -> None:
    root, told = refused
    for values in told:
        assert re.search(UNLIKE[kind], values[[*UNLIKE].index(kind)]["text"])
    assert not list((root / kind).rglob("ckpt.json"))


@pytest.mark.slow
def test_processes_with_disks_of_their_own_restore_what_all_of_them_have(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for told in run(2, "apart", root, "save", 3):
        assert told == {"problems": [], "steps": [2, 3], "ok": [True, True]}
    # Either has all that is replicated, and one half of what is not.
    for disk in root.iterdir():
        manifest = json.loads((disk / "3" / "ckpt.json").read_text())
        size = sum(file["size"] for file in manifest["files"].values())
        assert 0.5 < size / manifest["items"]["default"]["nbytes"] < 0.8
    # A process that was killed between two publications, or whose disk lost a step.
    shutil.rmtree(root / "disk 1" / "3")
    for told in run(2, "apart", root, "look", 2):
        assert told == {"problems": [], "steps": [2], "ok": [True]}
    # What other devices need may be on a disk that this process does not see.
    for told in run(4, "apart", root, "look", 2):
        assert "have in common: none" in str(told["error"])


def test_a_part_of_a_step_on_its_own_disk_does_not_pass_for_the_whole(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run(2, "apart", root, "save", 3)
    part = root / "disk 0" / "3"
    with pytest.raises(ckpt.errors.TargetMismatchError, match="on the disk of another process"):
        ckpt.sync.load(part)
    assert not (part / "commit_success.txt").exists()
    assert ckpt.sync.verify(part).ok
