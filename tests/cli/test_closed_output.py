"""Commands end quietly when nobody reads their output; test_wrong_use has all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.cli import exit_status
from tests.support.command import environment


@pytest.mark.parametrize("command", ["ls", "doctor", "watch"])
def test_a_closed_pipe(command: str, run_root: Path) -> None:
    options = ["--after", "0", "--until", "30"] if command == "watch" else []
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "ckpt", command, str(run_root), *options],
            stdout=writing,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment(),
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert (ran.returncode, ran.stderr) == (exit_status.CLOSED_PIPE, "")
    assert not [each for each in run_root.iterdir() if each.name.startswith(".ckpt-trial")]
