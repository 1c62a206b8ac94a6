"""Where stored chunks are read from: data files, or the item's database.

The manifest says in which file and at which byte a chunk lies, so it is read from there, straight
into the memory that wants it. A leaf whose places the manifest does not have is read through its
database, as any other zarr reader would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
import numpy as np
import tensorstore as ts

from ckpt._engine.codecs import decode_chunk
from ckpt._engine.memory.buffers import Buffers
from ckpt._engine.tensorstore import (
    as_stored,
    open_array,
    read_context,
    settle,
    translated,
)
from ckpt._format.dtypes import parse_dtype
from ckpt._format.manifest import ItemEntry, LeafEntry
from ckpt._format.regions import Region
from ckpt._format.zarr import chunk_key, stored_dtype
from ckpt._plan.multihost.read_groups import ByteRange
from ckpt.errors import CorruptCheckpointError, located

__all__ = ["BlockReader", "ChunkSource", "DataFiles", "ItemDatabase", "StoredChunk"]

T = TypeVar("T")
Array = np.ndarray[Any, Any]
# Fills memory from a data file of the item; see `Storage.read_block`.
BlockReader = Callable[[str, int, memoryview], Any]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One stored chunk.

    Attributes:
        leaf: The leaf's manifest entry.
        number: Number of the chunk in C order of the chunk grid.
        region: The part of the array it covers.
    """

    leaf: LeafEntry
    number: int
    region: Region


class ChunkSource(Protocol):
    """Reads stored chunks."""

    async def read(self, chunks: Sequence[StoredChunk], buffers: Sequence[Array]) -> None:
        """Fill a C-contiguous buffer for every chunk; no input is under way on return.

        Raises:
            CorruptCheckpointError: A chunk is not there; names the leaf.
        """


class DataFiles:
    """The data files of an item."""

    def __init__(self, read_block: BlockReader, entry: ItemEntry, buffers: Buffers) -> None:
        """Read with `read_block` from the files of `entry`; `buffers` holds padded chunks."""
        self._read_block = read_block
        self._buffers = buffers
        self._files = entry.data_files

    async def read(self, chunks: Sequence[StoredChunk], buffers: Sequence[Array]) -> None:
        """Fill a buffer for every chunk; see `ChunkSource.read`."""
        for chunk, buffer in zip(chunks, buffers, strict=True):
            leaf = chunk.leaf
            inside = Region((0,) * len(leaf.chunks), chunk.region.shape)
            if _is_read_as_it_is(leaf, inside):
                await self._read(leaf, chunk.number, buffer)
                continue
            # Padding lies between the elements, or comes out of the decoder with them.
            stored = self._buffers.empty(leaf.chunks, buffer.dtype)
            await self._read(leaf, chunk.number, stored)
            buffer[...] = stored[inside.slices]

    def extent(self, chunk: StoredChunk) -> ByteRange:
        """Return which bytes of which file `read` takes for a chunk."""
        leaf, number = chunk.leaf, chunk.number
        inside = Region((0,) * len(leaf.chunks), chunk.region.shape)
        if leaf.codec is not None:
            nbytes = leaf.lengths[number]
        elif _is_read_as_it_is(leaf, inside):
            nbytes = inside.size * parse_dtype(leaf.dtype).itemsize
        else:
            nbytes = math.prod(leaf.chunks) * parse_dtype(leaf.dtype).itemsize
        start = leaf.offsets[number]
        return ByteRange(
            self._files[leaf.files[number] if leaf.files else 0], start, start + nbytes
        )

    def extent_of_run(self, file: int, start: int, end: int) -> ByteRange:
        """Return the bytes of data file number `file` from `start` to `end`."""
        return ByteRange(self._files[file], start, end)

    async def read_run(self, file: int, offset: int, target: Array) -> None:
        """Fill `target` with what lies in data file number `file` from `offset` on."""
        await self._read_block(self._files[file], offset, _bytes_of(target))

    async def _read(self, leaf: LeafEntry, number: int, target: Array) -> None:
        file = self._files[leaf.files[number] if leaf.files else 0]
        offset = leaf.offsets[number]
        with located(leaf=leaf.name):
            if leaf.codec is None:
                await self._read_block(file, offset, _bytes_of(target))
                return
            encoded = bytearray(leaf.lengths[number])
            await self._read_block(file, offset, memoryview(encoded))
            into = target.reshape(-1).view(np.uint8)
            await _in_thread(decode_chunk, leaf, bytes(encoded), into)


