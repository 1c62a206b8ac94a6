"""Marks of a job are those of all its processes, and of a job of another size."""

from __future__ import annotations

from pathlib import Path

from tests.support.real_jobs import run_processes

PROGRAM = "train_marked_in_job.py"


def test_a_job_is_told_whether_it_repeats_what_a_job_of_another_size_did(tmp_path: Path) -> None:
    run_processes(2, PROGRAM, tmp_path, 8, "train", devices_per_process=2)

    (alone,) = run_processes(1, PROGRAM, tmp_path, 8, "train", devices_per_process=4)
    assert alone.value == [f"{tmp_path}: steps 4 to 7 were repeated exactly"]

    both = run_processes(2, PROGRAM, tmp_path, 8, "train", "forget", devices_per_process=2)
    same, forgetful = zip(*(child.values for child in both), strict=True)
    assert same == ([f"{tmp_path}: steps 4 to 7 were repeated exactly"], []), (
        "process 0 says it for all"
    )
    (said,) = forgetful[0]
    assert "step 4 is not what it was when it was run before: the random key rng differs" in said
    assert forgetful[1] == []
