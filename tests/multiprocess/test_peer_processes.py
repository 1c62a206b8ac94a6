"""Operations of real processes: killed, stopped, slow, or meeting an error at every stage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.real_jobs import Job, started

LIMIT = 3.0
# A process that is waited for is missed within the limit and 2 seconds, on a machine at leisure.
GRACE = 4.0

Record = dict[str, Any]


def record(job: Job, index: int, scenario: str) -> Record:
    """Wait for what one process says of one scenario."""

    def found(lines: list[str]) -> bool:
        return any(f'"{scenario}"' in line for line in lines)

    job[index].wait_for(found, f"nothing of {scenario}", job.left)
    return next(each for each in job[index].values if each["scenario"] == scenario)


def come_to(job: Job, line: str, indices: list[int]) -> None:
    for index in indices:
        job[index].wait_for(lambda lines: line in lines, f"no {line}", job.left)


def check_error(job: Job, stage: str, failed: int) -> None:
    """All raise what one of them met, and do so long before the limit."""
    for index in range(len(job)):
        said = record(job, index, f"fail:{stage}:{failed}")
        assert said["seconds"] < LIMIT
        assert said["waits"] == 0
        assert (said["error"], said["errno"], said["leaf"]) == ("StorageError", 28, "a.b")
        prefix = "" if index == failed else f"process {failed} of {len(job)} (host "
        assert f"step 7, item 'state', leaf 'a.b': {prefix}" in said["message"]
        assert said["message"].endswith(f"no space at {stage}")


def check_missing(said: Record, missing: list[int], stage: str, *words: str) -> None:
    assert said["error"] == "CoordinationTimeoutError"
    assert said["missing"] == missing
    assert said["seconds"] < LIMIT + GRACE
    for index in missing:
        assert f"process {index} of " in said["message"]
    for word in ("the save of step", f"stage '{stage}'", "Timeouts(coordination=...)", *words):
        assert word in said["message"]


def check_done(said: Record, processes: int) -> None:
    parts = ",".join(f"part {index}" for index in range(processes))
    assert said.get("outcome") == f"begin {parts}"


@pytest.mark.slow
def test_two_processes() -> None:
    early = [(stage, index) for stage in ("lead", "report") for index in (0, 1)]
    late = [("decide", 0), ("conclude", 0)]
    failures = [f"fail:{stage}:{index}" for stage, index in early + late]
    plain, slow, count = "none:x:0", "late:report:1", "count:any:1"
    stop, idle, gone = "stop:lead:1", "idle:conclude:0", "stop:report:0"
    scenarios = [*failures, plain, slow, count, stop, idle, gone]
    with started(2, "run_operations.py", LIMIT, *scenarios) as job:
        for stage, index in early + late:
            check_error(job, stage, index)
        for index in range(2):
            check_done(record(job, index, plain), 2)
            said = record(job, index, slow)
            check_done(said, 2)
            assert said["seconds"] > LIMIT
            said = record(job, index, count)
            assert said["error"] == "CoordinationError"
            assert (
                "process 1 takes part as one of 3, and the primary as one of 2" in said["message"]
            )
        # Stopped before it begins; all that is known of it is from before.
        job[1].reached(stop)
        come_to(job, f"begun {stop}", [0])
        job[1].stop()
        check_missing(record(job, 0, stop), [1], "write", "never came to it", "host ", "pid ")
        job[1].resume()
        job[1].go_on()
        assert record(job, 1, stop)["missing"] == [1]
        # The primary lives and does nothing after it has decided: nobody waits for ever.
        check_missing(record(job, 1, idle), [0], "publish", "gone silent", "host ")
        check_done(record(job, 0, idle), 2)
        # A stopped primary stops the service, too.
        job[0].reached(gone)
        come_to(job, f"reported {gone}", [1])
        job[0].stop()
        check_missing(record(job, 1, gone), [0], "publish", "process 0 of 2")


def test_four_processes() -> None:
    early = [(stage, index) for stage in ("lead", "report") for index in (0, 3)]
    failures = [f"fail:{stage}:{index}" for stage, index in early]
    stop, late, kill, end = "stop:report:3", "kill:conclude:1", "kill:report:2", "kill:report:0"
    scenarios = [*failures, stop, late, kill, end]
    with started(4, "run_operations.py", LIMIT, *scenarios) as job:
        for stage, index in early:
            check_error(job, stage, index)
        job[3].reached(stop)
        come_to(job, f"begun {stop}", [0, 1, 2])
        job[3].stop()
        for index in range(3):
            said = record(job, index, stop)
            assert said["waits"] == 0
            check_missing(
                said, [3], "write", "came to it, and has gone silent", f"pid {job[3].pid}"
            )
        job[3].resume()
        job[3].go_on()
        # It has reported, so nobody needs it any more.
        job[1].reached(late)
        job[1].kill()
        for index in (0, 2, 3):
            check_done(record(job, index, late), 4)
        # Who died before never comes; who dies now goes silent.
        job[2].reached(kill)
        come_to(job, f"begun {kill}", [0, 3])
        job[2].kill()
        for index in (0, 3):
            said = record(job, index, kill)
            check_missing(said, [1, 2], "write", "came to it, and has gone silent; process 1 of 4")
            assert f"pid {job[1].pid}" in said["message"]
        # The service goes with the primary: our error, or jax has aborted the process before.
        job[0].reached(end)
        come_to(job, f"begun {end}", [3])
        job[0].kill()
        job[3].go_on()
        job[3].process.wait(LIMIT + GRACE)
