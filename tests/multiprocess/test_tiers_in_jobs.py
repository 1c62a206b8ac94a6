"""Jobs of real processes with tiers: what devices hold in parts becomes one step of the root."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.parts_of_states import steps_of
from tests.support.peer_jobs import agent_of, kill_agent
from tests.support.real_jobs import Job, Result, run_processes, started
from tests.support.snapshots import shared_memory, wait_for

PROGRAM = "tiers_in_job.py"
DEVICES = {2: 2, 3: 1}


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def hosts(memory: Path, count: int) -> list[str]:
    folders = [memory / f"host-{number}" for number in range(count)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return [str(folder) for folder in folders]


def ended(root: Path, count: int, **given: Any) -> Sequence[Result]:
    told = json.dumps({"then": "end", **given})
    return run_processes(count, PROGRAM, root, told, devices_per_process=DEVICES[count])


def at_the_end(
    root: Path, count: int, options: Mapping[str, Any] | None = None, **given: Any
) -> Any:
    told = json.dumps({"then": "wait", **given})
    return started(
        count, PROGRAM, root, told, devices_per_process=DEVICES[count], **(options or {})
    )


def starts(results: Sequence[Result]) -> set[tuple[int, bool]]:
    return {(each.value["start"], each.value["right"]) for each in results}


def killed(job: Job) -> None:
    for child in job.children:
        child.reached("the end")
    for child in job.children:
        child.kill()


@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_devices_become_steps_of_the_root(count: int, tmp_path: Path) -> None:
    root, disk = tmp_path / "root", tmp_path / "disk"
    assert starts(ended(root, count, disk=str(disk), saves=2, in_root=True)) == {(0, True)}
    assert steps_of(root) == [0, 1]
    # The job goes on from its disks: no array is in the root any more.
    for path in root.glob("*/default/d/*"):
        path.write_bytes(b"")
    results = ended(root, count, disk=str(disk), saves=1)
    assert starts(results) == {(2, True)}
    own = {each.value["places"][0] for each in results}
    assert own == {str(disk / f"process_{n}-of-{count}") for n in range(count)}
    # What was saved last is in the root when the run has ended.
    shutil.rmtree(root / "0")
    shutil.rmtree(root / "1")
    assert steps_of(root) == [2]


def test_copies_are_in_the_root_once(tmp_path: Path) -> None:
    """Each process writes the whole of a replicated array to its disk."""
    root, disk = tmp_path / "root", tmp_path / "disk"
    ended(root, 3, disk=str(disk), saves=1, in_root=True)

    def nbytes(step: Path) -> int:
        return sum(path.stat().st_size for path in step.glob("default/d/*"))

    parts = sum(nbytes(disk / f"process_{n}-of-3" / "0") for n in range(3))
    once = 3072 * 4 + 64 * 4
    assert parts >= once + 2 * 64 * 4
    # With what aligns chunks and the nodes of the database.
    assert nbytes(root / "0") < once + 4096 + 2 * 64 * 4
    assert steps_of(root) == [0]


def test_the_last_snapshot_of_a_killed_job_is_written(tmp_path: Path, memory: Path) -> None:
    root = tmp_path / "root"
    with at_the_end(root, 3, hosts=hosts(memory, 3), saves=1, snapshots=2) as job:
        killed(job)
        wait_for(root, 2)
    assert steps_of(root) == [0, 2]


def test_a_scheduler_that_tells_all_processes_of_a_job(tmp_path: Path, memory: Path) -> None:
    """The trainers survive it: that of jax only notes it."""
    root = tmp_path / "root"
    with at_the_end(root, 2, hosts=hosts(memory, 2), snapshots=2) as job:
        for child in job.children:
            child.reached("the end")
        for child in job.children:
            child.send(signal.SIGTERM)
            os.kill(agent_of(child), signal.SIGTERM)
        wait_for(root, 1)
        assert all(child.process.poll() is None for child in job.children)
    assert steps_of(root) == [1]


def test_a_process_that_fails_leaves_its_part_to_its_agent(tmp_path: Path, memory: Path) -> None:
    """The others are killed later, as a scheduler does."""
    root = tmp_path / "root"
    given = {"hosts": hosts(memory, 2), "snapshots": 2, "raises": 1}
    # The one that fails waits in vain for the other one.
    with at_the_end(root, 2, {"shutdown_seconds": 5}, **given) as job:
        job[0].reached("the end")
        assert job[1].process.wait(200) != 0
        assert not (root / "1").exists()
        job[0].kill()
        wait_for(root, 1)
    assert steps_of(root) == [1]


def test_a_job_that_is_back_goes_on_from_memory(tmp_path: Path, memory: Path) -> None:
    root = tmp_path / "root"
    folders = hosts(memory, 2)
    with at_the_end(root, 2, hosts=folders, snapshots=2) as job:
        killed(job)
    results = ended(root, 2, hosts=folders, snapshots=1)
    assert starts(results) == {(2, True)}
    assert list(memory.glob("host-*/ckpt-*/*")) == []


def test_agents_that_are_alone_write_nothing(tmp_path: Path, memory: Path) -> None:
    """A machine is lost with its memory and its agent."""
    root = tmp_path / "root"
    folders = hosts(memory, 2)
    with at_the_end(root, 2, hosts=folders, snapshots=1, kept=3.0) as job:
        for child in job.children:
            child.reached("the end")
        kill_agent(job[1])
        shutil.rmtree(folders[1])
        for child in job.children:
            child.kill()
        # It ends when the output of the last agent has been closed.
        left = job[0].result()
    assert "could not be written: the agents of processes 1 of 2 offered no snapshot" in left.errors
    assert steps_of(root) == []
