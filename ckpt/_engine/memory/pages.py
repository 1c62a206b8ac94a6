"""Pages: the choice between small and huge pages for large new memory.

Neither is better everywhere. Measured with 512 MiB on a virtual machine: huge pages are 4 times as
fast to fill on memory that was used a moment ago, and 5 times as slow on memory that the machine
had given back to its host. So one huge page is filled first, and the time that it takes decides.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt._runtime.mappings import advise

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
