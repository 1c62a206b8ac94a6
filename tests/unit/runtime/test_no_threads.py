"""A system that refuses threads: saves go on with those there are, or say what is wrong."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._runtime import threads
from ckpt._runtime.threads import DaemonThreads
from ckpt.errors import StorageError
from tests.support.paths import PROGRAMS

PATIENCE_S = 120.0
STATE = {"w": np.arange(300_000.0), "b": np.ones(3)}
REFUSAL = r"the system refused a thread \(can't start new thread\): .*ulimit -u"


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Allow so many more threads to be started."""
    left, start = 10**6, threading.Thread.start

    def start_or_refuse(self: threading.Thread) -> None:
        nonlocal left
        if left <= 0:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(self)

    def set_left(count: int) -> None:
        nonlocal left
        left = count

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    return set_left


def save_in_manager(root: Path) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(0, STATE).result(PATIENCE_S)
        mgr.restore(0)


def save_once(root: Path) -> None:
    async def main() -> None:
        await ckpt.save(root / "0", STATE)
        await ckpt.load(root / "0")

    root.mkdir()
    asyncio.run(main())


@pytest.mark.parametrize("save", [save_in_manager, save_once])
def test_however_many_threads_there_are_a_save_is_made_or_says_why_not(
    save: Callable[[Path], None], tmp_path: Path, allow: Callable[[int], None]
) -> None:
    errors: list[StorageError | None] = []
    for count in range(20):
        root = tmp_path / str(count)
        allow(count)
        error = None
        try:
            save(root)
        except StorageError as raised:
            error = raised
        errors.append(error)
        if error is None:
            assert (root / "0").exists()
        elif root.exists():
            assert set(os.listdir(root)) <= {"0"}
    assert errors[0] is not None
    assert errors[-1] is None
    assert {each.errno for each in errors if each is not None} == {errno.EAGAIN}


def test_a_manager_works_once_there_are_threads_again(
    tmp_path: Path, allow: Callable[[int], None]
) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        allow(0)
        with pytest.raises(StorageError, match=REFUSAL):
            mgr.save(0, STATE)
        allow(100)
        assert mgr.save(0, STATE).result(PATIENCE_S)


def test_calls_wait_for_a_thread_that_is_there(allow: Callable[[int], None]) -> None:
    executor, free = DaemonThreads(4), threading.Event()
    allow(1)
    first = executor.submit(free.wait, PATIENCE_S)
    others = [executor.submit(threading.get_ident) for _ in range(3)]
    assert not any(each.done() for each in others)
    free.set()
    assert first.result(PATIENCE_S)
    assert len({each.result(PATIENCE_S) for each in others}) == 1
    assert others[0].result() != threading.get_ident()


def test_without_any_thread_a_call_runs_where_it_is_made(allow: Callable[[int], None]) -> None:
    executor = DaemonThreads(4)
    allow(0)
    assert executor.submit(threading.get_ident).result(0) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        executor.submit(divmod, 1, 0).result(0)


def test_an_error_of_the_function_itself_stays_as_it_is() -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        await threads.run_in_thread(fail)

    with pytest.raises(RuntimeError, match=r"^can't start new thread$"):
        asyncio.run(main())


def test_a_limit_of_the_system_is_told(tmp_path: Path) -> None:
    environment: dict[str, Any] = {**os.environ, "TMPDIR": "/tmp"}
    run = subprocess.run(
        [sys.executable, PROGRAMS / "save_without_threads.py"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        cwd="/",
    )
    if run.stdout == "no limit\n":
        pytest.skip("this system does not limit threads")
    assert run.stderr == ""
    error, left = run.stdout.splitlines()
    assert error.startswith(f"StorageError {errno.EAGAIN}: the system refused a thread")
    assert left == "['one', 'two']"
