"""Files of numpy, opened as a manifest over the file: an archive of arrays, or one array.

Python's `zipfile` and numpy's header parser read them in a worker thread, from any storage.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

import anyio
import anyio.from_thread
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._format.array_format import DTYPES
from ckpt._interop.foreign import (
    UNREAD_ERRORS,
    ForeignCheckpoint,
    ForeignFiles,
    checkpoint_of,
    naming,
    structure_of,
)
from ckpt._interop.runs_of_bytes import StoredRun, nested
from ckpt._redaction import redact
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import host_memory_bytes
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedFormatError,
)
from ckpt.storage._base import UNKNOWN_SIZE, Storage

logger = logging.getLogger("ckpt")

# Format of a manifest that describes a numpy file.
FORMAT = "numpy"
ARRAY = ".npy"
# Files in archives of other libraries, which are not supported here.
_MAKERS = {"model.weights.h5": "Keras", "data.pkl": "PyTorch"}
# Names of dtypes in a manifest, by the names of numpy's own dtypes.
_NAMES = {
    dtype.str: name
    for name, dtype in DTYPES.items()
    if dtype.isbuiltin == 1 and dtype.kind in "biufc"
}
# The name that numpy gives to bfloat16, whose own name it does not know; no other dtype of JAX has
# two bytes and no name.
_NAMELESS = "|V2"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_LONGEST_HEADER = 10_000
_MAX_RANK = 64
# Usual headers have 128 bytes.
_HEAD_BYTES = 1 << 10
# Number of archive members whose beginnings are read at once.
_AHEAD, _CONCURRENT_READS = 256, 16
# Bit in the flags of a member.
_ENCRYPTED = 1
# Bytes that are read and inflated at once.
_PIECE_BYTES = 1 << 20
# Marks and length of the end of an archive, which may have its directory's place in 64 bits.
_END, _END_64, _END_BYTES = b"PK\5\6", b"PK\6\6", 22 + 20 + 56
# Errors that zipfile and numpy raise for a damaged file.
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, OverflowError, MemoryError),
    *(ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError),
)


async def open_numpy(storage: Storage, name: str, *, is_archive: bool) -> ForeignCheckpoint | None:
    """Return the checkpoint in a numpy file; None if the file is gone.

    Args:
        storage: The directory, or the place in a store.
        name: Name of the file in it.
        is_archive: True for an archive of arrays, False for one array.

    Raises:
        CorruptCheckpointError: The file is damaged; names the array.
        UnsupportedFormatError: An array is of a kind that is not read; names the array.
        StorageError: The store refused.
    """
    size = await _size(storage, name)
    if size is None:
        return None
    where = f"{storage.location}/{name}"

    def file() -> IO[bytes]:
        stored: Any = _StoredFile(storage, name, size)
        # One request reads the local header of a member and the header of its array.
        return io.BufferedReader(stored, _HEAD_BYTES) if is_archive else stored

    # A limiter of its own, with one thread at a time: zipfile has one position in the file for all
    # members, and the default threads are needed for the reads that this thread waits for.
    limiter = anyio.CapacityLimiter(1)
    found = ForeignFiles(storage, "")
    make = partial(_opened, found, file, name, where, limiter, is_archive=is_archive)
    return await run_in_thread(make, limiter=limiter)


async def _size(storage: Storage, name: str) -> int | None:
    """Return the size of a file; None if there is none."""
    found = await storage.read_tail("", name, _END_BYTES)
    if found is None or found[1] != UNKNOWN_SIZE:
        return None if found is None else found[1]
    # A store does not report the size. The tail of an archive records where its end is.
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
        # The data that `look_ahead` has read, by offset, until it is used.
        self._ahead: dict[int, bytes] = {}

    def look_ahead(self, places: Iterable[int]) -> None:
        """Read the beginnings of members at once: a store takes as long for one as for many."""

        async def read(place: int) -> None:
            head = bytearray(_HEAD_BYTES)
            # If that fails, for example near the end, the beginning is read when its turn comes.
            with contextlib.suppress(CorruptCheckpointError, StorageError):
                await self._storage.read_block("", self._name, place, memoryview(head))
                self._ahead[place] = bytes(head)

        self._ahead.clear()
        anyio.from_thread.run(for_each, read, places, _CONCURRENT_READS)

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
        ahead = self._ahead.pop(self._at, None)
        if ahead is not None and len(ahead) <= length:
            buffer[: len(ahead)] = ahead
            self._at += len(ahead)
            return len(ahead)
        if length:
            target = memoryview(buffer)[:length]
            anyio.from_thread.run(self._storage.read_block, "", self._name, self._at, target)
            self._at += length
        return length


class _Array(Struct, frozen=True):
    """An array in a file of numpy.

    Attributes:
        open: Opens the file; for a compressed array, the member with its header and elements.
        dtype: Name of its dtype in a manifest.
        shape: Its shape.
        header: Length of its header.
        is_fortran: True if the first index is the fastest.
        is_big_endian: True if its numbers are big-endian.
        start: Offset of its header in the file; None if it is compressed.
        check: Checksum that distinguishes it from other arrays.
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

    def run(self, where: str, limiter: anyio.CapacityLimiter) -> StoredRun:
        """Return the array as a run of bytes; `where` is the file."""
        start, fill = self.start, None
        if start is None or self.is_fortran or self.is_big_endian:
            start, fill = 0, _Elements(where, self, limiter).fill
        return StoredRun(
            self.dtype,
            self.shape,
            start + self.header,
            fill=fill,
            in_blocks=not self.is_fortran,
            check=self.check,
        )


