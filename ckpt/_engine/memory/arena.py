"""Host memory: the staging arena, buffers of restored arrays, their pages and limits.

Pages: the choice between small and huge pages for large new memory. Neither is better everywhere.
Measured with 512 MiB on a virtual machine: huge pages are 4 times as fast to fill on memory that
was used a moment ago, and 5 times as slow on memory that the machine had given back to its host. So
one huge page is filled first, and the time that it takes decides.

The staging arena: one region of host memory, touched once and reused by every save. Writing to
memory for the first time takes 10 to 30 times as long as writing to warm memory, and longer on
virtual machines. So blocks are handed out lowest address first: the pages that the first save has
warmed serve all later ones. The region is only reserved address space until it is used.

Buffers: host memory of restored arrays, reused when the arrays are gone. On CPU devices a restored
array is the very buffer that the bytes were read into, so the buffer cannot come from the arena.
Evaluators restore again and again, and drop one state before the next. The memory of dropped states
is kept, since reading into warm memory is 5 to 15 times as fast as into fresh memory. The idle
memory and the touched part of the arena stay within one budget.
"""

from __future__ import annotations

import math
import mmap
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import jax
import numpy as np
from msgspec import Struct

from ckpt._format.array_format import parse_dtype
from ckpt._format.leaf_table import LeafEntry
from ckpt._runtime.mappings import address_of, advise, map_memory
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import address_space, host_memory_bytes
from ckpt.errors import CheckpointError, InvalidArgumentError, StorageError

if TYPE_CHECKING:
    from ckpt._plan.targets import ArrayRead, ArrayTarget

Array = np.ndarray[Any, Any]
Memory = np.ndarray[Any, np.dtype[np.uint8]]

_HUGE_BYTES = 2 << 20
# A region of this size contains a whole huge page, wherever the region begins.
LEAST_BYTES = 2 * _HUGE_BYTES
# A quick huge page usually takes 0.2 ms, a slow one 4 ms; the same bytes in small pages take 1 ms.
_QUICK_SECONDS = 1e-3
_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
# MADV_POPULATE_WRITE of Linux 5.14; Python has no name for it.
_POPULATE_WRITE = 23
# With cold small pages a call takes 2.5 ms; no other thread can map memory meanwhile.
_POPULATED_BYTES = 1 << 20


def choose_pages(regions: Sequence[Memory]) -> None:
    """Request huge pages for untouched regions, if filling one is quick.

    The contents of the regions stay as they are.
    """
    large = [region for region in regions if len(region) >= LEAST_BYTES]
    if _HUGEPAGE is None or not large or not _are_quick(large[0]):
        return
    for region in large:
        start = region.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        _advise(start, region.ctypes.data + len(region) - start, _HUGEPAGE)


def populate(memory: Memory) -> bool:
    """Fault in the pages of `memory`, unchanged; return False if the system cannot.

    Other threads go on meanwhile. `mmap.madvise` would keep the interpreter lock: 512 MiB block the
    event loop of a caller for 0.3 s. Each call also keeps the lock of the address space. A thread
    that holds the interpreter lock and needs memory waits for that lock, and the loop waits for the
    thread; hence many small calls.
    """
    start, length = memory.ctypes.data, len(memory)
    return all(
        _advise(start + done, min(length - done, _POPULATED_BYTES), _POPULATE_WRITE)
        for done in range(0, length, _POPULATED_BYTES)
    )


