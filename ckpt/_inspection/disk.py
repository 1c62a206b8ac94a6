"""Trials of a directory: the features and the speed of its file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ckpt._inspection.machine import Finding, Verdict
from ckpt._tree.table import format_bytes
from ckpt.storage._local.posix import exchange, fsync_directory, remove_tree, rename_new

# Steps, attempts and notes have no such names.
_PREFIX = ".ckpt-trial-"
_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Make a folder that others leave alone; remove it even if a signal ends the program.

    Raises:
        OSError: The parent directory cannot be written.
    """
    folder = parent / f"{_PREFIX}{uuid.uuid4().hex}"
    with _ended_by_signals():
        try:
            # Within the `try`, since Ctrl-C may come as soon as the folder exists.
            os.mkdir(folder)
            yield folder
        finally:
            with _undisturbed():
                remove_tree(folder)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make signals that would end the process at once end the body first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {each: signal.signal(each, _end) for each in _ENDS}
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and other signals that end the process during the body."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


_ROUNDS = 7
_SECTOR = 4096
_SLOW_FSYNC, _VERY_SLOW_FSYNC = 0.05, 1.0
_SKEWED_SECONDS = 60.0
# Linux FICLONE: the second file shares the bytes of the first.
_CLONE = 0x40049409
_IN_MEMORY = ("tmpfs", "ramfs")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "glusterfs")
_OTHER_SECONDS = 30


def disk(directory: Path, needed: int | None = None) -> Iterator[Finding]:
    """Yield a finding for each trial; the files of the trials are removed.

    Args:
        directory: An existing directory.
        needed: Bytes of a step, if there is one already.
    """
    yield _kind(directory)
    yield _space(directory, needed)
    try:
        with scratch_folder(directory) as folder:
            for name, trial in _TRIALS:
                try:
                    yield trial(folder)
                except OSError as error:
                    yield _problem(name, f"failed: {error.strerror or error}", "use another disk")
    except OSError as error:
        what = error.strerror or str(error)
        advice = "give the user of the job write permission, or use another directory"
        yield _problem("write", f"nothing can be written: {what}", advice)


def _kind(directory: Path) -> Finding:
    kind = file_system_of(directory)
    verdict: Verdict = "ok"
    advice = ""
    if kind in _IN_MEMORY:
        verdict, advice = "warning", "steps are lost when the machine restarts; use a disk"
    elif kind == "overlay":
        verdict, advice = "warning", "steps are lost with the container; mount a disk or a volume"
    elif kind in _NETWORK or kind.startswith("fuse."):
        verdict = "warning"
        advice = "other machines may see new files late; see the page on watching (NFS clients)"
    return Finding("disk", "file system", verdict, kind, advice)


