"""A thread that goes on after the main thread has ended."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ckpt.sync
from ckpt.errors import ClosedError
from tests.support.forked_programs import run
from tests.support.paths import PROGRAMS

LATE = "ClosedError: the main thread of the program has ended, and managers with it. Keep it until"
USES = {
    "only": LATE,
    "first": LATE,
    "again": LATE,
    "in tasks": LATE,
    "new": LATE,
    "watch": LATE,
    "one-shot": "done",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a thread of a program heard, by what it did."""
    base = tmp_path_factory.mktemp("late")

    def go(use: str) -> str:
        ran = run(PROGRAMS / "use_after_main.py", use, base / use)
        assert (ran.returncode, ran.stderr) == (0, "")
        return ran.stdout

    with ThreadPoolExecutor(2) as two:
        return dict(zip(USES, two.map(go, USES), strict=True))


@pytest.mark.parametrize("use", USES)
def test_what_comes_too_late_is_told_what_to_do(told: dict[str, str], use: str) -> None:
    assert told[use].startswith(USES[use])


def test_a_thread_that_python_refuses_at_the_end_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since Python 3.12."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ClosedError, match="the main thread of the program has ended"):
        ckpt.sync.save(tmp_path / "one", {"n": 1})


def test_a_save_that_goes_on_at_the_end_of_the_program_imports_nothing(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": 1.0})
    ran = subprocess.run(
        [sys.executable, PROGRAMS / "save_while_ending.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "[]\n")
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.all_steps() == [2]
