"""Host memory of a process during a restore: an estimate, made by going through its requests.

It follows what the engine does. At most `CONCURRENT_REQUESTS` requests are in progress. The buffers
of an array exist from the first request that needs them until the array is on its devices. Buffers
that are not needed any more are kept for the next array of their size, within the budget. Requests
that are not read straight into place have memory of their own. On CPU devices the arrays themselves
are in host memory, too.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from ckpt._engine.memory.thresholds import LEAST_BLANK, LESS_THAN_A_BYTE, MOST_LENT
from ckpt._format.dtypes import parse_dtype
from ckpt._inspection.restores.item_plans import WantedArray, WantedItem
from ckpt._plan.chunk_reads import (
    COALESCED_BYTES,
    CONCURRENT_REQUESTS,
    ChunkRead,
    ReadRequest,
    is_read_whole,
)

_PAGE = mmap.PAGESIZE


class HostMemory(Struct, frozen=True):
    """Host memory that a restore takes, in bytes.

    Attributes:
        peak: The most at one time.
        arrays: How much of what it leaves behind is arrays.
    """

    peak: int
    arrays: int


class _ReadArray(Struct):
    """An array while it is read.

    Attributes:
        placed: Bytes of host memory that it takes when it is done.
        buffers: Bytes of each of its buffers; none where it is read into its own memory, or packed.
        lent: Whether the buffers are free when it is done; else they are its memory.
        left: Chunks still to be read.
        is_open: Whether it has its buffers.
    """

    placed: int
    buffers: Sequence[int]
    lent: bool
    left: int = 0
    is_open: bool = False


class _MemoryUse(Struct):
    """The memory at one time."""

    capacity: int
    live: int = 0
    placed: int = 0
    arena: int = 0
    arena_most: int = 0
    idle_bytes: int = 0
    peak: int = 0
    idle: Counter[int] = field(default_factory=Counter)

    def take(self, nbytes: int) -> None:
        """Take a buffer, if possible one that is idle."""
        length = _rounded(nbytes)
        if self.idle[length]:
            self._drop(length)
        self.live += length
        self._look()

    def give(self, nbytes: int) -> None:
        """Give a buffer back, which is kept if there is room."""
        length = _rounded(nbytes)
        self.live -= length
        room = self.capacity - self.arena_most - length
        while self.idle_bytes > max(room, 0):
            self._drop(next(each for each, count in self.idle.items() if count))
        if room >= 0:
            self.idle[length] += 1
            self.idle_bytes += length

    def take_block(self, nbytes: int) -> None:
        """Take a block of the arena, whose pages stay when it is free again."""
        self.arena += _rounded(nbytes)
        self.arena_most = max(self.arena_most, min(self.arena, self.capacity))
        self._look()

    def place(self, nbytes: int) -> None:
        """Add memory of arrays."""
        self.placed += nbytes
        self._look()

    def _drop(self, length: int) -> None:
        self.idle[length] -= 1
        self.idle_bytes -= length

    def _look(self) -> None:
        now = self.live + self.placed + self.arena_most + self.idle_bytes
        self.peak = max(self.peak, now)


def host_memory(
    planned: Iterable[tuple[WantedItem, Sequence[ReadRequest]]],
    process: int,
    budget: int,
    *,
    on_cpu: bool,
) -> HostMemory:
    """Return the host memory that a process takes for a restore.

    Args:
        planned: The items, each with the requests of the process.
        process: Its number.
        budget: Its budget of memory.
        on_cpu: Whether its devices are CPU devices.
    """
    tally = _MemoryUse(_rounded(budget))
    for item, requests in planned:
        _read(item, requests, process, tally, on_cpu)
    return HostMemory(tally.peak, tally.placed)


def _read(
    item: WantedItem, requests: Sequence[ReadRequest], process: int, tally: _MemoryUse, on_cpu: bool
) -> None:
    arrays = _arrays(item, process, on_cpu)
    for request in requests:
        for chunk in request.chunks:
            for number in {use.read for use in chunk.uses}:
                arrays[number].left += 1
    for each in arrays:
        if not each.left:
            # It has no elements.
            tally.place(each.placed)
    under_way: deque[ReadRequest] = deque()
    for request in requests:
        if len(under_way) == CONCURRENT_REQUESTS:
            _end(under_way.popleft(), arrays, item, process, tally)
        for chunk in request.chunks:
            for use in chunk.uses:
                _open(arrays[use.read], tally)
        _begin(request, item, process, tally)
        under_way.append(request)
    for request in under_way:
        _end(request, arrays, item, process, tally)


def _arrays(item: WantedItem, process: int, on_cpu: bool) -> list[_ReadArray]:
    sizes = [_held_bytes(each, process) for each in item.arrays]
    blank = [
        on_cpu and size > 0 and _can_be_blank(each)
        for each, size in zip(item.arrays, sizes, strict=True)
    ]
    has_blanks = sum(size for size, is_blank in zip(sizes, blank, strict=True) if is_blank)
    found: list[_ReadArray] = []
    for each, size, is_blank in zip(item.arrays, sizes, blank, strict=True):
        leaf = each.leaf
        itemsize = parse_dtype(leaf.dtype).itemsize
        on_device = each.held.on_devices
        placed = size if on_cpu or not on_device else 0
        if is_read_whole(leaf) or (is_blank and has_blanks >= LEAST_BLANK):
            found.append(_ReadArray(placed, (), lent=True))
            continue
        buffers = [region.size * itemsize for region in each.held.parts[process].regions]
        lent = on_device and (not on_cpu or math.prod(leaf.shape) * itemsize <= MOST_LENT)
        found.append(_ReadArray(placed if lent else 0, buffers, lent))
    return found


def _held_bytes(array: WantedArray, process: int) -> int:
    return array.held.parts[process].elements * parse_dtype(array.leaf.dtype).itemsize


def _can_be_blank(array: WantedArray) -> bool:
    leaf = array.leaf
    return (
        array.held.on_devices
        and leaf.kind != "key"
        and not leaf.weak_type
        and not is_read_whole(leaf)
        and leaf.dtype not in LESS_THAN_A_BYTE
    )


def _open(array: _ReadArray, tally: _MemoryUse) -> None:
    if array.is_open:
        return
    array.is_open = True
    for nbytes in array.buffers:
        tally.take(nbytes)


def _begin(request: ReadRequest, item: WantedItem, process: int, tally: _MemoryUse) -> None:
    nbytes = request.source.nbytes
    if not _is_direct(request, item, process):
        if COALESCED_BYTES < nbytes <= tally.capacity:
            tally.take_block(nbytes)
        else:
            tally.take(nbytes)
    for chunk in request.chunks:
        if not chunk.is_plain and not _fills_its_place(chunk, item, process):
            # What its elements are decoded into.
            tally.take(chunk.nbytes)


def _end(
    request: ReadRequest,
    arrays: Sequence[_ReadArray],
    item: WantedItem,
    process: int,
    tally: _MemoryUse,
) -> None:
    for chunk in request.chunks:
        if not chunk.is_plain and not _fills_its_place(chunk, item, process):
            tally.give(chunk.nbytes)
        for number in {use.read for use in chunk.uses}:
            array = arrays[number]
            array.left -= 1
            if array.left:
                continue
            tally.place(array.placed)
            for nbytes in array.buffers:
                if array.lent:
                    tally.give(nbytes)
                else:
                    tally.live -= _rounded(nbytes)
                    tally.placed += _rounded(nbytes)
    if _is_direct(request, item, process):
        return
    nbytes = request.source.nbytes
    if COALESCED_BYTES < nbytes <= tally.capacity:
        tally.arena -= _rounded(nbytes)
    else:
        tally.give(nbytes)


def _is_direct(request: ReadRequest, item: WantedItem, process: int) -> bool:
    """Tell whether a request is read straight into the place of its only chunk."""
    chunk = request.chunks[0]
    return len(request.chunks) == 1 and chunk.is_plain and _fills_its_place(chunk, item, process)


def _fills_its_place(chunk: ChunkRead, item: WantedItem, process: int) -> bool:
    """Tell whether all of a chunk goes to one place, where it is one run of memory."""
    if len(chunk.uses) != 1 or is_read_whole(chunk.leaf):
        return False
    (use,) = chunk.uses
    region = item.arrays[use.read].held.parts[process].regions[use.region]
    return use.source.shape == chunk.covered.shape and use.target.is_contiguous_in(region.shape)


def _rounded(nbytes: int) -> int:
    return max(-(-nbytes // _PAGE) * _PAGE, _PAGE)
