"""Exports of the arrays of a checkpoint, under a temporary name until they are whole."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import anyio
from msgspec import Struct

from ckpt._conversion import safetensors_files, zarr_folder
from ckpt._conversion.checkpoint_items import CheckpointItem, Written
from ckpt._conversion.tensors import PIECE_BYTES, ExportedArray, tensors_of
from ckpt._format.array_format import DTYPES
from ckpt._format.manifest import Manifest
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import InvalidArgumentError, StepExistsError, located
from ckpt.exports import Safetensors, Zarr
from ckpt.storage._local.config import translated
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


_MOST_PIECES = 8
# A piece is in memory twice: as it was read, and as it is written.
_COPIES = 2


class ExportTarget(Struct, frozen=True):
    """A planned export; a `Target`.

    Attributes:
        path: Path of the export.
        options: Its format.
        at: The branch that is exported; None for everything.
        overwrite: True to replace an existing export.
    """

    path: Path
    options: Safetensors | Zarr
    at: str | None
    overwrite: bool

    @property
    def format(self) -> str:
        """Name of the format."""
        return type(self.options).__name__.lower()

    async def write(
        self, items: Mapping[str, CheckpointItem], old: Manifest, budget: int
    ) -> Written:
        """Write the arrays of the items."""
        options = self.options
        module = safetensors_files if isinstance(options, Safetensors) else zarr_folder
        tensors = tensors_of(items, old.unnamed, self.at, module.problem_of)
        at_once = _at_once(tensors, budget)

        async def write(path: Path) -> None:
            if isinstance(options, Safetensors):
                await safetensors_files.write_safetensors(tensors, options, path, at_once)
            else:
                await zarr_folder.write_zarr(tensors, path, at_once)

        with located(step=old.step):
            await exported(self.path, self.overwrite, module.is_export, write)
        nbytes = sum(tensor.spec.nbytes for tensor in tensors)
        return Written(str(self.path), len(tensors), nbytes)


def _at_once(tensors: Sequence[ExportedArray], budget: int) -> int:
    """Return the number of pieces that may be in memory."""
    largest = max((_piece_bytes(tensor) for tensor in tensors), default=0)
    return min(max(budget // (_COPIES * max(largest, PIECE_BYTES)), 1), _MOST_PIECES)


def _piece_bytes(tensor: ExportedArray) -> int:
    chunk = tensor.spec.chunk
    if chunk is None:
        return min(tensor.spec.nbytes, PIECE_BYTES)
    return math.prod(chunk) * DTYPES[tensor.spec.dtype or ""].itemsize
