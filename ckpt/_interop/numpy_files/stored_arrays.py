"""An array in a file of numpy: where it is, and how its elements are read if they are not plain."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from msgspec import Struct

from ckpt._format.dtypes import DTYPES
from ckpt._interop.foreign import Fill
from ckpt._interop.numpy_files.array_header import (
    MOST_HEADER_BYTES,
    ArrayHeader,
    header_length,
    parse_array_header,
)
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import host_memory_bytes
from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError

# Usual headers have 128 bytes.
_HEAD_BYTES = 1 << 10
# Compressed, no header takes more; without a limit, a file could have all of it read for nothing.
_MOST_PACKED_HEAD_BYTES = 64 << 10
# What is read and inflated at once.
_PIECE_BYTES = 4 << 20


class Content(Struct, frozen=True):
    """The bytes of an array with its header, within a file.

    Attributes:
        offset: Their first one.
        packed: How many they are in the file.
        nbytes: How many they are.
        is_deflated: Whether they are compressed.
        crc: Their CRC-32.
    """

    offset: int
    packed: int
    nbytes: int
    is_deflated: bool = False
    crc: int = 0


class NumpyArray(Struct, frozen=True):
    """An array, and where it is.

    Attributes:
        content: Its bytes.
        header: What they begin with.
    """

    content: Content
    header: ArrayHeader

    @property
    def offset(self) -> int:
        """Where the elements begin in the file, if they are not compressed."""
        return self.content.offset + self.header.length

    @property
    def is_plain(self) -> bool:
        """Whether the elements are in the file as this library has them."""
        return self.header.is_plain and not self.content.is_deflated


async def header_in(read: Fill, content: Content, head: bytes) -> ArrayHeader:
    """Return the header that bytes of a file begin with.

    Args:
        read: Reads bytes of the file.
        content: The bytes.
        head: The first of them, as they are in the file; as many as are known.

    Raises:
        CorruptCheckpointError: They do not begin with one.
        UnsupportedFormatError: The array has a dtype that is not read.
    """
    head = head[: content.packed]
    while True:
        data = await run_in_thread(_inflated, head) if content.is_deflated else head
        length = header_length(data)
        if length is not None and len(data) >= length:
            return parse_array_header(data[:length])
        most = min(content.packed, _MOST_PACKED_HEAD_BYTES)
        if len(head) >= most:
            raise CorruptCheckpointError("it ends within its header")
        head = await bytes_at(read, content.offset, min(max(4 * len(head), _HEAD_BYTES), most))


def array_of(content: Content, header: ArrayHeader) -> NumpyArray:
    """Return an array, checked.

    Raises:
        CorruptCheckpointError: It has not as many bytes as its header says.
        UnsupportedFormatError: It has to be unpacked in memory, and is larger than that.
    """
    if header.length + header.nbytes != content.nbytes:
        raise CorruptCheckpointError(
            f"{header.dtype}{list(header.shape)!s:.80} has {header.nbytes} bytes behind its "
            f"header, and there are {content.nbytes - header.length}"
        )
    found = NumpyArray(content, header)
    # Fortran's order is changed from one buffer to another.
    needed = header.nbytes * (2 if header.is_fortran else 1)
    available = host_memory_bytes()
    if not found.is_plain and needed > available:
        raise UnsupportedFormatError(
            "it is compressed, in the order of Fortran, or big-endian, and so cannot be read in "
            f"parts: that takes {needed} bytes of memory, and this machine has {available}. Save "
            "it with numpy.savez, in the order of C"
        )
    return found


async def bytes_at(read: Fill, offset: int, length: int) -> bytes:
    """Return bytes of a file."""
    target = bytearray(length)
    await read(offset, memoryview(target))
    return bytes(target)


def _inflated(head: bytes) -> bytes:
    """Return the beginning of what is compressed, from the first bytes of that."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(head, MOST_HEADER_BYTES)
    except zlib.error as error:
        raise CorruptCheckpointError(f"it cannot be decompressed: {error}") from error


