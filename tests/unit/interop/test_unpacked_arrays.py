"""Elements that are compressed are unpacked piece by piece, whatever the pieces are."""

from __future__ import annotations

import asyncio
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import errors
from ckpt._interop.numpy_files import stored_arrays
from ckpt._interop.numpy_files.array_header import ArrayHeader


def unpacked(content: bytes, header: ArrayHeader, level: int = 6) -> stored_arrays.UnpackedElements:
    packed = zlib.compress(content, level, wbits=-15)

    async def read(offset: int, target: memoryview) -> None:
        target[:] = packed[offset : offset + len(target)]

    place = stored_arrays.Content(0, len(packed), len(content), True, zlib.crc32(content))
    array = stored_arrays.array_of(place, header)
    return stored_arrays.UnpackedElements("x.npz", "a", read, array)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=300) | st.integers(0, 2000).map(bytes),
    st.integers(1, 400),
    st.integers(0, 9),
)
def test_pieces_of_any_length_are_inflated(content: bytes, piece: int, level: int) -> None:
    header = ArrayHeader("uint8", (len(content),), False, False, 0)
    target = bytearray(len(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_arrays, "_PIECE_BYTES", piece)
        asyncio.run(unpacked(content, header, level).fill(0, memoryview(target)))
    assert target == content


def test_parts_of_it() -> None:
    """Readers that share their reads ask for parts of a chunk."""
    array = np.arange(100, dtype=">i4")
    elements = unpacked(array.tobytes(), ArrayHeader("int32", (100,), False, True, 0))
    target = bytearray(20)
    asyncio.run(elements.fill(40, memoryview(target)))
    assert np.array_equal(np.frombuffer(target, "<i4"), range(10, 15))


def test_a_header_is_not_looked_for_in_all_of_a_file() -> None:
    """Compressed bytes may be as many as one likes, and be nothing."""
    read: list[int] = []

    async def fill(offset: int, target: memoryview) -> None:
        read.append(len(target))
        target[:] = (b"\0\0\0\xff\xff" * len(target))[: len(target)]

    content = stored_arrays.Content(0, 1 << 30, 200, True)
    with pytest.raises(errors.CorruptCheckpointError, match="within its header"):
        asyncio.run(stored_arrays.header_in(fill, content, b""))
    assert sum(read) < 1 << 20
