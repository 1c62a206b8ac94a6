"""Marks of a job are those of all its processes, and of a job of another size."""

from __future__ import annotations

from pathlib import Path

from tests.support.real_jobs import run_processes

PROGRAM = "train_marked_in_job.py"


def test_a_job_is_told_whether_it_repeats_what_a_job_of_another_size_did(tmp_path: Path) -> None:
    run_processes(2, PROGRAM, tmp_path, 8, devices_per_process=2)

    same = run_processes(2, PROGRAM, tmp_path, 8, devices_per_process=2)
    assert [child.value for child in same] == [
        [f"{tmp_path}: steps 4 to 7 were repeated exactly"],
        [],
    ], "process 0 says it for all"

    (alone,) = run_processes(1, PROGRAM, tmp_path, 8, devices_per_process=4)
    assert alone.value == [f"{tmp_path}: steps 4 to 7 were repeated exactly"]

    forgetful = run_processes(2, PROGRAM, tmp_path, 8, "forget", devices_per_process=2)
    (said,) = forgetful[0].value
    assert "step 4 is not what it was when it was run before: the random key rng differs" in said
    assert forgetful[1].value == []
