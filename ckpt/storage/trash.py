"""Steps moved into a folder instead of removed, and files of others moved out of steps.

Blocking functions that raise `OSError`.
"""

from __future__ import annotations

import errno
import os
from itertools import count
from pathlib import Path

from ckpt.storage import posix

__all__ = ["move_to_trash", "prepare_trash", "set_aside"]

_ASIDE = ".others"


def prepare_trash(root: Path, trash: Path) -> None:
    """Make the folder that steps of `root` are moved into, and check that they can be."""
    missing = [path for path in (trash, *trash.parents) if not path.exists()]
    os.makedirs(trash, exist_ok=True)
    for path in missing:
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


def set_aside(root: Path, entry: str, files: list[str]) -> Path:
    """Move files of an entry into a folder beside it, durably; return that folder.

    Not one file is replaced there: one whose name is taken gets a number behind it.
    """
    aside = root / f"{entry}{_ASIDE}"
    folders = set()
    for path in files:
        first = aside / path
        os.makedirs(first.parent, exist_ok=True)
        folders.add(first.parent)
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
