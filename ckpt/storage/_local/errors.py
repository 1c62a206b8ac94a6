"""Errors of the system, translated to those of the library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from ckpt.errors import CheckpointError, StorageError

T = TypeVar("T")


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
