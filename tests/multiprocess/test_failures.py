"""One process of a job is killed, stopped, slow, or meets an error; the others hear of it in time.

tests/reliability/jobs.py does the same at every stage, and says what is promised.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt.sync
from tests.reliability.jobs import at_stages, committed, play

# Real processes are started, which takes its time on a machine that does other things.
pytestmark = pytest.mark.timeout(400)


@pytest.mark.slow
def test_an_error_is_everybodys_and_a_silent_process_is_named(tmp_path: Path) -> None:
    scenarios = at_stages("error", 2)[2:]
    scenarios += ["error:save:before:1", *at_stages("cancel", 2, before=False, late=False)]
    scenarios += [
        "late:save:conclude:1",
        "cancel:save:reported:1",
        "full:save:stage:0",
        "full:save:stage:1",
    ]
    scenarios += ["error:restore:load:1", "error:open:begin:1", "error:delete:remove:0"]
    scenarios += ["error:one:write:1", "error:async_save:write:0", "none:save:x:0#1"]
    scenarios += ["slow:save:write:1", "stop:save:write:1", "none:save:x:0#2"]
    scenarios += ["stop:save:reported:1", "stop:save:manifest:0", "none:save:x:0#3"]
    play(tmp_path / "root", 2, scenarios).check(faults=len(scenarios) - 3)


@pytest.mark.slow
def test_a_call_more_or_fewer_harms_no_other(tmp_path: Path) -> None:
    scenarios = [
        "fewer:save:x:1",
        "none:save:x:0#1",
        "more:save:x:0",
        "none:save:x:0#2",
        "fewer:open:x:0",
        "none:open:x:0",
    ]
    play(tmp_path / "root", 2, scenarios).check(faults=3)


@pytest.mark.slow
def test_jobs_of_other_sizes_go_on_after_a_kill(tmp_path: Path) -> None:
    root = tmp_path / "root"
    play(root, 4, ["kill:save:write:3"]).check(faults=1)
    play(root, 2, ["kill:save:publish:0"]).check(faults=1)
    # Removes what the primary of the last one has left, and checks every step.
    play(root, 1, ["none:save:x:0"]).check(faults=0)
    assert len(committed(root)) == 4
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert set(mgr.all_steps()) == committed(root)