def _are_quick(region: Memory) -> bool:
    """Fill the first huge page of a region; return True if that was quick."""
    assert _HUGEPAGE is not None
    page = -(-region.ctypes.data // _HUGE_BYTES) * _HUGE_BYTES
    if not _advise(page, _HUGE_BYTES, _HUGEPAGE):
        return False
    began = time.perf_counter()
    return _advise(page, _HUGE_BYTES, _POPULATE_WRITE) and (
        time.perf_counter() - began < _QUICK_SECONDS
    )


def _advise(start: int, nbytes: int, advice: int) -> bool:
    return advise(start, nbytes, advice) is None


# Blocks start on page boundaries: whole pages are warmed, and direct I/O stays possible.
_ALIGNMENT = mmap.PAGESIZE
# A piece must not delay the end of a program: cold memory is filled at 0.4 GB/s or faster.
_WARMING_BYTES = 16 << 20


class Block(Struct, frozen=True):
    """A part of the arena; `memory` is its bytes as a `uint8` array."""

    offset: int
    nbytes: int
    memory: np.ndarray[Any, np.dtype[np.uint8]]


class Arena:
    """Hands out blocks of one memory region and waits while there is no room.

    The capacity is the byte budget of all saves of one engine. Used from the engine's loop only.
    Requests are served in order, so a large one cannot starve.
    """

    def __init__(self, capacity: int) -> None:
        """Reserve (not touch) `capacity` bytes, rounded up to whole pages."""
        self.capacity: int = _round_up(capacity)
        # Bytes of memory outside the region that count as used here.
        self._elsewhere = 0
        self._region: memoryview | None = None
        # True once small or huge pages were chosen for the region.
        self._has_pages = False
        self._free: list[tuple[int, int]] = [(0, self.capacity)]
        self._waiting: deque[tuple[int, anyio.Event, bool]] = deque()
        self.high_water: int = 0
        # Called just before new memory is touched.
        self.on_growth: Callable[[], None] = _do_nothing
        # Bytes requested since the arena was last empty, and the maximum of that number.
        self._asked = 0
        self._demand = 0

    @property
    def used(self) -> int:
        """Bytes in use: the blocks handed out, and the memory counted elsewhere."""
        return self._elsewhere + self.capacity - sum(length for _, length in self._free)

    def count_elsewhere(self, most: int) -> int:
        """Count up to `most` bytes of memory elsewhere as used; return the number counted.

        Half of the capacity stays for blocks. `uncount` undoes this.
        """
        counted = max(0, min(most, self.capacity // 2 - self._elsewhere))
        self._elsewhere += counted
        return counted

    def uncount(self, nbytes: int) -> None:
        """Stop counting `nbytes` of memory elsewhere: that memory is free."""
        self._elsewhere -= nbytes
        self._wake()

    def has_room(self, nbytes: int) -> bool:
        """Return True if a block of `nbytes` is available at once."""
        return not self._waiting and self._fits(_round_up(max(nbytes, 1)))

    async def allocate(self, nbytes: int, *, held: bool = False) -> Block:
        """Return a block of `nbytes`; waits for earlier blocks to be freed if there is no room.

        Cancellation leaves nothing allocated.

        Args:
            nbytes: Size of the block.
            held: True for a copy of data that is held elsewhere. This request goes before one that
                waits for just that memory, and before no other.

        Raises:
            ValueError: The block is larger than the whole capacity.
        """
        length = _round_up(max(nbytes, 1))
        if length > self.capacity:
            raise ValueError(f"a block of {nbytes} bytes in an arena of {self.capacity}")
        self._asked = length + (self._asked if self.used or self._waiting else 0)
        self._demand = max(self._demand, self._asked)
        if self._waiting or not self._fits(length):
            ticket = (length, anyio.Event(), held)
            self._waiting.append(ticket)
            try:
                self._wake()
                # The event is set only while the length fits, and nothing is taken before this task
                # runs again, so the length still fits then.
                await ticket[1].wait()
            except BaseException:
                self._waiting.remove(ticket)
                self._wake()
                raise
            self._waiting.remove(ticket)
        return self._take(nbytes, length)

    def free(self, block: Block) -> None:
        """Free `block`; its memory may be overwritten from now on."""
        start, end = block.offset, block.offset + _round_up(max(block.nbytes, 1))
        spans = sorted([*self._free, (start, end - start)])
        merged: list[tuple[int, int]] = []
        for offset, length in spans:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((offset, length))
        self._free = merged
        self._wake()

    def shrink(self, block: Block, nbytes: int) -> Block:
        """Free the end of a block, from `nbytes` on, and return the rest of the block."""
        kept = _round_up(max(nbytes, 1))
        if kept >= _round_up(block.nbytes):
            return block
        end = block.offset + kept
        self.free(Block(end, block.nbytes - kept, block.memory[:0]))
        return Block(block.offset, nbytes, block.memory[:nbytes])

    async def warm(self, go_on: Callable[[], bool]) -> None:
        """Touch as much of the region as one save wanted at a time, to warm it for the next save.

        The first save copies so slowly into cold memory that its first blocks are free again before
        it requests its last; the next save is faster, and would touch cold memory again.

        Args:
            go_on: Called before every piece of a few milliseconds; False stops.
        """
        target = min(self._demand, self.capacity)
        while self._region is not None and self.high_water < target and go_on():
            start = self.high_water
            length = min(target - start, _WARMING_BYTES)
            self._grow(start + length)
            fresh = np.frombuffer(self._region, np.uint8, count=length, offset=start)
            if not await run_in_thread(populate, fresh):
                return

    def _grow(self, end: int) -> None:
        if end > self.high_water:
            if self._region is not None and not self._has_pages and end >= LEAST_BYTES:
                # Not for small saves: to choose, a whole huge page is filled.
                self._has_pages = True
                choose_pages([np.frombuffer(self._region, np.uint8)[self.high_water :]])
            self.high_water = end
            self.on_growth()

    def _wake(self) -> None:
        if not self._waiting or any(called.is_set() for _, called, _ in self._waiting):
            # A request has its room already, and its task has not run yet.
            return
        ticket = self._waiting[0]
        if ticket[0] > self.capacity - self._elsewhere:
            ticket = next((each for each in self._waiting if each[2]), ticket)
        if self._fits(ticket[0]):
            ticket[1].set()

    def _fits(self, length: int) -> bool:
        if length > self.capacity - self.used:
            return False
        return any(room >= length for _, room in self._free)

    def _take(self, nbytes: int, length: int) -> Block:
        if self._region is None:
            self._region = _reserve(self.capacity)
        place = next(i for i, (_, room) in enumerate(self._free) if room >= length)
        offset, room = self._free[place]
        self._free[place : place + 1] = [(offset + length, room - length)] if room > length else []
        self._grow(offset + length)
        memory = np.frombuffer(self._region, np.uint8, count=nbytes, offset=offset)
        self._wake()
        return Block(offset, nbytes, memory)


def _do_nothing() -> None:
    pass


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def limit_reached() -> str:
    """Return a remark on the limit of the address space; empty if there is no limit."""
    space = address_space()
    if space is None:
        return ""
    limit, left = space
    return (
        f"; this process may have {limit} bytes of address space (RLIMIT_AS, ulimit -v), and "
        f"{left} are left"
    )


def _reserve(nbytes: int) -> memoryview:
    """Map anonymous memory that takes no page until it is touched."""
    try:
        region = map_memory(nbytes)
    except OSError as error:
        raise StorageError(
            f"cannot reserve {nbytes} bytes of staging memory: {error.strerror}{limit_reached()}. "
            "Give a smaller Staging(budget_bytes=...)",
            errno=error.errno,
        ) from error
    if hasattr(mmap, "MADV_DONTFORK"):
        # A forked data loader would otherwise turn every write here into a copy of the page.
        advise(address_of(region), nbytes, mmap.MADV_DONTFORK)
    return region


# jax takes over a host buffer without a copy if it is aligned to a cache line, and files can be
# read directly into one that is aligned to sectors; a mapping is aligned to both.
_PAGE = mmap.PAGESIZE


class Buffers:
    """Makes buffers, and reuses the memory of arrays that are gone for buffers of the same size.

    Arrays may be dropped in any thread.
    """

    def __init__(self, arena: Arena) -> None:
        """Limit idle memory to the part of the arena's capacity that is still untouched."""
        self._arena = arena
        # Not a bound method: it would form a cycle with the arena, and the memory of a closed
        # engine would stay until the garbage collector runs.
        arena.on_growth = partial(_trim, weakref.ref(self))
        # Reentrant: garbage collection can drop an array while this thread holds the lock.
        self._guard = threading.RLock()
        self._idle: dict[int, list[memoryview]] = {}
        self.idle_bytes: int = 0

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an array with undefined content, aligned so that jax can take it over.

        Raises:
            CheckpointError: There is not enough memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        length = max(-(-nbytes // _PAGE) * _PAGE, _PAGE)
        with self._guard:
            region = self._take(length)
        if region is None:
            region = _map(length, shape)
        # Every view of this array refers to it, so the array lives as long as any view.
        memory = np.frombuffer(region, np.uint8)
        weakref.finalize(memory, _give_back, weakref.ref(self), region).atexit = False
        return memory[:nbytes].view(dtype).reshape(shape)

    def trim(self) -> None:
        self._make_room(0)

    def recycle(self, region: memoryview) -> None:
        """Keep `region`, whose arrays are gone; regions that were kept earlier give way."""
        length = len(region)
        with self._guard:
            if self._make_room(length):
                self._idle.setdefault(length, []).append(region)
                self.idle_bytes += length

    def _make_room(self, nbytes: int) -> bool:
        """Free idle memory until `nbytes` more fit, oldest sizes first; return True if they do."""
        with self._guard:
            limit = self._arena.capacity - self._arena.high_water - nbytes
            while self._idle and self.idle_bytes > max(limit, 0):
                length = next(iter(self._idle))
                self._take(length)
            return limit >= 0

    def _take(self, length: int) -> memoryview | None:
        """Return an idle region of `length` bytes, or None."""
        same = self._idle.get(length)
        if not same:
            return None
        region = same.pop()
        self.idle_bytes -= length
        if not same:
            del self._idle[length]
        return region


def _trim(buffers: weakref.ref[Buffers]) -> None:
    found = buffers()
    if found is not None:
        found.trim()


def _give_back(buffers: weakref.ref[Buffers], region: memoryview) -> None:
    alive = buffers()
    if alive is not None:
        alive.recycle(region)


def _map(length: int, shape: Sequence[int]) -> memoryview:
    try:
        region = map_memory(length)
    except (OSError, OverflowError, ValueError) as error:
        raise CheckpointError(
            f"there is no memory for an array of shape {list(shape)[:8]} and {length} bytes"
            f"{limit_reached()}. Skip it with ... in like=, or shard it over more devices"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        advise(address_of(region), length, mmap.MADV_HUGEPAGE)
    return region


def check_memory(reads: Sequence[ArrayRead], leaves: Sequence[LeafEntry]) -> None:
    """Refuse arrays that do not fit, before any memory is taken.

    The sizes come from a file, and the system promises more memory than it has: it kills the
    process only when the memory is used.

    Raises:
        InvalidArgumentError: The arrays take more host memory than there is.
    """
    available = host_memory_bytes()
    # Counted by shape, of which thousands of arrays have a few.
    counts = Counter((read.shape, read.stored) for read in reads)
    everything = sum(
        count * math.prod(shape) * parse_dtype(stored).itemsize
        for (shape, stored), count in counts.items()
    )
    if everything <= available:
        return
    # For devices with memory of their own a host buffer is temporary. Of a sharded array, only the
    # part of this process counts.
    sizes = [(_local_bytes(read), read) for read in reads if _stays_on_host(read.target)]
    needed = sum(size for size, _ in sizes)
    if needed > available:
        size, read = max(sizes, key=lambda each: each[0])
        raise InvalidArgumentError(
            f"the arrays take {needed} bytes of host memory, and this machine has {available}; the "
            f"largest takes {size}. Restore a part of them (like= with ... for the others), or "
            "restore in more processes",
            leaf=read.path or (None if read.leaf is None else leaves[read.leaf].name),
        )


def _stays_on_host(target: ArrayTarget) -> bool:
    if target.kind in ("jax", "key") and target.sharding is None:
        return jax.default_backend() == "cpu"
    devices = getattr(target.sharding, "addressable_devices", ())
    return all(device.platform == "cpu" for device in devices)


def _local_bytes(read: ArrayRead) -> int:
    return sum(region.size for region in read.regions) * parse_dtype(read.stored).itemsize
