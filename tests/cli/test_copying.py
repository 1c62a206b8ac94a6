"""`ckpt cp`: copies that are whole or not there, and that go on where they ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt
from tests.cli.test_verifying import data_file, flip
from tests.support.command import (
    check_golden,
    ckpt_command,
    environment,
    on_terminal,
    settled,
    without_styles,
)

SLOW = "tests.support.slow_command"


@pytest.fixture
def root(run_root: Path, tmp_path: Path) -> Path:
    """A copy of the root, to be changed."""
    return Path(shutil.copytree(run_root, tmp_path / "runs"))


def files_of(root: Path) -> dict[str, bytes]:
    """The files of the steps of a root."""
    found = (path for path in root.rglob("*") if path.is_file() and ".ckpt-pins" not in path.parts)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def begin(*arguments: object, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", SLOW, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(extra),
    )


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_output(as_json: bool, run_root: Path, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    for name in ("first", "again"):
        ran = ckpt_command("cp", run_root, target, *["--json"] * as_json)
        assert (ran.status, ran.err) == (0, "")
        text = settled(ran.out, root=run_root, target=target)
        check_golden(f"cp_{name}{'_json' * as_json}", text)
    assert files_of(target) == files_of(run_root)
    with ckpt.sync.CheckpointManager(target, mode="r") as mgr:
        assert [each.name for each in mgr.pins()[20]] == ["paper"]
        assert mgr.metrics(20) == {"loss": 0.05}
        assert all(mgr.verify(step).ok for step in (10, 20, 30))


def test_where_a_step_goes(run_root: Path, tmp_path: Path) -> None:
    assert ckpt_command("cp", run_root / "10", tmp_path / "final").status == 0
    assert ckpt_command("cp", run_root / "10", f"{tmp_path}/b/").status == 0
    assert ckpt_command("cp", run_root / "20", tmp_path / "b").status == 0
    (tmp_path / "c").mkdir()
    assert ckpt_command("cp", run_root / "20", tmp_path / "c").status == 0
    for path, step in (("final", "10"), ("b/10", "10"), ("b/20", "20"), ("c/20", "20")):
        assert files_of(tmp_path / path) == files_of(run_root / step)
    assert ckpt_command("ls", tmp_path / "b", "--json").json["steps"][1]["step"] == 20


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (".", ".", "cannot be copied to itself"),
        ("10", "10", "cannot be copied to itself"),
        (".", "10", "is a checkpoint, and"),
        ("10", "99", "cannot have the name of step 99"),
        ("nothing", "x", "there is no directory"),
    ],
)
def test_places_that_make_no_sense(source: str, target: str, words: str, run_root: Path) -> None:
    before = files_of(run_root)
    ran = ckpt_command("cp", run_root / source, run_root / target)
    assert (ran.status, ran.out) == (2, "")
    assert words in ran.err
    assert len(ran.err.splitlines()) == 1
    assert files_of(run_root) == before


def test_other_steps_are_not_replaced_unless_that_is_meant(root: Path, tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "b") as mgr:
        mgr.save(20, {"other": jnp.zeros(3)})
    ran = ckpt_command("cp", root, tmp_path / "b")
    assert (ran.status, ran.out) == (2, "")
    assert "has other steps 20 already; nothing was copied" in ran.err
    assert not (tmp_path / "b" / "10").exists()
    assert ckpt_command("cp", root / "20", tmp_path / "b" / "20").status == 2
    assert ckpt_command("cp", root, tmp_path / "b", "--overwrite").status == 0
    assert ckpt_command("verify", tmp_path / "b").status == 0
    assert (tmp_path / "b/20/ckpt.json").read_bytes() == (root / "20/ckpt.json").read_bytes()


def test_what_is_missing_in_a_copy_is_copied_again(run_root: Path, tmp_path: Path) -> None:
    target = tmp_path / "b"
    assert ckpt_command("cp", run_root, target).status == 0
    (target / "20" / "default" / "_METADATA").unlink()
    shutil.rmtree(target / "10")
    ran = ckpt_command("cp", run_root, target, "--json")
    assert [step["outcome"] for step in ran.json["steps"]] == ["copied", "copied", "there"]
    assert files_of(target) == files_of(run_root)


def test_a_damaged_step_is_named_and_not_copied(root: Path, tmp_path: Path) -> None:
    flip(*data_file(root / "20"))
    (root / "30" / "default" / "_METADATA").unlink()
    (root / "10" / "notes.txt").write_text("mine")
    ran = ckpt_command("cp", root, tmp_path / "b")
    assert ran.status == 1
    assert "files that are not of the steps are not copied, such as notes.txt" in ran.err
    assert "was changed after it was saved" in ran.out
    assert f"{tmp_path}/b: 1 step copied, 6.2 KiB, 2 not copied" in ran.out
    assert sorted(each.name for each in (tmp_path / "b").iterdir()) == ["10"]
    ran = ckpt_command("cp", root / "20", tmp_path / "c")
    assert (ran.status, ran.out) == (1, "")
    assert "was changed after it was saved" in ran.err
    assert not (tmp_path / "c").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_target_that_is_read_only(run_root: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    ran = ckpt_command("cp", run_root, tmp_path / "b")
    tmp_path.chmod(0o700)
    assert (ran.status, ran.out) == (3, "")


def test_a_target_below_a_file(run_root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    ran = ckpt_command("cp", run_root, tmp_path / "file" / "b")
    assert ran.status in (2, 3)
    assert len(ran.err.splitlines()) == 1


def test_a_store_that_cannot_be_reached(run_root: Path) -> None:
    began = time.monotonic()
    ran = ckpt_command(
        "cp",
        run_root,
        "s3://bucket/run",
        AWS_ENDPOINT_URL="http://127.0.0.1:9",
        AWS_ACCESS_KEY_ID="a",
        AWS_SECRET_ACCESS_KEY="b",
        AWS_REGION="us-east-1",
    )
    assert ran.status == 3
    assert len(ran.err.splitlines()) == 1
    assert time.monotonic() - began < 60


def test_a_virtual_step_stays_one_unless_all_of_it_is_wanted(tmp_path: Path) -> None:
    save_file({"a": np.arange(1000.0, dtype="f4")}, tmp_path / "m.safetensors")
    ckpt.sync.adopt(tmp_path / "m.safetensors", tmp_path / "a", step=0)
    ran = ckpt_command("cp", tmp_path / "a", tmp_path / "b")
    assert ran.status == 0
    assert "virtual: its arrays stay where they are" in ran.out
    assert ckpt_command("cp", tmp_path / "a", tmp_path / "c", "--whole").status == 0
    (tmp_path / "m.safetensors").unlink()
    assert np.array_equal(ckpt.sync.load(tmp_path / "c" / "0")["a"], np.arange(1000.0))
    assert ckpt_command("verify", tmp_path / "b").status == 1


def test_large_files_are_copied_in_parts(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (60 << 20) + 12345, np.uint8)
    formats = {"w": ckpt.ArrayFormat(chunk_bytes=64 << 20)}
    ckpt.sync.save(tmp_path / "a", {"w": data}, formats=formats)
    sizes = [path.stat().st_size for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert max(sizes) > 32 << 20
    assert ckpt_command("cp", tmp_path / "a", tmp_path / "b").status == 0
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_a_kill_leaves_whole_steps_and_the_next_copy_ends_it(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "b"

    def cut_at(read: int) -> bool:
        cut = {"HANG_AT_READ": str(read), "SLOW_SAYS": "here", "SLOW_READ_SECONDS": "0"}
        process = begin("cp", root, target, **cut)
        assert process.stderr is not None
        reached = process.stderr.readline() == "here\n"
        process.kill()
        process.communicate()
        return reached

    # Not at every read: that takes long.
    read, seen = 1, set()
    while cut_at(read):
        there = [each for each in (10, 20, 30) if (target / str(each)).exists()]
        for step in there:
            assert ckpt.sync.verify(target / str(step)).ok
        seen.add(len(there))
        shutil.rmtree(target, ignore_errors=True)
        read += 4
    # It was cut off in each of the steps.
    assert seen == {0, 1, 2}
    shutil.rmtree(target)
    assert cut_at(read // 2)
    assert ckpt_command("cp", root, target).status == 0
    assert files_of(target) == files_of(root)
    assert not [each for each in target.iterdir() if "tmp" in each.name]


def test_an_interrupt_leaves_nothing_half_done(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "b"
    process = begin("cp", root, target, SLOW_READ_SECONDS="0.3")
    assert process.stdout is not None
    assert "10: copied" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "ckpt: interrupted\n")
    left = sorted(each.name for each in target.iterdir())
    assert left == ["10"]
    assert not list((root / ".ckpt-pins").glob("*lease*"))


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_progress_on_a_terminal(columns: int, run_root: Path, tmp_path: Path) -> None:
    status, shown = on_terminal("cp", run_root, tmp_path / "b", columns=columns, program=SLOW)
    assert status == 0
    frames = [each for each in re.split(r"\r|\n", without_styles(shown)) if "left" in each]
    assert frames
    assert max(map(len, frames)) < columns


def test_new_steps_of_a_live_run_are_followed(tmp_path: Path) -> None:
    process = begin("cp", tmp_path / "a", tmp_path / "b", "--follow", "--until", 3)
    with ckpt.sync.CheckpointManager(tmp_path / "a", custom_metadata={"model": "tiny"}) as mgr:
        for step in range(4):
            mgr.save(step, {"w": jnp.full(100, step)})
            time.sleep(0.5)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.count(": copied, ") == 4
    with ckpt.sync.CheckpointManager(tmp_path / "b", mode="r") as mgr:
        assert mgr.all_steps() == [0, 1, 2, 3]
        assert mgr.root_metadata() == {"model": "tiny"}


def test_an_interrupt_ends_a_copy_that_follows(root: Path, tmp_path: Path) -> None:
    process = begin("cp", root, tmp_path / "b", "--follow", SLOW_READ_SECONDS="0")
    assert process.stdout is not None
    for step in (10, 20, 30):
        assert f"{step}: copied" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "ckpt: interrupted\n")


def test_the_names_of_a_run_are_learned_once_it_begins(tmp_path: Path) -> None:
    process = begin("cp", tmp_path / "a", tmp_path / "b", "--follow", "--until", 2)
    names = ckpt.step_names.Standard("ckpt", 6)
    with ckpt.sync.CheckpointManager(tmp_path / "a", step_names=names) as mgr:
        for step in range(3):
            mgr.save(step, {"w": jnp.full(100, step)}, durable=True)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.count(": copied, ") == 3
    found = sorted(each.name for each in (tmp_path / "b").glob("ckpt_*"))
    assert found == ["ckpt_000000", "ckpt_000001", "ckpt_000002"]


def test_a_damaged_step_does_not_end_a_copy_that_follows(root: Path, tmp_path: Path) -> None:
    flip(root / "10" / "ckpt.json", 900)
    flip(*data_file(root / "20"))
    ran = ckpt_command("cp", root, tmp_path / "b", "--follow", "--until", 30)
    assert ran.status == 1
    assert "10: not copied: " in ran.out
    assert "20: not copied: " in ran.out
    assert "30: copied, " in ran.out
