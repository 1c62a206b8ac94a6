"""The drill, with real programs and kills."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import ckpt
import ckpt.sync
from ckpt._proof.drill import drill
from ckpt.errors import CheckpointError, InvalidArgumentError
from ckpt.testing.drill import resume_drill
from tests.support.command import ckpt_command
from tests.support.conditions import until
from tests.support.paths import PROGRAMS

__all__ = ["resume_drill"]
PROGRAM = PROGRAMS / "train_for_drill.py"
SEED = 3


def program(tmp_path: Path, fault: str = "", *more: str) -> list[str]:
    return [sys.executable, str(PROGRAM), str(tmp_path / "own"), fault, *more]


def left_behind(folder: Path) -> list[str]:
    """Return the commands of processes that were started with a folder in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            is_ours = f"CKPT_DRILL_ROOT={folder}".encode() in environ.read_bytes()
            if (
                is_ours
                and environ.with_name("stat").read_text().rpartition(")")[2].split()[0] != "Z"
            ):
                found.append(environ.with_name("cmdline").read_text())
    return found


def test_a_program_that_resumes_repeats_its_steps_and_its_root_stays_as_it_was(
    tmp_path: Path,
) -> None:
    (tmp_path / "own").mkdir()
    scratch = tmp_path / "scratch"
    found = drill(program(tmp_path, "", "tier"), steps=10, devices=[2], seed=SEED, scratch=scratch)
    assert found.ok, found
    ((last, first),) = found.kills
    assert first <= last + 1
    assert found.steps == (first, 10)
    assert str(found).endswith(f"steps {first} to 10 were repeated exactly")
    assert sorted(os.listdir(tmp_path)) == ["own", "scratch"]
    assert os.listdir(tmp_path / "own") == []
    assert "devices: 2" in (scratch / "killed-1.log").read_text()
    until(lambda: not left_behind(scratch), 20)


def test_a_program_that_resumes_wrongly_is_told_step_and_leaf(tmp_path: Path) -> None:
    call = [
        "drill",
        "--steps",
        "10",
        "--seed",
        str(SEED),
        "--json",
        "--",
        *program(tmp_path, "stale"),
    ]
    ran = ckpt_command(*call)
    assert ran.status == 1, ran.err
    found = ran.json
    assert found["leaves"] == ["m"]
    assert found["step"] == found["kills"][0][1]
    assert (
        "only some leaves in m differ: they were not restored, or are stale" in found["difference"]
    )
    assert "ckpt: killed it after step" in ran.err


def test_a_program_that_begins_again_is_found(tmp_path: Path, resume_drill: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match="began again at step 0: it does not resume"):
        resume_drill(program(tmp_path, "does not resume", "tier"), steps=10, seed=SEED)
    # Its agent cannot copy a step whose number is taken, and would wait for ever.
    until(lambda: not left_behind(tmp_path), 20)


def test_without_a_seed_nothing_is_known(tmp_path: Path) -> None:
    found = drill(program(tmp_path, "without seed"), steps=10, seed=SEED)
    assert not found.ok
    assert not found.is_repeatable
    assert "two runs from the beginning differ already" in str(found)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no mark", "has made no mark .call mgr.mark"),
        ("fails", "ended with status 1. Its last output:\nno GPU was found"),
        ("saves nothing", "saved nothing before step 9: save more often"),
        ("dies", "ended with status -9"),
        ("two managers", "several managers of the program make marks"),
    ],
)
def test_a_program_that_cannot_be_drilled_is_told_why(
    tmp_path: Path, fault: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        drill(program(tmp_path, fault), steps=10)


def test_bad_arguments() -> None:
    for given in ({"steps": 1}, {"kills": 0}, {"devices": [0]}):
        with pytest.raises(InvalidArgumentError, match=next(iter(given))):
            drill(["true"], **given)
    with pytest.raises(InvalidArgumentError, match="kills=3: expected 2, one for each number"):
        drill(["true"], kills=3, devices=[1, 2])
    with pytest.raises(InvalidArgumentError, match="no-such-program"):
        drill(["no-such-program"])
    with pytest.raises(InvalidArgumentError, match="command"):
        drill([])
    # What an earlier drill has left there would be taken for this one's.
    with pytest.raises(InvalidArgumentError, match="scratch"):
        drill(["true"], scratch=Path(__file__).parent)


def test_a_scratch_folder_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = ["sh", "-c", 'cd / && exec "$0" "$@"', *program(tmp_path)]
    assert drill(elsewhere, steps=10, seed=SEED, scratch=Path("scratch")).ok
    assert sorted(os.listdir(tmp_path)) == ["scratch"]


def test_options_of_the_command() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    for options, told in (
        (["--kills", "0"], "kills=0: expected a whole number, 1 or more"),
        (["--devices", "0"], "devices=0: expected a whole number, 1 or more"),
        (["--timeout", "1s"], "has made no mark"),
        (["--step", "3"], "--step"),
    ):
        ran = ckpt_command("drill", *options, "--", *sleep)
        assert ran.status == 2
        assert told in ran.err


def test_all_places_of_a_program_are_scratch_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, own = tmp_path / "scratch", tmp_path / "own"
    ckpt.sync.save(own / "10", {"w": 10})
    monkeypatch.setenv("CKPT_DRILL_ROOT", str(scratch))
    # What the program has not written in the drill, it finds where it is.
    assert ckpt.sync.load(own / "10") == {"w": 10}
    with ckpt.sync.CheckpointManager(own, mode="r+", trash="/elsewhere/trash", keep=1) as mgr:
        assert mgr.latest_step() is None
        mgr.save(10, {"w": 11}).result()
        mgr.save(20, {"w": 20}).result()
    for value in (1, 2):
        # A program that looks for the first one itself does not see it.
        assert not own.with_name("once").exists()
        ckpt.sync.save(own.with_name("once"), {"w": value})
    ckpt.sync.save("s3://bucket/run", {"w": 2})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["own", "scratch"]
    assert [each.name for each in own.iterdir()] == ["10"]
    # From then on, what it has written.
    with ckpt.sync.CheckpointManager(own, mode="r") as mgr:
        assert mgr.all_steps() == [20]
        assert ckpt.sync.load(f"{mgr.directory}/20") == ckpt.sync.load(own / "20") == {"w": 20}
    for store in ("s3://bucket/run", ckpt.storage.S3("s3://bucket/run")):
        assert ckpt.sync.load(store) == {"w": 2}
    monkeypatch.delenv("CKPT_DRILL_ROOT")
    assert ckpt.sync.load(own / "10") == {"w": 10}
