"""Programs that tests start, forked from a process that has imported the libraries already.

A new Python needs two seconds of a processor until it has imported jax and ckpt, and jobs have many
processes. So there are two nurseries, programs that import what takes its time, start no thread,
and wait. A child is forked off one of them; its environment, arguments and standard streams are
given to it, and it ends as every program does. A test of what is imported needs a new Python.
Two, because what is forked off one nursery hashes texts alike, as processes of a real job do not.

Between a nursery and a child stands a keeper, which waits for the child and says how it ended.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TextIO

__all__ = ["Forked", "fork", "program", "run"]

_LARGEST_REQUEST = 1 << 20
_PATIENCE_S = 120.0
_LIBRARIES = (
    "aiofiles",
    "anyio._backends._asyncio",
    "jax.experimental.multihost_utils",
    "jax.numpy",
    # jax imports it when it compiles for the first time.
    "jaxlib.mlir.dialects.mhlo",
    "pydantic",
    "tensorstore",
)
_LOCK = threading.Lock()


class Forked:
    """A child; what of `subprocess.Popen` is needed."""

    def __init__(self, stdin: TextIO, stdout: TextIO, stderr: TextIO | None, report: Any) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: Any = None
        self._report = report
        self.pid = self._line(_PATIENCE_S) or 0
        assert self.pid > 0, "a nursery forks nothing"

    def _line(self, timeout: float | None) -> int | None:
        """Return the next number that the keeper says; None if there is none in time."""
        readable = select.poll()
        readable.register(self._report, select.POLLIN)
        if not readable.poll(timeout if timeout is None else timeout * 1000):
            return None
        line = self._report.readline()
        # The keeper ends before its child only if somebody kills it, and the child with it.
        return int(line) if line else -signal.SIGKILL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        if self.stderr is not None:
            self.stderr.close()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.wait()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._line(timeout)
            if self.returncode is None:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"child {self.pid}", timeout)
            self._report.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = _PATIENCE_S) -> tuple[str, str]:
        """Close its input, and return the rest of its output and errors when it has ended."""
        deadline = time.monotonic() + timeout
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        found = ["", ""]

        def read(number: int, stream: TextIO) -> None:
            found[number] = stream.read()
            stream.close()

        readers = [
            threading.Thread(target=read, args=each, daemon=True)
            for each in enumerate((self.stdout, self.stderr))
            if each[1] is not None and not each[1].closed
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(deadline - time.monotonic(), 0))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(f"child {self.pid}", timeout)
        self.wait(max(deadline - time.monotonic(), 0))
        return found[0], found[1]


def program(
    script: str | Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    errors: int | None = 2,
) -> Forked:
    """Start a script that is no part of a job; "-c" and its code are one, too.

    The environment and the folder are ours unless they are given; errors go to the file `errors`,
    or to a pipe.
    """
    return fork(0, [str(script), *map(str, args)], errors, dict(env or os.environ), cwd)


def run(
    *what: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = _PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, as `program` starts it; it is killed when it takes too long."""
    with program(*map(str, what), env=env, cwd=cwd, errors=None) as child:
        try:
            out, errors = child.communicate(timeout)
        finally:
            child.kill()
        return subprocess.CompletedProcess([*map(str, what)], child.returncode, out, errors)


def fork(
    number: int,
    argv: list[str],
    errors: int | None,
    env: dict[str, str],
    cwd: Path | None = None,
) -> Forked:
    """Start a script with its arguments, in this environment; `number` chooses a nursery.

    Its standard input and output are pipes, its errors go to the file `errors`, or to a pipe.
    """
    with _LOCK:
        control = _nurseries()[number % 2]
        child_in, to_child = os.pipe()
        from_child, child_out = os.pipe()
        report, keeper = os.pipe()
        ours = [child_in, child_out, keeper]
        from_errors = None
        if errors is None:
            from_errors, errors = os.pipe()
            ours.append(errors)
        given = [child_in, child_out, errors, keeper]
        request = json.dumps([argv, env, str(cwd or os.getcwd())]).encode()
        try:
            control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST_REQUEST)
            socket.send_fds(control, [request], given)
        finally:
            for each in ours:
                os.close(each)
        return Forked(
            open(to_child, "w"),
            open(from_child),
            None if from_errors is None else open(from_errors),
            open(report, "rb", buffering=0),
        )


@functools.cache
def _nurseries() -> list[socket.socket]:
    """Start both; each ends when this process does, for then its socket has no other end."""
    found = []
    for _ in range(2):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Threads of numpy's, which it starts when it is imported, would not be in a forked process.
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=env | {"JAX_PLATFORMS": "cpu"},
            )
        atexit.register(process.wait)
        atexit.register(ours.close)
        found.append(ours)
    return found


# What follows runs in a nursery, and in what is forked off it.


def _be_a_nursery(control: socket.socket) -> None:
    """Fork for every request; return in a child, and in the nursery when nobody is there to ask."""
    for name in (*_LIBRARIES, *_modules_of_ckpt()):
        importlib.import_module(name)
    _look_up_once()
    # A collection in a child, such as that at its end, would copy all the memory that they share.
    gc.freeze()
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1
    # The system reaps the keepers.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, given, _, _ = socket.recv_fds(control, _LARGEST_REQUEST, 4)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            argv, env, cwd = json.loads(request)
            _keep(argv, env, cwd, given)
            return
        for each in given:
            os.close(each)


def _look_up_once() -> None:
    """Have the library look up the installed packages, which every process does once."""
    from ckpt._engine import engine
    from ckpt.handlers._registry import installed_handlers

    installed_handlers()
    engine._known_versions()


def _modules_of_ckpt() -> list[str]:
    """Return the modules that programs may use, without the command and the tools for tests."""
    import ckpt

    aside = ("ckpt.__main__", "ckpt.cli", "ckpt.orbax", "ckpt.page", "ckpt.testing")
    found = pkgutil.walk_packages(ckpt.__path__, "ckpt.")
    return [each.name for each in found if not each.name.startswith(aside)]


def _keep(argv: list[str], env: dict[str, str], cwd: str, given: list[int]) -> None:
    """Fork once more, and wait for that child; return in it only."""
    from tests.support.real_jobs import die_with_parent

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    *streams, report = given
    pid = os.fork()
    if pid:
        for each in streams:
            os.close(each)
        os.write(report, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(report)
    for number, each in enumerate(streams):
        os.dup2(each, number)
        os.close(each)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for action in filter(None, env.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(action)  # type: ignore[arg-type]
    sys.argv = [__file__, *argv]


if __name__ == "__main__":
    _be_a_nursery(socket.socket(fileno=int(sys.argv[1])))
    from tests.support.real_jobs import run_child

    run_child()
