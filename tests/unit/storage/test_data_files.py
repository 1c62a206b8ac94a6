"""Data files: what is written is what is read, past the page cache or through it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._settings import Timeouts
from ckpt.errors import CorruptCheckpointError, StorageError
from ckpt.storage._local import data_files as blocks
from ckpt.storage._local.data_files import write_block
from ckpt.storage._local.storage import LocalStorage
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

SIZES = [
    *(0, 1, 63, 64, 4095, 4096, 4097),
    *(MIB - 4096, MIB - 1, MIB, MIB + 1, MIB + 512, MIB + 4095, MIB + 4096, MIB + 4097),
    *(2 * MIB, 3 * MIB + 8192),
]
# Where memory starts within a page: direct I/O wants a sector, jax a cache line.
SHIFTS = [0, 64, 512, 1]


@pytest.fixture(params=["disk", "tmpfs", "without direct I/O"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A directory on a disk, in memory, and where O_DIRECT is refused as old file systems do."""
    if request.param == "tmpfs":
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("there is no /dev/shm")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            yield Path(directory)
        return
    if request.param == "without direct I/O":
        refuse_direct(monkeypatch)
    yield tmp_path


# -- what is written is what is read --------------------------------------------------------------


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_in_the_file(place: Path, nbytes: int, shift: int) -> None:
    write_block(place / "x", filled(nbytes, shift))
    assert (place / "x").read_bytes() == RANDOM[:nbytes]
    assert stat.S_IMODE((place / "x").stat().st_mode) & 0o111 == 0


@pytest.mark.parametrize("before", [evict, warm])
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_in_the_file_is_read(
    place: Path, nbytes: int, shift: int, before: Callable[[Path], None]
) -> None:
    path = place / "x"
    path.write_bytes(RANDOM[: nbytes + 4096 + 77])
    for offset in (0, 64, 77, 4096):
        before(path)
        target = memory(nbytes, shift)
        read_block(path, offset, target)
        assert target == RANDOM[offset : offset + nbytes], offset


