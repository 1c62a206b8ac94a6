"""How what is not kept is deleted."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePath

from ckpt._arguments import check_bool, check_count, shown
from ckpt.errors import InvalidArgumentError

__all__ = ["Deletion"]

_MOST_AT_ONCE = 64
_LONGEST_NAME_BYTES = 255
_NUMBER = re.compile(r"^[0-9]+\Z")
# Names that mean something in a root: see the format.
_RESERVED = frozenset({"metadata"})
_UNFINISHED = ".orbax-checkpoint-tmp"
_OURS = ".ckpt-"


@dataclass(frozen=True, slots=True)
class Deletion:
    """How steps that are no longer kept are deleted.

    Attributes:
        concurrency: How many steps are deleted at the same time, from 1 to 64.
        trash: Where steps go instead of being removed, for something else to empty: the name of a
            folder below the root, or an absolute path. None removes them.
        keep_latest: Keep the greatest step whatever the preservation policy says. With False the
            step one would resume from can be deleted.

    Raises:
        InvalidArgumentError: One of them cannot be meant: such as a trash that could be a step,
            has `..` in it, or lies in another folder than the root's without being absolute.
    """

    concurrency: int = 2
    trash: str | os.PathLike[str] | None = None
    keep_latest: bool = True

    def __post_init__(self) -> None:
        count = check_count("Deletion", self.concurrency, name="concurrency", most=_MOST_AT_ONCE)
        object.__setattr__(self, "concurrency", count)
        check_bool("Deletion", self.keep_latest, name="keep_latest")
        if self.trash is not None:
            # As text, so that equal ones are equal.
            object.__setattr__(self, "trash", _checked_trash(self.trash))


def _checked_trash(trash: object) -> str:
    path = os.fspath(trash) if isinstance(trash, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise _no_trash(trash, "expected the name of a folder, or an absolute path")
    if ".." in PurePath(path).parts:
        raise _no_trash(trash, "expected a path without '..'")
    if os.path.isabs(path):
        if path.strip("/") == "":
            raise _no_trash(trash, "expected a folder, not the root of the file system")
        return path
    if "/" in path or path == "." or len(os.fsencode(path)) > _LONGEST_NAME_BYTES:
        raise _no_trash(
            trash,
            "expected the name of one folder below the root, such as 'trash', or an absolute path",
        )
    if _NUMBER.match(path) or path in _RESERVED or _UNFINISHED in path or path.startswith(_OURS):
        raise _no_trash(
            trash,
            f"expected a name that is not a step's, not 'metadata', without '{_UNFINISHED}' in it, "
            f"and not beginning with '{_OURS}'",
        )
    return path


def _no_trash(trash: object, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"Deletion(trash={shown(trash, 120)}): {expected}")
