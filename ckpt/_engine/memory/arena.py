"""The staging arena: one region of host memory, touched once and reused by every save.

Writing to memory for the first time takes 10 to 30 times as long as writing to warm memory, and
longer on virtual machines. So blocks are handed out lowest address first: the pages that the first
save has warmed serve all later ones. The region is only reserved address space until it is used.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
from msgspec import Struct

from ckpt._engine.memory.pages import LEAST_BYTES, choose_pages, populate
from ckpt._runtime.mappings import address_of, advise, map_memory
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import address_space
from ckpt.errors import StorageError

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
