"""Copies whose manifest arrives first, as rsync and tar make them: no step before the last byte."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.storage._local import posix
from tests.support.manifests import document_of, rewrite
from tests.support.trees import assert_same


def state(step: int) -> dict[str, object]:
    return {"w": np.arange(3000.0) + step, "b": np.ones(7, np.int8), "n": step}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A root of two steps, the second with an item that is not a tree."""
    with ckpt.sync.CheckpointManager(tmp_path / "source") as mgr:
        mgr.save(1, state(1)).result()
        mgr.save(2, items={"state": state(2), "config": {"lr": 0.1}}).result()
    return tmp_path / "source"


def copied(source: Path, copy: Path, chance: random.Random) -> Iterator[None]:
    """Copy a step, its manifest first, the rest as chance has it; stop before each half of a file.

    Empty files and directories come at once.
    """
    shutil.copytree(source, copy, copy_function=lambda _, target: Path(target).touch())
    paths = [path for path in source.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(paths) > 8
    chance.shuffle(paths)
    for path in sorted(paths, key=lambda path: path.name != "ckpt.json"):
        data = path.read_bytes()
        for half in (data[: len(data) // 2], data[len(data) // 2 :]):
            yield
            with (copy / path.relative_to(source)).open("ab") as file:
                file.write(half)


@pytest.mark.parametrize("seed", range(5))
def test_a_copied_step_is_seen_when_it_is_whole(source: Path, tmp_path: Path, seed: int) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source / "1", copy / "1")
    with ckpt.sync.CheckpointManager(copy, mode="r") as mgr:
        for _ in copied(source / "2", copy / "2", random.Random(seed)):
            assert mgr.latest_step() == 1
            assert mgr.all_steps() == [1]
            with ckpt.sync.CheckpointManager(copy, mode="r") as other:
                assert_same(other.restore(), state(1))
        assert mgr.all_steps() == [1, 2]
        assert_same(mgr.restore(), {"state": state(2), "config": {"lr": 0.1}})


def half_of_step_2(source: Path) -> Path:
    """Cut the largest file of step 2, as an interrupted copy does."""
    largest = max((source / "2").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    return largest


def test_half_a_step_is_named_once(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut = half_of_step_2(source)
    with ckpt.sync.CheckpointManager(source, mode="r") as mgr:
        for _ in range(3):
            assert mgr.latest_step() == 1
            assert mgr.all_steps() == [1]
    (said,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert said.startswith(f"{source}: step 2 is damaged and is left out: {cut} has 1000 of ")
    assert "a copy of it is not complete" in said


def test_half_a_step_that_is_asked_for_raises(source: Path) -> None:
    half_of_step_2(source)
    with ckpt.sync.CheckpointManager(source, mode="r") as mgr:
        with pytest.raises(ckpt.errors.CorruptCheckpointError, match=r"'w'.* it has 1000 bytes"):
            mgr.restore(2)
        assert not mgr.verify(2).ok
    with pytest.raises(ckpt.errors.CorruptCheckpointError, match="it has 1000 bytes"):
        ckpt.sync.load(source / "2")


def test_half_a_step_is_kept_when_its_number_is_saved(source: Path) -> None:
    cut = half_of_step_2(source)
    with ckpt.sync.CheckpointManager(source) as mgr:
        start, found = mgr.resume(lambda: state(0))
        assert start == 2
        assert_same(found, state(1))
        mgr.save(2, state(7)).result()
        assert_same(mgr.restore(), state(7))
    kept = source / "damaged" / cut.relative_to(source)
    assert kept.stat().st_size == 1000


def test_only_half_steps_are_all_there_is(source: Path) -> None:
    half_of_step_2(source)
    shutil.rmtree(source / "1")
    with ckpt.sync.CheckpointManager(source) as mgr:
        assert mgr.latest_step() is None
        with pytest.raises(ckpt.errors.StepNotFoundError, match=r"step 2 is damaged.* 1000 of"):
            mgr.restore()
        with pytest.raises(ckpt.errors.StepNotFoundError, match="step 2 is damaged"):
            mgr.resume(lambda: state(0))


def test_a_step_that_is_replaced_while_it_is_looked_at_stays(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is of the old attempt, and the files already of the new one."""
    look = posix.cut_file

    with ckpt.sync.CheckpointManager(source) as mgr:

        def replace_first(top: str, sizes: dict[str, int]) -> str | None:
            monkeypatch.setattr(posix, "cut_file", look)
            mgr.save(2, state(5), if_exists="replace").result()
            return look(top, sizes)

        monkeypatch.setattr(posix, "cut_file", replace_first)
        with ckpt.sync.CheckpointManager(source, mode="r") as other:
            assert other.all_steps() == [1, 2]
            assert_same(other.restore(), state(5))


def test_whole_steps_are_looked_at_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    look = posix.cut_file

    def counted(top: str, sizes: dict[str, int]) -> str | None:
        looked.append(Path(top).name)
        return look(top, sizes)

    monkeypatch.setattr(posix, "cut_file", counted)
    with ckpt.sync.CheckpointManager(source) as mgr:
        assert mgr.all_steps() == [1, 2]
        assert set(looked) == {"1", "2"}
        looked.clear()
        for _ in range(3):
            assert mgr.all_steps() == [1, 2]
            assert mgr.latest_step() == 2
        assert looked == []


def test_of_many_files_the_largest_are_looked_at(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt._steps.index._MOST_FILES", 1)
    small, *_, largest = sorted((source / "2").rglob("*"), key=lambda path: path.stat().st_size)
    small.unlink()
    with ckpt.sync.CheckpointManager(source, mode="r") as mgr:
        assert mgr.all_steps() == [1, 2]
    largest.unlink()
    with ckpt.sync.CheckpointManager(source, mode="r") as mgr:
        assert mgr.all_steps() == [1]


@pytest.mark.parametrize(
    "path", ["../1/ckpt.json", "a/../../1/ckpt.json", "a\0b", "x" * 300, "y/" * 3000]
)
def test_paths_of_a_hostile_manifest_hide_no_other_step(source: Path, path: str) -> None:
    """Nor is a file outside the step looked at."""
    changed = document_of(source / "2")
    size = (source / "1" / "ckpt.json").stat().st_size
    changed["files"] = {path: {"size": size, "digest": "0" * 32}}
    rewrite(source / "2", changed)
    with ckpt.sync.CheckpointManager(source, mode="r") as mgr:
        assert mgr.all_steps() == [1]
        assert mgr.latest_step() == 1


def test_a_file_that_may_not_be_looked_at_is_left_to_its_readers(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = os.lstat

    def refuse(path: str) -> os.stat_result:
        if "/2/state" in path:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return look(path)

    monkeypatch.setattr(os, "lstat", refuse)
    with ckpt.sync.CheckpointManager(source, mode="r") as mgr:
        assert mgr.all_steps() == [1, 2]
