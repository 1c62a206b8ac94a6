"""A job of several processes saves and restores by Orbax's names."""

from __future__ import annotations

from pathlib import Path

import orbax.checkpoint as ocp

import ckpt.sync
from tests.support.real_jobs import run_processes


def test_all_processes_save_the_same_steps(tmp_path: Path) -> None:
    root = tmp_path / "run"
    program = "orbax_names_in_job.py"
    results = run_processes(2, program, root, "0.4", devices_per_process=2)
    first, second = (result.value for result in results)
    # The clocks of the processes differ, and the first one has decided.
    assert first == second
    assert first["saved"] == [True, False, True, False, True, False]
    assert (first["listed"], first["right"], first["again"]) == ([2, 4], True, True)
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        assert mgr.all_steps() == [2, 4]
        assert mgr.verify(4).ok
    with ocp.CheckpointManager(root) as orbax:
        assert sorted(orbax.all_steps()) == [2, 4]
