"""Jobs of several real processes under `jax.distributed`, on this machine's loopback.

A test starts N children that run one script; each of them has joined the job before the script's
first line:

    results = run_processes(2, PROGRAMS / "echo_job.py", root)
    assert [child.value for child in results] == [{"index": 0}, {"index": 1}]

or it stays in the middle, and stops or kills a child at a moment the child has announced:

    with started(4, PROGRAMS / "run_operations.py", root) as job:
        job[3].reached("before report")
        job[3].kill()
        results = job.results()

Scripts import what they need from here:

    from tests.support.real_jobs import at, tell
    at("before report")     # waits until the test says `go_on()`
    tell({"error": "..."})  # the result of this child: anything that JSON takes
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from tests.support.forked_programs import Forked
from tests.support.paths import PROGRAMS

_AT, _RESULT = "AT ", "RESULT "
_SETTINGS = "CKPT_TEST_PROCESS"
# How long a test waits for something that has to happen, even on a busy machine.
PATIENCE_S = 200.0


class Process(Protocol):
    """A child, new or forked."""

    pid: int
    returncode: int | Any
    stdin: IO[str] | None
    stdout: IO[str] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True)
class Result:
    """What one child left: what it told, how it ended, what it printed.

    `value` is the last of the `values` that it told, or None. `code` is that of `subprocess`:
    negative for a signal. -9 is also that of children which the job itself ended, once all had told
    their results.
    """

    index: int
    values: list[Any]
    value: Any
    code: int
    output: str
    errors: str


class Child:
    """One process of a job, as its test sees it."""

    def __init__(self, index: int, process: Process | Forked, errors: IO[str]) -> None:
        self.index = index
        self.process = process
        self.pid = process.pid
        self.harmed = False
        self._errors = errors
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, there: Callable[[list[str]], bool], what: str, timeout: float) -> None:
        """Wait until the lines printed so far are `there`; fail if the child ends before."""
        with self._changed:
            self._changed.wait_for(lambda: there(self._lines) or self._ended, timeout)
            found = there(self._lines)
        if not found:
            _fail(f"{what} of child {self.index} within {timeout:.0f} s\n{self.report()}")

    def reached(self, mark: str, timeout: float = PATIENCE_S) -> None:
        """Wait until the child stands `at(mark)`."""
        self.wait_for(lambda lines: f"{_AT}{mark}" in lines, f"no mark {mark!r}", timeout)

    def go_on(self, line: str = "") -> None:
        """Let the child go on from where it stands, or will stand next; `at` returns `line`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once, and wait until it has ended."""
        self.harmed = True
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Suspend it; `resume` lets it go on."""
        self.harmed = True
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a stopped child go on."""
        self.send(signal.SIGCONT)

    @property
    def lines(self) -> list[str]:
        """What it has printed so far, without marks and results."""
        with self._changed:
            return [line for line in self._lines if not line.startswith((_AT, _RESULT))]

    @property
    def values(self) -> list[Any]:
        """The results it has told so far."""
        with self._changed:
            found = [line for line in self._lines if line.startswith(_RESULT)]
        return [json.loads(line.removeprefix(_RESULT)) for line in found]

    def told(self, timeout: float) -> None:
        """Wait until it has told its result or has ended."""
        with self._changed:
            ready = self._changed.wait_for(
                lambda: self._ended or any(line.startswith(_RESULT) for line in self._lines),
                timeout,
            )
        if not ready:
            _fail(f"child {self.index} told no result in time\n{self.report()}")

    def result(self) -> Result:
        """Return what it left; it has ended."""
        self._reader.join()
        values = self.values
        self._errors.seek(0)
        return Result(
            self.index,
            values,
            values[-1] if values else None,
            self.process.returncode,
            "\n".join(self.lines),
            self._errors.read(),
        )

    def report(self) -> str:
        """Return all it printed, for the message of a test that failed."""
        self._errors.flush()
        errors = Path(self._errors.name).read_text(errors="replace")
        printed = "\n".join(self._lines)
        return f"--- child {self.index} printed\n{printed}\n--- and to stderr\n{errors[-4000:]}"


class Job:
    """The children of one job, by index."""

    def __init__(self, children: list[Child], deadline: float) -> None:
        self.children = children
        self._deadline = deadline

    def __getitem__(self, index: int) -> Child:
        return self.children[index]

    def __len__(self) -> int:
        return len(self.children)

    @property
    def left(self) -> float:
        """Seconds until the job is given up."""
        return max(self._deadline - time.monotonic(), 0.0)

    def results(self, *without: int) -> list[Result]:
        """Wait for the result of every child but those `without`, end all, return all results.

        Children end by themselves, unless one of them was killed or stopped: jax would have the
        others wait for it, and then abort them.
        """
        for child in self.children:
            if child.index not in without and child.process.poll() is None and not child.harmed:
                child.told(self.left)
        if any(child.harmed or child.process.poll() for child in self.children):
            self.end()
        for child in self.children:
            try:
                child.process.wait(self.left)
            except subprocess.TimeoutExpired:
                _fail(f"child {child.index} does not end\n{child.report()}")
        return [child.result() for child in self.children]

    def end(self) -> None:
        """End every child that still runs, at once."""
        for child in self.children:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()


@contextlib.contextmanager
def started(
    count: int,
    script: str | Path,
    *args: object,
    devices_per_process: int = 2,
    timeout: float = PATIENCE_S,
    heartbeat_seconds: int = 200,
    shutdown_seconds: int = 200,
    environment: dict[str, str] | None = None,
    distributed: bool = True,
) -> Iterator[Job]:
    """Start `count` processes of one job; they are ended, and reaped, at the end of the block.

    Args:
        count: How many. With one, `jax.distributed` is initialized too.
        script: A file, or the name of one in tests/support/programs/.
        *args: Its arguments, as text.
        devices_per_process: CPU devices of each.
        timeout: Seconds after which a wait for any of them fails the test.
        heartbeat_seconds: After how long without a sign of life jax takes a process for dead, and
            aborts the others.
        shutdown_seconds: How long a process that ends waits for the others.
        environment: Further variables.
        distributed: Whether they join a job; otherwise they only run next to each other.
    """
    # Not for children, which import this file from elsewhere.
    from tests.support.forked_programs import fork

    with contextlib.ExitStack() as stack:
        # gRPC shares ports; while this socket is bound, nobody else is given the same one.
        reserved = stack.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        settings = {
            "address": f"127.0.0.1:{reserved.getsockname()[1]}",
            "count": count,
            "heartbeat": heartbeat_seconds,
            "shutdown": shutdown_seconds,
            "distributed": distributed,
        }
        base = {name: value for name, value in os.environ.items() if "_proxy" not in name.lower()}
        base |= {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_per_process}",
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
        }
        children: list[Child] = []
        job = Job(children, time.monotonic() + timeout)
        stack.callback(job.end)
        for index in range(count):
            errors = stack.enter_context(tempfile.NamedTemporaryFile("w+", errors="replace"))
            arguments = [str(PROGRAMS / script), *map(str, args)]
            env = base | {_SETTINGS: json.dumps(settings | {"index": index})}
            # Further variables may be such as are looked at when a library is imported.
            process = (_start if environment else fork)(index, arguments, errors.fileno(), env)
            assert process.stdin is not None
            assert process.stdout is not None
            stack.callback(process.stdout.close)
            stack.callback(_close, process.stdin)
            children.append(Child(index, process, errors))
        stack.callback(_join, children)
        stack.callback(job.end)
        yield job


def run_processes(count: int, script: str | Path, *args: object, **options: Any) -> list[Result]:
    """Run a job of which nobody is harmed to its end; every child has to end with code 0.

    Args and options are those of `started`.
    """
    with started(count, script, *args, **options) as job:
        results = job.results()
    for result in results:
        assert result.code == 0, f"child {result.index} ended with {result.code}\n{result.errors}"
    return results


def _start(_: int, arguments: list[str], errors: int, env: dict[str, str]) -> Process:
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=env,
    )


def _fail(message: str) -> NoReturn:
    # Here, for the children import this file too, and have no use for a third of a second.
    import pytest

    pytest.fail(message)


def _close(pipe: IO[str]) -> None:
    # What was not read any more is lost, and may be.
    with contextlib.suppress(BrokenPipeError):
        pipe.close()


def _join(children: list[Child]) -> None:
    for child in children:
        child._reader.join()


# What follows runs in the children.


def at(mark: str) -> str:
    """Say that this child has come to `mark`, and wait for the test; return what it says."""
    os.write(1, f"{_AT}{mark}\n".encode())
    return sys.stdin.readline().rstrip("\n")


def tell(value: object) -> None:
    """Tell the result of this child: anything that JSON takes."""
    os.write(1, f"{_RESULT}{json.dumps(value)}\n".encode())


def die_with_parent() -> None:
    """End when the process ends that started this one: PR_SET_PDEATHSIG."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def run_child() -> None:
    """Join the job, and run the script, or the code after "-c"."""
    import types

    # A test that is killed takes its children with it.
    die_with_parent()
    settings = json.loads(os.environ.pop(_SETTINGS, '{"distributed": false}'))
    del sys.argv[0]
    script = sys.argv[0]
    code = sys.argv.pop(1) if script == "-c" else Path(script).read_bytes()
    sys.path.insert(0, str(Path(script).parent))
    if settings["distributed"]:
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            settings["address"],
            settings["count"],
            settings["index"],
            # Otherwise it listens on every interface.
            coordinator_bind_address=settings["address"],
            cluster_detection_method="deactivate",
            initialization_timeout=int(PATIENCE_S),
            heartbeat_timeout_seconds=settings["heartbeat"],
            shutdown_timeout_seconds=settings["shutdown"],
        )
        # Waits for all, so that from here on each can be killed without holding up another's start.
        jax.devices()
    # It is the main module until the very end, as in a Python of its own.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    exec(compile(code, script, "exec"), vars(main))


if __name__ == "__main__":
    run_child()
