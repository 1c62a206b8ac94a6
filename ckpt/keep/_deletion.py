"""`Deletion`: how steps that are no longer kept are deleted."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePath

from ckpt._arguments import invalid, true_or_false, whole_number
from ckpt.errors import InvalidArgumentError

_MOST_AT_ONCE = 64
_LONGEST_NAME_BYTES = 255
_NUMBER = re.compile(r"^[0-9]+\Z")
# Names that the format uses in a root.
_RESERVED = frozenset({"metadata"})
_UNFINISHED = ".orbax-checkpoint-tmp"
_OURS = ".ckpt-"


@dataclass(frozen=True, slots=True)
class Deletion:
    """How steps that are no longer kept are deleted.

    Attributes:
        concurrency: Number of steps that are deleted at the same time, from 1 to 64.
        trash: Folder to which steps are moved instead of being removed, until `mgr.trash.empty()`
            removes them or `mgr.trash.undelete(step)` takes one back. It is the name of a folder
            below the root, or an absolute path. In a store any name will do: the objects of a step
            stay where they are. None removes steps.
        keep_latest: Keep the greatest step whatever the keep policy says. With False, the
            step to resume from can be deleted.
        orbax_steps: Delete steps that Orbax wrote by the same policy. By default they stay, and
            only `delete(step)` removes one.

    Raises:
        InvalidArgumentError: `concurrency` is out of its range, or `trash` could be the name of a
            step, contains `..`, or is a relative path of several folders.

    Example:
        ```python
        deletion = ckpt.keep.Deletion(trash="trash", concurrency=8)
        mgr = ckpt.CheckpointManager(root, keep=3, trash=deletion)
        ```
    """

    concurrency: int = 2
    trash: str | os.PathLike[str] | None = None
    keep_latest: bool = True
    orbax_steps: bool = False

    def __post_init__(self) -> None:
        count = whole_number("concurrency", self.concurrency, of="Deletion", most=_MOST_AT_ONCE)
        object.__setattr__(self, "concurrency", count)
        true_or_false("keep_latest", self.keep_latest, of="Deletion")
        true_or_false("orbax_steps", self.orbax_steps, of="Deletion")
        if self.trash is not None:
            # As text, so that equal paths are equal.
            object.__setattr__(self, "trash", _checked_trash(self.trash))


def trash_of(deletion: Deletion) -> str | None:
    """Return the trash as text; None if steps are removed."""
    return None if deletion.trash is None else os.fspath(deletion.trash)


def _checked_trash(trash: object) -> str:
    path = os.fspath(trash) if isinstance(trash, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise _wrong_trash(trash, "the name of a folder, or an absolute path")
    if ".." in PurePath(path).parts:
        raise _wrong_trash(trash, "a path without '..'")
    if os.path.isabs(path):
        if path.strip("/") == "":
            raise _wrong_trash(trash, "a folder, not the root of the file system")
        return path
    if "/" in path or path == "." or len(os.fsencode(path)) > _LONGEST_NAME_BYTES:
        raise _wrong_trash(
            trash, "the name of one folder below the root, such as 'trash', or an absolute path"
        )
    if _NUMBER.match(path) or path in _RESERVED or _UNFINISHED in path or path.startswith(_OURS):
        raise _wrong_trash(
            trash,
            f"a name that is not a step's, not 'metadata', without '{_UNFINISHED}' in it, and not "
            f"beginning with '{_OURS}'",
        )
    return path


def _wrong_trash(trash: object, expected: str) -> InvalidArgumentError:
    return invalid("trash", trash, expected, of="Deletion")
