"""Files that users name for traces and pictures."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt.errors import StorageError

PathLike = str | os.PathLike[str]


def write_file(path: PathLike, data: bytes) -> None:
    """Write `data` to `path`, and replace an existing file.

    Raises:
        StorageError: The file system failed.
    """
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise StorageError(
            f"cannot write {os.fspath(path)}: {error.strerror or error}. Give the path of a file "
            "in a directory that exists, that you may write to, on a disk that is not full",
            errno=error.errno,
        ) from error
