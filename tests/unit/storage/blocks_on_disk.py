"""Blocks of memory and files for the tests of data files, in the page cache or not."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.storage._local.data_files import read_block as read_below

KIB, MIB = 1 << 10, 1 << 20
RANDOM = np.random.default_rng(0).bytes(8 * MIB)


def read_block(path: Path, offset: int, target: memoryview) -> None:
    read_below(path.parent, path.name, offset, target)


def memory(nbytes: int, shift: int = 0) -> memoryview:
    """Return memory that begins `shift` bytes after a page boundary."""
    region = mmap.mmap(-1, nbytes + shift + 1)
    return memoryview(region)[shift : shift + nbytes]


def filled(nbytes: int, shift: int = 0) -> memoryview:
    block = memory(nbytes, shift)
    block[:] = RANDOM[:nbytes]
    return block


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real, real_control = os.open, fcntl.fcntl

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real(path, flags, *rest, **named)

    def control(fd: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_control(fd, command, value)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(fcntl, "fcntl", control)


def evict(path: Path) -> None:
    """Drop a file from the page cache; a file system in memory has nothing to drop."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def warm(path: Path) -> None:
    path.read_bytes()


def supports_direct(directory: Path) -> bool:
    path = directory / "trial"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            return os.pwrite(fd, memory(4096), 0) == 4096
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
