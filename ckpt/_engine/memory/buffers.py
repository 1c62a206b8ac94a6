"""Buffers: host memory of restored arrays, reused when the arrays are gone.

On CPU devices a restored array is the very buffer that the bytes were read into, so the buffer
cannot come from the arena. Evaluators restore again and again, and drop one state before the next.
The memory of dropped states is kept, since reading into warm memory is 5 to 15 times as fast as
into fresh memory. The idle memory and the touched part of the arena stay within one budget.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ckpt._engine.memory.arena import Arena, limit_reached
from ckpt._runtime.mappings import address_of, advise, map_memory
from ckpt.errors import CheckpointError

Array = np.ndarray[Any, Any]

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