def _opened(
    found: ForeignFiles,
    file: Callable[[], IO[bytes]],
    name: str,
    where: str,
    limiter: anyio.CapacityLimiter,
    *,
    is_archive: bool,
) -> ForeignCheckpoint:
    with _errors_of(where):
        stored = file()
        if is_archive:
            tree: Any = nested(_members(stored, file, where), where, "./")
        else:
            tree = _array(stored, file, 0, 0)
            _check_end(stored, tree)
        structure = structure_of(tree, where)
    arrays = [leaf if isinstance(leaf, _Array) else None for leaf in structure.leaves]
    nameless = [
        each
        for each, array in zip(structure.names, arrays, strict=True)
        if array is not None and array.dtype == "bfloat16"
    ]
    if nameless:
        logger.warning(
            "%s: %d arrays of two bytes have no dtype, as numpy saves bfloat16, and are read as "
            "that, such as %r",
            redact(where),
            len(nameless),
            nameless[0],
        )
    leaves = [
        leaf.run(where, limiter) if isinstance(leaf, _Array) else leaf for leaf in structure.leaves
    ]
    return checkpoint_of(FORMAT, found, [name], structure, leaves, where)


def _read_at_least(nbytes: int, member: Any) -> None:
    """Set the number of bytes that a member inflates at once; has no effect on other files."""
    member.MIN_READ_SIZE = nbytes


def _has(file: IO[bytes], place: int) -> bool:
    # In a store, a read beyond the end raises an error.
    with contextlib.suppress(CorruptCheckpointError):
        file.seek(place)
        return bool(file.read(1))
    return False


def _check_end(file: IO[bytes], array: _Array) -> None:
    """Detect a truncated file at open rather than in the middle of a load; or further arrays."""
    end = array.header + array.nbytes
    if not _has(file, end - 1):
        raise CorruptCheckpointError(f"it has fewer than the {array.nbytes} bytes of its array")
    if _has(file, end):
        raise UnsupportedFormatError(
            "it holds more than one array, one after the other, as Equinox writes them, which is "
            "not read here: load it with equinox or numpy, and save the tree with ckpt.save"
        )


def _members(
    file: IO[bytes], again: Callable[[], IO[bytes]], where: str
) -> dict[str, _Array | CheckpointError]:
    """Return the arrays of an archive by name, with the error of each unreadable one.

    Args:
        file: The archive.
        again: Opens the archive once more.
        where: The file, for messages.
    """
    # Not closed here: the last of its members closes it.
    archive = zipfile.ZipFile(file)
    found: dict[str, _Array | CheckpointError] = {}
    others: list[str] = []
    members = archive.infolist()
    for number, member in enumerate(members):
        if number % _AHEAD == 0 and isinstance(raw := getattr(file, "raw", None), _StoredFile):
            raw.look_ahead(each.header_offset for each in members[number : number + _AHEAD])
        name = member.filename.removesuffix(ARRAY)
        if name == member.filename:
            others.append(name)
            continue
        try:
            with _errors_of(where):
                if name in found:
                    raise CorruptCheckpointError("two members of the archive have its name")
                found[name] = _member(archive, member, file, again)
        except UNREAD_ERRORS as error:
            found[name] = error
    if others and not found:
        raise UnsupportedFormatError(
            f"it is an archive that holds no array of numpy, but {len(others)} other files, such "
            f"as {others[0]!r:.120}{_maker(others)}"
        )
    if others:
        logger.warning(
            "%s: %d files in it are no arrays and are left out, such as %r",
            redact(where),
            len(others),
            others[0][:120],
        )
    return {name: found[name] for name in sorted(found)}


