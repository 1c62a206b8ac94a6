"""Mappings: other threads go on while they are made, and they go when nobody refers to them."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from pathlib import Path

import pytest

from ckpt._runtime.mappings import address_of, advise, map_memory
from tests.support.conditions import lets_others_run
from tests.support.paths import ROOT

# Where memory is mapped while a save, a restore, a copy or a check is under way.
ROOMS = ("_engine", "_conversion", "_steps", "_tiers", "storage")


def is_mapped(start: int) -> bool:
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split(maxsplit=1)[0].split("-") for line in maps]
    return any(int(first, 16) <= start < int(end, 16) for first, end in spans)


def test_other_threads_go_on_while_memory_is_mapped() -> None:
    assert lets_others_run(lambda: map_memory(mmap.PAGESIZE), times=100_000)


def test_no_room_maps_memory_with_the_interpreter_lock() -> None:
    modules = [path for room in ROOMS for path in (ROOT / "ckpt" / room).rglob("*.py")]
    assert modules
    naming = [path for path in modules if "mmap.mmap(" in path.read_text(encoding="utf-8")]
    assert naming == []


def test_memory_is_zeros_and_can_be_written() -> None:
    region = map_memory(3 * mmap.PAGESIZE)
    assert bytes(region) == bytes(3 * mmap.PAGESIZE)
    region[5:8] = b"abc"
    assert bytes(region[4:9]) == b"\0abc\0"


def test_a_part_of_a_file_is_read_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * mmap.PAGESIZE + b"b" * mmap.PAGESIZE)
    fd = os.open(path, os.O_RDONLY)
    try:
        region = map_memory(mmap.PAGESIZE, fd, mmap.PAGESIZE)
    finally:
        os.close(fd)
    assert bytes(region[:3]) == b"bbb"
    region[0] = 0
    assert path.read_bytes()[mmap.PAGESIZE :] == b"b" * mmap.PAGESIZE


def test_memory_goes_with_the_last_that_refers_to_it() -> None:
    region = map_memory(mmap.PAGESIZE)
    start = address_of(region)
    part = region[10:20]
    del region
    gc.collect()
    assert is_mapped(start)
    del part
    gc.collect()
    assert not is_mapped(start)


def test_what_the_system_refuses_is_an_error() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        map_memory(1 << 62)
    with pytest.raises((OverflowError, ValueError)):
        map_memory(1 << 64)
    error = advise(address_of(map_memory(mmap.PAGESIZE)), mmap.PAGESIZE, 9999)
    assert error is not None
    assert error.errno == errno.EINVAL