def test_a_block_of_several_calls(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_MOST_BYTES", 64 * KIB)
    for nbytes in (5 * MIB, 5 * MIB + 4096, 5 * MIB + 1):
        path = place / str(nbytes)
        write_block(path, filled(nbytes))
        assert path.read_bytes() == RANDOM[:nbytes]
        for before in (evict, warm):
            before(path)
            target = memory(nbytes)
            read_block(path, 0, target)
            assert target == RANDOM[:nbytes]


def test_a_file_that_is_partly_in_the_cache(place: Path) -> None:
    path = place / "x"
    write_block(path, filled(4 * MIB))
    for first, count in ((0, MIB), (3 * MIB, MIB), (MIB + 4096, 8192)):
        evict(path)
        with open(path, "rb", buffering=0) as file:
            file.seek(first)
            file.read(count)
        target = memory(4 * MIB)
        read_block(path, 0, target)
        assert target == RANDOM[: 4 * MIB]


def test_what_was_changed_and_not_synced_is_read(place: Path) -> None:
    path = place / "x"
    write_block(path, filled(2 * MIB))
    evict(path)
    with open(path, "r+b", buffering=0) as file:
        file.seek(MIB + 5)
        file.write(b"changed")
        target = memory(2 * MIB)
        read_block(path, 0, target)
    assert target == RANDOM[: MIB + 5] + b"changed" + RANDOM[MIB + 12 : 2 * MIB]


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_read_leaves_the_page_cache_alone(tmp_path: Path, shift: int) -> None:
    """Wherever its memory starts: that of arrays starts on cache lines."""
    if not supports_direct(tmp_path):
        pytest.skip("the file system of the temporary directory has no direct I/O")
    path, nbytes = tmp_path / "x", 3 * MIB + 4096
    path.write_bytes(RANDOM[:nbytes])
    evict(path)
    target = memory(nbytes, shift)
    read_block(path, 0, target)
    assert target == RANDOM[:nbytes]
    with path.open("rb") as file:
        assert not blocks._is_cached(file.fileno(), 0, nbytes)


# -- calls that do less than they were asked ------------------------------------------------------


# The first is a multiple of what direct I/O needs, the second of what some devices need, the
# third of nothing.
@pytest.mark.parametrize("least", [3 * 4096, 3 * 512, 1000])
@pytest.mark.parametrize("nbytes", [50_000, MIB, 3 * MIB])
def test_short_writes_are_continued(
    place: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, least: int
) -> None:
    """The calls write less, as the kernel may: what they say they wrote is what they wrote."""
    real, calls = os.pwrite, 0

    def short(fd: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        return real(fd, data[:least] if calls % 2 else data[: 40 * 4096], offset)

    monkeypatch.setattr(os, "pwrite", short)
    write_block(place / "x", filled(nbytes))
    assert calls > 1
    assert (place / "x").read_bytes() == RANDOM[:nbytes]


@pytest.mark.parametrize("least", [3 * 4096, 3 * 512, 1000])
@pytest.mark.parametrize("nbytes", [50_000, MIB, 3 * MIB])
def test_short_reads_are_continued(
    place: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, least: int
) -> None:
    path = place / "x"
    write_block(path, filled(nbytes))
    evict(path)
    real, calls = os.preadv, 0

    def short(fd: int, parts: list[Any], offset: int, *flags: int) -> int:
        nonlocal calls
        if flags:
            return real(fd, parts, offset, *flags)
        calls += 1
        [target] = parts
        return real(fd, [target[:least] if calls % 2 else target[: 40 * 4096]], offset)

    monkeypatch.setattr(os, "preadv", short)
    target = memory(nbytes)
    read_block(path, 0, target)
    assert calls > 1
    assert target == RANDOM[:nbytes]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_direct_calls_that_are_refused_midway_go_on_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """But a device that fails is not asked again."""
    if not supports_direct(tmp_path):
        pytest.skip("the file system of the temporary directory has no direct I/O")
    monkeypatch.setattr(blocks, "_MOST_BYTES", 256 * KIB)
    path = tmp_path / "x"
    if call == "preadv":
        path.write_bytes(RANDOM[: 2 * MIB])
        evict(path)
    refused: list[int] = []
    real = getattr(os, call)

    def refusing(fd: int, data: Any, offset: int, *flags: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and offset >= 512 * KIB:
            refused.append(offset)
            raise OSError(code, "from the device")
        return real(fd, data, offset, *flags)

    monkeypatch.setattr(os, call, refusing)
    expected = pytest.raises(OSError, match="from the device")
    with expected if code == errno.EIO else contextlib.nullcontext():
        if call == "pwrite":
            write_block(path, filled(2 * MIB))
            assert path.read_bytes() == RANDOM[: 2 * MIB]
        else:
            target = memory(2 * MIB)
            read_block(path, 0, target)
            assert target == RANDOM[: 2 * MIB]
    assert refused == [512 * KIB]


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 100, 2 * MIB])
def test_no_file_is_replaced(place: Path, nbytes: int) -> None:
    for name, make in {
        "file": lambda path: path.write_bytes(b"kept"),
        "link": lambda path: path.symlink_to("nowhere"),
        "directory": lambda path: path.mkdir(),
    }.items():
        make(place / name)
        with pytest.raises(FileExistsError):
            write_block(place / name, filled(nbytes))
    assert (place / "file").read_bytes() == b"kept"
    assert not (place / "nowhere").exists()


@pytest.mark.parametrize("nbytes", [100, 2 * MIB])
@pytest.mark.parametrize("before", [evict, warm])
def test_a_file_that_is_too_short_is_told(
    place: Path, nbytes: int, before: Callable[[Path], None]
) -> None:
    path = place / "x"
    path.write_bytes(RANDOM[:nbytes])
    before(path)
    for offset, wanted in ((0, nbytes + 1), (1, nbytes), (nbytes, 1), (nbytes + 4096, 100)):
        with pytest.raises(EOFError, match=f"has {nbytes} bytes, {offset + wanted} are needed"):
            read_block(path, offset, memory(wanted))
    with pytest.raises(EOFError):
        read_block(path, 1 << 40, memory(2 * MIB))
    read_block(path, nbytes, memory(0))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("left", [0, 4096, MIB + 100])
def test_a_file_cut_short_while_it_is_read_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, left: int, cached: bool
) -> None:
    path = place / "x"
    path.write_bytes(RANDOM[: 2 * MIB])

    def cut(fd: int, offset: int, nbytes: int) -> bool:
        os.truncate(path, left)
        return cached

    monkeypatch.setattr(blocks, "_is_cached", cut)
    with pytest.raises(EOFError, match="cut short"):
        read_block(path, 0, memory(2 * MIB))


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


