"""Paths as users give them, to storage."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ckpt.errors import InvalidArgumentError
from ckpt.redaction import redact
from ckpt.settings import Timeouts
from ckpt.storage.base import Storage
from ckpt.storage.local import LocalStorage

__all__ = ["PathLike", "check_trash", "open_entry", "open_root"]

PathLike = str | os.PathLike[str]

_DEFAULT_TIMEOUTS = Timeouts()
# With the set-group bit, so that a group keeps what its members make.
_MOST_PERMISSIONS = 0o7777
_OWNER = 0o700
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/")


def open_root(
    path: PathLike,
    timeouts: Timeouts = _DEFAULT_TIMEOUTS,
    *,
    create: bool = True,
    permission_mode: int | None = None,
) -> Storage:
    """Return the storage whose root is `path`.

    Args:
        path: The root.
        timeouts: How long leases last.
        create: Whether the root is made if it is not there.
        permission_mode: Permissions of new directories; files get those that files can have. None
            lets both follow the umask.

    Raises:
        InvalidArgumentError: It is not a path, or of a kind of storage this version lacks; or the
            mode is none that the owner could use.
    """
    if permission_mode is not None and (
        type(permission_mode) is not int
        or not 0 <= permission_mode <= _MOST_PERMISSIONS
        or permission_mode & _OWNER != _OWNER
    ):
        raise InvalidArgumentError(
            f"permission_mode={permission_mode!r:.60}: expected the permissions of a directory in "
            "which its owner may do everything, such as 0o750"
        )
    return LocalStorage(_local_path(path), timeouts, create=create, mode=permission_mode)


def check_trash(root: PathLike, trash: PathLike, is_step: Callable[[str], bool]) -> None:
    """Raise if steps of a root cannot be kept apart from those moved into its trash folder.

    Args:
        root: The root.
        trash: A folder below it, or an absolute path.
        is_step: Tells whether a directory of the root may be a step.

    Raises:
        InvalidArgumentError: It is the root, or may be a step of it, or lies in one.
    """
    top = Path(os.path.realpath(_local_path(root)))
    folder = Path(os.path.realpath(top / trash))
    if not folder.is_relative_to(top):
        return
    parts = folder.relative_to(top).parts
    if len(parts) != 1 or is_step(parts[0]) or parts[0] == "metadata" or parts[0].startswith("."):
        raise InvalidArgumentError(
            f"Deletion(trash={os.fspath(trash)!r:.120}): expected a folder of its own directly "
            f"below {_shown(root)}, that is no step and not 'metadata', or one elsewhere"
        )


def open_entry(path: PathLike, *, follow: bool = False) -> tuple[Storage, str]:
    """Return the storage and the entry of a single checkpoint at `path`.

    Args:
        path: The path.
        follow: Take what a symbolic link of that name leads to, for readers: the links that a user
            names are trusted, those in a checkpoint are not.

    Raises:
        InvalidArgumentError: As `open_root`; or the path has no last name.
    """
    given = _local_path(path)
    local = Path(os.path.realpath(given) if follow else os.path.abspath(given))
    if not local.name:
        raise InvalidArgumentError(
            f"path={_shown(path)}: expected the path of a directory, not a root"
        )
    return LocalStorage(local.parent, _DEFAULT_TIMEOUTS), local.name


def _local_path(path: PathLike) -> Path:
    try:
        text: object = os.fspath(path)
    except TypeError as error:
        raise InvalidArgumentError(
            f"path={_shown(path)}: expected a string or a path object, not {type(path).__name__}"
        ) from error
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidArgumentError(f"path={_shown(text)}: expected the path of a directory")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(text)
    if scheme[1].lower() != "file":
        raise InvalidArgumentError(
            f"path={_shown(text)}: storage {scheme[1]!r} is not supported by this "
            "version; give a path of a local or mounted file system"
        )
    parts = urlsplit(text)
    if parts.query or parts.fragment or "\0" in unquote(parts.path):
        raise InvalidArgumentError(
            f"path={_shown(text)}: a file URL has no query and no fragment; write %3F and %23"
        )
    if parts.netloc not in ("", "localhost"):
        raise InvalidArgumentError(f"path={_shown(text)}: a file URL of another host")
    return Path(unquote(parts.path))


def _shown(path: object) -> str:
    # Before it is cut: a part of a secret is not recognized.
    return redact(repr(path))[:120]
