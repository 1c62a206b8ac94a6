"""Notes: small files in folders of a root, beside its steps, such as root metadata and pins.

A lasting note is written like an attempt, and gets its name once it is durable, so that a sweep
finds the remains of a dead writer. A brief note says what a process is doing at the moment. It is
made under its own name and never synced, since no process survives a power cut. A folder is made
for its first note and removed with its last. Folders and notes get the permissions `mode`, notes
without execution; None follows the umask. The functions block and raise `OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ckpt.storage._base import note_parts
from ckpt.storage._local import attempts, posix
from ckpt.storage._local.data_files import write_block
from ckpt.storage._local.leases import store_time

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_RENAME_NOREPLACE = 1
# Tries to use a folder, which may vanish between making and using it while it is empty.
_TRIES = 100


def put(
    root: Path,
    name: str,
    data: bytes,
    lease_seconds: float,
    mode: int | None = None,
    *,
    replace: bool,
) -> bool:
    """Write a note, atomically and durably; False if it exists and may not be replaced."""
    folder, file = note_parts(name)
    attempt = attempts.begin(root, folder, lease_seconds, mode)
    try:
        written = attempt.path / file
        write_block(written, memoryview(data), mode)
        for last in _tries():
            try:
                with _open_made_folder(root, folder, mode) as directory:
                    if not _give_name(written, root / folder / file, directory, replace):
                        return False
                    # A rename from one directory to another changes both.
                    posix.fsync_directory(attempt.path)
                    posix.fsync_directory(root / folder, directory)
            except FileNotFoundError:
                if last or not posix.is_there(written):
                    raise
                continue
            posix.fsync_directory(root)
            break
        return True
    finally:
        with contextlib.suppress(OSError):
            attempts.discard(attempt)
        attempts.end(attempt)


def _give_name(written: Path, target: Path, directory: int, replace: bool) -> bool:
    if replace:
        os.replace(written, target)
        return True
    code = posix.renameat2(written, target, _RENAME_NOREPLACE)
    if code == errno.EEXIST:
        return False
    if code:
        # Hard links do not replace either, and some systems have only those.
        try:
            os.link(written, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in posix.UNLINKABLE:
                raise
            return _rename_alone(written, target, directory)
    return True


def _rename_alone(written: Path, target: Path, directory: int) -> bool:
    """Rename a note to a name that must not exist, where the system has no such operation.

    Writers take turns by a lock on the folder. Where there are no locks either, the later of two
    writers of a note in the same moment wins. The note is whole at any time.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(directory, fcntl.LOCK_EX)
    try:
        if posix.is_there(target):
            return False
        os.rename(written, target)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_UN)
    return True


def put_brief(root: Path, name: str, data: bytes, mode: int | None = None) -> bool:
    """Make a note that need not survive a power cut; False if it exists, which changes nothing.

    The name of the note appears before its content.
    """
    folder, file = note_parts(name)
    for last in _tries():
        try:
            with _open_made_folder(root, folder, mode) as directory:
                fd = os.open(file, _NEW, 0o666, dir_fd=directory)
        except FileExistsError:
            return False
        except FileNotFoundError:
            if last:
                raise
            continue
        try:
            if mode is not None:
                os.fchmod(fd, mode & 0o666)
            while data:
                data = data[os.write(fd, data) :]
        except BaseException:
            with contextlib.suppress(OSError):
                drop(root, name, durable=False)
            raise
        finally:
            os.close(fd)
        break
    return True


def ages(root: Path, folder: str) -> dict[str, float]:
    """Return the seconds since each note of a folder was written or touched, by name."""
    note_parts(f"{folder}/any")
    found: dict[str, float] = {}
    with _opened(root, folder) as directory:
        if directory is None:
            return {}
        with os.scandir(directory) as step_dirs:
            names = [step_dir.name for step_dir in step_dirs]
        if not names:
            return {}
        # Taken before the notes are read, so a note renewed meanwhile does not look too old.
        now = _now(root)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found[name] = now - status.st_mtime
    return found


def _now(root: Path) -> float:
    try:
        return store_time(root)
    except OSError:
        # A process that may not write here only shows notes, and any clock will do for that.
        return time.time()


def touch(root: Path, name: str) -> bool:
    """Set the age of a note back to 0; False if it does not exist."""
    folder, file = note_parts(name)
    with _opened(root, folder) as directory:
        if directory is not None:
            with contextlib.suppress(FileNotFoundError):
                os.utime(file, dir_fd=directory, follow_symlinks=False)
                return True
    return False


def drop(root: Path, name: str, *, durable: bool) -> bool:
    """Remove a note, and its folder if that is empty then; False if it does not exist."""
    folder, file = note_parts(name)
    with _opened(root, folder) as directory:
        if directory is None:
            return False
        try:
            os.unlink(file, dir_fd=directory)
        except FileNotFoundError:
            return False
        if durable:
            posix.fsync_directory(root / folder, directory)
    with contextlib.suppress(OSError):
        os.rmdir(root / folder)
    return True


def _tries() -> Iterator[bool]:
    return (turn == _TRIES - 1 for turn in range(_TRIES))


@contextlib.contextmanager
def _open_made_folder(root: Path, folder: str, mode: int | None) -> Iterator[int]:
    """Open a folder of notes, and make it if it is missing. A link is refused."""
    with contextlib.suppress(FileExistsError):
        posix.make_directory(root / folder, mode)
    fd = os.open(root / folder, _DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _opened(root: Path, folder: str) -> Iterator[int | None]:
    """Open a folder of notes; None if it does not exist. A link is refused."""
    try:
        fd = os.open(root / folder, _DIRECTORY)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
