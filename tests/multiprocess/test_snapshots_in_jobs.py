"""A job goes on from the memory of its hosts, where all of them still have theirs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt.sync
from tests.support.real_jobs import run_processes, started
from tests.support.snapshots import shared_memory

PROGRAM = "snapshot_in_job.py"
DEVICES = {2: 2, 4: 1}


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def killed(count: int, root: Path, memory: Path, *more: str) -> list[Any]:
    """Run a job that is killed after its second snapshot; return what its processes told.

    With `flush`, its agents have written that when this returns.
    """
    told = root, memory, "wait", *more
    with started(count, PROGRAM, *told, devices_per_process=DEVICES[count]) as job:
        for child in job.children:
            child.reached("the end")
        for child in job.children:
            child.kill()
        return [result.value for result in job.results()]


def ended(count: int, root: Path, memory: Path, *more: str) -> list[Any]:
    """Run a job to its end; return what its processes told."""
    devices, told = DEVICES[count], (root, memory, "end", *more)
    results = run_processes(count, PROGRAM, *told, devices_per_process=devices)
    return [result.value for result in results]


@pytest.mark.parametrize("count", [2, 4])
def test_a_job_that_is_started_again_goes_on_from_memory(
    count: int, tmp_path: Path, memory: Path
) -> None:
    root = tmp_path / "run"
    assert {each["start"] for each in killed(count, root, memory)} == {0}
    # The root has step 0, the memories have step 1.
    for each in killed(count, root, memory):
        assert each["start"] == 2
        assert each["right"]
        assert [place.startswith(str(memory)) for place in each["places"]] == [True]
        assert each["steps"] == [0, 2, 3]
    for each in ended(count, root, memory):
        assert (each["start"], each["right"]) == (4, True)
    # Snapshots are not written unless that is asked for; a clean end gives the memory back.
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.all_steps() == [0, 2, 4]
    assert list(memory.iterdir()) == []


def test_a_clean_end_of_a_job_keeps_its_last_snapshot(tmp_path: Path, memory: Path) -> None:
    """The agents of all processes make one step of their parts."""
    root = tmp_path / "run"
    ended(2, root, memory, "flush")
    assert list(memory.iterdir()) == []
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.all_steps() == [0, 1]
    for each in ended(2, root, memory, "flush"):
        assert (each["start"], each["right"]) == (2, True)
        assert each["places"] == [str(root)]


@pytest.mark.parametrize(("more", "start"), [((), 1), (("flush",), 2)])
def test_a_job_that_has_lost_a_memory_goes_on_from_its_root(
    more: tuple[str, ...], start: int, tmp_path: Path, memory: Path
) -> None:
    root = tmp_path / "run"
    killed(2, root, memory, *more)
    [user] = memory.iterdir()
    assert user.name == f"ckpt-{os.getuid()}"
    folders = sorted(user.iterdir())
    assert len(folders) == 2
    shutil.rmtree(folders[1])
    for each in killed(2, root, memory):
        assert (each["start"], each["right"]) == (start, True)
        assert each["places"] == [str(root)]


@pytest.mark.parametrize(("more", "start"), [((), 1), (("flush",), 2)])
def test_a_job_of_another_size_goes_on_from_its_root(
    more: tuple[str, ...], start: int, tmp_path: Path, memory: Path
) -> None:
    root = tmp_path / "run"
    killed(4, root, memory, *more)
    for each in ended(2, root, memory):
        assert (each["start"], each["right"]) == (start, True)


def test_if_one_process_has_no_memory_none_has(tmp_path: Path, memory: Path) -> None:
    """A folder that a process cannot use; the job trains without snapshots, and says so."""
    root = tmp_path / "run"
    killed(2, root, memory)
    [user] = memory.iterdir()
    folder = sorted(user.iterdir())[0]
    shutil.rmtree(folder)
    folder.write_text("in the way")
    devices = DEVICES[2]
    with started(2, PROGRAM, root, memory, "end", devices_per_process=devices) as job:
        results = job.results()
    for result in results:
        assert "without snapshots in memory" in result.errors
        # The program insists on its snapshots.
        assert result.value is None
        assert "AssertionError" in result.errors
