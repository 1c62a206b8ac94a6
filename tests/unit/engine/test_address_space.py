"""Processes whose address space is limited (`ulimit -v`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import PROGRAMS

LIMITED = "bytes of address space (RLIMIT_AS, ulimit -v), and"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What came of the calls of a process with little address space."""
    root: Path = tmp_path_factory.mktemp("little")
    run = subprocess.run(
        [sys.executable, PROGRAMS / "save_in_little_space.py", root],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.splitlines()


def test_the_default_budget_fits_into_what_is_left(told: list[str]) -> None:
    assert told[:2] == ["done", "done"]


def test_a_budget_that_does_not_fit_is_told_the_limit(told: list[str]) -> None:
    error = told[2]
    assert error.startswith("StorageError:")
    assert f"cannot reserve {4 << 30} bytes of staging memory: Cannot allocate memory" in error
    assert LIMITED in error
    assert error.endswith("are left. Give a smaller Staging(budget_bytes=...)")


def test_an_array_that_does_not_fit_is_told_the_limit(told: list[str]) -> None:
    assert "there is no memory for an array of shape [536870912]" in told[3]
    assert LIMITED in told[3]
