"""Blocking file-system primitives of the commit protocol. Linux first, POSIX where it can be.

Each function does one thing and raises `OSError`; `storage.local` runs them in threads and
translates. See docs/design/001-commit-protocol.md for the order in which they are used and what a
crash between any two leaves on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import sys
from pathlib import Path

__all__ = [
    "exchange",
    "fsync_directories",
    "fsync_path",
    "lock_directory",
    "make_locked_directory",
    "open_regular",
    "read_regular",
    "remove_tree",
    "rename_new",
]

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def fsync_path(path: str | os.PathLike[str]) -> None:
    """Make a file's content, or a directory's entries, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_directories(top: Path) -> None:
    """Make the entries of every directory below and including `top` durable, deepest first."""
    for directory, _, _ in os.walk(top, topdown=False, onerror=_raise):
        fsync_path(directory)


def lock_directory(path: Path) -> int | None:
    """Lock a directory without waiting.

    Returns:
        A file descriptor that holds the lock until it is closed (or this process ends, however it
        ends), or None where somebody else holds it.

    Raises:
        OSError: The directory is gone, or the file system has no such locks.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_locked_directory(path: Path, nursery: Path) -> int:
    """Make the directory `path` so that it is locked from the first moment it can be seen there.

    It is made and locked under the name `nursery`, then renamed: a cleaner that finds `path`
    unlocked therefore knows that its writer is dead.

    Returns:
        The file descriptor that holds the lock.
    """
    os.mkdir(nursery)
    try:
        fd = os.open(nursery, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # A cleaner that looks at the nursery holds its lock for a moment, so this waits. A file
            # system without such locks is no error: what is unlocked there is never taken for
            # dead, since the cleaner cannot lock it either.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            os.rename(nursery, path)
        except BaseException:
            os.close(fd)
            raise
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(nursery)
        raise
    return fd


def rename_new(source: Path, target: Path) -> None:
    """Rename a directory to a name that must not exist.

    Raises:
        FileExistsError: The target exists.
    """
    code = _renameat2(source, target, _RENAME_NOREPLACE)
    if code in _UNSUPPORTED:
        # rename() refuses a target that is a file or a non-empty directory; an empty directory is
        # not a step, and replacing it loses nothing.
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, "exists", str(target)) from error
            raise
    elif code:
        raise OSError(code, os.strerror(code), str(target))


def exchange(first: Path, second: Path) -> None:
    """Swap two existing names in one atomic act.

    Raises:
        OSError: Also where the file system cannot (ENOTSUP).
    """
    code = _renameat2(first, second, _RENAME_EXCHANGE)
    if code in _UNSUPPORTED:
        raise OSError(errno.ENOTSUP, "cannot swap two directories atomically", str(second))
    if code:
        raise OSError(code, os.strerror(code), str(second))


def _renameat2(source: Path, target: Path, flags: int) -> int:
    """Call renameat2(2); return 0 or the error number, ENOSYS where the platform lacks it."""
    if not sys.platform.startswith("linux"):
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return errno.ENOSYS
    result = libc.renameat2(
        _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)
    )
    return ctypes.get_errno() if result else 0


def open_regular(path: Path) -> tuple[int, int]:
    """Open a regular file for reading; return its descriptor and its size.

    Symbolic links in the last place are not followed and nothing but a regular file is opened, so
    that a FIFO or device put there cannot make the reader hang.

    Raises:
        FileNotFoundError, NotADirectoryError: It is not there.
        ValueError: It is not a regular file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a symbolic link") from error
        if error.errno == errno.ENXIO:
            raise ValueError("it is a socket or a device") from error
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd, status.st_size


def read_regular(path: Path, limit: int) -> bytes | None:
    """Return the content of a regular file, or None where it or its directory is not there.

    Raises:
        ValueError: It is not a regular file, or larger than `limit`.
    """
    try:
        fd, size = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if size > limit:
            raise ValueError(f"it has {size} bytes, more than the {limit} allowed")
        with open(fd, "rb", closefd=False) as file:
            return file.read(limit + 1)
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a directory and all below it; what is already gone is no error."""

    def ignore_missing(_function: object, _path: str, error: BaseException) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=ignore_missing)
    else:
        shutil.rmtree(path, onerror=lambda f, p, info: ignore_missing(f, p, info[1]))


def _raise(error: OSError) -> None:
    # os.walk would pass over a directory it cannot read, and with it over its files.
    raise error
