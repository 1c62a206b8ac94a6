"""`Local`: a local root, and how its files are written, for which a path has no room."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

from ckpt._arguments import invalid, one_of, true_or_false
from ckpt.errors import CheckpointError, StorageError

T = TypeVar("T")
FileIo = Literal["direct", "tensorstore"]

# With the set-group bit, all files belong to the group, whichever user makes them.
_MOST_PERMISSIONS = 0o7777
_OWNER = 0o700


@dataclass(frozen=True, slots=True)
class Local:
    """A root on a file system, and how its data files are written and read.

    Attributes:
        path: The directory.
        io: `direct` moves data files past the page cache where the file system can, which is
            fastest on the machines it was measured on. `tensorstore` has the file driver of
            TensorStore write and read the same files. A checkpoint written in one way is read in
            either.
        hard_links: True lets a step share the files of arrays that are the same as in the step
            before: such a file has a name in both steps, its bytes are stored once, and each step
            can be deleted without harm to the other. False writes every step in full.
        permission_mode: Permissions of new directories, such as 0o750; files get the same without
            the execute bits. None lets both follow the umask.

    Raises:
        InvalidArgumentError: An argument is invalid.

    Example:
        ```python
        place = ckpt.storage.Local("runs/a", io="tensorstore")
        mgr = ckpt.CheckpointManager(place)
        ```
    """

    path: str | os.PathLike[str]
    io: FileIo = "direct"
    hard_links: bool = True
    permission_mode: int | None = None

    def __post_init__(self) -> None:
        one_of("io", self.io, get_args(FileIo), of="Local")
        true_or_false("hard_links", self.hard_links, of="Local")
        _check_mode(self.permission_mode)
        given: object = self.path
        if isinstance(given, Local) or not isinstance(given, str | os.PathLike):
            raise invalid("path", given, "the path of a directory", of="Local")
        text: object = os.fspath(given)
        if isinstance(text, str) and "://" in text and not text.lower().startswith("file:"):
            raise invalid("path", text, "the path of a directory, not a URL", of="Local")

    def __fspath__(self) -> str:
        return os.fspath(self.path)


def _check_mode(mode: int | None) -> None:
    if mode is not None and (
        type(mode) is not int or not 0 <= mode <= _MOST_PERMISSIONS or mode & _OWNER != _OWNER
    ):
        what = "permissions that allow the owner of a directory everything, such as 0o750"
        if type(mode) is int and re.fullmatch("7[0-7]{2}", str(mode)):
            what += f". Did you mean 0o{mode}?"
        raise invalid("permission_mode", mode, what, of="Local")


def of_each(
    what: str, top: str, names: Sequence[str], path: str, act: Callable[[str], T]
) -> list[T]:
    """Return the result of `act` for each step directory. An error names the step directory."""
    found = []
    for name in names:
        try:
            found.append(act(name))
        except OSError:
            with translated(what, Path(top, name, path)):
                raise
    return found


@contextlib.contextmanager
def translated(what: str, path: Path | str) -> Iterator[None]:
    """Turn every `OSError` of the body into a `StorageError` that names the path."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot {what} {path}: {reason}", errno=error.errno) from error
