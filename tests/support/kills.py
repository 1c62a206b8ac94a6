"""Run a program so that it dies, stops or meets an error at one chosen system call.

The calls that change files below one directory are shown to this process before the kernel carries
them out, all threads in one order; for each it lets the call be, sends a signal to the process that
makes it, or has it fail. So the program can be killed between any two changes of the disk, exactly,
again and again:

```python
clean = run_watched(command, below=root)
for number in range(1, len(clean.calls) + 1):
    dead = run_watched(command, at_call(number, signal.SIGKILL), below=root)
    assert dead.returncode == -signal.SIGKILL
    ...  # what is below root now, and is it what was acknowledged?
```

This needs Linux 5.9 on x86-64 or ARM64, and no privileges: a seccomp filter hands the calls over.
strace does not serve: its `when=` counts the calls of every thread alone, so in a program with
several threads it cannot reach every call. `can_watch` tells whether all of this works here.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.forked_programs import Forked

__all__ = [
    "KINDS",
    "Call",
    "Decide",
    "Watched",
    "at_call",
    "can_watch",
    "run_watched",
    "watching",
    "watching_forked",
]

KINDS: Mapping[str, tuple[str, ...]] = {
    "create": ("openat",),
    "write": ("write", "pwrite64", "writev", "pwritev", "ftruncate", "fallocate"),
    "sync": ("fsync", "fdatasync"),
    "rename": ("rename", "renameat", "renameat2"),
    "mkdir": ("mkdir", "mkdirat"),
    "remove": ("unlink", "unlinkat", "rmdir"),
    "lock": ("flock",),
}
"""The calls that are watched, by kind; of `openat` those that may create a file."""

_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
# Architecture, as seccomp numbers them, and the numbers of the calls.
_MACHINES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "write": 1, "pwrite64": 18, "writev": 20, "flock": 73, "fsync": 74, "fdatasync": 75,
            "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84, "unlink": 87, "openat": 257,
            "mkdirat": 258, "unlinkat": 263, "renameat": 264, "fallocate": 285, "pwritev": 296,
            "renameat2": 316, "seccomp": 317, "tgkill": 234,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "flock": 32, "mkdirat": 34, "unlinkat": 35, "renameat": 38, "ftruncate": 46,
            "fallocate": 47, "openat": 56, "write": 64, "writev": 66, "pwrite64": 68, "pwritev": 70,
            "fsync": 82, "fdatasync": 83, "tgkill": 131, "renameat2": 276, "seccomp": 277,
        },
    ),
}  # fmt: skip
# Where a call has its paths: (directory descriptor or None, path) by the numbers of arguments.
_PATHS: dict[str, tuple[tuple[int | None, int], ...]] = {
    "openat": ((0, 1),),
    "mkdir": ((None, 0),),
    "mkdirat": ((0, 1),),
    "rename": ((None, 0), (None, 1)),
    "renameat": ((0, 1), (2, 3)),
    "renameat2": ((0, 1), (2, 3)),
    "unlink": ((None, 0),),
    "unlinkat": ((0, 1),),
    "rmdir": ((None, 0),),
}
_AT_FDCWD = 0xFFFFFF9C
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_REQUEST, _ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_CONTINUE = 1
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that is about to happen.

    Attributes:
        kind: One of `KINDS`.
        name: Its name.
        paths: The absolute paths that it concerns: one, or source and target of a rename.
        process: Who makes it: the program, or a process that it has started.
    """

    kind: str
    name: str
    paths: tuple[str, ...]
    process: int


Decide = Callable[[Call], int | None]
"""Says what becomes of a call: None lets it be; a member of `signal.Signals` is sent to its thread,
which takes it when the call has ended (SIGKILL: before it begins); any other number is the error
(such as `errno.EIO`) that it fails with."""


