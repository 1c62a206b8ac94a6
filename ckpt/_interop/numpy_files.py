"""Files of numpy, opened: an archive of arrays, or one array, as a manifest over the file.

Python's `zipfile` and numpy's parser of headers read them, in a worker thread, from any storage.
"""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

import anyio
import anyio.from_thread
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._format.digests import digest
from ckpt._format.dtypes import DTYPES
from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._interop.foreign import (
    ITEM,
    Fill,
    ForeignCheckpoint,
    ForeignFiles,
    is_file,
    manifest_of,
    structure_of,
)
from ckpt._interop.nested_names import nested
from ckpt._interop.runs_of_bytes import kind_of, leaf_of_run
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import host_memory_bytes
from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError, located
from ckpt.storage._base import UNKNOWN_SIZE, ReadsTails, Storage

logger = logging.getLogger("ckpt")

# What a manifest is of that describes a file of numpy.
FORMAT = "numpy"
SUFFIXES = (ARCHIVE, ARRAY) = (".npz", ".npy")
# By what numpy calls a dtype that it knows itself, the name that it has in a manifest.
_NAMES = {
    dtype.str: name
    for name, dtype in DTYPES.items()
    if dtype.isbuiltin == 1 and dtype.kind in "biufc"
}
# What numpy calls bfloat16, of which it does not know the name; no other dtype of JAX has two bytes
# and no name.
_NAMELESS = "|V2"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_LONGEST_HEADER = 10_000
_MAX_RANK = 64
# Usual headers have 128 bytes.
_HEAD_BYTES = 1 << 10
# Of the flags of a member.
_ENCRYPTED = 1
# What is read and inflated at once.
_PIECE_BYTES = 1 << 20
# The end of an archive, with the place of its directory where numbers need 64 bits.
_END, _END_64, _END_BYTES = b"PK\5\6", b"PK\6\6", 22 + 20 + 56
# What zipfile and numpy raise of a file that is damaged.
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, OverflowError, MemoryError),
    *(ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError),
)


async def open_numpy(storage: Storage, name: str) -> ForeignCheckpoint | None:
    """Return the checkpoint that a file of numpy is; None if there is no such file.

    Args:
        storage: The directory, or the place in a store.
        name: The file in it.

    Raises:
        CorruptCheckpointError: It is damaged; names the array.
        UnsupportedFormatError: An array is of a kind that is not read; names the array.
        StorageError: The store refused.
    """
    size = await _size(storage, name) if await is_file(storage, name) else None
    if size is None:
        return None
    where = f"{storage.location}/{name}"

    def file() -> IO[bytes]:
        stored: Any = _StoredFile(storage, name, size)
        # What is before a member, and its header, in one request.
        return io.BufferedReader(stored, _HEAD_BYTES) if name.endswith(ARCHIVE) else stored

    # One thread at a time, since zipfile has one place in the file for all members; and none of the
    # loop's, which read what it waits for.
    limiter = anyio.CapacityLimiter(1)
    manifest, made = await run_in_thread(_opened, file, name, where, limiter, limiter=limiter)
    return ForeignCheckpoint(manifest, ForeignFiles(storage, "", {ITEM: ""}, made=made))


async def _size(storage: Storage, name: str) -> int | None:
    """Return the size of a file; None if there is none."""
    if not isinstance(storage, ReadsTails):
        data = await storage.read("", name, host_memory_bytes())
        return None if data is None else len(data)
    found = await storage.read_tail("", name, _END_BYTES)
    if found is None or found[1] != UNKNOWN_SIZE:
        return None if found is None else found[1]
    # A store does not tell. An archive says how long it is up to its end, which the tail has.
    tail, _ = found
    end, end_64 = tail.rfind(_END), tail.rfind(_END_64)
    if not 0 <= end <= len(tail) - 22:
        return UNKNOWN_SIZE
    nbytes, offset = struct.unpack_from("<II", tail, end + 12)
    if 0 <= end_64 <= end - 76:
        end = end_64
        nbytes, offset = struct.unpack_from("<QQ", tail, end + 40)
    return int(offset + nbytes + len(tail) - end)


