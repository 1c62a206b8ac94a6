"""Steps moved into a folder instead of removed, and files of others moved out of steps.

Blocking functions that raise `OSError`.
"""

from __future__ import annotations

import errno
import os
import stat
from itertools import count
from pathlib import Path

from ckpt.storage._local import posix

__all__ = ["move_to_trash", "prepare_trash", "set_aside"]

_ASIDE = ".others"


def prepare_trash(root: Path, trash: Path, mode: int | None = None) -> None:
    """Make the folder that steps of `root` are moved into, and check that they can be.

    It gets the permissions `mode`, and so does what is missing above it; None follows the umask.
    """
    for path in posix.make_directories(trash, mode):
        posix.fsync_path(path.parent)
    if os.stat(trash).st_dev != os.stat(root).st_dev:
        raise OSError(
            errno.EXDEV,
            f"it is on another file system than {root}, and steps are only renamed. Choose a "
            "folder of the same file system",
            str(trash),
        )


def move_to_trash(root: Path, entry: str, trash: Path) -> Path | None:
    """Rename an entry into a folder, durably; return its path there, None if it was not there.

    It keeps its name, with a number behind it if that is taken.

    Raises:
        FileNotFoundError: The entry is there, and the folder is not.
    """
    for number in count():
        target = trash / (f"{entry}-{number}" if number else entry)
        try:
            posix.rename_new(root / entry, target)
        except FileExistsError:
            continue
        except FileNotFoundError:
            if posix.is_there(root / entry):
                raise
            return None
        # The new name first: a power cut may show the step at both places, and not at none.
        posix.fsync_path(trash)
        posix.fsync_path(root)
        return target
    raise AssertionError("count() does not end")


def set_aside(root: Path, entry: str, files: list[str], mode: int | None = None) -> Path:
    """Move files of an entry into a folder beside it, durably; return that folder.

    Not one file is replaced there: one whose name is taken gets a number behind it. So does the
    folder, if a file of it is where a directory is needed. New directories get the permissions
    `mode`; None follows the umask.
    """
    aside = root / f"{entry}{_ASIDE}"
    for number in count(1):
        folders = {(aside / path).parent for path in files}
        if not any(_is_blocked(folder, root) for folder in folders):
            break
        aside = root / f"{entry}{_ASIDE}-{number}"
    for folder in folders:
        posix.make_directories(folder, mode)
    for path in files:
        first = aside / path
        for number in count():
            target = first.with_name(f"{first.name}-{number}") if number else first
            try:
                posix.rename_new(root / entry / path, target)
            except FileExistsError:
                continue
            except FileNotFoundError:
                # Its owner was quicker, or another cleaner.
                if posix.is_there(root / entry / path):
                    raise
            break
    for folder in {each for path in folders for each in (path, *path.parents)}:
        if folder == root or folder.is_relative_to(aside):
            posix.fsync_path(folder)
    return aside


def _is_blocked(folder: Path, root: Path) -> bool:
    """Tell whether a folder below `root` cannot be made, or leads elsewhere."""
    below = [path for path in (folder, *folder.parents) if root in path.parents]
    return any(posix.is_there(path) and not stat.S_ISDIR(os.lstat(path).st_mode) for path in below)
