"""Writers in a root: their leases, and the sweep, which removes the remains of dead ones.

Leases: how a cleaner knows that the writer of an attempt is gone. Beside an attempt there is a
lease, a small file that its writer keeps locked as long as it lives. The lease says on which boot
of which machine the writer runs, and how long it lasts. The writer renews it by touching it, so
only the clock of the file system decides when it has expired. The functions block and raise
`OSError`; docs/design/001-commit-protocol.md has the rule.

The sweep, which removes the remains of dead writers in a root; names of unfinished things. A
cleaner must never take an attempt away from a live writer, so it checks the attempt's lease. Then
it renames the attempt. Either that rename or the one that publishes succeeds, never both. So a
writer that is alive after all gets an error and never publishes half a step.

No byte is removed before the rename that hides it is durable: otherwise a power cut could bring the
name back without the bytes. The functions block and raise `OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from msgspec import Struct

from ckpt._settings import LONGEST_LEASE_SECONDS
from ckpt.storage._base import AttemptEntry, owner_of, time_in
from ckpt.storage._local.posix import fsync_directory, remove_tree

_MAX_BYTES = 4096
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# One second in all. A cleaner holds the lock for less than a millisecond.
_LOCK_TRIES, _LOCK_PAUSE_SECONDS = 200, 0.005
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
# For a lease that was just made and is still empty, and an attempt whose lease was removed.
WITHOUT_LEASE_SECONDS = 3600.0


class Lease(Struct, frozen=True):
    """A lease that a cleaner has opened.

    Attributes:
        is_local: True if the writer ran on this boot of this machine, saw the same device, and had
            the lock.
        seconds: Duration of the lease after a renewal.
        renewed: Time of the last renewal, in seconds of the file system's clock.
        free: True if the cleaner holds its lock, False if another process does, None if the file
            system has no locks.
        begun: Time at which the writer made it, by the writer's clock; None if unknown.
        owner: Host and process of the writer, for people.
    """

    is_local: bool
    seconds: float
    renewed: float
    free: bool | None
    begun: float | None = None
    owner: str = ""


def boot_id() -> str | None:
    """Return the id of this boot of this machine; None if the system has no such id.

    Containers on one machine share it, together with the kernel that holds the locks. They may
    have mounts, and with them locks, of their own; then the device numbers differ.
    """
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


def take_lease(path: Path, seconds: float, mode: int | None = None) -> int:
    """Make a lease at `path` and lock it.

    Args:
        path: The lease.
        seconds: Duration of the lease after a renewal.
        mode: Permissions, of which execution is left out; None follows the umask.

    Returns:
        The file descriptor. It holds the lock until it is closed or this process ends, for whatever
        reason.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if mode is not None:
            os.fchmod(fd, mode & 0o666)
        # A lease that its writer could not lock names no boot: a cleaner that locks it proves
        # nothing, and only the time decides.
        boot = boot_id() if _locked(fd) else None
        # Written after it is locked, so that a valid unlocked lease has a writer that ended. Not
        # synced, since no writer survives a power cut.
        content = {"boot": boot, "device": os.fstat(fd).st_dev, "seconds": seconds}
        people = {"host": platform.node(), "pid": os.getpid(), "begun": time.time()}
        data = json.dumps(content | people).encode()
        while data:
            data = data[os.write(fd, data) :]
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return fd


def _locked(lease: int) -> bool:
    """Lock a new lease; return True if that worked.

    A cleaner that inspects the lease holds the lock for a moment, or forever if it is stopped then.
    """
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_SECONDS)
        except OSError:
            return False
    return False


def renew_lease(lease: int) -> None:
    os.utime(lease)


