"""Several processes and threads on one root, or beside each other: one wins, nobody is harmed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

import ckpt
import ckpt.sync
from ckpt.storage._base import FileStamp
from tests.reliability.races import different_steps, same_steps, sweeps
from tests.reliability.readers import latest_beside_a_trainer, steps_beside_a_trainer
from tests.reliability.threads import managers_in_tasks, managers_in_threads, one_manager_in_threads
from tests.support.kills import can_watch

# Programs are started here, which takes its time on a machine that does other things.
pytestmark = pytest.mark.timeout(300)


def test_of_two_processes_that_save_the_same_step_one_wins(tmp_path: Path) -> None:
    same_steps(tmp_path, 12).check(faults=3)


def test_two_processes_that_keep_the_latest_steps_do_not_harm_each_other(tmp_path: Path) -> None:
    different_steps(tmp_path, 20).check(faults=4)


@pytest.mark.skipif(not can_watch(), reason="system calls cannot be watched here")
def test_no_live_attempt_is_swept_and_every_dead_one_is(tmp_path: Path) -> None:
    sweeps(tmp_path, 6).check(faults=4)


def test_a_restore_beside_a_trainer_is_right_or_says_that_the_step_is_gone(tmp_path: Path) -> None:
    steps_beside_a_trainer(tmp_path, 120).check(faults=1)


def test_the_latest_step_can_always_be_restored_beside_a_trainer(tmp_path: Path) -> None:
    latest_beside_a_trainer(tmp_path, 60).check(faults=1)


@pytest.mark.parametrize("call", ["latest_step", "all_steps", "restore"])
def test_a_reader_never_finds_no_step_where_there_always_is_one(tmp_path: Path, call: str) -> None:
    """The only step it has seen in the root is deleted, after the next one was committed."""
    one = ckpt.keep.Latest(1)
    with (
        ckpt.sync.CheckpointManager(tmp_path, keep=one) as trainer,
        ckpt.sync.CheckpointManager(tmp_path, mode="r") as reader,
    ):
        trainer.save(0, {"n": 0}).result()
        storage = reader._service.storage
        read, stamps = storage.read, storage.stamps
        moved_on = False

        def move_on() -> None:
            trainer.save(1, {"n": 1}).result()
            trainer.wait_until_finished()

        async def look_late() -> None:
            nonlocal moved_on
            if not moved_on:
                moved_on = True
                await anyio.to_thread.run_sync(move_on)

        async def read_late(step_dir: str, path: str, limit: int) -> bytes | None:
            await look_late()
            return await read(step_dir, path, limit)

        async def stamps_late(step_dirs: Sequence[str], path: str) -> list[FileStamp | None]:
            await look_late()
            return await stamps(step_dirs, path)

        storage.read = read_late
        storage.stamps = stamps_late
        found = getattr(reader, call)()
    assert moved_on
    assert found == {"latest_step": 1, "all_steps": [1], "restore": {"n": 1}}[call]


@pytest.mark.slow
def test_eight_managers_in_eight_threads_do_not_mind_each_other(tmp_path: Path) -> None:
    managers_in_threads(tmp_path, 10).check(faults=0)


@pytest.mark.slow
def test_eight_managers_in_eight_tasks_do_not_mind_each_other(tmp_path: Path) -> None:
    managers_in_tasks(tmp_path, 10).check(faults=0)


def test_one_manager_serves_eight_threads_at_once(tmp_path: Path) -> None:
    one_manager_in_threads(tmp_path, 5).check(faults=5)