def _member(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    file: IO[bytes],
    again: Callable[[], IO[bytes]],
) -> _Array:
    if member.flag_bits & _ENCRYPTED:
        raise UnsupportedFormatError("it is encrypted")
    with archive.open(member) as opened:
        # Read the bytes of a header, not all that is behind it.
        _read_at_least(_HEAD_BYTES // 2, opened)
        array = _array(opened, partial(archive.open, member), None, member.CRC)
    if array.header + array.nbytes != member.file_size:
        raise CorruptCheckpointError(
            f"{array.dtype}{list(array.shape)!s:.80} has {array.nbytes} bytes behind its "
            f"header, and there are {member.file_size - array.header}"
        )
    if member.compress_type != zipfile.ZIP_STORED:
        return array
    file.seek(member.header_offset + 26)
    start = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
    # Read without zipfile, which loses count in Python 3.13 on seeking forward in a member.
    return replace(array, open=again, start=start)


def _maker(members: Sequence[str]) -> str:
    """Return a note on the library that writes archives with these members, for messages."""
    found = [
        maker
        for name, maker in _MAKERS.items()
        if any(f"/{each}".endswith(f"/{name}") for each in members)
    ]
    return f": it is one of {found[0]}, so load it with that" if found else ""


def _array(
    opened: IO[bytes], again: Callable[[], IO[bytes]], start: int | None, check: int
) -> _Array:
    """Return the array whose header is at the beginning of a file."""
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
        # With a single axis longer than 1, both orders are the same.
        is_fortran and sum(n > 1 for n in shape) > 1,
        dtype.str[0] == ">",
        start,
        check,
    )
    available = host_memory_bytes()
    # Conversion from the Fortran order needs a second buffer.
    if array.is_fortran and 2 * array.nbytes > available:
        raise UnsupportedFormatError(
            "it is in the order of Fortran, and so cannot be read in parts: that takes "
            f"{2 * array.nbytes} bytes of memory, and this machine has {available}. Save it in the "
            "order of C"
        )
    return array


class _Elements:
    """The elements of an array that is not plain, as if they were in a file of their own.

    They are read forward. A read of earlier elements inflates the array from its beginning again.
    """

    def __init__(self, where: str, array: _Array, limiter: anyio.CapacityLimiter) -> None:
        self._where = where
        self._array = array
        self._limiter = limiter
        self._file: IO[bytes] | None = None
        # Serves requests in their order, which is the order of the elements.
        self._lock = anyio.Lock()

    async def fill(self, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of the elements, from `offset` on.

        Raises:
            CorruptCheckpointError: The elements are damaged; names the file.
        """
        async with self._lock:
            await run_in_thread(self._fill, offset, target, limiter=self._limiter)

    def _fill(self, offset: int, target: memoryview) -> None:
        array = self._array
        with _errors_of(self._where):
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
                # A read at the end makes zipfile compare the checksum.
                self._file.read(1)
            self._file.close()
            self._file = None


def _to_native(array: _Array, elements: memoryview) -> None:
    """Reverse the bytes of big-endian numbers, in place."""
    if array.is_big_endian:
        dtype = DTYPES[array.dtype]
        width = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        np.frombuffer(elements, f"u{width}").byteswap(inplace=True)


def _unknown(dtype: np.dtype[Any]) -> UnsupportedFormatError:
    """Return the error for an unsupported dtype."""
    if dtype.hasobject:
        return UnsupportedFormatError(
            "it is an array of Python objects, which numpy pickles, and to read a pickle is to run "
            "the code in it: that is not done here. Save arrays of numbers, each under its name"
        )
    if dtype.kind == "V" and dtype.names is None:
        return _unnamed(f"it has the dtype {dtype.str!r:.40}")
    what = "numbers" if dtype.names is None else "an array for each of its fields"
    return UnsupportedFormatError(
        f"it has the dtype {dtype!s:.80}, which is not read here: save it as {what}"
    )


def _unnamed(found: str) -> UnsupportedFormatError:
    """Return the error for a dtype whose name numpy does not know."""
    return UnsupportedFormatError(
        f"{found:.120}, as numpy calls dtypes that it does not know, so it cannot be told which. "
        "Save it with ckpt.save or as safetensors; or save array.astype(numpy.float32)"
    )


@contextmanager
def _errors_of(where: str) -> Iterator[None]:
    """Translate errors of zipfile and numpy, and name the file."""
    try:
        with naming(where):
            yield
    except CheckpointError:
        raise
    except NotImplementedError as error:
        raise UnsupportedFormatError(f"{where}: it is not read here: {error}") from error
    except _DAMAGED as error:
        reason = str(error) or type(error).__name__
        raise CorruptCheckpointError(f"{where}: it is damaged: {reason:.200}") from error
