"""Writes what was drawn or recorded to a file of the user's."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt.errors import StorageError

__all__ = ["PathLike", "write_file"]

PathLike = str | os.PathLike[str]


def write_file(path: PathLike, data: bytes) -> None:
    """Write `data` to `path`, replacing what is there.

    Raises:
        StorageError: The file system refused.
    """
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise StorageError(
            f"cannot write {os.fspath(path)}: {error.strerror or error}. Give the path of a file "
            "in a directory that exists, that you may write to, on a disk that is not full",
            errno=error.errno,
        ) from error
