"""A disk that is full, or has a quota: the run hears of it in its next save."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import StorageError
from tests.support.command import environment
from tests.support.conditions import until
from tests.support.forked_programs import run
from tests.support.paths import PROGRAMS
from tests.support.power import small_memory_disk
from tests.support.real_jobs import run_processes

MIB = 1 << 20
SMALL = {"w": np.arange(8.0)}
# Each run makes so many steps of 2 MiB on a disk of 9 MiB.
STEPS = 12


def state(step: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(step).random(1 << 18)}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 9 MiB."""
    if os.geteuid():
        pytest.skip("only root can mount a file system")
    with small_memory_disk(tmp_path, size_bytes=9 * MIB) as root:
        yield root


def whole_steps(root: Path) -> list[int]:
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        steps = mgr.all_steps()
        assert all(mgr.verify(step).ok for step in steps)
        return steps


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]


def test_a_plain_loop_stops_when_the_disk_is_full(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = disk / "run"
    with ckpt.sync.CheckpointManager(root) as mgr:
        steps = iter(range(STEPS))
        with pytest.raises(StorageError, match="No space left") as caught:  # noqa: PT012
            for step in steps:
                commit = mgr.save(step, state(step))
                # Otherwise the next one might find no room for its own first file.
                until(commit.done)
        lost, now = caught.value.step, next(steps) - 1
        assert caught.value.errno == errno.ENOSPC
        assert lost == now - 1
        assert f"step {now} was begun" in str(caught.value)
        # Somebody makes room.
        mgr.delete(0)
        mgr.save(now, state(now)).result(60)
    assert told(caplog)[0].startswith(f"step {lost} of {root} was NOT saved: ")
    assert "No space left" in told(caplog)[0]
    assert f"the newest durable step is {lost - 1}" in told(caplog)[0]
    assert whole_steps(root) == [*range(1, lost), now]


def test_so_does_a_loop_of_asyncio(disk: Path) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(disk / "run") as mgr:
            for step in range(STEPS):
                await mgr.save(step, state(step))

    with pytest.raises(StorageError, match="No space left"):
        asyncio.run(main())
    steps = whole_steps(disk / "run")
    assert steps == [*range(len(steps))]
    assert 0 < len(steps) < STEPS


def test_a_step_in_parts_says_that_the_disk_is_full(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckpt.sync.CheckpointManager(disk / "run") as mgr:
        with pytest.raises(StorageError, match="No space left"), mgr.partial(5) as part:  # noqa: PT012
            for number in range(STEPS):
                part.save({f"part {number}": state(number)})
        assert told(caplog)[0].startswith(f"step 5 of {disk}/run was NOT saved: ")
        # The block has raised it.
        mgr.save(6, SMALL).result(60)
    assert whole_steps(disk / "run") == [6]


def test_so_do_saves_without_a_manager(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    large = {str(step): state(step) for step in range(STEPS)}
    with pytest.raises(StorageError, match="No space left"):
        ckpt.sync.save(disk / "one", large)
    assert not told(caplog)
    commit = ckpt.sync.save(disk / "two", large, durable=False)
    with pytest.raises(StorageError, match="No space left"):
        commit.result(60)
    assert told(caplog)[0].startswith(f"{disk}/two was NOT saved: ")
    assert os.listdir(disk) == []


def trained(root: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run(PROGRAMS / "train_on_small_disk.py", root, *arguments, env=environment({}))


def test_a_program_without_logging_hears_of_a_quota(tmp_path: Path) -> None:
    done = trained(tmp_path / "run", 5, MIB)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[:3] == ["0: called", "1: called", "2: called"]
    assert lines[3].startswith("3: StorageError: step 2, ")
    assert "File too large" in lines[3]
    assert len(lines) == 4
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"step 2 of {tmp_path}/run was NOT saved: ")
    assert line.endswith("; the newest durable step is 1")
    assert whole_steps(tmp_path / "run") == [0, 1]


def test_a_program_that_ends_then_says_so_and_has_failed(tmp_path: Path) -> None:
    done = trained(tmp_path / "run", 5, MIB, "end")
    assert done.returncode == 120
    first, last = done.stderr.splitlines()
    assert first.startswith(f"step 2 of {tmp_path}/run was NOT saved: ")
    assert last.startswith(f"ckpt: a save to {tmp_path}/run failed, and was never awaited: step 2")


@pytest.mark.slow
def test_all_processes_of_a_job_stop_in_the_same_call(disk: Path) -> None:
    first, second = (
        child.value
        for child in run_processes(2, "fill_disk_in_job.py", disk / "run", devices_per_process=2)
    )
    assert [each["step"] for each in first] == [each["step"] for each in second]
    for last in (first[-1], second[-1]):
        assert last["kind"] == "StorageError"
        assert "No space left" in last["error"]
        assert "the same call again saves it" in last["error"]
    assert not any("error" in each for each in (*first[:-1], *second[:-1]))
    steps = whole_steps(disk / "run")
    assert steps == [*range(len(steps))]
    assert 0 < len(steps) < len(first)
