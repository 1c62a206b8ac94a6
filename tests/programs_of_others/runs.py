"""Runs the programs of others by Orbax and by `ckpt_orbax`, and kills them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LINE", "OTHERS", "OURS", "Outcome", "killed", "program", "run"]

LINE = "import ckpt_orbax; ckpt_orbax.install()"
"""All that is put into a program, as its first line."""

OTHERS = "orbax"
OURS = "ckpt_orbax"

_HERE = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Outcome:
    """What a program has told when it ended."""

    start: int
    """The step from which it went on."""

    losses: dict[str, float]
    """By step, of the steps that this run has made."""

    digest: str
    """Of the bytes of the state at the end."""

    sums: list[float]
    """The sum of every array of the state."""


def program(name: str, library: str) -> str:
    """Returns the text of a program, with one line more if it shall use `ckpt_orbax`."""
    text = (_HERE / f"{name}.py").read_text()
    return f"{LINE}\n{text}" if library == OURS else text


def _start(
    name: str, library: str, root: Path, devices: int, die_in: int | None
) -> subprocess.CompletedProcess[str]:
    scratch = root.parent / f"{root.name}-files"
    scratch.mkdir(exist_ok=True)
    script = scratch / "program.py"
    script.write_text(program(name, library))
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # The runs of a program compile the same, which takes most of their time.
        "JAX_COMPILATION_CACHE_DIR": str(Path(sys.prefix, "compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(script), str(root), str(die_in)]
    return subprocess.run(
        command, cwd=scratch, env=environment, text=True, capture_output=True, timeout=300
    )


def run(name: str, library: str, root: Path, devices: int = 1) -> Outcome:
    """Lets a program train to its end."""
    ended = _start(name, library, root, devices, die_in=None)
    assert ended.returncode == 0, ended.stderr[-6000:]
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert told.pop("library") == library
    return Outcome(**told)


def killed(name: str, library: str, root: Path, step: int, devices: int = 1) -> None:
    """Lets a program train until it has asked for the batch of this step, and kills it."""
    ended = _start(name, library, root, devices, die_in=step)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-6000:]
