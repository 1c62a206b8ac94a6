"""Whether the files of a step are in the page cache when a restore begins.

A library may have written past the cache (O_DIRECT). So a warm restore of every peer begins after
an untimed read of all of the step's files, and a cold one after they were dropped.
"""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK_BYTES = 1 << 22


def warm(place: Path) -> None:
    """Reads every file below `place`, so that all of it is in the page cache."""
    block = bytearray(_BLOCK_BYTES)
    for file in _files(place):
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(block):
                pass


def drop(place: Path) -> None:
    """Drops every file below `place` from the page cache, as far as the system agrees.

    The disk behind a virtual machine may still have it in the memory of its host. On tmpfs nothing
    is dropped.
    """
    os.sync()  # pages that are not written back stay
    for file in _files(place):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return [Path(folder, name) for folder, _, names in os.walk(place) for name in names]
