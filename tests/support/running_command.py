"""A command that runs while a test does something else: it is waited for, interrupted, cut off."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tests.support.command import Ran, environment
from tests.support.paths import ROOT

_SECONDS = 120
_NOBODY = 65534


class Running:
    """A process whose output goes to pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        """Wait for the next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def stop_reading(self) -> None:
        """Close the reading end of its output."""
        out: IO[str] | None = self.process.stdout
        assert out is not None
        out.close()
        self.process.stdout = None

    def end(self) -> Ran:
        """Wait until it ends; return what it has printed since."""
        out, err = self.process.communicate(timeout=_SECONDS)
        return Ran(self.process.returncode, out or "", err)


@contextlib.contextmanager
def running(*arguments: object, script: str | None = None, **extra: str) -> Iterator[Running]:
    """Start `ckpt` with these arguments, or a script that gets them; end it with the body."""
    what = ["-m", "ckpt"] if script is None else ["-c", script]
    process = subprocess.Popen(
        [sys.executable, *what, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment({"PYTHONPATH": str(ROOT), **extra}),
    )
    try:
        yield Running(process)
    finally:
        process.kill()
        process.wait(_SECONDS)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


# Other users may not be allowed to read the interpreter, so it is imported before.
_AS_NOBODY = f"""
import os, sys
import email.parser, anyio._backends._asyncio, ckpt.cli.app, ckpt._steps.path_diagnosis
import ckpt._interop.orbax.layout, ckpt._inspection.locations
from ckpt.cli import commands
for name in commands.NAMES:
    commands.load(name)
if os.getuid() == 0:
    os.setgroups([])
    os.setgid({_NOBODY})
    os.setuid({_NOBODY})
raise SystemExit(ckpt.cli.app.run(sys.argv[1:]))
"""


def as_ordinary_user(*arguments: object, **extra: str) -> Ran:
    """Run `ckpt` as a user whom permissions bind, even if the tests run as root."""
    with running(*arguments, script=_AS_NOBODY, **extra) as command:
        return command.end()


def let_everybody_enter(path: Path) -> None:
    """Let other users reach a directory of pytest's, which is its owner's alone."""
    for each in (path, *path.parents):
        if os.stat(each).st_uid != os.getuid() or each == Path("/"):
            break
        if not os.stat(each).st_mode & 0o001:
            os.chmod(each, os.stat(each).st_mode | 0o011)
