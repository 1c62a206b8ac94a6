"""File-system primitives of the commit protocol: Linux first, POSIX where possible.

Each function does one thing, blocks, and raises `OSError`. See docs/design/001-commit-protocol.md
for the order of their use, and for the state on disk after a crash between any two of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from ckpt.storage._base import FileStamp

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}

# Errors of a file system without hard links, or of a file that can have no more of them.
UNLINKABLE = _UNSUPPORTED | {errno.EPERM, errno.EXDEV, errno.EMLINK}
# Errors that every other file would meet, too.
WITHOUT_LINKS = UNLINKABLE - {errno.EMLINK}
_COPIED_BYTES = 4 << 20


def fsync_directory(path: str | os.PathLike[str], fd: int | None = None) -> None:
    """Make the entries of a directory durable; `fd` is the directory if it is open.

    Raises:
        OSError: The system refused; the message names the call and the directory.
    """
    try:
        if fd is not None:
            os.fsync(fd)
            return
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except FileNotFoundError:
        raise
    except OSError as error:
        # The error names the fsync: the operation before it has succeeded, and would be blamed.
        what = f"fsync of the directory {os.fspath(path)} was refused: {error.strerror}"
        if error.errno in _UNSUPPORTED:
            what += ". On this file system no step would survive a power cut; use another one"
        raise OSError(error.errno, what, os.fspath(path)) from error


def fsync_directories(top: Path) -> None:
    """Make the entries of every directory below and including `top` durable, deepest first."""
    for directory, _, _ in os.walk(top, topdown=False, onerror=_raise):
        fsync_directory(directory)


def make_directory(path: Path, mode: int | None) -> None:
    """Make a directory with the permissions `mode`; None follows the umask."""
    # Made with `mode`, so that it never has more permissions, not even for a moment.
    os.mkdir(path, 0o777 if mode is None else mode & 0o777)
    if mode is not None:
        os.chmod(path, mode)


def make_directories(path: Path, mode: int | None) -> list[Path]:
    """Make a directory and its missing parents with these permissions; return those it made.

    Raises:
        FileExistsError, NotADirectoryError: It, or a part of its path, is not a directory.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            make_directory(each, mode)
    # This raises if anything but a directory has one of the names.
    os.makedirs(path, exist_ok=True)
    return missing


def rename_new(source: Path, target: Path) -> None:
    """Rename a directory to a name that must not exist.

    Raises:
        FileExistsError: The target exists.
    """
    code = renameat2(source, target, _RENAME_NOREPLACE)
    if code in _UNSUPPORTED:
        # rename() refuses a target that is a file or a non-empty directory. An empty directory is
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
    """Swap two existing names in one atomic operation.

    Raises:
        OSError: Among others ENOTSUP, if the file system has no such operation.
    """
    code = renameat2(first, second, _RENAME_EXCHANGE)
    if code in _UNSUPPORTED:
        raise OSError(errno.ENOTSUP, "cannot swap two directories atomically", str(second))
    if code:
        raise OSError(code, os.strerror(code), str(second))


def renameat2(source: Path, target: Path, flags: int) -> int:
    """Call `renameat2`; return 0 or the error number, ENOSYS if the system does not have it."""
    if not sys.platform.startswith("linux"):
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return errno.ENOSYS
    result = libc.renameat2(
        _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)
    )
    return ctypes.get_errno() if result else 0


def open_regular(top: Path, path: str) -> tuple[int, int]:
    """Open a regular file below a directory for reading; return its descriptor and its size.

    No symbolic link below `top` is followed and only a regular file is opened. So a link in a
    checkpoint cannot lead out of it, and a FIFO or a device cannot make the reader hang.

    Args:
        top: The directory.
        path: Path of the file relative to `top`, with `/`.

    Raises:
        FileNotFoundError, NotADirectoryError: The file does not exist.
        ValueError: The file is not a regular file, or a part of the path is a link.
    """
    *directories, name = path.split("/")
    if {"", ".", ".."} & {*directories, name}:
        raise ValueError("its path has empty names, '.' or '..' in it")
    step = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
    current = os.open(top, step & ~os.O_NOFOLLOW)
    try:
        for directory in directories:
            inner = _open_below(current, directory, step)
            os.close(current)
            current = inner
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = _open_below(current, name, flags)
    finally:
        os.close(current)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd, status.st_size


def _open_below(directory: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(directory, name):
            raise ValueError(f"{name!r:.120} is a symbolic link") from error
        if error.errno == errno.ENXIO:
            raise ValueError("it is a socket or a device") from error
        raise


def _is_link(directory: int, name: str) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)


def read_regular(top: Path, path: str, limit: int) -> bytes | None:
    """Return the content of a regular file below `top`, or None if it does not exist.

    Raises:
        ValueError: The file is not a regular file, or larger than `limit`; see `open_regular`.
    """
    found = read_head(top, path, limit, limit)
    return None if found is None else found[0]