@dataclass(slots=True)
class Watched:
    """What a program did below the watched directory.

    Attributes:
        calls: Its calls in order; the last ones may not have been carried out.
        met: Those of them that were not let be.
        returncode: As `subprocess` gives it; None while it runs.
        output: What it wrote to standard output; empty where that was taken from it directly.
        failure: What the decision raised; the program was killed then.
    """

    calls: list[Call] = field(default_factory=list)
    met: list[Call] = field(default_factory=list)
    returncode: int | None = None
    output: str = ""
    failure: BaseException | None = None

    @property
    def counts(self) -> Counter[str]:
        """How many calls of each kind there were."""
        return Counter(call.kind for call in self.calls)


def at_call(
    number: int,
    answer: int,
    *,
    kind: str | None = None,
    path: str | os.PathLike[str] | None = None,
    lasting: bool = False,
) -> Decide:
    """Return a decision that gives `answer` to one call and lets the others be.

    Args:
        number: Which call, from 1.
        answer: A signal or an error number; see `Decide`.
        kind: Count calls of this kind, or of this name, only.
        path: Count calls that concern exactly this path only.
        lasting: Give the answer to every later one, too.
    """
    seen = 0

    def decide(call: Call) -> int | None:
        nonlocal seen
        wanted = kind in (None, call.kind, call.name)
        wanted = wanted and (path is None or os.fspath(path) in call.paths)
        seen += wanted
        return answer if wanted and (seen == number or (lasting and seen > number)) else None

    return decide


def run_watched(
    command: Sequence[str],
    decide: Decide | None = None,
    *,
    below: Path,
    kinds: Iterable[str] = KINDS,
    timeout_s: float = 120,
    environment: Mapping[str, str] | None = None,
    forked: bool = False,
) -> Watched:
    """Run a program to its end; its standard output is collected.

    Args:
        command: The program and its arguments.
        decide: What becomes of its calls; without it they are only recorded.
        below: Calls that concern this directory, or what is below it, are shown.
        kinds: The kinds of calls to show.
        timeout_s: After so long the program is killed.
        environment: The program's environment; this one's where it is not given.
        forked: Whether the command is a script with its arguments, for a process that is forked off
            one that has imported the libraries; see `forked_programs`.

    Raises:
        subprocess.TimeoutExpired: The program did not end in time.
        OSError: The calls cannot be watched here; see `can_watch`.
    """
    with _watching(command, decide, below, kinds, environment, None, forked) as (child, watched):
        watched.output, _ = child.communicate(timeout=timeout_s)
    return watched


@contextlib.contextmanager
def watching(
    command: Sequence[str],
    decide: Decide | None = None,
    *,
    below: Path,
    kinds: Iterable[str] = KINDS,
    environment: Mapping[str, str] | None = None,
    errors: IO[str] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], Watched]]:
    """Run a program beside the body, with pipes to its input and output; see `run_watched`.

    Its errors go to the file `errors`, or else where ours go.

    What still runs at the end of the body is killed.
    """
    with _watching(command, decide, below, kinds, environment, errors, False) as (child, watched):
        assert isinstance(child, subprocess.Popen)
        yield child, watched


@contextlib.contextmanager
def watching_forked(
    command: Sequence[str],
    decide: Decide | None = None,
    *,
    below: Path,
    kinds: Iterable[str] = KINDS,
    errors: IO[str] | None = None,
) -> Iterator[tuple[Forked, Watched]]:
    """Run a script with its arguments, as `watching` does, but forked; see `forked_programs`."""
    with _watching(command, decide, below, kinds, None, errors, True) as (child, watched):
        assert not isinstance(child, subprocess.Popen)
        yield child, watched


@contextlib.contextmanager
def _watching(
    command: Sequence[str],
    decide: Decide | None,
    below: Path,
    kinds: Iterable[str],
    environment: Mapping[str, str] | None,
    errors: IO[str] | None,
    forked: bool,
) -> Iterator[tuple[subprocess.Popen[str] | Forked, Watched]]:
    watched = Watched()
    top = os.path.realpath(below)
    start = _start_forked if forked else _start
    child, listener = start(command, ",".join(kinds), environment, errors)
    guard = threading.Thread(target=_guard, args=(listener, child, decide, top, watched))
    guard.start()
    try:
        with child:
            try:
                yield child, watched
            finally:
                child.kill()
                child.wait()
    finally:
        guard.join()
        os.close(listener)
        watched.returncode = child.returncode
        if watched.failure is not None:
            raise watched.failure


