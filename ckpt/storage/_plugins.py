"""Plugins: stores of other installed packages, by the scheme of their URLs."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from ckpt._arguments import shown
from ckpt._redaction import redact
from ckpt._settings import Timeouts
from ckpt.errors import CheckpointError, InvalidArgumentError
from ckpt.storage._base import Storage

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# The group in which packages register schemes.
ENTRY_POINTS = "ckpt.storage"
_BUILT_IN = ("file", "gs", "memory", "s3")


def schemes() -> list[str]:
    """Return the schemes of all stores that are built in or installed."""
    return sorted({*_BUILT_IN, *(point.name for point in _points())})


def open_installed(scheme: str, url: str, timeouts: Timeouts, *, create: bool) -> Storage | None:
    """Return the storage that an installed package opens for a URL; None if there is none.

    The registered function is called as `open(url, timeouts, create)`.

    Raises:
        InvalidArgumentError: The package cannot be used, or does not accept the URL.
        CheckpointError: The function raised it.
    """
    point = next((each for each in _points() if each.name == scheme), None)
    if point is None:
        return None
    try:
        opened: Any = point.load()(url, timeouts, create)
    except CheckpointError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"path={shown(url)}: {point.value!r:.120}, which is installed for {scheme}://, raised "
            f"{type(error).__name__}: {error}"
        ) from _if_harmless(error)
    missing = [name for name in dir(Storage) if name[0] != "_" and not hasattr(opened, name)]
    if missing:
        raise InvalidArgumentError(
            f"path={shown(url)}: {point.value!r:.120}, which is installed for {scheme}://, gave "
            f"{type(opened).__name__}, which is not a storage: it lacks {', '.join(missing[:5])}"
        )
    storage: Storage = opened
    return storage


def _points() -> list[EntryPoint]:
    # Only here: most programs use built-in schemes, and the import takes 20 ms.
    from importlib.metadata import entry_points

    return list(entry_points(group=ENTRY_POINTS))


def _if_harmless(error: Exception) -> Exception | None:
    """Return an error unless a traceback would show secrets with it."""
    text = "".join(traceback.format_exception(error))
    return error if redact(text) == text else None
