"""Rates at which a disk writes and reads one large file, in the same way as data files."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from ckpt.storage._local.data_files import read_block, write_block
from ckpt.storage._local.posix import fsync_directory

_BLOCK_BYTES = 16 << 20
_NAME = "raw"


class RawFile:
    """A file of random bytes that is written and read in turns, from memory touched beforehand."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        """Prepare `nbytes`, a multiple of a page."""
        self._folder = folder
        self._nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes)
        block = os.urandom(min(_BLOCK_BYTES, nbytes))
        for start in range(0, nbytes, len(block)):
            part = block[: nbytes - start]
            self._memory[start : start + len(part)] = part

    def write(self) -> float:
        """Write the file, past the page cache if possible, and sync it; return the seconds."""
        os.sync()
        began = time.perf_counter()
        with memoryview(self._memory) as data:
            write_block(self._folder / _NAME, data)
        fsync_directory(self._folder)
        return time.perf_counter() - began

    def read(self) -> float:
        """Drop the file from the page cache and read it; return the seconds."""
        drop_from_cache(self._folder)
        began = time.perf_counter()
        with memoryview(self._memory) as data:
            read_block(self._folder, _NAME, 0, data)
        return time.perf_counter() - began

    def remove(self) -> None:
        """Remove the file."""
        os.unlink(self._folder / _NAME)


def drop_from_cache(folder: Path) -> None:
    """Drop all files below a folder from the page cache, as far as the system complies."""
    # Written back first, since dirty pages stay in the cache.
    os.sync()
    for directory, _, names in os.walk(folder):
        for name in names:
            fd = os.open(Path(directory, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