class UnpackedElements(Struct, frozen=True):
    """The elements of an array that is not plain, as if they were a file of their own.

    Attributes:
        where: The file, for messages.
        leaf: The leaf path of the array.
        read: Reads bytes of the file.
        array: The array.
    """

    where: str
    leaf: str
    read: Fill
    array: NumpyArray

    async def fill(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the elements from a byte of them on.

        Raises:
            CorruptCheckpointError: They are damaged; names the leaf.
        """
        nbytes = self.array.header.nbytes
        if len(target) == nbytes:
            await self._fill_whole(target)
            return
        # Only a reader that asks for parts of a chunk comes here.
        whole = bytearray(nbytes)
        await self._fill_whole(memoryview(whole))
        target[:] = whole[offset : offset + len(target)]

    async def _fill_whole(self, target: memoryview) -> None:
        header = self.array.header
        stored = memoryview(bytearray(len(target))) if header.is_fortran else target
        if self.array.content.is_deflated:
            await self._inflate(stored)
        else:
            await self.read(self.array.offset, stored)
        await run_in_thread(_rearrange, header, stored, target)

    async def _inflate(self, target: memoryview) -> None:
        content = self.array.content
        work = _Inflation(content, self.array.header.length, target)
        try:
            for start in range(0, content.packed, _PIECE_BYTES):
                length = min(_PIECE_BYTES, content.packed - start)
                piece = await bytes_at(self.read, content.offset + start, length)
                await run_in_thread(work.take, piece)
            work.finish()
        except CorruptCheckpointError as error:
            if error.message.startswith(self.where):
                raise
            raise CorruptCheckpointError(
                f"{self.where}: {error.message}", leaf=self.leaf
            ) from error


class _Inflation:
    """Decompresses an array piece by piece, and leaves out its header."""

    def __init__(self, content: Content, skipped: int, target: memoryview) -> None:
        self._content = content
        self._target = target
        self._decoder: Any = zlib.decompressobj(-zlib.MAX_WBITS)
        # Where the next byte goes; those of the header go nowhere.
        self._at = -skipped
        self._crc = 0

    def take(self, piece: bytes) -> None:
        """Decompress the next piece.

        Raises:
            CorruptCheckpointError: It is damaged, or has more than there should be.
        """
        while True:
            try:
                found = self._decoder.decompress(piece, _PIECE_BYTES)
            except zlib.error as error:
                raise CorruptCheckpointError(f"it cannot be decompressed: {error}") from error
            piece = self._decoder.unconsumed_tail
            self._put(memoryview(found))
            # As many as were allowed: there may be more of them.
            if not piece and len(found) < _PIECE_BYTES:
                break
        if self._decoder.unused_data:
            raise CorruptCheckpointError("it has fewer compressed bytes than the archive says")

    def _put(self, found: memoryview) -> None:
        self._crc = zlib.crc32(found, self._crc)
        kept = found[max(-self._at, 0) :]
        self._at += len(found)
        if self._at > len(self._target):
            raise CorruptCheckpointError(f"it has more than the {self._content.nbytes} bytes")
        self._target[self._at - len(kept) : self._at] = kept

    def finish(self) -> None:
        """Check that this was all.

        Raises:
            CorruptCheckpointError: It was not, or was changed.
        """
        if self._at != len(self._target) or not self._decoder.eof:
            raise CorruptCheckpointError(f"it has fewer than the {self._content.nbytes} bytes")
        if self._crc != self._content.crc:
            raise CorruptCheckpointError("it was changed: its checksum is another")


def _rearrange(header: ArrayHeader, stored: memoryview, target: memoryview) -> None:
    """Bring stored elements into the order of C and of this machine; `stored` may be `target`."""
    dtype = DTYPES[header.dtype]
    if header.is_big_endian:
        width = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        np.frombuffer(stored, f"u{width}").byteswap(inplace=True)
    if header.is_fortran:
        array = np.frombuffer(stored, dtype).reshape(header.shape[::-1]).T
        np.frombuffer(target, dtype).reshape(header.shape)[...] = array
