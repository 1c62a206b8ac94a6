"""The arrays of one item: from Orbax's metadata to leaf entries whose chunks lie in its files."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import anyio.lowlevel
import google_crc32c
import numpy as np
from msgspec import Struct, field

from ckpt._engine.codecs import decode_chunk, encode_chunk
from ckpt._format.array_format import Blosc, Zstd, parse_dtype
from ckpt._format.leaf_table import UNCHECKED, LeafEntry
from ckpt._format.regions import chunk_grid, position_in_grid
from ckpt._interop.flax import PackedArray, check_packed, is_number, value_entry
from ckpt._interop.orbax.database import ReadRange, ValueLocation, Values, check_path
from ckpt._interop.orbax.layout import PACKED_FILE
from ckpt._interop.orbax.tree import ARRAY_KINDS, OrbaxTree, Param
from ckpt._interop.orbax.zarr_arrays import V2_FILE, V3_FILE, ZarrArray, parse_array
from ckpt._interop.runs_of_bytes import StoredRun, leaf_of_run
from ckpt._runtime.futures import for_each
from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from ckpt.storage._base import UNKNOWN_SIZE

# A file in memory: values in the nodes of a database, and chunks that were never written.
INLINE_FILE = ".inline"
_NOT_STORED = 2**64 - 1
_MOST_METADATA_BYTES = 1 << 20
_CONCURRENT_READS = 16
# Limit of a chunk that was never written and is made in memory.
_MOST_FILL_BYTES = 1 << 30
# Kinds of Python values for the dtypes of scalars.
_PYTHON_KINDS = {"bool": "bool", "int64": "int", "float64": "float", "complex128": "complex"}

Found = tuple[int, int, int]


class ArrayStore(Struct):
    """The places of the arrays of one item.

    Attributes:
        values: Metadata files and chunks by key, or their places.
        read: Reads bytes of the item's files.
        files: Paths of the files with chunks; the first one is in memory.
        numbers: Number of each file.
        inline: Content of the first file.
        fills: Places of chunks that were never written, by dtype, shape, codec and value.
    """

    values: Values
    read: ReadRange
    files: list[str] = field(default_factory=lambda: [INLINE_FILE])
    numbers: dict[str, int] = field(default_factory=dict)
    inline: bytearray = field(default_factory=bytearray)
    fills: dict[tuple[Any, ...], Found] = field(default_factory=dict)

    async def value(self, key: str, limit: int) -> bytes | None:
        """Return a value, or None if there is no such key.

        Raises:
            CorruptCheckpointError: The value is longer than `limit`.
        """
        value = self.values.get(key)
        if value is None or isinstance(value, bytes):
            return value
        if value.length > limit:
            raise CorruptCheckpointError(f"{key!r:.120} has {value.length} bytes")
        return await self.read(check_path(value.file), value.offset, value.length)

    def place(self, value: bytes | ValueLocation, nbytes: int | None = None) -> Found:
        """Return file, offset and length of a value; a value in the database is kept in memory.

        Args:
            value: The value, or its place.
            nbytes: The length that it must have, if known.

        Raises:
            UnsupportedFormatError: Its length is needed, and the store does not report it.
        """
        if isinstance(value, bytes):
            self.inline += value
            return 0, len(self.inline) - len(value), len(value)
        length = value.length
        if length == UNKNOWN_SIZE and nbytes is None:
            raise UnsupportedFormatError(
                "its chunks are compressed files of a store that does not tell their sizes: copy "
                "the checkpoint to a disk and load it from there"
            )
        path = check_path(value.file)
        number = self.numbers.setdefault(path, len(self.files))
        if number == len(self.files):
            self.files.append(path)
        return number, value.offset, nbytes if nbytes is not None and length < 0 else length


class Described(Struct, frozen=True):
    """An array and its place.

    Attributes:
        array: The array.
        places: Places of its chunks.
        value: The value of an array without dimensions that represents a Python scalar.
    """

    array: ZarrArray
    places: Sequence[Found]
    value: Any = None


async def describe_arrays(
    store: ArrayStore, tree: OrbaxTree, params: Sequence[Param]
) -> dict[str, Described | CheckpointError]:
    """Return the arrays of leaves by name of the leaf, with the error of each unreadable one."""
    found: dict[str, Described | CheckpointError] = {}

    async def describe(param: Param) -> None:
        try:
            found[param.name] = await _read_metadata(store, tree, param)
        except (CorruptCheckpointError, UnsupportedFormatError) as error:
            found[param.name] = error
        # Thousands of arrays may need no read, and other tasks must get their turn meanwhile.
        await anyio.lowlevel.checkpoint()

    await for_each(describe, params, _CONCURRENT_READS)
    return found


async def _read_metadata(store: ArrayStore, tree: OrbaxTree, param: Param) -> Described:
    # A tree that is a single leaf has no name.
    folder, data = f"{param.name}/" if param.name else "", None
    for is_v3 in (tree.is_v3, not tree.is_v3):
        file = V3_FILE if is_v3 else V2_FILE
        data = await store.value(folder + file, _MOST_METADATA_BYTES)
        if data is not None:
            array = parse_array(data, is_v3=is_v3)
            break
    else:
        if param.kind not in ARRAY_KINDS:
            raise UnsupportedFormatError(
                f"Orbax wrote it as {param.kind!r:.80}, which is not read here: load it with Orbax"
            )
        raise CorruptCheckpointError("its array is missing; the checkpoint was damaged")
    count = math.prod(chunk_grid(array.shape, array.chunks))
    if count > max(len(store.values) * 4096, 1 << 20):
        raise CorruptCheckpointError(f"it is said to have {count} chunks")
    places: list[Found | None] = [None] * count
    nbytes = math.prod(array.chunks) * parse_dtype(array.dtype).itemsize
    if array.shards is None:
        expected = nbytes if array.codec is None else None
        for number, place in enumerate(array.grid()):
            value = store.values.get(folder + array.key(place))
            places[number] = None if value is None else store.place(value, expected)
    else:
        await _open_shards(store, folder, array, places)
    missing = [number for number, place in enumerate(places) if place is None]
    if missing and tree.has_all_chunks:
        raise CorruptCheckpointError(
            f"{len(missing)} of its {count} chunks are missing; the checkpoint was damaged"
        )
    whole = [_fill(store, array) if place is None else place for place in places]
    if array.codec is None and any(length != nbytes for _, _, length in whole):
        raise CorruptCheckpointError(
            f"a chunk of it has not the {nbytes} bytes that it should have"
        )
    value = None
    if param.kind == "scalar" and not array.shape and array.dtype in _PYTHON_KINDS:
        value = await _scalar(store, param.name, array, whole[0])
    return Described(array, whole, value)


async def _open_shards(
    store: ArrayStore, folder: str, array: ZarrArray, places: list[Found | None]
) -> None:
    """Find the chunks in the shards of an array, by the index at the end of each shard."""
    grid = chunk_grid(array.shape, array.chunks)
    inner = tuple(a // b for a, b in zip(array.keyed, array.chunks, strict=True))
    for shard in array.grid():
        value = store.values.get(folder + array.key(shard))
        if value is None:
            continue
        file, start, length = store.place(value)
        if length < array.index_bytes:
            raise CorruptCheckpointError(f"a shard of it has {length} bytes")
        at = start + length - array.index_bytes
        if isinstance(value, bytes):
            index = value[-array.index_bytes :]
        else:
            index = await store.read(value.file, at, array.index_bytes)
        for position, (offset, nbytes) in zip(np.ndindex(*inner), _parse_index(index), strict=True):
            place = tuple(s * n + p for s, n, p in zip(shard, inner, position, strict=True))
            if any(p >= n for p, n in zip(place, grid, strict=True)):
                # The chunk is beyond the edge of the array.
                continue
            if offset == nbytes == _NOT_STORED:
                continue
            if offset + nbytes > length - array.index_bytes:
                raise CorruptCheckpointError("a shard of it has an index that leads out of it")
            places[position_in_grid(place, grid)] = (file, start + offset, nbytes)


def _parse_index(data: bytes) -> Iterator[tuple[int, int]]:
    count, rest = divmod(len(data), 16)
    if rest and google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise CorruptCheckpointError("a shard of it is damaged: its index has another checksum")
    return iter(struct.iter_unpack("<QQ", data[: 16 * count]))


def _fill(store: ArrayStore, array: ZarrArray) -> Found:
    """Return the place of a chunk that was not stored, since all of its elements are one value."""
    key = (array.dtype, array.chunks, array.codec, repr(array.fill))
    if key not in store.fills:
        dtype = parse_dtype(array.dtype)
        nbytes = math.prod(array.chunks) * dtype.itemsize
        if nbytes > _MOST_FILL_BYTES:
            raise UnsupportedFormatError(
                f"a chunk of {nbytes} bytes was not stored, which is not read here: load it with "
                "Orbax"
            )
        try:
            chunk = np.full(math.prod(array.chunks), array.fill or 0, dtype).view(np.uint8)
        except (TypeError, ValueError):
            raise UnsupportedFormatError(
                f"its fill value {array.fill!r:.60} is not read here: load it with Orbax"
            ) from None
        encoded = chunk.tobytes()
        if array.codec == "gzip":
            encoded = zlib.compress(encoded, wbits=31)
        elif array.codec is not None:
            how = Zstd() if array.codec == "zstd" else Blosc()
            encoded = encode_chunk(chunk, how, dtype.itemsize)
        store.fills[key] = store.place(encoded)
    return store.fills[key]


def leaf_entry(
    param: Param,
    name: str,
    described: Described,
    sharding: int | None,
    impl: str | None,
) -> LeafEntry:
    """Return the leaf for an array of Orbax.

    Args:
        param: The leaf in Orbax.
        name: Its name in this library.
        described: Its array.
        sharding: Number of its sharding, or None.
        impl: Implementation of a typed PRNG key, or None.
    """
    array, places = described.array, described.places
    kind = "numpy"
    if param.kind == "jax.Array":
        kind = "jax" if impl is None else "key"
    elif param.kind == "scalar" and not array.shape:
        python, value = _PYTHON_KINDS.get(array.dtype), described.value
        if python is not None:
            return LeafEntry(name, python, value=value if python == "bool" else repr(value))
        kind = "numpy_scalar"
    return LeafEntry(
        name,
        kind,
        array.dtype,
        array.shape,
        array.chunks,
        (UNCHECKED,) * len(places),
        tuple(offset for _, offset, _ in places),
        tuple(file for file, _, _ in places),
        array.codec,
        tuple(length for _, _, length in places) if array.codec is not None else (),
        sharding=sharding if kind == "jax" else None,
        committed=kind in ("jax", "key") and sharding is not None,
        impl=impl if kind == "key" else None,
    )


async def _scalar(store: ArrayStore, name: str, array: ZarrArray, place: Found) -> Any:
    """Return the value of an array without dimensions."""
    file, offset, length = place
    dtype = parse_dtype(array.dtype)
    if length > _MOST_METADATA_BYTES:
        raise CorruptCheckpointError(f"a number takes {length} bytes")
    if file == 0:
        data = bytes(store.inline[offset : offset + length])
    else:
        data = await store.read(store.files[file], offset, length)
    target = np.empty(dtype.itemsize, np.uint8)
    encoded = np.frombuffer(data, np.uint8)
    if array.codec is None:
        target[:] = encoded
    else:
        decode_chunk(LeafEntry(name, "numpy", codec=array.codec), encoded, target)
    return target.view(dtype)[0].item()


async def packed_entry(store: ArrayStore, name: str, leaf: Any) -> LeafEntry:
    """Return the leaf for a value in the msgpack file.

    Args:
        store: The arrays of the item.
        name: Name of the leaf in this library.
        leaf: Its value, or its place.

    Raises:
        CorruptCheckpointError: The leaf contradicts itself, or is not the value of a leaf.
        UnsupportedFormatError: The leaf has an unsupported dtype.
    """
    if not isinstance(leaf, PackedArray):
        return value_entry(name, leaf)
    check_packed(leaf, "Orbax")
    if len(leaf.pieces) == 1:
        file, offset, _ = store.place(ValueLocation(PACKED_FILE, "", *leaf.pieces[0]))
    else:
        # Pieces of a gigabyte do not form a grid of chunks, so they are joined in memory.
        whole = bytearray()
        for start, length in leaf.pieces:
            whole += await store.read(PACKED_FILE, start, length)
        file, offset, _ = store.place(bytes(whole))
    kind = "jax" if leaf.kind == "jax.Array" else "numpy_scalar" if is_number(leaf) else "numpy"
    return leaf_of_run(name, StoredRun(leaf.dtype, leaf.shape, offset, file, kind=kind))
