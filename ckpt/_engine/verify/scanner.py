"""The scanner: reads a step from end to end to compute digests, in constant memory.

Every lane has one piece of memory, which is filled and digested again and again, so files and
chunks of any size take no more memory than that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio
import numpy as np
from msgspec import Struct

from ckpt._engine.chunk_extensions import ReadCheck, TakesBytes
from ckpt._engine.codecs import decode_chunk
from ckpt._engine.restore.step_files import StepFiles
from ckpt._engine.save.session import LANES
from ckpt._events import EventRecorder
from ckpt._format.array_format import parse_dtype
from ckpt._format.chunk_locations import (
    ChunkLocation,
    ChunkSlice,
    FileSegment,
    parts_of,
    region_of,
    segments,
)
from ckpt._format.leaf_table import UNCHECKED, LeafEntry
from ckpt._format.manifest_head import Digester, new_digest
from ckpt._runtime.mappings import map_memory
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CorruptCheckpointError

T = TypeVar("T")

# Every piece opens the file again: measured on two cores, pieces of 1 MiB take twice the processor
# time. Larger pieces gain nothing, and touch more memory.
_PIECE_BYTES = 4 << 20
# Pieces are made of whole segments; small segments fill them better.
_SEGMENT_BYTES = 1 << 20
# Largest digest that is computed on the loop: a change of threads would take longer.
_INLINE_BYTES = 1 << 18
# Most bytes of a chunk that is decoded for a check, since it is held whole in memory. The library
# writes chunks of a tenth of that; other libraries write every shard as one chunk.
MOST_DECODED_BYTES = 256 << 20
MOST_FOREIGN_BYTES = 16 << 30


def _nbytes_of(leaf: LeafEntry) -> int:
    """Return the bytes of one whole chunk of a leaf, decoded."""
    return math.prod(leaf.chunks) * parse_dtype(leaf.dtype).itemsize


# A chunk whose digest was not known, and its digest.
FirstDigest = tuple[ChunkLocation, str]


class ScannedFile(Struct, frozen=True):
    """The result of reading a file from end to end.

    Attributes:
        digest: Digest of the file.
        is_right: True if all of its chunks have the digests of their leaves, as far as known.
        first: The digests of the chunks that had none.
        checked: What the check of an extension has for each chunk, with the number of its leaf.
    """

    digest: str
    is_right: bool
    first: list[FirstDigest]
    checked: list[tuple[int, Any]]


class Scanner:
    """Reads files and chunks of one step; closing it frees its memory."""

    def __init__(
        self,
        files: StepFiles,
        recorder: EventRecorder,
        most_decoded: int = MOST_DECODED_BYTES,
        check: ReadCheck | None = None,
    ) -> None:
        """Read from `files`; every piece is reported to `recorder`.

        Chunks of more than `most_decoded` bytes are not decoded. `check` gets the bytes of chunks.
        """
        self._check = check
        self.nbytes = 0
        self._most_decoded = most_decoded
        self._files = files
        self._recorder = recorder
        self._regions: dict[int, memoryview] = {}
        # Decoding takes the memory of three chunks, so one chunk is decoded at a time.
        self._decoding = anyio.Lock()

    def plan(self, nbytes: int) -> None:
        """Report the number of bytes to read, unless damage is found."""
        now = time.perf_counter_ns()
        self._recorder.report("plan", now, now, nbytes)

    def close(self) -> None:
        """Free the memory; no read may be in progress."""
        # An error in flight may still refer to a region, which is then freed with the error.
        self._regions.clear()

    async def in_lanes(self, jobs: Iterable[T], work: Callable[[T, int], Awaitable[None]]) -> None:
        """Await `work(job, lane)` for every job, one at a time in each lane."""
        left = iter(jobs)

        async def lane_of_work(lane: int) -> None:
            for job in left:
                await work(job, lane)

        async with anyio.create_task_group() as tasks:
            for lane in range(LANES):
                tasks.start_soon(lane_of_work, lane)

    async def scan_file(
        self,
        path: str,
        nbytes: int,
        places: Sequence[ChunkLocation],
        leaves: Sequence[LeafEntry],
        lane: int,
    ) -> ScannedFile:
        """Read the first `nbytes` bytes of a file once.

        Args:
            path: The file.
            nbytes: Its size.
            places: Chunks in it whose digests are compared as well; see `segments`.
            leaves: The leaves of the item.
            lane: Number of the lane.

        Raises:
            CorruptCheckpointError: The file is missing, is shorter, or is not a regular file.
            StorageError: The store refused.
        """
        scan = _FileScan(leaves, self._check)
        for run in _runs(segments(places, leaves, nbytes, _SEGMENT_BYTES)):
            length = run[-1].start + run[-1].nbytes - run[0].start
            piece = await self._read(path, run[0].start, length, lane)
            self.nbytes += length
            await self._digested(length, lane, partial(scan.take, piece, run))
        if not nbytes:
            await self._read(path, 0, 0, lane)
        return scan.ended()

    async def chunk_digest(
        self, path: str, place: ChunkLocation, leaf: LeafEntry, lane: int
    ) -> str:
        """Return the digest of the part of a chunk that is inside the array.

        Raises:
            CorruptCheckpointError: The bytes are missing, or cannot be decoded.
            StorageError: The store refused.
        """
        dtype = parse_dtype(leaf.dtype)
        digester = new_digest()
        if leaf.codec is not None:
            async with self._decoding:
                chunk = await self._decoded(path, place, leaf)
                whole = ChunkSlice(0, tuple(leaf.chunks), region_of(leaf, place.number).shape)
                take = partial(_take_corner, digester, chunk.data, whole, dtype)
                await self._digested(chunk.nbytes, lane, take)
            return digester.hexdigest()
        for part in parts_of(leaf, place.number, _PIECE_BYTES):
            length = math.prod(part.shape) * dtype.itemsize
            piece = await self._read(path, place.start + part.offset, length, lane)
            await self._digested(length, lane, partial(_take_corner, digester, piece, part, dtype))
        return digester.hexdigest()

    async def _decoded(
        self, path: str, place: ChunkLocation, leaf: LeafEntry
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        nbytes = _nbytes_of(leaf)
        if nbytes > self._most_decoded:
            raise CorruptCheckpointError(f"{nbytes} bytes are too many to be decoded for a check")
        encoded = np.empty(place.end - place.start, np.uint8)
        await self._files.read_block(path, place.start, encoded.data)
        chunk = np.empty(nbytes, np.uint8)
        await run_in_thread(partial(decode_chunk, leaf, encoded, chunk))
        return chunk

    async def _read(self, path: str, start: int, nbytes: int, lane: int) -> memoryview:
        if lane not in self._regions:
            self._regions[lane] = map_memory(_PIECE_BYTES)
        piece = self._regions[lane][:nbytes]
        with self._recorder.phase("read", nbytes, lane):
            await self._files.read_block(path, start, piece)
        return piece

    async def _digested(self, nbytes: int, lane: int, take: Callable[[], None]) -> None:
        """Call `take`, which digests `nbytes`, in a thread if that takes long."""
        if nbytes <= _INLINE_BYTES:
            take()
            return
        with self._recorder.phase("digest", nbytes, lane):
            await run_in_thread(take)


class _FileScan:
    """The digest of a file, and the digests of chunks in it, taken piece by piece."""

    def __init__(self, leaves: Sequence[LeafEntry], check: ReadCheck | None) -> None:
        self._leaves = leaves
        self._check = check
        self._file = new_digest()
        self._place: ChunkLocation | None = None
        self._chunk = new_digest()
        self._right = True
        self._first: list[FirstDigest] = []
        self._takes: TakesBytes | None = None
        self._checked: list[tuple[int, Any]] = []

    def take(self, piece: memoryview, run: Sequence[FileSegment]) -> None:
        """Digest the bytes of consecutive segments."""
        for segment in run:
            start = segment.start - run[0].start
            # Both digests of a segment are taken while it is in the processor's cache.
            mine = piece[start : start + segment.nbytes]
            self._file.update(mine)
            if segment.place is None or segment.part is None:
                continue
            if segment.place is not self._place:
                self._end_chunk()
                self._place = segment.place
                self._chunk = new_digest()
                if self._check is not None:
                    leaf = self._leaves[segment.place.leaf]
                    self._takes = self._check.of_chunk(leaf, segment.place)
            dtype = parse_dtype(self._leaves[segment.place.leaf].dtype)
            corner = _corner(mine, segment.part, dtype)
            self._chunk.update(corner)
            if self._takes is not None:
                self._takes.update(corner)

    def ended(self) -> ScannedFile:
        self._end_chunk()
        return ScannedFile(self._file.hexdigest(), self._right, self._first, self._checked)

    def _end_chunk(self) -> None:
        if self._place is not None:
            saved = self._leaves[self._place.leaf].digests[self._place.number]
            found = self._chunk.hexdigest()
            if saved == UNCHECKED:
                self._first.append((self._place, found))
            else:
                self._right = self._right and found == saved
            if self._takes is not None:
                self._checked.append((self._place.leaf, self._takes.sums()))


def _runs(found: Iterable[FileSegment]) -> Iterator[list[FileSegment]]:
    """Yield consecutive segments that fit into one piece."""
    run: list[FileSegment] = []
    for segment in found:
        if run and segment.start + segment.nbytes - run[0].start > _PIECE_BYTES:
            yield run
            run = []
        run.append(segment)
    if run:
        yield run


def _take_corner(
    digester: Digester, piece: memoryview, part: ChunkSlice, dtype: np.dtype[Any]
) -> None:
    """Digest the corner of a piece that is not padding."""
    digester.update(_corner(piece, part, dtype))


def _corner(piece: memoryview, part: ChunkSlice, dtype: np.dtype[Any]) -> memoryview:
    """Return the bytes of a piece that are not padding."""
    if part.inside == part.shape:
        return piece
    whole = np.frombuffer(piece, dtype).reshape(part.shape)
    corner = whole[tuple(slice(0, length) for length in part.inside)]
    return np.ascontiguousarray(corner).reshape(-1).view(np.uint8).data