def _start(
    command: Sequence[str],
    kinds: str,
    environment: Mapping[str, str] | None,
    errors: IO[str] | None,
) -> tuple[subprocess.Popen[str], int]:
    """Start a program; return it, and the descriptor at which its calls arrive."""
    ours, theirs = socket.socketpair()
    launcher = [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), kinds]
    pipe = subprocess.PIPE
    with ours, theirs:
        child = subprocess.Popen(
            [*launcher, *command],
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            text=True,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        try:
            return child, _received(ours)
        except BaseException:
            child.kill()
            child.communicate()
            raise


def _start_forked(
    command: Sequence[str],
    kinds: str,
    environment: Mapping[str, str] | None,
    errors: IO[str] | None,
) -> tuple[Forked, int]:
    """Do the same with a script, forked."""
    # Not for those that run this file as a program.
    from tests.support.forked_programs import fork

    with socket.socket(socket.AF_UNIX) as server:
        # A name of the kernel's choice, which no file has.
        server.bind("")
        server.listen()
        server.settimeout(_PATIENCE_S)
        name = f"@{server.getsockname().hex()}"
        where = 2 if errors is None else errors.fileno()
        env = dict(os.environ if environment is None else environment)
        child = fork(0, [__file__, name, kinds, *command], where, env)
        try:
            ours, _ = server.accept()
            with ours:
                return child, _received(ours)
        except BaseException:
            child.kill()
            child.communicate()
            raise


def can_watch() -> bool:
    """Whether this machine lets the system calls of a child be watched."""
    with tempfile.TemporaryDirectory() as directory:
        script = f"import os; os.mkdir({directory + '/made'!r})"
        try:
            found = run_watched([sys.executable, "-I", "-S", "-c", script], below=Path(directory))
        except (OSError, subprocess.SubprocessError):
            return False
        return found.returncode == 0 and found.counts["mkdir"] == 1


def _received(ours: socket.socket) -> int:
    """Return the descriptor that the launcher sends, or raise the error that it met."""
    size = array.array("i").itemsize
    data, ancillary, _, _ = ours.recvmsg(64, socket.CMSG_SPACE(size))
    if not ancillary:
        number = int(data or errno.ENOSYS)
        raise OSError(number, f"cannot watch system calls: {os.strerror(number)}")
    (listener,) = array.array("i", ancillary[0][2][:size])
    return listener


def _guard(
    listener: int,
    child: subprocess.Popen[str] | Forked,
    decide: Decide | None,
    top: str,
    watched: Watched,
) -> None:
    """Answer for every call until the program has ended."""
    names = {number: name for name, number in _MACHINES[platform.machine()][1].items()}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while not any(what & select.POLLHUP for _, what in poll.poll()):
        buffer = bytearray(_REQUEST.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, buffer)
        except OSError:
            # Whoever called was killed meanwhile.
            continue
        request, thread, _, number, _, _, *arguments = _REQUEST.unpack(buffer)
        name = names[number]
        paths = _paths_of(thread, name, arguments)
        call = Call(_KIND_OF[name], name, paths, _process_of(thread) or child.pid)
        answer = None
        if any(path == top or path.startswith(top + os.sep) for path in call.paths):
            watched.calls.append(call)
            try:
                answer = None if decide is None else decide(call)
            except BaseException as error:
                watched.failure = error
                answer = signal.SIGKILL
        if answer is not None:
            watched.met.append(call)
        failing = answer is not None and not isinstance(answer, signal.Signals)
        if isinstance(answer, signal.Signals):
            _send(answer, call.process, thread)
            if answer == signal.SIGKILL:
                # Not let go: the call is never carried out.
                continue
        flags = 0 if failing else _CONTINUE
        reply = _ANSWER.pack(request, 0, -answer if failing and answer else 0, flags)
        with contextlib.suppress(OSError):
            fcntl.ioctl(listener, _SEND, reply)


def _send(what: signal.Signals, process: int, thread: int) -> None:
    """Send a signal to the thread that waits, so that it cannot run on before it takes it."""
    system: Any = ctypes.CDLL(None)
    system.syscall(_MACHINES[platform.machine()][1]["tgkill"], process, thread, int(what))


def _process_of(thread: int) -> int | None:
    """Return the process of a waiting thread; None if it is gone."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{thread}/status").read_text()
        return int(status.partition("\nTgid:")[2].split()[0])
    return None


def _paths_of(thread: int, name: str, arguments: Sequence[int]) -> tuple[str, ...]:
    """Return the absolute paths that a call of a waiting thread concerns; none if it is gone."""
    try:
        if name not in _PATHS:
            return (os.readlink(f"/proc/{thread}/fd/{arguments[0] & 0xFFFFFFFF}"),)
        return tuple(_path_at(thread, arguments, *where) for where in _PATHS[name])
    except OSError:
        return ()


def _path_at(thread: int, arguments: Sequence[int], directory: int | None, path: int) -> str:
    base = _AT_FDCWD if directory is None else arguments[directory] & 0xFFFFFFFF
    start = f"/proc/{thread}/cwd" if base == _AT_FDCWD else f"/proc/{thread}/fd/{base}"
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        found = b""
        while b"\0" not in found:
            # Not across the end of a page: the next one may not be there.
            at = arguments[path] + len(found)
            piece = os.pread(memory.fileno(), 4096 - at % 4096, at)
            found += piece or b"\0"
    given = os.fsdecode(found.partition(b"\0")[0])
    return os.path.normpath(given if given.startswith("/") else f"{os.readlink(start)}/{given}")


def _launch(channel: socket.socket, kinds: str) -> None:
    """This file as a program: have the calls of this process watched."""
    with channel:
        try:
            listener = _filter(kinds.split(","))
        except OSError as error:
            channel.send(str(error.errno).encode())
            raise SystemExit(127) from None
        descriptors = array.array("i", [listener])
        channel.sendmsg([b"0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        os.close(listener)


def _filter(kinds: Sequence[str]) -> int:
    """Install the filter; return the descriptor at which its calls arrive."""
    if platform.machine() not in _MACHINES or sys.platform != "linux":
        raise OSError(errno.ENOSYS, "no table of system calls for this machine")
    architecture, numbers = _MACHINES[platform.machine()]
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    program: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (give, 0, 0, _ALLOW),
        (load, 0, 0, 0),
    ]
    for name in (name for kind in kinds for name in KINDS[kind] if name in numbers):
        if name == "openat":
            # Only what may create a file; of the argument, 32 bits are enough.
            flags = 16 + 8 * 2
            check = [(load, 0, 0, flags), (any_bit, 0, 1, os.O_CREAT), (give, 0, 0, _NOTIFY)]
            program += [(equal, 0, 4, numbers[name]), *check, (give, 0, 0, _ALLOW)]
        else:
            program += [(equal, 0, 1, numbers[name]), (give, 0, 0, _NOTIFY)]
    program.append((give, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(
        struct.pack("@HP", len(program), ctypes.addressof(code)), 2 * ctypes.sizeof(ctypes.c_void_p)
    )
    system: Any = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_mode_filter = 38, 1
    if system.prctl(no_new_privileges, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    # Waiting calls are not to be interrupted by signals that do not kill; old kernels cannot.
    for flags in (_NEW_LISTENER | _WAIT_KILLABLE, _NEW_LISTENER):
        found = system.syscall(numbers["seccomp"], set_mode_filter, flags, header)
        if found >= 0:
            return int(found)
    raise OSError(ctypes.get_errno(), "seccomp")


def _run_forked(name: str, kinds: str) -> None:
    """In a forked process: have its calls watched, then become the script that follows."""
    from tests.support.real_jobs import run_child

    channel = socket.socket(socket.AF_UNIX)
    channel.connect(bytes.fromhex(name.removeprefix("@")))
    _launch(channel, kinds)
    sys.argv[1:3] = []
    run_child()


if __name__ == "__main__":
    if sys.argv[1].startswith("@"):
        _run_forked(sys.argv[1], sys.argv[2])
    else:
        _launch(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
        os.execvp(sys.argv[3], sys.argv[3:])
