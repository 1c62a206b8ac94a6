"""The zarr codecs: chunks are encoded and decoded in memory, by numcodecs.

That is zarr's own library of codecs. It decodes into memory that it is given, and leaves the
interpreter's lock alone meanwhile. (TensorStore encodes and decodes only on the way to a store, and
copies a chunk three times for that.)

Everything here runs in worker threads. Encoding holds two more copies of a chunk, decoding none.
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

# numcodecs says in this way what is shuffled.
_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
# The beginning of a Zstandard frame: its magic number, and which fields come next.
_ZSTD_HEADER = struct.Struct("<IB")
_ZSTD_MAGIC = 0xFD2FB528
# What numcodecs says of memory that is too small for a frame, or larger than its content.
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
    # The decoders believe a header, and leave what is beyond its size as it was.
    is_zstd = leaf.codec == "zstd"
    found = _zstd_size(encoded) if is_zstd else _blosc_size(encoded)
    # TensorStore stated no size for years. The decoder refuses such a frame if it has another one.
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

    The frame need not state its size, and the decoder does not tell it.

    Raises:
        CorruptCheckpointError: It is damaged, or has more than `most` bytes.
    """
    room = min(max(16 * len(encoded), 1 << 16), most)
    while True:
        target = np.zeros(room, np.uint8)
        try:
            _codec("zstd").decompress(encoded, target)
        except (RuntimeError, ValueError) as error:
            # The content of a frame without a size is there, even if there was more room for it.
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
    """Decode gzip or zlib, which Orbax wrote once."""
    # 47: with either header.
    decoder = zlib.decompressobj(47)
    try:
        decoded = decoder.decompress(encoded.data, target.nbytes + 1)
    except zlib.error as error:
        raise _corrupt(leaf, target, encoded, str(error)) from error
    if len(decoded) != target.nbytes or not decoder.eof:
        raise _corrupt(leaf, target, encoded, "it is longer or shorter")
    target[:] = np.frombuffer(decoded, np.uint8)


def _zstd_size(encoded: Bytes) -> int | None:
    """Return the decoded size that a Zstandard frame states, if it does (RFC 8878, 3.1.1.1)."""
    if len(encoded) < _ZSTD_HEADER.size:
        return None
    magic, flags = _ZSTD_HEADER.unpack_from(encoded.data)
    is_single, length = bool(flags & 0x20), 1 << (flags >> 6)
    if magic != _ZSTD_MAGIC or (length == 1 and not is_single):
        return None
    # Before it come a window, unless there is a single segment, and the number of a dictionary.
    start = _ZSTD_HEADER.size + (not is_single) + (0, 1, 2, 4)[flags & 3]
    field = encoded[start : start + length].tobytes()
    # Two bytes count from where one byte ends.
    return int.from_bytes(field, "little") + (256 if length == 2 else 0)


def _is_unsized_frame(encoded: Bytes) -> bool:
    """Tell whether this is a Zstandard frame that does not state its decoded size."""
    if len(encoded) < _ZSTD_HEADER.size:
        return False
    magic, flags = _ZSTD_HEADER.unpack_from(encoded.data)
    return bool(magic == _ZSTD_MAGIC and not flags & 0xE0)


def _blosc_size(encoded: Bytes) -> int | None:
    """Return the decoded size that a blosc buffer states, if the buffer is whole."""
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
