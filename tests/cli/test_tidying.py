"""`ckpt rm`, `trash` and `pin`: what goes, what comes back and what stays."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt
from tests.support.command import check_golden, ckpt_command, environment, settled


@pytest.fixture
def root(run_root: Path, tmp_path: Path) -> Path:
    """Return a root of one's own with the steps 10, 20 (pinned) and 30."""
    return Path(shutil.copytree(run_root, tmp_path / "runs" / "a"))


def tree(root: Path) -> dict[str, bytes | None]:
    """Return the content of every file below a directory."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def steps(root: Path) -> list[int]:
    return [each["step"] for each in ckpt_command("ls", root, "--json").json["steps"]]


@pytest.mark.parametrize("trash", [(), ("--trash", "bin")], ids=["removed", "trash"])
def test_steps_are_deleted(trash: tuple[str, ...], root: Path) -> None:
    before = tree(root)
    dry = ckpt_command("rm", root / "10", root / "30", "--dry-run", *trash)
    assert tree(root) == before
    ran = ckpt_command("rm", root / "10", root / "30", *trash)
    assert (dry.status, ran.status, dry.err, ran.err) == (0, 0, "", "")
    name = "rm_trash" if trash else "rm"
    check_golden(name, settled(dry.out + ran.out, root=root))
    assert steps(root) == [20]
    assert (root / "bin" / "10").exists() is bool(trash)
    again = ckpt_command("rm", root / "10")
    assert again.status == 2
    assert "has steps 20" in again.err


def test_of_a_pinned_step_and_another_none_is_deleted(root: Path) -> None:
    before = tree(root)
    ran = ckpt_command("rm", root / "10", root / "20")
    assert (ran.status, ran.out) == (2, "")
    assert "pinned by 'paper'" in ran.err
    assert tree(root) == before
    assert ckpt_command("pin", root, "paper", "--remove").status == 0
    assert ckpt_command("rm", root / "10", root / "20", "--json").json["done"]
    assert steps(root) == [30]


def test_a_damaged_step_is_deleted_and_files_of_others_stay(root: Path) -> None:
    (root / "10" / "ckpt.json").write_bytes(b"{}")
    (root / "30" / "plot.png").write_bytes(b"mine")
    ran = ckpt_command("rm", root / "10", root / "30")
    assert ran.status == 0
    assert "were not written by this library" in ran.err
    assert (root / "30.others" / "plot.png").read_bytes() == b"mine"
    assert steps(root) == [20]


def test_what_is_no_step_is_not_deleted(root: Path, items_path: Path) -> None:
    (root / "7").mkdir()
    (root / "link").symlink_to(root / "10")
    (root / "8").symlink_to(root / "10")
    with ckpt.sync.CheckpointManager(root, step_names=ckpt.step_names.Standard("old")) as mgr:
        mgr.save(10, {"w": np.ones(2)})
    before, single = tree(root), tree(items_path)
    for path in (root, root / "7", root / "8", root / "link", items_path, root / "9", root / "x"):
        ran = ckpt_command("rm", path)
        assert (ran.status, ran.out) == (2, ""), path
        assert "\nckpt: " in f"\n{ran.err}"
    assert (tree(root), tree(items_path)) == (before, single)
    # Of two steps of one number it is the one that was named.
    assert ckpt_command("rm", root / "old_10").status == 0
    assert not (root / "old_10").exists()
    assert (root / "10").exists()


def test_a_step_comes_back_from_the_trash(root: Path) -> None:
    before = tree(root / "10")
    assert ckpt_command("trash", root).out == "the trash is empty\n"
    assert ckpt_command("rm", root / "10", "--trash", "trash").status == 0
    check_golden("trash", settled(ckpt_command("trash", root).out, root=root))
    as_json = ckpt_command("trash", root, "--json").out
    check_golden("trash_json", settled(as_json, root=root))
    missing = ckpt_command("trash", root, "--restore", "11")
    assert (missing.status, "holds 10" in missing.err) == (2, True)
    ran = ckpt_command("trash", root, "--restore", "10")
    assert (ran.status, ran.out) == (0, f"restored: {root}/10\n")
    assert tree(root / "10") == before
    assert ckpt_command("trash", root, "--restore", "10").status == 2


def test_old_steps_of_the_trash_are_removed(root: Path) -> None:
    assert ckpt_command("rm", root / "10", root / "30", "--trash", "trash").status == 0
    young = ckpt_command("trash", root, "--empty", "7d", "--json")
    assert [each["goes"] for each in young.json] == [False, False]
    before = tree(root)
    dry = ckpt_command("trash", root, "--empty", "0s", "--dry-run")
    assert dry.out.count("would be removed") == 2
    assert tree(root) == before
    ran = ckpt_command("trash", root, "--empty", "0s", "--json")
    assert all(each["stored_bytes"] > 5000 and each["removed"] for each in ran.json)
    assert list((root / "trash").iterdir()) == []
    assert steps(root) == [20]
    wrong = ckpt_command("trash", root, "--restore", "10", "--empty", "0s")
    assert (wrong.status, wrong.out) == (2, "")


def test_every_step_comes_back_under_its_own_name(tmp_path: Path) -> None:
    names = ckpt.step_names.Standard("ckpt", 8)
    with ckpt.sync.CheckpointManager(tmp_path, step_names=names) as mgr:
        mgr.save(1, {"w": np.ones(2)})
    assert ckpt_command("rm", tmp_path / "ckpt_00000001", "--trash", "trash").status == 0
    ran = ckpt_command("trash", tmp_path, "--restore", "1")
    assert (ran.status, ran.out) == (0, f"restored: {tmp_path}/ckpt_00000001\n")


def test_pins(root: Path) -> None:
    ran = [
        ckpt_command("pin", root, "best"),
        ckpt_command("pin", root / "10", "best", "--json"),
        ckpt_command("pin", root / "20", "paper", "--remove"),
        ckpt_command("pin", root, "best", "--remove", "--json"),
    ]
    assert [(each.status, each.err) for each in ran] == [(0, "")] * 4
    check_golden("pins", settled("".join(each.out for each in ran), root=root))
    assert not (root / ".ckpt-pins").exists()


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("10", ("../x",)),
        ("11", ("x",)),
        ("10", ("paper", "--remove")),
        ("", ("none", "--remove")),
        ("x", ("paper", "--remove")),
    ],
)
def test_pins_that_cannot_be(path: str, arguments: tuple[str, ...], root: Path) -> None:
    before = tree(root)
    ran = ckpt_command("pin", root / path, *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert tree(root) == before


def test_a_single_checkpoint_has_no_pins(items_path: Path) -> None:
    for options in (), ("--remove",):
        ran = ckpt_command("pin", items_path, *options)
        assert ran.status == 2
        assert "single checkpoint" in ran.err


def test_the_pin_of_a_step_that_is_gone_can_be_taken_away(root: Path) -> None:
    shutil.rmtree(root / "20")
    assert ckpt_command("pin", root / "20", "paper", "--remove").status == 0


# As root, permissions would not count. What is imported must be so before: the interpreter may lie
# where others cannot read.
_AS_A_USER = """
import os, sys
from ckpt.cli import commands
from ckpt.cli.app import run

for name in commands.NAMES:
    commands.load(name)
run(["ls", sys.argv[1]])
if os.getuid() == 0:
    os.setuid(65534)
print("begin", flush=True)
sys.exit(run(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "arguments", [("rm", "10"), ("pin", "10"), ("pin", "20", "paper", "--remove")]
)
def test_a_root_that_may_not_be_written(arguments: tuple[str, ...], root: Path) -> None:
    for path in root.parents:
        if path != Path("/tmp") and path.is_relative_to("/tmp"):
            path.chmod(0o755)
    for path in (root, root / ".ckpt-pins"):
        path.chmod(0o555)
    before = tree(root)
    command, step, *rest = arguments
    ran = subprocess.run(
        [sys.executable, "-c", _AS_A_USER, str(root), command, str(root / step), *rest],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout.partition("begin\n")[2]) == (3, ""), ran.stderr
    assert "Permission denied" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert tree(root) == before