class ItemDatabase:
    """The OCDBT database of an item."""

    def __init__(self, base: Any, item: str) -> None:
        """Read the database of the item called `item`; see `Storage.database_spec`."""
        self._base = base
        self._item = item
        self._context = read_context()
        self._database: ts.KvStore | None = None

    async def read(self, chunks: Sequence[StoredChunk], buffers: Sequence[Array]) -> None:
        """Fill a buffer for every chunk; see `ChunkSource.read`."""
        # Filled as reads begin, and kept whatever happens: they go on into the buffers until they
        # are done, also where a later one cannot begin, or the caller is cancelled meanwhile.
        futures: list[Any] = []
        try:
            await _in_thread(self._start, chunks, buffers, futures)
        finally:
            for future in futures:
                await settle(future)
        for chunk, future in zip(chunks, futures, strict=True):
            with translated("read an array", leaf=chunk.leaf.name):
                future.result()

    async def read_values(self, leaves: Sequence[LeafEntry]) -> list[Array]:
        """Return packed leaves, as they are stored."""
        futures = await _in_thread(self._start_values, leaves)
        for future in futures:
            await settle(future)
        return await _in_thread(_values, leaves, futures)

    def _open(self) -> ts.KvStore:
        if self._database is None:
            with translated(f"open the database of item {self._item!r}"):
                spec = {"driver": "ocdbt", "base": self._base}
                self._database = ts.KvStore.open(spec, context=self._context).result()
        return self._database

    def _start(
        self, chunks: Sequence[StoredChunk], buffers: Sequence[Array], futures: list[Any]
    ) -> None:
        database = self._open()
        opened: dict[str, ts.TensorStore] = {}
        for chunk, buffer in zip(chunks, buffers, strict=True):
            leaf = chunk.leaf
            with translated("open an array", leaf=leaf.name):
                if leaf.name not in opened:
                    dtype = stored_dtype(leaf.dtype or "")
                    opened[leaf.name] = open_array(
                        database, self._context, leaf.name, leaf.shape, leaf.chunks, dtype
                    )
                source = opened[leaf.name][chunk.region.slices]
                futures.append(ts.array(as_stored(buffer)).write(source))

    def _start_values(self, leaves: Sequence[LeafEntry]) -> list[Any]:
        database = self._open()
        batch = ts.Batch()
        futures = []
        for leaf in leaves:
            key = f"{leaf.name}/{chunk_key((0,) * len(leaf.shape))}"
            futures.append(database.read(key, batch=batch))
        batch.submit()
        return futures


def _values(leaves: Sequence[LeafEntry], futures: Sequence[Any]) -> list[Array]:
    arrays = []
    for leaf, future in zip(leaves, futures, strict=True):
        with translated("read an array", leaf=leaf.name):
            data = future.result().value
        dtype = parse_dtype(leaf.dtype)
        if len(data) != Region((), tuple(leaf.shape)).size * dtype.itemsize:
            raise CorruptCheckpointError(
                f"{len(data)} bytes are stored for shape {leaf.shape[:8]}", leaf=leaf.name
            )
        arrays.append(np.frombuffer(data, dtype).reshape(leaf.shape))
    return arrays


def _is_read_as_it_is(leaf: LeafEntry, inside: Region) -> bool:
    """Tell whether what lies `inside` a chunk is one run of what is stored of it."""
    return inside.shape == tuple(leaf.chunks) or (
        leaf.codec is None and inside.is_contiguous_in(tuple(leaf.chunks))
    )


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


async def _in_thread(function: Callable[..., T], *args: Any) -> T:
    return await anyio.to_thread.run_sync(partial(function, *args))
