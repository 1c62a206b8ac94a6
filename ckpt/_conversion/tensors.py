"""Tensors: the arrays of a checkpoint by name, and their bytes written in pieces."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from msgspec import Struct

from ckpt._conversion.checkpoint_items import CheckpointItem
from ckpt._format.array_format import DTYPES
from ckpt._format.regions import Region, chunk_grid, chunk_region
from ckpt._runtime.mappings import map_memory
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import CALLABLE
from ckpt._tree.leaf_names import branch_of, suggestion, unescape_key
from ckpt._tree.leaf_specs import CheckpointLeaf, LeafSpec
from ckpt.errors import WHOLE_ITEM, InvalidArgumentError, UnsupportedLeafError
from ckpt.storage._local.config import translated
from ckpt.storage._local.data_files import WITHOUT_DIRECT, reserve

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
logger = logging.getLogger("ckpt")

# Bytes that are read and written at once, unless the chunks of the checkpoint are larger.
PIECE_BYTES = 8 << 20
_SHOWN = 20


class ExportedArray(Struct, frozen=True, eq=False):
    """An array to export.

    Attributes:
        path: Its leaf path, as messages write it.
        keys: The keys of the path.
        leaf: The array.
    """

    path: str
    keys: tuple[str, ...]
    leaf: CheckpointLeaf

    @property
    def spec(self) -> LeafSpec:
        """Spec of the array."""
        return self.leaf.spec


def tensors_of(
    items: Mapping[str, CheckpointItem],
    unnamed: bool,
    at: str | None,
    problem: Callable[[LeafSpec], str | None],
) -> list[ExportedArray]:
    """Return the arrays of a checkpoint, or of one branch of it.

    Args:
        items: Its items. If there are several, keys begin with the name of the item.
        unnamed: True if the only item has no name.
        at: The branch; None for everything.
        problem: Returns the reason why the format cannot hold a leaf, or None.

    Raises:
        InvalidArgumentError: There is no such branch.
        UnsupportedLeafError: The format cannot hold some leaves; lists them.
    """
    only, branch = (None, "") if at is None else branch_of(at, list(items), unnamed=unnamed)
    found: list[ExportedArray] = []
    problems: list[str] = []
    functions: list[str] = []
    paths: list[str] = []
    for name, item in items.items():
        if only not in (None, name):
            continue
        top = () if unnamed or only is not None else (name,)
        if item.tree is None:
            problems.append(f"{name}: it is not a tree of arrays")
            continue
        names = unboxed_names(item.tree.nodes, item.tree.names)
        for path, leaf in zip(names, item.tree.leaves, strict=True):
            full = ".".join(top if path == WHOLE_ITEM else (*top, path))
            paths.append(full)
            rest = _below(full, branch)
            if rest is None:
                continue
            if not isinstance(leaf, CheckpointLeaf):
                problems.append(f"{full}: it is a Python {type(leaf).__name__}")
                continue
            if leaf.spec.kind == CALLABLE:
                functions.append(full)
                continue
            why = problem(leaf.spec)
            if why is not None:
                problems.append(f"{full}: {why}")
            keys = tuple(unescape_key(key) for key in rest.split(".") if rest)
            found.append(ExportedArray(rest or full, keys, leaf))
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        advice = " Name a branch without them (at='params')" if at is None else ""
        raise UnsupportedLeafError(
            f"{len(problems)} leaves cannot be in this format, so nothing was written.{advice}\n  "
            + "\n  ".join(problems[:_SHOWN])
            + more
        )
    if not found:
        if at is not None:
            hint = suggestion(branch, paths)
            raise InvalidArgumentError(f"at={at!r:.120}: there is no array below it{hint}")
        raise InvalidArgumentError("there is no array in the checkpoint, so nothing was written")
    if functions:
        logger.warning(
            "%d functions among the leaves (%s, ...) are left out", len(functions), functions[0]
        )
    return found


def _below(path: str, at: str) -> str | None:
    """Return the rest of a path below a branch, or None if the path is elsewhere."""
    if not at:
        return path
    if path == at:
        return path.rpartition(".")[2]
    return path[len(at) + 1 :] if path.startswith(f"{at}.") else None


def pieces_of(spec: LeafSpec) -> Iterator[Region]:
    """Yield the regions in which an array is read; together they cover the array."""
    if 0 in spec.shape:
        return
    chunk = spec.chunk or _rows(spec)
    for place in itertools.product(*map(range, chunk_grid(spec.shape, chunk))):
        yield chunk_region(place, chunk, spec.shape)


def _rows(spec: LeafSpec) -> tuple[int, ...]:
    """Return the shape of a box of about `PIECE_BYTES` that is contiguous in the array."""
    left = max(PIECE_BYTES // DTYPES[spec.dtype or ""].itemsize, 1)
    box = list(spec.shape)
    for axis, length in enumerate(spec.shape):
        inner = math.prod(spec.shape[axis + 1 :])
        if inner <= left:
            box[axis] = min(length, max(left // inner, 1))
            break
        box[axis] = 1
    return tuple(box)


# Direct writes consist of whole sectors. Below a MiB the page cache is as fast.
_SECTOR = 4096
_DIRECT_BYTES = 1 << 20
# Size of the scratch memory, which stays in the cache of a core.
_SCRATCH_BYTES = 2 << 20


async def write_pieces(pieces: Iterable[Callable[[Bytes], None]], at_once: int) -> None:
    """Call functions that each read and write a piece, in worker threads.

    Args:
        pieces: The functions; each is called with scratch memory, see `LargeFile.write`.
        at_once: Number of functions that may run at once.
    """
    left = iter(pieces)

    async def work() -> None:
        scratch = np.frombuffer(map_memory(_SCRATCH_BYTES), np.uint8)
        for piece in left:
            await run_in_thread(piece, scratch)

    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(work)


def write_region(
    file: LargeFile, start: int, shape: tuple[int, ...], region: Region, data: Array, scratch: Bytes
) -> None:
    """Write a region of an array to its places in a file that has the array in C order.

    Args:
        file: The file.
        start: Offset of the array in it.
        shape: Shape of the array.
        region: The region.
        data: Its elements.
        scratch: See `LargeFile.write`.
    """
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    itemsize = data.dtype.itemsize
    done = 0
    for offset, count in runs_of(shape, region):
        nbytes = count * itemsize
        file.write(flat[done : done + nbytes], start + offset * itemsize, scratch)
        done += nbytes


def runs_of(shape: tuple[int, ...], region: Region) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the contiguous runs of elements of a region."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    # The axes from here on are whole, so one step along the axis before them is one run.
    inner = len(shape)
    while inner > 0 and region.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    axis = max(inner - 1, 0)
    count = int(np.prod(region.shape[axis:], dtype=np.int64)) if shape else 1
    base = sum(o * s for o, s in zip(region.offset, strides, strict=True))
    for place in np.ndindex(*region.shape[:axis]):
        yield base + sum(p * s for p, s in zip(place, strides, strict=False)), count


class LargeFile:
    """A new file that is written past the page cache if possible.

    Writing through the page cache fills memory with bytes that are not read again soon, and takes
    time: on a virtual machine, 4 GiB took 10.6 s that way, and 5.0 s past it.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        """Make the file, with room for `nbytes`.

        Raises:
            StorageError: The file cannot be made, or the disk has no room for it.
        """
        self._path = path
        with translated("write", path):
            self._open(path, nbytes)

    def __enter__(self) -> LargeFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, path: Path, nbytes: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._direct = -1
        self._fd = os.open(path, flags, 0o666)
        try:
            if nbytes >= _DIRECT_BYTES:
                reserve(self._fd, nbytes)
                with contextlib.suppress(OSError):
                    # Not every file system supports direct I/O.
                    direct = getattr(os, "O_DIRECT", 0)
                    self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | direct)
        except BaseException:
            self.close()
            raise

    def write(self, data: Bytes, offset: int, scratch: Bytes) -> None:
        """Write bytes at an offset.

        Args:
            data: The bytes.
            offset: Their offset in the file.
            scratch: Page-aligned memory, through which whole sectors are copied.

        Raises:
            StorageError: The file system refused.
        """
        with translated("write", self._path):
            self._write_at(data, offset, scratch)

    def _write_at(self, data: Bytes, offset: int, scratch: Bytes) -> None:
        head = min(-offset % _SECTOR, len(data))
        whole = (len(data) - head) // _SECTOR * _SECTOR
        if self._direct < 0 or whole < _DIRECT_BYTES:
            self._write(data, offset)
            return
        self._write(data[:head], offset)
        done = self._write_sectors(data[head : head + whole], offset + head, scratch)
        self._write(data[head + done :], offset + head + done)

    def _write_sectors(self, data: Bytes, offset: int, scratch: Bytes) -> int:
        """Write past the page cache; return the number of bytes written, fewer on a failure."""
        done = 0
        try:
            while done < len(data):
                part = scratch[: len(data) - done]
                np.copyto(part, data[done : done + len(part)])
                written = os.pwrite(self._direct, part.data, offset + done)
                done += written
                if written % _SECTOR:
                    break
        except OSError as error:
            if error.errno not in WITHOUT_DIRECT:
                raise
        return done

    def _write(self, data: Bytes, offset: int) -> None:
        left = data.data
        while left:
            written = os.pwrite(self._fd, left, offset)
            left, offset = left[written:], offset + written

    def sync(self) -> None:
        """Make the file durable."""
        with translated("write", self._path):
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        for fd in (self._direct, self._fd):
            if fd >= 0:
                os.close(fd)
