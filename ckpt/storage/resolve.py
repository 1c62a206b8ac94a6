"""Paths as users give them, to storage."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ckpt.errors import InvalidArgumentError
from ckpt.storage.base import Storage
from ckpt.storage.local import LocalStorage

__all__ = ["PathLike", "open_entry", "open_root"]

PathLike = str | os.PathLike[str]

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/")


def open_root(path: PathLike) -> Storage:
    """Return the storage whose root is `path`.

    Raises:
        InvalidArgumentError: It is not a path, or of a kind of storage this version lacks.
    """
    return LocalStorage(_local_path(path))


def open_entry(path: PathLike) -> tuple[Storage, str]:
    """Return the storage and the entry of a single checkpoint at `path`.

    Raises:
        InvalidArgumentError: As `open_root`; or the path has no last name.
    """
    local = Path(os.path.abspath(_local_path(path)))
    if not local.name:
        raise InvalidArgumentError(f"path={path!r}: expected the path of a directory, not a root")
    return LocalStorage(local.parent), local.name


def _local_path(path: PathLike) -> Path:
    try:
        text: object = os.fspath(path)
    except TypeError as error:
        raise InvalidArgumentError(
            f"path={path!r:.120}: expected a string or a path object, not {type(path).__name__}"
        ) from error
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidArgumentError(f"path={text!r:.120}: expected the path of a directory")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(text)
    if scheme[1].lower() != "file":
        raise InvalidArgumentError(
            f"path={text.split('?')[0]!r:.120}: storage {scheme[1]!r} is not supported by this "
            "version; give a path of a local or mounted file system"
        )
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise InvalidArgumentError(f"path={text!r:.120}: a file URL of another host")
    return Path(unquote(parts.path))
