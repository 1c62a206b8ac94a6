"""The zarr codecs: chunks are encoded and decoded in memory, by numcodecs.

numcodecs is zarr's own library of codecs. It decodes into memory that the caller gives, and
releases the interpreter lock meanwhile. (TensorStore encodes and decodes only on the way to a
store, and copies a chunk three times for that.)

All functions run in worker threads. Encoding needs memory for two more copies of a chunk, decoding
for none.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Literal

import numpy as np

from ckpt._format.array_format import Compression, Zstd
from ckpt._format.leaf_table import LeafEntry
from ckpt._plan.write_batches import encoded_bound
from ckpt.errors import CheckpointError, CorruptCheckpointError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Numbers by which numcodecs names the unit of the shuffle.
_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
# Beginning of a Zstandard frame: its magic number, and the flags of the fields that follow.
_ZSTD_HEADER = struct.Struct("<IB")
_ZSTD_MAGIC = 0xFD2FB528
# Messages of numcodecs for memory that is too small for a frame, or larger than its content.
_LITTLE_ROOM, _MUCH_ROOM = "too small", "expected to decompress"
# The decoded and the encoded size, in the header of 16 bytes of a blosc buffer.
_BLOSC_SIZES = struct.Struct("<4xI4xI")


def encode_chunk(chunk: Bytes, compression: Compression, itemsize: int) -> bytes:
    """Return `chunk` encoded; its elements have `itemsize` bytes."""
    encoded: bytes
    if isinstance(compression, Zstd):
        encoded = _codec("zstd").compress(chunk, compression.level)
    else:
        encoded = _codec("blosc").compress(
            chunk,
            compression.cname.encode(),
            compression.clevel,
            _SHUFFLES[compression.shuffle],
            typesize=itemsize,
        )
    if len(encoded) > encoded_bound(chunk.nbytes):
        raise CheckpointError(f"{compression} made {len(encoded)} bytes of {chunk.nbytes}")
    return encoded


def decode_chunk(leaf: LeafEntry, encoded: Bytes, target: Bytes) -> None:
    """Fill `target` with the bytes of a chunk of `leaf`; never decodes more than that.

    Raises:
        CorruptCheckpointError: The encoded bytes are damaged, or decode to another size.
    """
    if leaf.codec == "gzip":
        _inflate(leaf, encoded, target)
        return
    # The decoders trust the size in a header, and leave the rest of the target unwritten.
    is_zstd = leaf.codec == "zstd"
    found = _zstd_size(encoded) if is_zstd else _blosc_size(encoded)
    # For years, TensorStore stated no size. The decoder refuses such a frame if its size differs.
    is_unsized = is_zstd and _is_unsized_frame(encoded)
    if found != target.nbytes and not is_unsized:
        why = "their header is damaged" if found is None else f"their header says {found} bytes"
        raise _corrupt(leaf, target, encoded, why)
    try:
        _codec("zstd" if is_zstd else "blosc").decompress(encoded, target)
    except (RuntimeError, ValueError) as error:
        raise _corrupt(leaf, target, encoded, str(error)) from error


def decode_zstd(encoded: bytes, most: int) -> bytes:
    """Return the content of a Zstandard frame, which may be followed by zeros.

    The frame need not state its size, and the decoder does not return it.

    Raises:
        CorruptCheckpointError: The frame is damaged, or its content has more than `most` bytes.
    """
    room = min(max(16 * len(encoded), 1 << 16), most)
    while True:
        target = np.zeros(room, np.uint8)
        try:
            _codec("zstd").decompress(encoded, target)
        except (RuntimeError, ValueError) as error:
            # For a frame without a size, the content is complete even if the target has more room.
            if _MUCH_ROOM in str(error):
                return target.tobytes()
            if _LITTLE_ROOM not in str(error) or room == most:
                raise CorruptCheckpointError(
                    f"{len(encoded)} bytes cannot be decoded to at most {most}: {error}"
                ) from error
            room = min(4 * room, most)
        else:
            return target.tobytes()


def _inflate(leaf: LeafEntry, encoded: Bytes, target: Bytes) -> None:
    """Decode gzip or zlib, which early versions of Orbax wrote."""
    # 47 accepts either header.
    decoder = zlib.decompressobj(47)
    try:
        decoded = decoder.decompress(encoded.data, target.nbytes + 1)
    except zlib.error as error:
        raise _corrupt(leaf, target, encoded, str(error)) from error
    if len(decoded) != target.nbytes or not decoder.eof:
        raise _corrupt(leaf, target, encoded, "it is longer or shorter")
    target[:] = np.frombuffer(decoded, np.uint8)


def _zstd_size(encoded: Bytes) -> int | None:
    """Return the decoded size that a Zstandard frame states, or None (RFC 8878, 3.1.1.1)."""
    if len(encoded) < _ZSTD_HEADER.size:
        return None
    magic, flags = _ZSTD_HEADER.unpack_from(encoded.data)
    is_single, length = bool(flags & 0x20), 1 << (flags >> 6)
    if magic != _ZSTD_MAGIC or (length == 1 and not is_single):
        return None
    # The size comes after a window, unless there is a single segment, and a dictionary number.
    start = _ZSTD_HEADER.size + (not is_single) + (0, 1, 2, 4)[flags & 3]
    field = encoded[start : start + length].tobytes()
    # A size of two bytes is stored minus 256, the sizes that one byte can hold.
    return int.from_bytes(field, "little") + (256 if length == 2 else 0)


def _is_unsized_frame(encoded: Bytes) -> bool:
    """Return True for a Zstandard frame that does not state its decoded size."""
    if len(encoded) < _ZSTD_HEADER.size:
        return False
    magic, flags = _ZSTD_HEADER.unpack_from(encoded.data)
    return bool(magic == _ZSTD_MAGIC and not flags & 0xE0)


def _blosc_size(encoded: Bytes) -> int | None:
    """Return the decoded size that a blosc buffer states; None if the buffer is not whole."""
    if len(encoded) < _BLOSC_SIZES.size:
        return None
    decoded, length = _BLOSC_SIZES.unpack_from(encoded.data)
    return int(decoded) if length == len(encoded) else None


def _corrupt(leaf: LeafEntry, target: Bytes, encoded: Bytes, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{len(encoded)} bytes cannot be decoded to a chunk of {target.nbytes}: {why}. The data "
        "was damaged; restore another step",
        leaf=leaf.name,
    )


def _codec(name: Literal["zstd", "blosc"]) -> Any:
    # Few steps are compressed, and the import takes 25 ms.
    import numcodecs

    return numcodecs.zstd if name == "zstd" else numcodecs.blosc