OTHERS: dict[str, Callable[[Path], Any]] = {
    "it is not a regular file (FIFO)": os.mkfifo,
    "it is not a regular file (directory)": os.mkdir,
    "is a symbolic link": lambda path: path.symlink_to(path.parent / "real"),
    "it is a socket": make_socket,
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("nbytes", [10, 2 * MIB])
def test_nothing_but_a_regular_file_is_read(nbytes: int, kind: str) -> None:
    # The path of a socket is limited to about a hundred bytes.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "real").write_bytes(RANDOM[: 4 * MIB])
        OTHERS[kind](directory / "x")
        with pytest.raises(ValueError, match=kind.split(" (", maxsplit=1)[0]):
            read_block(directory / "x", 0, memory(nbytes))


def test_a_missing_file_and_a_missing_directory_are_told(place: Path) -> None:
    for path in (place / "none", place / "none" / "x"):
        with pytest.raises(FileNotFoundError):
            read_block(path, 0, memory(10))
        if path.parent != place:
            with pytest.raises(FileNotFoundError):
                write_block(path, filled(10))


@contextlib.contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


# The limit is met when space is reserved, at a direct write, and at one through the cache.
@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("nbytes", [5000, 2 * MIB, 2 * MIB + 1])
def test_a_disk_that_takes_no_more_is_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, reserve: bool
) -> None:
    if not reserve:
        monkeypatch.setattr(blocks, "reserve", lambda fd, nbytes, offset: None)
    for limit in (4096, nbytes - 1, nbytes // 2 // 4096 * 4096 + 512):
        with largest_file(limit), pytest.raises(OSError, match="too large") as caught:
            write_block(place / str(limit), filled(nbytes))
        assert caught.value.errno == errno.EFBIG
    with largest_file(nbytes):
        write_block(place / "fits", filled(nbytes))


def test_no_descriptor_is_left_open(place: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for nbytes in (100, 2 * MIB):
        path = place / str(nbytes)
        write_block(path, filled(nbytes))
        evict(path)
        read_block(path, 0, memory(nbytes))
        for offset, wanted in ((0, nbytes + 1), (1, nbytes)):
            with pytest.raises(EOFError):
                read_block(path, offset, memory(wanted))
        with pytest.raises(FileExistsError):
            write_block(path, filled(nbytes))
        with largest_file(50), pytest.raises(OSError, match="too large"):
            write_block(place / f"{nbytes} more", filled(nbytes))
        with pytest.raises(ValueError, match="regular"):
            read_block(place, 0, memory(nbytes))
    assert count() == before


# -- as the storage tells it ----------------------------------------------------------------------


def stored(root: Path, work: Callable[[LocalStorage], Any]) -> Any:
    async def main() -> Any:
        return await work(LocalStorage(root, Timeouts()))

    return anyio.run(main)


def test_a_data_file_of_an_attempt(place: Path) -> None:
    async def work(storage: LocalStorage) -> None:
        await storage.prepare()
        attempt = await storage.begin("7")
        await storage.write_block(attempt, "state/d/x", filled(2 * MIB))
        with pytest.raises(StorageError, match=r"cannot write .*state/d/x.*exists") as caught:
            await storage.write_block(attempt, "state/d/x", filled(10))
        assert caught.value.errno == errno.EEXIST
        await storage.publish(attempt, overwrite=False)
        target = memory(MIB)
        await storage.read_block("7", "state/d/x", 4096, target)
        assert target == RANDOM[4096 : MIB + 4096]

    stored(place, work)


def test_a_data_file_that_was_damaged_is_told_as_damage(tmp_path: Path) -> None:
    step_dir = tmp_path / "7"
    step_dir.mkdir()
    (step_dir / "short").write_bytes(b"1234")
    (step_dir / "directory").mkdir()
    (step_dir / "link").symlink_to("short")
    os.mkfifo(step_dir / "fifo")
    reasons = {
        "none": "No such file",
        "none/none": "No such file",
        "short/none": "Not a directory",
        "short": "it has 4 bytes, 10 are needed",
        "directory": "not a regular file",
        "fifo": "not a regular file",
        "link": "symbolic link",
    }

    async def work(storage: LocalStorage) -> None:
        for path, reason in reasons.items():
            with pytest.raises(CorruptCheckpointError, match=reason) as caught:
                await storage.read_block("7", path, 0, memory(10))
            assert str(caught.value).startswith(f"{step_dir}/{path}: ")
            assert str(caught.value).count(str(step_dir)) == 1

    stored(tmp_path, work)


def test_a_data_file_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "x").write_bytes(bytes(10))

    def denied(*arguments: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    async def work(storage: LocalStorage) -> None:
        monkeypatch.setattr(os, "open", denied)
        with pytest.raises(StorageError, match=r"cannot read .*Permission denied") as caught:
            await storage.read_block("7", "x", 0, memory(10))
        monkeypatch.undo()
        assert caught.value.errno == errno.EACCES

    stored(tmp_path, work)


@pytest.mark.parametrize("limit", [64 * KIB, MIB + 512])
def test_a_save_that_meets_the_limit_of_file_sizes_leaves_nothing(
    tmp_path: Path, limit: int
) -> None:
    state = {"w": np.ones(MIB, np.float32)}
    with (
        largest_file(limit),
        pytest.raises(StorageError, match=r"leaf 'w'.*File too large") as caught,
    ):
        ckpt.sync.save(tmp_path / "step", state)
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []
    ckpt.sync.save(tmp_path / "step", state)
    shutil.rmtree(tmp_path / "step")
