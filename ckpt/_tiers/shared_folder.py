"""The folder in shared memory for the snapshots of one run, and its owner.

    /dev/shm/ckpt-UID/           0700, ours
        KEY/                     0700; KEY is a digest of the root and of the process of the job
            owner                locked by the process that takes snapshots; names its run, and its
                                 process of the job
            owner.new            written by the next owner, before it is renamed to `owner`
            steps/               the root of the snapshots
            held/                parts that other processes have saved; see `peers.parts`
            flushing-PID/        hard links to a snapshot that an agent writes to the root

The operating system releases a lock when its process dies, however it dies. A forked process does
not keep it. The content of the folder is used only if it belongs to the same run: a root that was
removed and created anew is another run. So the note of the owner must be whole at any moment at
which a process may be killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ckpt._format.manifest_head import digest
from ckpt._tiers.peers.parts import REPLICAS, STEPS
from ckpt.errors import StorageError

FLUSHING = "flushing-"
_OWNER, _NEW_OWNER = "owner", "owner.new"
_PRIVATE = 0o700
# Limit of the owner's note; the name fits even if each character takes six bytes.
_MOST_BYTES, _MOST_SHOWN = 4096, 500
# Errors while another process, at the same moment, has the lock or removes the folder.
_PASSING = (errno.EWOULDBLOCK, errno.ENOENT)
_PATIENCE_SECONDS, _PAUSE_SECONDS = 1.0, 0.02

# Content of the folder: nothing, snapshots of this run, or of another run, which are removed.
Found = Literal["nothing", "same run", "another run"]


def folder_of(directory: str, location: str, process: int, count: int) -> Path:
    """Return the folder for the snapshots of one process of a job that saves to `location`."""
    key = digest(f"{location}\0{process}\0{count}".encode())
    return Path(directory, f"ckpt-{os.getuid()}", key)


class SharedFolder:
    """The folder, while this process owns it. Its methods block."""

    def __init__(self, path: Path) -> None:
        """Make it without owning the folder yet."""
        self.path = path
        self._fd: int | None = None
        # Content of the owner's note.
        self.note: dict[str, object] = {}

    @property
    def steps(self) -> Path:
        """The root of the snapshots."""
        return self.path / STEPS

    @property
    def claim_id(self) -> str:
        """Unique id of this claim on the folder."""
        return str(self.note.get("claim", ""))

    def claim(self, run: str, location: str, process: int = 0, count: int = 1) -> Found:
        """Own the folder; its content stays only if it belongs to the run `run`.

        Args:
            run: The id of the run.
            location: The root of the run.
            process: Number of this process in its job.
            count: Number of processes in the job.

        Raises:
            StorageError: Another process owns it, or there is no folder of ours; the error says
                which.
        """
        note = {
            "run": run,
            "pid": os.getpid(),
            # The end of a long name, which tells people more than its beginning.
            "root": location[-_MOST_SHOWN:],
            "process": process,
            "count": count,
            "claim": uuid.uuid4().hex,
        }
        ends = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return self._claim(note)
            except OSError as error:
                # An agent may be checking at this moment if the folder is owned, or releasing its
                # memory.
                is_final = isinstance(error, StorageError) or error.errno not in _PASSING
                if is_final or time.monotonic() > ends:
                    raise self._explained(error) from error
            time.sleep(_PAUSE_SECONDS)

    def _claim(self, note: dict[str, object]) -> Found:
        for folder in (self.path.parent, self.path):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(_PRIVATE)
            _check_ours(folder)
        fd = _locked(self.path, os.O_CREAT)
        try:
            return self._begin(fd, note)
        finally:
            os.close(fd)

    def _begin(self, fd: int, note: dict[str, object]) -> Found:
        """Own the folder; `fd` holds the lock until then."""
        for each in self.path.glob(f"{FLUSHING}*"):
            # Keep the folder of a live agent: it has its files open, or tries an older snapshot.
            if not is_alive(each.name.removeprefix(FLUSHING)):
                shutil.rmtree(each, ignore_errors=True)
        contents = [self.steps, self.path / REPLICAS]
        has_steps = any(each.is_dir() and any(each.iterdir()) for each in contents)
        is_same = _read(fd).get("run") == note["run"]
        if not is_same:
            for each in contents:
                shutil.rmtree(each, ignore_errors=True)
        self._fd, self.note = _put_note(self.path, note), note
        os.register_at_fork(after_in_child=_forgetting(weakref.ref(self)))
        if not has_steps:
            return "nothing"
        return "same run" if is_same else "another run"

    def _explained(self, error: OSError) -> StorageError:
        if isinstance(error, StorageError):
            return error
        why = error.strerror or str(error)
        if isinstance(error, BlockingIOError):
            owner: object = "another"
            with contextlib.suppress(OSError), open(self.path / _OWNER, "rb") as file:
                owner = _read(file.fileno()).get("pid", owner)
            why = f"process {owner} takes snapshots of this run"
        return _unusable(self.path, why)

    def remove(self) -> None:
        """Release the memory, and remove the folder."""
        if self._fd is not None:
            # The owner's note goes last: the next owner must not lose the snapshots that it begins
            # with.
            for each in self.path.iterdir():
                if each.name != _OWNER:
                    shutil.rmtree(each, ignore_errors=True)
            with contextlib.suppress(OSError):
                # A process that was killed may have left this file.
                os.remove(self.path / _NEW_OWNER)
            with contextlib.suppress(OSError):
                (self.path / _OWNER).unlink()
                self.path.rmdir()
                self.path.parent.rmdir()
            self.leave()

    def leave(self) -> None:
        """Release the folder; its content stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def claim_of(path: Path) -> object:
    """Return the id of the claim on a folder; None if there is none."""
    try:
        fd = os.open(path / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb"):
        return _read(fd).get("claim")


def take_abandoned(path: Path) -> SharedFolder | None:
    """Own a folder whose process has died; None if another process owns it now, or it is gone."""
    folder = SharedFolder(path)
    try:
        fd = _locked(path)
    except OSError:
        return None
    folder._fd, folder.note = fd, _read(fd)
    return folder


def take_abandoned_of(
    path: Path, run: str, location: str, count: int
) -> list[tuple[int, SharedFolder]]:
    """Own the folders of dead processes of a run, beside the folder of this process.

    Args:
        path: The folder of this process.
        run: The id of the run.
        location: The root of the run.
        count: Number of processes in the job; folders of a job of another size are left alone.

    Returns:
        The folders, each with the number of its process.
    """
    found = []
    wanted = {"run": run, "root": location[-_MOST_SHOWN:], "count": count}
    for each in sorted(path.parent.iterdir()):
        folder = None if each == path else take_abandoned(each)
        if folder is None:
            continue
        process = folder.note.get("process")
        if isinstance(process, int) and wanted.items() <= folder.note.items():
            found.append((process, folder))
        else:
            folder.leave()
    return found


def is_alive(pid: str) -> bool:
    """Return True if there is a process with this number."""
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
        # Release the lock in the child: it would hold the lock of a parent that has died.
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


def _locked(path: Path, flags: int = 0) -> int:
    """Open and lock the note of an owner; raise if another process owns the folder."""
    fd = os.open(path / _OWNER, os.O_RDWR | flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(path / _OWNER)):
            raise FileNotFoundError(errno.ENOENT, "it was removed just now")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _put_note(path: Path, note: dict[str, object]) -> int:
    """Replace the note of a locked folder; return the descriptor that has the lock now.

    The file of this name is whole and locked at every moment. An empty note would belong to no run,
    and the next process would remove the snapshots.
    """
    new = path / _NEW_OWNER
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, json.dumps(note).encode(), 0)
        os.replace(new, path / _OWNER)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read(fd: int) -> dict[str, object]:
    """Return the content of an owner's note; empty if it cannot be read."""
    with contextlib.suppress(ValueError):
        found = json.loads(os.pread(fd, _MOST_BYTES, 0))
        if isinstance(found, dict):
            return found
    return {}


def _unusable(path: Path, why: str) -> StorageError:
    return StorageError(f"cannot keep snapshots in {path}: {why}")
