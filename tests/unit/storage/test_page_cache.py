"""Saving and restoring leave nothing in the page cache where direct I/O works."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.storage._local import data_files as blocks
from ckpt.storage._local.data_files import write_block
from tests.unit.storage.blocks_on_disk import (
    KIB,
    MIB,
    RANDOM,
    evict,
    filled,
    memory,
    read_block,
    refuse_direct,
    supports_direct,
    warm,
)

pytestmark = pytest.mark.disk


def cached_bytes(path: Path) -> int:
    """Return how much of a file can be read without asking the device; afterwards none can.

    By the kernel's count of what this thread has had read from devices. (A read that must not wait
    would tell as well, but sets off the reading ahead of what the next look would find.)
    """

    def from_devices() -> int:
        lines = Path("/proc/thread-self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])

    before = from_devices()
    size = len(path.read_bytes())
    # It may have had other things read besides, such as what the file system keeps of the file.
    found = max(size - (from_devices() - before), 0)
    evict(path)
    return found


@pytest.fixture
def uncached(tmp_path: Path) -> Path:
    """A directory of a file system that has direct I/O, and tells what is in its cache."""
    if not supports_direct(tmp_path):
        pytest.skip("the file system of the temporary directory has no direct I/O")
    path = tmp_path / "probe"
    path.write_bytes(bytes(MIB))
    try:
        known = (cached_bytes(path), cached_bytes(path)) == (MIB, 0)
    except OSError:
        known = False
    if not known:
        pytest.skip("the file system does not tell what is in the page cache")
    return tmp_path


@pytest.mark.parametrize("nbytes", [2 * MIB, 4 * MIB + 4096])
def test_a_block_leaves_nothing_in_the_page_cache(uncached: Path, nbytes: int) -> None:
    path = uncached / "x"
    write_block(path, filled(nbytes))
    assert cached_bytes(path) == 0
    # Not after several reads either: none may take a trace of the one before for a cached file.
    for _ in range(3):
        read_block(path, 0, memory(nbytes))
    read_block(path, 4096, memory(nbytes - 4096))
    assert cached_bytes(path) == 0
    # Through the cache it would be there.
    warm(path)
    assert cached_bytes(path) == nbytes


def test_what_is_mostly_in_the_page_cache_is_read_from_there(
    uncached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = uncached / "x"
    write_block(path, filled(4 * MIB))
    refuse_direct(monkeypatch)
    monkeypatch.setattr(blocks, "WITHOUT_DIRECT", set[int]())
    for offset, cached, tries_direct in (
        (0, 0, True),
        (0, 64 * KIB, True),
        (0, 3 * MIB, False),
        (0, 4 * MIB, False),
        (MIB, MIB, True),
        # Only the part that is read counts, not what lies before it.
        (3 * MIB, 3 * MIB, True),
        (2 * MIB, 4 * MIB, False),
    ):
        evict(path)
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            file.read(cached)
        target = memory(4 * MIB - offset)
        expected = pytest.raises(OSError, match="Invalid argument")
        with expected if tries_direct else contextlib.nullcontext():
            read_block(path, offset, target)
            assert target == RANDOM[offset : 4 * MIB]


def test_space_need_not_be_reserved_to_go_past_the_page_cache(
    uncached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    write_block(uncached / "x", filled(2 * MIB))
    assert cached_bytes(uncached / "x") == 0
    assert (uncached / "x").read_bytes() == RANDOM[: 2 * MIB]


def large_files(step: Path) -> list[Path]:
    return [path for path in step.rglob("d/*") if path.stat().st_size >= MIB]


def test_a_saved_state_is_not_in_the_page_cache(uncached: Path) -> None:
    """All of the way: blocks of the arena are aligned, and batches end on a sector."""
    state = {f"p{n}": np.full(MIB + 17 * n, n, np.float32) for n in range(5)}
    staging = ckpt.Staging(budget_bytes=32 * MIB)
    ckpt.sync.save(uncached / "step", state, staging=staging)
    files = large_files(uncached / "step")
    assert sum(path.stat().st_size for path in files) >= 20 * MIB
    assert [cached_bytes(path) for path in files] == [0] * len(files)


def test_a_restored_state_is_not_in_the_page_cache(uncached: Path) -> None:
    state = {f"p{n}": np.full(MIB, n, np.float32) for n in range(5)}
    ckpt.sync.save(uncached / "step", state, staging=ckpt.Staging(budget_bytes=32 * MIB))
    files = large_files(uncached / "step")
    for path in files:
        evict(path)
    for _ in range(2):
        found = ckpt.sync.load(uncached / "step")
        assert all(np.array_equal(found[name], array) for name, array in state.items())
    assert [cached_bytes(path) for path in files] == [0] * len(files)
