"""Loops that other libraries began go on here, killed and resumed, to the same last bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.interop.loops.toy import FIRST
from tests.support.paths import ROOT

# Each test starts several programs, which takes its time on a machine that does other things.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 240
KILL_AFTER, UNTIL = FIRST + 2, FIRST + 9
LOOPS = sorted(
    path.stem
    for path in (ROOT / "tests" / "interop" / "loops").glob("*.py")
    if path.stem not in ("__init__", "__main__", "toy")
)


def program(name: str, root: Path, until: int | str) -> list[str]:
    return [sys.executable, "-m", "tests.interop.loops", name, str(root), str(until)]


def run(name: str, root: Path, until: int | str) -> list[str]:
    """The lines of a run that ends well."""
    done = subprocess.run(
        program(name, root, until),
        cwd=ROOT,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def kill_after(name: str, root: Path, step: int) -> None:
    """Kill a run that never ends when it has made this step."""
    with subprocess.Popen(
        program(name, root, 10**9), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as child:
        watchdog = threading.Timer(PATIENCE_S, child.kill)
        watchdog.start()
        assert child.stdout is not None
        found = any(line.startswith(f"step {step}\n") for line in child.stdout)
        child.kill()
        watchdog.cancel()
        assert found, f"{name} did not come to step {step}"


def files_of(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_goes_on(name: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    run(name, whole, "before")
    shutil.copytree(whole, cut)
    began = files_of(whole)
    end = run(name, whole, UNTIL)[-1]
    assert end.startswith("end ")
    kill_after(name, cut, KILL_AFTER)
    again = run(name, cut, UNTIL)
    assert again[-1] == end
    # It went on where it was, and not from the beginning.
    assert int(again[0].split()[1]) >= FIRST - 1
    # What others wrote is what it was.
    after = files_of(whole)
    assert {path: after.get(path) for path in began} == began
