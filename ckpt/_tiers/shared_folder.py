"""The folder in shared memory in which the snapshots of one run lie, and who owns it.

    /dev/shm/ckpt-UID/           0700, ours
        KEY/                     0700; KEY is a digest of the root and of the process of the job
            owner                locked by the process that takes snapshots; says which run it is
            steps/               the root of the snapshots
            flushing-PID/        hard links to a snapshot that a keeper writes to the root

A lock of the system goes when its process dies, however it dies. A process that was forked does not
keep it. What is in the folder is used only if it is of the same run: a root that was removed and
made anew is another run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ckpt._format.digests import digest
from ckpt.errors import StorageError

STEPS, FLUSHING = "steps", "flushing-"
_OWNER = "owner"
_PRIVATE = 0o700
_MOST_BYTES = 4096

# What was in the folder: nothing, snapshots of this run, or of another one, which are removed.
Found = Literal["nothing", "same run", "another run"]


def folder_of(directory: str, location: str, process: int, count: int) -> Path:
    """Return the folder for the snapshots of one process of a job that saves to `location`."""
    key = digest(f"{location}\0{process}\0{count}".encode())
    return Path(directory, f"ckpt-{os.getuid()}", key)


class SharedFolder:
    """The folder, while this process owns it. Its methods block."""

    def __init__(self, path: Path) -> None:
        """Own nothing yet."""
        self.path = path
        self._fd: int | None = None

    @property
    def steps(self) -> Path:
        """The root of the snapshots."""
        return self.path / STEPS

    def claim(self, run: str, location: str) -> Found:
        """Own the folder; what is in it stays only if it is of the run called `run`.

        Raises:
            StorageError: Another process owns it, or there is no folder of ours; says why.
        """
        try:
            for folder in (self.path.parent, self.path):
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(_PRIVATE)
                _check_ours(folder)
            fd = os.open(
                self.path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise _unusable(self.path, error.strerror or str(error)) from error
        try:
            return self._lock(fd, run, location)
        except BaseException:
            os.close(fd)
            raise

    def _lock(self, fd: int, run: str, location: str) -> Found:
        before = os.pread(fd, _MOST_BYTES, 0)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _read(before).get("pid", "another")
            raise _unusable(self.path, f"process {owner} takes snapshots of this run") from error
        if not os.path.samestat(os.fstat(fd), os.stat(self.path / _OWNER)):
            raise _unusable(self.path, "it was removed just now")
        for each in self.path.glob(f"{FLUSHING}*"):
            # A keeper that still writes has its files open, or tries an older snapshot.
            if not is_alive(each.name.removeprefix(FLUSHING)):
                shutil.rmtree(each, ignore_errors=True)
        has_steps = self.steps.is_dir() and any(self.steps.iterdir())
        is_same = _read(before).get("run") == run
        if not is_same:
            shutil.rmtree(self.steps, ignore_errors=True)
        note = json.dumps({"run": run, "root": location, "pid": os.getpid()}).encode()
        os.ftruncate(fd, 0)
        os.pwrite(fd, note[:_MOST_BYTES], 0)
        self._fd = fd
        os.register_at_fork(after_in_child=_forgetting(weakref.ref(self)))
        if not has_steps:
            return "nothing"
        return "same run" if is_same else "another run"

    def remove(self) -> None:
        """Give the memory back, and the folder."""
        if self._fd is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()
            self.leave()

    def leave(self) -> None:
        """Own it no more; what is in it stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def take_abandoned(path: Path) -> SharedFolder | None:
    """Own a folder whose process has died; None if another one owns it by now, or it is gone."""
    folder = SharedFolder(path)
    try:
        fd = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    folder._fd = fd
    return folder


def is_alive(pid: str) -> bool:
    """Tell whether a process of that number is there."""
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _forgetting(folder: weakref.ref[SharedFolder]) -> Callable[[], None]:
    def forget() -> None:
        # A child that lives on would hold the lock of a parent that has died.
        found = folder()
        if found is not None:
            found.leave()

    return forget


def _check_ours(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise _unusable(folder, "it belongs to another user, or is not a folder")
    if status.st_mode & 0o077:
        raise _unusable(folder, f"others may enter it ({stat.filemode(status.st_mode)})")


def _read(note: bytes) -> dict[str, object]:
    with contextlib.suppress(ValueError):
        found = json.loads(note)
        if isinstance(found, dict):
            return found
    return {}


def _unusable(path: Path, why: str) -> StorageError:
    return StorageError(f"cannot keep snapshots in {path}: {why}")