def file_system_of(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the kind of the file system of a directory; `unknown` if it cannot be found."""
    try:
        device = os.stat(directory).st_dev
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return "unknown"
    wanted = f"{os.major(device)}:{os.minor(device)}"
    real = os.path.realpath(directory)
    best, kind = -1, "unknown"
    for line in lines:
        head, _, tail = line.partition(" - ")
        parts, rest = head.split(" "), tail.split(" ")
        if len(parts) < 5 or not rest[0]:
            continue
        point = parts[4].replace("\\040", " ")
        above = os.path.commonpath([real, point]) == point
        # Btrfs has devices that no mount names; then only the path shows the mount.
        rank = len(point) * above + (1 << 20) * (parts[2] == wanted)
        if (above or parts[2] == wanted) and rank >= best:
            best, kind = rank, rest[0]
    return kind


def _space(directory: Path, needed: int | None) -> Finding:
    state = os.statvfs(directory)
    free, size = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    found = f"{format_bytes(free)} of {format_bytes(size)} free"
    if needed:
        found += f"; the last step has {format_bytes(needed)}"
    if state.f_files and not state.f_favail:
        return _problem("space", "no more files can be made", "remove files: no inodes are left")
    if free < max(needed or 0, 1 << 20):
        return _problem("space", found, "make room, or keep fewer steps", free)
    if needed and free < 3 * needed:
        advice = "there is room for fewer than three more steps"
        return Finding("disk", "space", "warning", found, advice, free)
    if size and free / size < 0.02:
        return Finding("disk", "space", "warning", found, "the disk is nearly full", free)
    return Finding("disk", "space", "ok", found, value=free)


def _fsync(folder: Path) -> Finding:
    times = []
    for number in range(_ROUNDS):
        file = folder / f"fsync-{number}"
        began = time.perf_counter()
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, bytes(_SECTOR), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        times.append(time.perf_counter() - began)
    fsync_directory(folder)
    median = statistics.median(times)
    found = f"{median * 1e3:.3g} ms, the slowest of {_ROUNDS} {max(times) * 1e3:.3g} ms"
    if median >= _VERY_SLOW_FSYNC:
        return _problem("fsync", found, "every commit waits for several of them", median)
    if median >= _SLOW_FSYNC:
        advice = "every commit waits for several of them; a local disk takes a few milliseconds"
        return Finding("disk", "fsync", "warning", found, advice, median)
    return Finding("disk", "fsync", "ok", found, value=median)


def direct_io(folder: Path) -> Finding:
    """Check whether files can be written past the page cache."""
    advice = "data files go through the page cache, which takes memory and processor time"
    without = Finding("disk", "direct I/O", "warning", "not possible", advice)
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return without
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flag
    try:
        fd = os.open(folder / "direct", flags, 0o600)
    except OSError:
        return without
    try:
        # Direct I/O needs aligned memory; anonymous memory begins at a page.
        with mmap.mmap(-1, 1 << 20) as data:
            os.pwrite(fd, data, 0)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        return without
    finally:
        os.close(fd)
    return _ok("direct I/O", "works")


def _hard_links(folder: Path) -> Finding:
    (folder / "one").write_bytes(b"1")
    try:
        os.link(folder / "one", folder / "two")
    except OSError as error:
        advice = "saves that take over files of an older step copy them"
        return Finding("disk", "hard links", "warning", f"not possible: {error.strerror}", advice)
    return _ok("hard links", "work")


def _clones(folder: Path) -> Finding:
    (folder / "cloned").write_bytes(bytes(_SECTOR))
    with open(folder / "cloned", "rb") as source, open(folder / "clone", "wb") as target:
        try:
            fcntl.ioctl(target.fileno(), _CLONE, source.fileno())
        except OSError:
            # Nothing depends on reflinks; without them, copies made by other tools are slower.
            return _ok("reflinks", "not possible, and not needed")
    return _ok("reflinks", "work")


def _rename(folder: Path) -> Finding:
    for name in ("attempt", "step"):
        (folder / name).mkdir()
        (folder / name / name).touch()
    try:
        rename_new(folder / "attempt", folder / "step")
    except FileExistsError:
        rename_new(folder / "attempt", folder / "fresh")
    else:
        what = "replaces a directory that exists"
        return _problem("atomic rename", what, "use another file system: a step could be lost")
    if not (folder / "fresh" / "attempt").exists():
        return _problem("atomic rename", "loses files", "use another file system")
    try:
        exchange(folder / "fresh", folder / "step")
    except OSError:
        advice = "if_exists='replace' and other replacements of a step are refused here"
        return Finding("disk", "atomic rename", "warning", "works, but swaps nothing", advice)
    return _ok("atomic rename", "works, and swaps two directories")


# The program of the other process: it reads a file that was written here, writes a file itself, and
# prints whether it gets the lock that this process holds.
_OTHER = """
import fcntl, sys
folder = sys.argv[1]
seen = open(folder + "/ours").read()
open(folder + "/theirs", "w").write(seen + "!")
with open(folder + "/lock", "r+") as lock:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("free")
    except BlockingIOError:
        print("held")
    except OSError:
        print("none")
"""


def _another_process(folder: Path) -> Finding:
    word = os.urandom(8).hex()
    (folder / "ours").write_text(word)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _OTHER, str(folder)],
            capture_output=True,
            text=True,
            timeout=_OTHER_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return _problem("other processes", f"no answer after {_OTHER_SECONDS} s", "look at it")
    finally:
        os.close(lock)
    theirs = folder / "theirs"
    if ran.returncode or not theirs.exists() or theirs.read_text() != f"{word}!":
        what = "what one process writes, another one does not see"
        return _problem("other processes", what, "use another file system")
    if ran.stdout.strip() != "held":
        advice = "what dead writers leave is removed only when their leases have run out"
        return Finding("disk", "other processes", "warning", "see files, but no locks", advice)
    return _ok("other processes", "see files and locks")


def _clock(folder: Path) -> Finding:
    (folder / "now").touch()
    skew = (folder / "now").stat().st_mtime - time.time()
    found = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine"
    if abs(skew) < 1:
        return _ok("clock", "that of this machine", skew)
    if abs(skew) < _SKEWED_SECONDS:
        return _ok("clock", found, skew)
    advice = "set the clocks (NTP): ages of steps and times of logs are wrong by as much"
    return Finding("disk", "clock", "warning", found, advice, skew)


_TRIALS: tuple[tuple[str, Callable[[Path], Finding]], ...] = (
    ("fsync", _fsync),
    ("direct I/O", direct_io),
    ("atomic rename", _rename),
    ("hard links", _hard_links),
    ("reflinks", _clones),
    ("other processes", _another_process),
    ("clock", _clock),
)


def _ok(name: str, found: str, value: float | None = None) -> Finding:
    return Finding("disk", name, "ok", found, value=value)


def _problem(name: str, found: str, advice: str, value: float | None = None) -> Finding:
    return Finding("disk", name, "problem", found, advice, value)


_BLOCK_BYTES = 16 << 20
_NAME = "raw"