class _StoredFile(io.RawIOBase):
    """A file of a storage, for code that reads files in a worker thread."""

    def __init__(self, storage: Storage, name: str, size: int) -> None:
        self._storage = storage
        self._name = name
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self._size == UNKNOWN_SIZE:
            raise zipfile.BadZipFile("it does not end like a zip archive")
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        length = len(buffer)
        if self._size != UNKNOWN_SIZE:
            length = max(0, min(length, self._size - self._at))
        if length:
            target = memoryview(buffer)[:length]
            anyio.from_thread.run(self._storage.read_block, "", self._name, self._at, target)
            self._at += length
        return length


class _Array(Struct, frozen=True):
    """An array in a file of numpy.

    Attributes:
        open: Opens the file; of a compressed array its header with the elements behind it.
        dtype: Its dtype, by the name that it has in a manifest.
        shape: Its shape.
        header: How long the header is.
        is_fortran: Whether the first index is the fastest.
        is_big_endian: Whether the bytes of each number are the other way round.
        start: Where the header is in the file, unless it is compressed.
        check: What tells it from another.
    """

    open: Callable[[], IO[bytes]]
    dtype: str
    shape: tuple[int, ...]
    header: int
    is_fortran: bool
    is_big_endian: bool
    start: int | None
    check: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def offset(self) -> int | None:
        """Where the elements are in the file as this library has them, or None."""
        is_plain = not (self.is_fortran or self.is_big_endian)
        return self.start + self.header if is_plain and self.start is not None else None


class _ArrayLeaf:
    """An array in the place of its leaf."""

    __slots__ = ("array",)

    def __init__(self, array: _Array) -> None:
        self.array = array


def _opened(
    file: Callable[[], IO[bytes]], name: str, where: str, limiter: anyio.CapacityLimiter
) -> tuple[Manifest, Mapping[str, Fill]]:
    """Return the manifest of a file, and the files that are made of it when they are read."""
    with _errors_of(where):
        stored = file()
        if name.endswith(ARRAY):
            tree: Any = _ArrayLeaf(_array(stored, file, 0, 0))
            _check_end(stored, tree.array)
        else:
            tree = _tree(_members(stored, file, where), where)
        structure = structure_of(tree, where)
    files = [name]
    made: dict[str, Fill] = {}
    entries: list[LeafEntry] = []
    arrays = [leaf.array for leaf in structure.leaves]
    nameless = [
        each
        for each, array in zip(structure.names, arrays, strict=True)
        if array.dtype == "bfloat16"
    ]
    if nameless:
        logger.warning(
            "%s: %d arrays of two bytes have no dtype, as numpy saves bfloat16, and are read as "
            "that, such as %r",
            redact(where),
            len(nameless),
            nameless[0],
        )
    for leaf, array in zip(structure.names, arrays, strict=True):
        number, offset = 0, array.offset
        if offset is None:
            # As it is a path in a file, no other file has it.
            number, offset = len(files), 0
            files.append(f"{name}/{number}")
            made[f"{ITEM}/{files[-1]}"] = _Elements(where, leaf, array, limiter).fill
        kind, in_blocks = kind_of(array.dtype), not array.is_fortran
        entries.append(
            leaf_of_run(leaf, kind, array.dtype, array.shape, number, offset, in_blocks=in_blocks)
        )
    nbytes = sum(array.nbytes for array in arrays)
    item = ItemEntry("pytree", list(structure.nodes), LeafTable.of(entries), [], files, nbytes)
    identity = [f"{entry!r} {array.check}" for entry, array in zip(entries, arrays, strict=True)]
    return manifest_of(FORMAT, item, digest("\n".join(identity).encode())), made


def _read_at_least(nbytes: int, member: Any) -> None:
    """Set how many bytes of a file are inflated at once; has no effect on other files."""
    member.MIN_READ_SIZE = nbytes


