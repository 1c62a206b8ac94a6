"""Leases: how a cleaner knows that the writer of an attempt is gone.

Beside an attempt there is a lease, a small file that its writer keeps locked as long as it lives.
The lease says on which boot of which machine the writer runs, and how long it lasts. The writer
renews it by touching it, so only the clock of the file system decides when it has expired. The
functions block and raise `OSError`; docs/design/001-commit-protocol.md has the rule.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from ckpt._settings import LONGEST_LEASE_SECONDS
from ckpt.storage._base import owner_of, time_in

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