def read_head(top: Path, path: str, limit: int, most: int) -> tuple[bytes, int] | None:
    """Return the beginning of a regular file below `top` and its size; None if there is none.

    Args:
        top: The directory.
        path: The file, relative to it.
        limit: The largest size that the file may have.
        most: Most bytes to read.

    Raises:
        ValueError: The file is not a regular file, or larger than `limit`; see `open_regular`.
    """
    try:
        fd, size = open_regular(top, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if size > limit:
            raise ValueError(f"it has {size} bytes, more than the {limit} allowed")
        parts, left = [], min(size, most)
        while left and (part := os.read(fd, left)):
            parts.append(part)
            left -= len(part)
        return (parts[0] if len(parts) == 1 else b"".join(parts)), size
    finally:
        os.close(fd)


def read_tail(top: Path, path: str, most: int) -> tuple[bytes, int] | None:
    """Return the end of a regular file below `top` and its size; None if there is none.

    Raises:
        ValueError: The file is not a regular file, or was cut meanwhile; see `open_regular`.
    """
    try:
        fd, size = open_regular(top, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        data = os.pread(fd, most, max(size - most, 0))
    finally:
        os.close(fd)
    if len(data) != min(size, most):
        raise ValueError("it was cut short while it was read")
    return data, size


def link_file(fd: int, source: Path, target: Path) -> None:
    """Give a regular file a second name; copy it, durably, if the file system has no links.

    `fd` is the file, open for reading, and `source` its name. The name `target` must not exist.

    Raises:
        ValueError: `source` is not, or no longer, the name of the open file.
    """
    try:
        add_name(fd, source, target)
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        _copy(fd, target)


def add_name(fd: int, source: Path, target: Path) -> None:
    """Give a regular file a second name.

    `fd` is the file, open for reading, and `source` its name. The name `target` must not exist.

    Raises:
        ValueError: `source` is not, or no longer, the name of the open file; nothing is left.
        OSError: The system refused; the errors of `UNLINKABLE` mean that no link can be made.
    """
    os.link(source, target, follow_symlinks=False)
    kept, linked = os.fstat(fd), os.lstat(target)
    if (kept.st_dev, kept.st_ino) != (linked.st_dev, linked.st_ino):
        os.unlink(target)
        raise ValueError("another file took its name meanwhile, or a part of its path is a link")


def _copy(fd: int, target: Path) -> None:
    copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.fchmod(copy, os.fstat(fd).st_mode & 0o666)
        offset = 0
        while part := os.pread(fd, _COPIED_BYTES, offset):
            done = 0
            while done < len(part):
                done += os.pwrite(copy, part[done:], offset + done)
            offset += done
        os.fsync(copy)
    finally:
        os.close(copy)


def is_there(path: Path) -> bool:
    """Return True if anything has that name. Unlike `os.path`, it raises all other errors."""
    try:
        os.lstat(path)
    except OSError as error:
        # Nothing can have a name that is too long.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return False
        raise
    return True


def cut_file(top: str, sizes: Mapping[str, int]) -> str | None:
    """Return a text about a file that is missing or has another size; None if all are whole.

    Args:
        top: The directory.
        sizes: The size in bytes of files by path relative to it.
    """
    for path, size in sizes.items():
        # Paths come from a manifest, and may lead out of the directory or be invalid.
        if ".." in path.split("/") or "\0" in path:
            return f"{path!r:.200} is not a file of it"
        try:
            found = os.lstat(f"{top}/{path}").st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"{path:.200} is missing"
        except PermissionError:
            # The size is unknown; a read of the file will say why.
            continue
        except OSError as error:
            if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
                raise
            return f"{path!r:.200} is not a file of it"
        if found != size:
            return f"{path:.200} has {found} of {size} bytes"
    return None


def stamp(path: str) -> FileStamp | None:
    """Return a value that changes whenever a file may have changed; None if it does not exist."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    # Device and inode differ between hosts that mount the same file system.
    version = f"{status.st_size} bytes, {status.st_mtime_ns}"
    return FileStamp(version, (status.st_dev, status.st_ino, status.st_ctime_ns))


def list_files(top: Path) -> dict[str, int | None]:
    """Return the size of every file below `top` by relative path, None if it is not regular.

    Raises:
        OSError: A directory cannot be read, or `top` is not a directory.
    """
    found: dict[str, int | None] = {}
    directories = [""]
    while directories:
        directory = directories.pop()
        with os.scandir(top / directory) as entries:
            for entry in entries:
                path = f"{directory}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    directories.append(f"{path}/")
                    continue
                status = entry.stat(follow_symlinks=False)
                found[path] = status.st_size if stat.S_ISREG(status.st_mode) else None
    return found


def remove_tree(path: Path) -> None:
    """Remove a directory with everything in it, unless it is already gone."""

    def ignore_missing(_function: object, _path: str, error: BaseException) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    try:
        if sys.version_info >= (3, 12):
            shutil.rmtree(path, onexc=ignore_missing)
        else:
            shutil.rmtree(path, onerror=lambda f, p, info: ignore_missing(f, p, info[1]))
    except RecursionError as error:
        raise OSError(errno.ELOOP, "directories are nested too deeply", str(path)) from error


def _raise(error: OSError) -> None:
    # Otherwise os.walk would silently skip a directory that it cannot read.
    raise error