@contextlib.contextmanager
def opened_lease(path: Path) -> Iterator[Lease | None]:
    """Read a lease, and hold its lock during the body if it is free; None if gone."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # Network file systems give exclusive locks only on files opened for writing.
        fd = os.open(path, os.O_RDWR | flags)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        fd = os.open(path, os.O_RDONLY | flags)
    try:
        free: bool | None = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:
            free = None
        status = os.fstat(fd)
        content = os.read(fd, _MAX_BYTES) if stat.S_ISREG(status.st_mode) else b""
        yield _parsed(content, status, free)
    finally:
        os.close(fd)


def _parsed(content: bytes, status: os.stat_result, free: bool | None) -> Lease:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(content)
        if isinstance(found, dict):
            seconds, boot = found.get("seconds"), boot_id()
            if isinstance(seconds, int | float):
                same = boot is not None and found.get("boot") == boot
                is_local = same and found.get("device") == status.st_dev
                lasts = max(0.0, min(seconds, LONGEST_LEASE_SECONDS))
                begun, owner = time_in(found, "begun"), owner_of(found)
                return Lease(is_local, lasts, status.st_mtime, free, begun, owner)
    return Lease(False, WITHOUT_LEASE_SECONDS, status.st_mtime, free)


def is_abandoned(lease: Lease, now: Callable[[], float]) -> bool:
    """Return True if the writer of a lease is dead, or must be taken for dead.

    The kernel drops the lock however its owner ends. So for a writer on this boot of this machine
    the lock alone decides. For a writer elsewhere a free lock may mean nothing, since not all file
    systems show locks to other machines; then the time decides.

    Args:
        lease: The lease.
        now: Returns the time of the file system's clock, in seconds.
    """
    if lease.free is False:
        return False
    if lease.free and lease.is_local:
        return True
    return now() - lease.renewed > lease.seconds


# Orbax skips every name that contains this, and lists it as unfinished.
_MARK = ".orbax-checkpoint-tmp-"
_TRASH = ".trash"
_LEASE_PREFIX = ".ckpt-lease-"
_PROBE_PREFIX = ".ckpt-clock-"
_ATTEMPT = re.compile(re.escape(_MARK) + r"([0-9a-f]{32})(\.trash)?\Z")
_LEASE = re.compile("^" + re.escape(_LEASE_PREFIX) + r"([0-9a-f]{32})\Z")
_PROBE = re.compile("^" + re.escape(_PROBE_PREFIX) + r"[0-9a-f]{32}\Z")
# Folders of notes, except those that Orbax names; see `notes`.
_NOTES = re.compile(r"^\.ckpt-[a-z]+\Z")


def attempt_name(step_dir: str, token: str) -> str:
    return f"{step_dir}{_MARK}{token}"


def lease_name(token: str) -> str:
    return f"{_LEASE_PREFIX}{token}"


def trash_name(name: str) -> str:
    """Return the name under which the directory of an attempt is removed."""
    return name if name.endswith(_TRASH) else f"{name}{_TRASH}"


def is_unfinished(name: str) -> bool:
    """Return True if a directory of that name is an attempt, trash, a probe or notes."""
    return any((_ATTEMPT.search(name), _PROBE.match(name), _NOTES.match(name)))


class _Unfinished(Struct):
    """The contents of a root besides steps.

    Attributes:
        attempts: Names of attempts by id; None where only a lease is left.
        trash: Attempts and steps that are being removed.
        others: Folders that are of use only while they are not empty.
    """

    attempts: dict[str, str | None]
    trash: list[str]
    others: list[str]


def _unfinished_in(root: Path) -> _Unfinished:
    found = _Unfinished({}, [], [])
    with contextlib.suppress(FileNotFoundError), os.scandir(root) as entries:
        for each in entries:
            name = each.name
            if lease := _LEASE.match(name):
                found.attempts.setdefault(lease[1], None)
            elif "." not in name or not each.is_dir(follow_symlinks=False):
                continue
            elif match := _ATTEMPT.search(name):
                if match[2]:
                    found.trash.append(name)
                else:
                    found.attempts[match[1]] = name
            elif _PROBE.match(name) or _NOTES.match(name):
                found.others.append(name)
    return found


def attempts_in(root: Path) -> list[AttemptEntry]:
    """Return the attempts in `root`, and what is being removed, without changing anything."""

    @cache
    def now() -> float:
        # The clock of the store can be read only with permission to write.
        try:
            return store_time(root)
        except OSError:
            return time.time()

    unfinished = _unfinished_in(root)
    found = [
        _entry_of_attempt(root, token, name, now) for token, name in unfinished.attempts.items()
    ]
    found += [_removal(root, name) for name in unfinished.trash]
    return sorted(
        (each for each in found if each is not None), key=lambda each: (each.step_dir, each.id)
    )


def _entry_of_attempt(
    root: Path, token: str, name: str | None, now: Callable[[], float]
) -> AttemptEntry | None:
    """Return an attempt as it is listed; None if it is gone, or only a live writer's lease."""
    lease = None
    try:
        with opened_lease(root / lease_name(token)) as lease:
            is_live: bool | None = not _is_dead(root, name, lease, now)
    except FileNotFoundError:
        return None
    except OSError:
        is_live = None
    if name is None:
        return None if lease is None or is_live is not False else AttemptEntry("", token, False)
    step_dir = name.partition(_MARK)[0]
    nbytes, left = _nbytes(root / name), name if is_live is False else ""
    if lease is None:
        return AttemptEntry(step_dir, token, is_live, nbytes=nbytes, directory=left)
    age = None if lease.begun is None else max(time.time() - lease.begun, 0.0)
    silent = max(now() - lease.renewed, 0.0) if lease.free is not False else None
    owner = lease.owner
    return AttemptEntry(step_dir, token, is_live, age, silent, nbytes, owner, directory=left)


