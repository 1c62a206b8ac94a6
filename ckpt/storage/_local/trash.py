"""The trash folder for steps, and the folder for files that others have put into a step.

The functions block and raise `OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
import uuid
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
from msgspec import Struct

from ckpt._format.manifest_head import FILE_NAME, HEAD_BYTES, MAX_BYTES, peek
from ckpt.storage._base import TrashEntry
from ckpt.storage._local import posix
from ckpt.storage._local.leases import attempt_name, trash_name

_ASIDE = ".others"
# Folder of the root with the notes about step directories in the trash.
_NOTES = ".ckpt-trash"
_MOST_NOTE_BYTES = 1 << 16


def prepare_trash(root: Path, trash: Path, mode: int | None = None) -> None:
    """Make the folder that steps of `root` are moved into, and check that this is possible.

    It and its missing parents get the permissions `mode`; None follows the umask.
    """
    for path in posix.make_directories(trash, mode):
        posix.fsync_directory(path.parent)
    if os.stat(trash).st_dev != os.stat(root).st_dev:
        raise OSError(
            errno.EXDEV,
            f"it is on another file system than {root}, and steps are only renamed. Choose a "
            "folder of the same file system",
            str(trash),
        )


def move_to_trash(
    root: Path, step_dir: str, trash: Path, note: Callable[[str, bytes], object] | None = None
) -> Path | None:
    """Move a step directory into a folder, durably; return its new path, None if it did not exist.

    It keeps its name, with a number appended if the name is taken. Before the move, `note` is
    called with the name and content of a file of the root that records it.

    Raises:
        FileNotFoundError: The step directory exists, and the folder does not.
    """
    for number in count():
        target = trash / (f"{step_dir}-{number}" if number else step_dir)
        try:
            if posix.is_there(target):
                continue
            with contextlib.ExitStack() as stack:
                if note is not None:
                    name, data = _note_of(root, step_dir, target)
                    note(name, data)
                    stack.callback(_unlink, root / name)
                posix.rename_new(root / step_dir, target)
                stack.pop_all()
        except FileExistsError:
            continue
        except FileNotFoundError:
            if posix.is_there(root / step_dir):
                raise
            return None
        # The new name first: after a power cut the step may be in both places, but not in none.
        posix.fsync_directory(trash)
        posix.fsync_directory(root)
        return target
    raise AssertionError("count() does not end")


class _Note(Struct):
    """The record of a step directory that goes to the trash.

    Attributes:
        path: Path in the trash.
        step_dir: Name before the deletion.
        inode: Inode of the directory, which a rename keeps: another directory may take its place in
            the trash.
        deleted_ns: Time of the deletion, in Unix nanoseconds.
    """

    path: str
    step_dir: str
    inode: int
    deleted_ns: int


def _note_of(root: Path, step_dir: str, target: Path) -> tuple[str, bytes]:
    inode = os.stat(root / step_dir, follow_symlinks=False).st_ino
    note = _Note(str(target), step_dir, inode, time.time_ns())
    return f"{_NOTES}/{uuid.uuid4().hex}", msgspec.json.encode(note)


def trashed(root: Path, trash: Path) -> list[TrashEntry]:
    """Return the step directories of the root that are in the trash folder.

    Other contents of the folder, such as the steps of another root, are left out.
    """
    found = []
    for note in _notes(root).values():
        path = Path(note.path)
        if path.parent == trash and _is_there(note):
            save = _save_of(path)
            found.append(TrashEntry(path.name, note.step_dir, note.path, note.deleted_ns, save))
    return found


def _save_of(path: Path) -> str:
    """Return `Manifest.save`, which copies of a step on several disks share; empty if unknown."""
    with contextlib.suppress(OSError, ValueError):
        head = posix.read_head(path, FILE_NAME, MAX_BYTES, HEAD_BYTES)
        summary = None if head is None else peek(*head)
        return "" if summary is None else summary.save
    return ""


def undelete(root: Path, path: Path, step_dir: str) -> None:
    """Move a directory out of the trash folder, durably.

    Raises:
        FileExistsError: There is a step directory of that name.
        FileNotFoundError: The directory is gone from the trash.
    """
    posix.rename_new(path, root / step_dir)
    posix.fsync_directory(root)
    posix.fsync_directory(path.parent)
    forget(root)


def hide(root: Path, path: Path) -> Path | None:
    """Give a directory of the trash a name that a sweep removes, durably; None if it is gone."""
    hidden = root / trash_name(attempt_name(path.name, uuid.uuid4().hex))
    try:
        os.rename(path, hidden)
    except FileNotFoundError:
        return None
    posix.fsync_directory(root)
    posix.fsync_directory(path.parent)
    return hidden


def forget(root: Path) -> None:
    """Remove the records of directories that are gone from the trash."""
    for file, note in _notes(root).items():
        if not _is_there(note):
            _unlink(file)


def _notes(root: Path) -> dict[Path, _Note]:
    found = {}
    try:
        names = sorted(os.listdir(root / _NOTES))
    except FileNotFoundError:
        return {}
    for name in names:
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            data = posix.read_regular(root / _NOTES, name, _MOST_NOTE_BYTES)
            if data is not None:
                found[root / _NOTES / name] = msgspec.json.decode(data, type=_Note)
    return found


def _unlink(file: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(file)


def _is_there(note: _Note) -> bool:
    try:
        about = os.stat(note.path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_ino == note.inode


def set_aside(root: Path, step_dir: str, files: list[str], mode: int | None = None) -> Path:
    """Move files of a step directory into a new folder beside it, durably; return that folder.

    The folder is always new, so no earlier file can be in the way or be replaced.
    New directories get the permissions `mode`; None follows the umask.
    """
    aside = _new_folder(root, f"{step_dir}{_ASIDE}", mode)
    for path in files:
        target = aside / path
        posix.make_directories(target.parent, mode)
        try:
            os.rename(root / step_dir / path, target)
        except FileNotFoundError:
            # The file's owner has removed it, or another cleaner was quicker.
            if posix.is_there(root / step_dir / path):
                raise
    posix.fsync_directories(aside)
    posix.fsync_directory(root)
    return aside


def _new_folder(root: Path, name: str, mode: int | None) -> Path:
    folder = root / name
    for number in count(1):
        try:
            posix.make_directory(folder, mode)
        except FileExistsError:
            folder = root / f"{name}-{number}"
        else:
            break
    return folder
