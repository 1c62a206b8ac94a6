"""Data files by TensorStore: the memory is written as it is, and read in pieces."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.storage._local import data_files, tensorstore_files

pytestmark = pytest.mark.disk

PIECE = 4 << 20
# Prints the KiB of memory that writing a block of 64 MiB takes beside the block.
WRITE = """
import mmap, sys
from pathlib import Path
import numpy, tensorstore
from ckpt.storage._local.tensorstore_files import write_block
block = mmap.mmap(-1, 64 << 20)
for _ in range(64):
    block.write(b"x" * (1 << 20))
write_block(Path(sys.argv[1], "first"), memoryview(block)[:4096])
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
write_block(Path(sys.argv[1], "block"), memoryview(block))
print(peak() - before)
"""


def test_a_large_part_of_a_file_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TensorStore copies what it has read while it keeps the interpreter lock.
    import tensorstore

    data = bytes(range(251)) * (3 * PIECE // 251)
    (tmp_path / "file").write_bytes(data)
    read: list[int] = []
    real = tensorstore.KvStore

    def opened(spec: Any) -> Any:
        store = real.open(spec).result()

        def part(key: str, *, byte_range: slice) -> Any:
            read.append(byte_range.stop - byte_range.start)
            return store.read(key, byte_range=byte_range)

        return SimpleNamespace(result=lambda: SimpleNamespace(read=part))

    monkeypatch.setattr(tensorstore, "KvStore", SimpleNamespace(open=opened))
    target = memoryview(bytearray(2 * PIECE + 100))
    tensorstore_files.read_block(tmp_path, "file", 77, target)
    assert target == data[77 : 77 + len(target)]
    assert read == [PIECE, PIECE, 100]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, PIECE + 1])
def test_files_are_those_of_the_own_writers(tmp_path: Path, size: int) -> None:
    data = memoryview(bytes(range(251)) * (size // 251 + 1))[:size]
    for name, files in (("own", data_files), ("other", tensorstore_files)):
        files.write_block(tmp_path / name, data, 0o751)
    assert (tmp_path / "other").read_bytes() == (tmp_path / "own").read_bytes() == data
    assert (tmp_path / "other").stat().st_mode == (tmp_path / "own").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "own"]


def test_no_file_is_replaced_and_no_directory_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"there")
    with pytest.raises(FileExistsError):
        tensorstore_files.write_block(tmp_path / "file", memoryview(b"x"))
    assert (tmp_path / "file").read_bytes() == b"there"
    with pytest.raises(OSError, match="No such file") as caught:
        tensorstore_files.write_block(tmp_path / "removed" / "file", memoryview(b"x"))
    assert caught.value.errno == errno.ENOENT
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_is_not_copied(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", WRITE, tmp_path],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (tmp_path / "block").stat().st_size == 64 << 20
    assert int(found.stdout) < 16 << 10
