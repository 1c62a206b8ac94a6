"""The trash folder for steps, and the folder for files in a step that others have put there.

The functions block and raise `OSError`.
"""

from __future__ import annotations

import errno
import os
import uuid
from itertools import count
from pathlib import Path

from ckpt.storage._base import TrashEntry
from ckpt.storage._local import posix
from ckpt.storage._local.sweep import attempt_name, trash_name

_ASIDE = ".others"


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


def move_to_trash(root: Path, step_dir: str, trash: Path) -> Path | None:
    """Move a step directory into a folder, durably; return its new path, None if it did not exist.

    It keeps its name, with a number appended if that is taken.

    Raises:
        FileNotFoundError: The step directory exists, and the folder does not.
    """
    for number in count():
        target = trash / (f"{step_dir}-{number}" if number else step_dir)
        try:
            posix.rename_new(root / step_dir, target)
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


def trashed(root: Path, trash: str) -> list[TrashEntry]:
    """Return the directories in the trash folder; none if it is not there."""
    try:
        with os.scandir(root / trash) as entries:
            found = [each for each in entries if each.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    # A rename changes the time of the inode, and nobody writes to a step that was deleted.
    return [
        TrashEntry(each.name, each.name, f"{trash}/{each.name}", each.stat().st_ctime_ns)
        for each in found
    ]


def undelete(root: Path, trash: str, name: str, step_dir: str) -> None:
    """Move a directory out of the trash folder, durably.

    Raises:
        FileExistsError: There is a step directory of that name.
        FileNotFoundError: It is not in the trash any more.
    """
    posix.rename_new(root / trash / name, root / step_dir)
    posix.fsync_directory(root)
    posix.fsync_directory(root / trash)


def hide(root: Path, trash: str, name: str) -> Path | None:
    """Give a directory of the trash a name that a sweep removes, durably; None if it is gone."""
    hidden = root / trash_name(attempt_name(name, uuid.uuid4().hex))
    try:
        os.rename(root / trash / name, hidden)
    except FileNotFoundError:
        return None
    posix.fsync_directory(root)
    posix.fsync_directory(root / trash)
    return hidden


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
            # Its owner has removed it, or another cleaner was quicker.
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