def _check_end(file: IO[bytes], array: _Array) -> None:
    """Find a file that was cut, and not in the middle of a load."""
    file.seek(array.header + array.nbytes - 1)
    if not file.read(1):
        raise CorruptCheckpointError(f"it has fewer than the {array.nbytes} bytes of its array")


def _members(file: IO[bytes], again: Callable[[], IO[bytes]], where: str) -> dict[str, _Array]:
    """Return the arrays of an archive by name; `again` opens the archive once more."""
    # Closed with the last of its members.
    archive = zipfile.ZipFile(file)
    found: dict[str, _Array] = {}
    others: list[str] = []
    for member in archive.infolist():
        name = member.filename.removesuffix(ARRAY)
        if name == member.filename:
            others.append(name)
            continue
        with located(leaf=name), _errors_of(where):
            if name in found:
                raise CorruptCheckpointError("two members of the archive have its name")
            if member.flag_bits & _ENCRYPTED:
                raise UnsupportedFormatError("it is encrypted")
            with archive.open(member) as opened:
                # What a header takes, and not all that is behind it.
                _read_at_least(_HEAD_BYTES // 2, opened)
                array = _array(opened, partial(archive.open, member), None, member.CRC)
            if array.header + array.nbytes != member.file_size:
                raise CorruptCheckpointError(
                    f"{array.dtype}{list(array.shape)!s:.80} has {array.nbytes} bytes behind its "
                    f"header, and there are {member.file_size - array.header}"
                )
            if member.compress_type == zipfile.ZIP_STORED:
                file.seek(member.header_offset + 26)
                start = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
                # Not by zipfile, which loses count in Python 3.13 when it goes forward in a member.
                array = replace(array, open=again, start=start)
            found[name] = array
    if others and not found:
        raise UnsupportedFormatError(
            f"it holds no array of numpy, but {len(others)} other files, such as {others[0]!r:.120}"
        )
    if others:
        logger.warning(
            "%s: %d files in it are no arrays and are left out, such as %r",
            redact(where),
            len(others),
            others[0][:120],
        )
    return {name: found[name] for name in sorted(found)}


def _array(
    opened: IO[bytes], again: Callable[[], IO[bytes]], start: int | None, check: int
) -> _Array:
    """Return the array whose header a file begins with."""
    version = np.lib.format.read_magic(opened)
    if version not in _HEADERS:
        raise UnsupportedFormatError(
            f"it is of version {version[0]} of numpy's format, which is not known here"
        )
    try:
        shape, is_fortran, dtype = _HEADERS[version](opened, max_header_size=_LONGEST_HEADER)
    except ValueError as error:
        if "dtype" in str(error):
            raise _unnamed(str(error)) from error
        raise
    name = _NAMES.get(dtype.newbyteorder("=").str)
    if dtype.str == _NAMELESS:
        name = "bfloat16"
    if name is None:
        raise _unknown(dtype)
    if len(shape) > _MAX_RANK or any(n < 0 for n in shape):
        raise CorruptCheckpointError(f"its header is damaged: the shape is {shape!r:.80}")
    array = _Array(
        again,
        name,
        tuple(shape),
        opened.tell(),
        # With a single axis, there is one order.
        is_fortran and sum(n > 1 for n in shape) > 1,
        dtype.str[0] == ">",
        start,
        check,
    )
    available = host_memory_bytes()
    # The order of Fortran is changed from one buffer to another.
    if array.is_fortran and 2 * array.nbytes > available:
        raise UnsupportedFormatError(
            "it is in the order of Fortran, and so cannot be read in parts: that takes "
            f"{2 * array.nbytes} bytes of memory, and this machine has {available}. Save it in the "
            "order of C"
        )
    return array


def _tree(arrays: Mapping[str, _Array], where: str) -> Any:
    leaves = {name: _ArrayLeaf(array) for name, array in arrays.items()}
    tree = nested(leaves, where, "./")
    if tree is None:
        logger.warning(
            "%s: some names are parts of others, so the names are the keys of one dict",
            redact(where),
        )
    return leaves if tree is None else tree


class _Elements:
    """The elements of an array that is not plain, as if they were a file of their own.

    They are read forward. Who asks for earlier ones has the array inflated from its beginning.
    """

    def __init__(
        self, where: str, leaf: str, array: _Array, limiter: anyio.CapacityLimiter
    ) -> None:
        self._where = where
        self._leaf = leaf
        self._array = array
        self._limiter = limiter
        self._file: IO[bytes] | None = None
        # In the order of the requests, which is that of the elements.
        self._lock = anyio.Lock()

    async def fill(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the elements from a byte of them on.

        Raises:
            CorruptCheckpointError: They are damaged; names the leaf.
        """
        async with self._lock:
            await run_in_thread(self._fill, offset, target, limiter=self._limiter)

    def _fill(self, offset: int, target: memoryview) -> None:
        array = self._array
        with located(leaf=self._leaf), _errors_of(self._where):
            if not array.is_fortran:
                self._read(offset, target)
                _to_native(array, target)
                return
            whole = memoryview(bytearray(array.nbytes))
            self._read(0, whole)
            _to_native(array, whole)
            stored = np.frombuffer(whole, DTYPES[array.dtype]).reshape(array.shape[::-1]).T
            ordered = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
            target[:] = ordered[offset : offset + len(target)].data

    def _read(self, offset: int, target: memoryview) -> None:
        array = self._array
        if self._file is None:
            self._file = array.open()
            _read_at_least(_PIECE_BYTES, self._file)
        self._file.seek((array.start or 0) + array.header + offset)
        at = 0
        while at < len(target):
            piece = self._file.read(min(len(target) - at, _PIECE_BYTES))
            if not piece:
                raise CorruptCheckpointError(f"it has fewer than its {array.nbytes} bytes")
            target[at : at + len(piece)] = piece
            at += len(piece)
        if offset + at == array.nbytes:
            if array.start is None:
                # At its end the checksum is compared.
                self._file.read(1)
            self._file.close()
            self._file = None


def _to_native(array: _Array, elements: memoryview) -> None:
    """Turn the bytes of big-endian numbers round, in place."""
    if array.is_big_endian:
        dtype = DTYPES[array.dtype]
        width = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        np.frombuffer(elements, f"u{width}").byteswap(inplace=True)


def _unknown(dtype: np.dtype[Any]) -> UnsupportedFormatError:
    """Return the error for a dtype that is not read."""
    if dtype.names is not None:
        return UnsupportedFormatError(
            f"it has the structured dtype {dtype!s:.80}, which is not read here: save each of its "
            "fields as an array"
        )
    if dtype.hasobject:
        return UnsupportedFormatError(
            "it is an array of Python objects, which numpy pickles, and to read a pickle is to run "
            "the code in it: that is not done here. Save arrays of numbers, each under its name"
        )
    if dtype.kind == "V":
        return _unnamed(f"it has the dtype {dtype.str!r:.40}")
    return UnsupportedFormatError(
        f"it has the dtype {dtype.str!r:.40}, which is not read here: save it as numbers"
    )


def _unnamed(found: str) -> UnsupportedFormatError:
    """Return the error for a dtype that numpy does not know by name."""
    return UnsupportedFormatError(
        f"{found:.120}, as numpy calls dtypes that it does not know, so it cannot be told which. "
        "Save it with ckpt.save or as safetensors; or save array.astype(numpy.float32)"
    )


@contextmanager
def _errors_of(where: str) -> Iterator[None]:
    """Translate what zipfile and numpy raise, and name the file."""
    try:
        yield
    except CheckpointError as error:
        known = isinstance(error, CorruptCheckpointError | UnsupportedFormatError)
        if not known or where in error.message:
            raise
        raise type(error)(f"{where}: {error.message}", leaf=error.leaf) from error
    except NotImplementedError as error:
        raise UnsupportedFormatError(f"{where}: it is not read here: {error}") from error
    except _DAMAGED as error:
        reason = str(error) or type(error).__name__
        raise CorruptCheckpointError(f"{where}: it is damaged: {reason:.200}") from error
