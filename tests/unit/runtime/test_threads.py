"""Threads that interpreter exit does not wait for."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from ckpt._runtime import threads
from ckpt._runtime.threads import DaemonThreads
from tests.support.paths import PROGRAMS

PATIENCE_S = 120.0


def test_results_and_errors_are_those_of_the_call() -> None:
    executor = DaemonThreads(2)
    assert list(executor.map(pow, [2, 3], [3, 2])) == [8, 9]
    with pytest.raises(ZeroDivisionError):
        executor.submit(divmod, 1, 0).result(PATIENCE_S)


@pytest.mark.parametrize("most", [1, 3])
def test_calls_run_beside_each_other_up_to_the_limit(most: int) -> None:
    executor, running, free = DaemonThreads(most), threading.Semaphore(0), threading.Event()

    def hold() -> bool:
        running.release()
        return free.wait(PATIENCE_S)

    futures = [executor.submit(hold) for _ in range(most + 2)]
    for _ in range(most):
        assert running.acquire(timeout=PATIENCE_S)
    # The others have not begun, so they can still be taken back.
    assert [future.cancel() for future in futures] == [False] * most + [True] * 2
    free.set()
    assert all(future.result(PATIENCE_S) for future in futures[:most])
    with pytest.raises(CancelledError):
        futures[-1].result(0)
    assert executor.submit(int, "7").result(PATIENCE_S) == 7


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_IDLE_SECONDS", 0.01)
    executor = DaemonThreads(4)
    used = {executor.submit(threading.current_thread).result(PATIENCE_S) for _ in range(3)}
    for thread in used:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert executor.submit(int, "7").result(PATIENCE_S) == 7


def test_threads_told_to_end_finish_what_was_asked_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "_IDLE_SECONDS", 600.0)
    executor, free = DaemonThreads(1), threading.Event()
    executor.submit(free.wait, PATIENCE_S)
    last = executor.submit(threading.current_thread)
    executor.end()
    free.set()
    thread = last.result(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("operation", ["read_regular", "rename_new"])
def test_a_file_system_that_hangs_does_not_keep_a_program_from_ending(
    tmp_path: Path, operation: str
) -> None:
    run = subprocess.run(
        [sys.executable, PROGRAMS / "hang_in_files.py", operation, tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stdout == "ends\n"
    assert ("the save of step 2" in run.stderr) == (operation == "rename_new")
    # As after output that could not be written.
    assert run.returncode == (120 if operation == "rename_new" else 0)
