"""Exports to a disk, written under a temporary name beside their place, and then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from ckpt._runtime.threads import run_in_thread
from ckpt.errors import InvalidArgumentError, StepExistsError
from ckpt.storage._local.errors import translated
from ckpt.storage._local.posix import exchange, fsync_directory, rename_new
from ckpt.storage._resolve import PathLike, local_path


def export_path(target: PathLike) -> Path:
    """Return the path of an export.

    Raises:
        InvalidArgumentError: The target is not on a disk.
    """
    path = local_path(target)
    if path is None:
        raise InvalidArgumentError(
            f"target={target!r:.200}: exports are written to a path of a disk. Write there, and "
            "copy the result to the store"
        )
    return path


async def exported(
    path: Path,
    overwrite: bool,
    may_replace: Callable[[Path], bool],
    write: Callable[[Path], Awaitable[None]],
) -> None:
    """Write a file or a directory; it is durable on return, and never visible in part.

    Args:
        path: Its path.
        overwrite: True to replace an existing file or directory.
        may_replace: Returns True if an existing directory is such an export.
        write: Writes the export to the given path, which does not exist, and makes all of it
            durable.

    Raises:
        StepExistsError: There is a file or directory that may not be replaced.
        StorageError: The file system refused.

    Cancellation: nothing is left behind.
    """
    await run_in_thread(_refuse_taken, path, overwrite, may_replace)
    temporary = path.parent / f".{path.name[:100]}.{uuid.uuid4().hex}.tmp"
    try:
        with translated("write", path):
            await run_in_thread(lambda: path.parent.mkdir(parents=True, exist_ok=True))
            await write(temporary)
            with anyio.CancelScope(shield=True):
                await run_in_thread(_publish, temporary, path, overwrite)
    finally:
        with anyio.CancelScope(shield=True):
            await run_in_thread(_remove, temporary)


def _refuse_taken(path: Path, overwrite: bool, may_replace: Callable[[Path], bool]) -> None:
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise StepExistsError(
            f"{path} already exists and was not changed. Choose another path, or pass "
            "if_exists='replace' to replace it"
        )
    if path.is_dir() and not may_replace(path):
        raise StepExistsError(
            f"{path} is a directory that was not exported in this format, so it is never replaced. "
            "Move it away, or choose another path"
        )


def _publish(temporary: Path, path: Path, overwrite: bool) -> None:
    if not overwrite or not os.path.lexists(path):
        try:
            rename_new(temporary, path)
        except FileExistsError as error:
            raise StepExistsError(f"{path} was made meanwhile, and was not changed") from error
    elif temporary.is_dir() or path.is_dir():
        exchange(temporary, path)
    else:
        os.replace(temporary, path)
    fsync_directory(path.parent)


def _remove(temporary: Path) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if temporary.is_dir() and not temporary.is_symlink():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink()