def _removal(root: Path, name: str) -> AttemptEntry:
    step_dir, _, token = name.removesuffix(_TRASH).partition(_MARK)
    nbytes = _nbytes(root / name)
    return AttemptEntry(step_dir, token, False, nbytes=nbytes, is_removal=True)


def _nbytes(directory: Path) -> int:
    """Return the bytes of the files below a directory; files removed meanwhile do not count."""
    total = 0
    for path, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, file)).st_size
    return total


def sweep_root(root: Path) -> list[str]:
    """Remove the remains of dead writers in `root`, and trash; return the removed names."""

    @cache
    def now() -> float:
        return store_time(root)

    found = _unfinished_in(root)
    trash = found.trash
    if trash and not _is_durable(root):
        trash = []
    swept = [name for name in trash if _removed(root / name)]
    for token, attempt in found.attempts.items():
        if _sweep(root, token, attempt, now):
            swept.append(attempt or lease_name(token))
    for name in found.others:
        # An empty folder was left by a dead process; a live one makes it again. Notes stay.
        with contextlib.suppress(OSError):
            os.rmdir(root / name)
    return swept


def _sweep(root: Path, token: str, name: str | None, now: Callable[[], float]) -> bool:
    """Remove an attempt, or the lease of one that is gone, unless it may have a live writer."""
    # Opened by its name, since the listing may show an attempt and miss its lease.
    path = root / lease_name(token)
    try:
        with opened_lease(path) as lease:
            if not _is_dead(root, name, lease, now):
                return False
            if name is not None:
                trash = root / trash_name(name)
                os.rename(root / name, trash)
                fsync_directory(root)
                if not _removed(trash):
                    return False
            if lease is not None:
                os.unlink(path)
    except OSError:
        return False
    return True


def _is_dead(root: Path, name: str | None, lease: Lease | None, now: Callable[[], float]) -> bool:
    """Return True if the writer of an attempt is dead, or must be taken for dead."""
    if lease is not None:
        return is_abandoned(lease, now)
    if name is None:
        return False
    return now() - os.lstat(root / name).st_mtime > WITHOUT_LEASE_SECONDS


def _is_durable(root: Path) -> bool:
    """Make the names in a root durable; the processes that made them may have died too early."""
    try:
        fsync_directory(root)
    except OSError:
        return False
    return True


def _removed(trash: Path) -> bool:
    """Remove a directory without a living writer. Several cleaners may try at once."""
    try:
        remove_tree(trash)
    except OSError:
        return False
    return True


def store_time(root: Path) -> float:
    """Return the time of the clock that stamps the files of `root`, in seconds."""
    probe = root / f"{_PROBE_PREFIX}{uuid.uuid4().hex}"
    try:
        os.mkdir(probe)
    except OSError:
        # On a full disk, where a sweep would help, times can still be set.
        os.utime(root)
        return os.stat(root).st_mtime
    try:
        return os.lstat(probe).st_mtime
    finally:
        # Another cleaner may have removed it.
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(probe)
