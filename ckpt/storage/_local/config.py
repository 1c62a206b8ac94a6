"""A local root as users name it when a path has no room for how its files are written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from ckpt._arguments import invalid, one_of, true_or_false

FileIo = Literal["direct", "tensorstore"]


@dataclass(frozen=True, slots=True)
class Local:
    """A root on a file system, and how its data files are written and read.

    Attributes:
        path: The directory.
        io: `direct` moves data files past the page cache where the file system can, which is
            fastest on the machines it was measured on. `tensorstore` has the file driver of
            TensorStore write and read the same files. A checkpoint written in one way is read in
            either.
        hard_links: Whether a step shares the files of arrays that are the same as in the step
            before: such a file has a name in both steps, its bytes are stored once, and each step
            can be deleted without harm to the other. False writes every step in full.

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

    def __post_init__(self) -> None:
        one_of("io", self.io, get_args(FileIo), of="Local")
        true_or_false("hard_links", self.hard_links, of="Local")
        given: object = self.path
        if isinstance(given, Local) or not isinstance(given, str | os.PathLike):
            raise invalid("path", given, "the path of a directory", of="Local")
        text: object = os.fspath(given)
        if isinstance(text, str) and "://" in text and not text.lower().startswith("file:"):
            raise invalid("path", text, "the path of a directory, not a URL", of="Local")

    def __fspath__(self) -> str:
        return os.fspath(self.path)
