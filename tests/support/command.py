"""Runs the command `ckpt` as a user does: as a process, into a pipe or on a terminal."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GOLDEN_OUTPUT = Path(__file__).resolve().parents[1] / "cli" / "golden"
_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did: its exit status, and what it printed."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON that it printed."""
        return json.loads(self.out)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a user who has set nothing."""
    names = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "LC_ALL", "PYTHONIOENCODING")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"TERM": "xterm-256color", "PYTHONWARNINGS": "error"} | dict(extra or {})


def ckpt_command(*arguments: object, **extra: str) -> Ran:
    """Run `ckpt` with these arguments, its output going to pipes.

    It runs in this process, which saves a second, unless it is to have other variables.
    """
    if extra:
        return ckpt_process(*arguments, **extra)
    from ckpt.cli.app import run

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run([str(each) for each in arguments])
    return Ran(status, *(each.buffer.getvalue().decode() for each in (out, err)))


def ckpt_process(*arguments: object, **extra: str) -> Ran:
    """Run `ckpt` with these arguments in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "ckpt", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(extra),
        timeout=_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def in_this_process(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ran:
    """Run `ckpt` with these arguments without a process of its own, which takes a second."""
    from ckpt.cli.app import run

    capsys.readouterr()
    status = run([str(each) for each in arguments])
    return Ran(status, *capsys.readouterr())


def on_terminal(
    *arguments: object, columns: int = 80, program: str = "ckpt", **extra: str
) -> tuple[int, str]:
    """Run `ckpt` on a terminal of its own; return its exit status and all that it showed.

    `program` is the module that runs it.
    """
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", program, *map(str, arguments)],
        stdin=its,
        stdout=its,
        stderr=its,
        env=environment(extra),
        start_new_session=True,
    )
    os.close(its)
    shown = bytearray()
    while True:
        try:
            part = os.read(own, 65536)
        except OSError:
            # Linux says so when the last one that has the terminal open is gone.
            break
        if not part:
            break
        shown += part
    os.close(own)
    return process.wait(_SECONDS), shown.decode().replace("\r\n", "\n")


def without_styles(text: str) -> str:
    """Return what a terminal shows, without colours and styles."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


_CHANGING = (
    # Times, and how long something took or is ago.
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?(Z| UTC)", "<time>"),
    (r"\b\d+(\.\d+)? (s|min|h|d|y)\b|\bnow\b", "<duration>"),
    (r'"(age_seconds|seconds)":[\d.e-]+', r'"\1":"<seconds>"'),
    (r'"(blocked|waited|staged|written|merged|published)":[\d.e-]+', r'"\1":"<seconds>"'),
    # Files of a step: how long a save took has more digits in one manifest than in another.
    (r"\b\d+(\.\d+)? KiB(?!/s)", "<size>"),
    (r'"stored_bytes":\d{4,}', '"stored_bytes":"<size>"'),
    # Versions.
    (r"(python|ckpt-jax|jax|numpy|tensorstore) \d[\w.]*", r"\1 <version>"),
    (r'"(python|ckpt-jax|jax|numpy|tensorstore)":"[^"]*"', r'"\1":"<version>"'),
    # A machine and a process.
    (r"[\w.-]+, process \d+", "<process>"),
    # Random names.
    (r"\b[0-9a-f]{32}\b", "<id>"),
)


def settled(text: str, **places: Path) -> str:
    """Return an output without what differs from run to run; `places` get the names given."""
    for name, place in places.items():
        text = text.replace(str(place), f"<{name}>")
    for pattern, stand_in in _CHANGING:
        text = re.sub(pattern, stand_in, text)
    # The width of a column depends on what is in it.
    return "\n".join(re.sub(r" {2,}", "  ", line.rstrip()) for line in text.split("\n"))


def check_golden(name: str, text: str) -> None:
    """Compare a settled output with the one that was looked at and kept.

    With `CKPT_WRITE_GOLDEN=1` it is kept instead; then look at it with `git diff`.
    """
    file = GOLDEN_OUTPUT / f"{name}.txt"
    if os.environ.get("CKPT_WRITE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    kept = file.read_text() if file.exists() else ""
    assert text == kept, "\n".join(difflib.unified_diff(kept.split("\n"), text.split("\n"), "kept"))
