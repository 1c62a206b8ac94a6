"""The tool that cuts the power: it takes what was not durable, and nothing else."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.power import can_cut_power, power_supply, small_memory_disk

needs_power = pytest.mark.skipif(
    not can_cut_power(), reason="needs root, loop devices and mkfs.ext4"
)


def write(path: Path, *, durable: bool) -> None:
    with open(path, "wb") as file:
        file.write(os.urandom(100_000))
        file.flush()
        if durable:
            os.fsync(file.fileno())


@needs_power
def test_a_cut_takes_what_was_not_durable_and_nothing_else(tmp_path: Path) -> None:
    with power_supply(tmp_path) as disk:
        write(disk.root / "kept", durable=True)
        kept = (disk.root / "kept").read_bytes()
        write(disk.root / "lost", durable=False)
        disk.cut()
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            write(disk.root / "late", durable=False)
        disk.restore()
        assert (disk.root / "kept").read_bytes() == kept
        assert set(os.listdir(disk.root)) == {"kept", "lost+found"}
        write(disk.root / "late", durable=True)
    assert os.listdir(tmp_path) == []


@needs_power
def test_without_a_cut_nothing_is_lost(tmp_path: Path) -> None:
    with power_supply(tmp_path) as disk:
        write(disk.root / "a", durable=False)
        disk.restore()
        assert (disk.root / "a").stat().st_size == 100_000


@needs_power
@pytest.mark.parametrize("cut", [False, True])
def test_everything_is_unmounted_after_an_error_too(tmp_path: Path, cut: bool) -> None:
    def fail() -> None:
        with power_supply(tmp_path) as disk:
            # The file system is in use, and stays so.
            files.append(os.open(disk.root / "a", os.O_CREAT | os.O_WRONLY))
            if cut:
                disk.cut()
            raise ZeroDivisionError

    files: list[int] = []
    with pytest.raises(ZeroDivisionError):
        fail()
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    os.close(files[0])
    assert os.listdir(tmp_path) == []


@needs_power
def test_a_small_disk_is_full_when_it_is_full(tmp_path: Path) -> None:
    with small_memory_disk(tmp_path, size_bytes=1 << 20) as root:
        (root / "a").write_bytes(bytes(1 << 19))
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (root / "b").write_bytes(bytes(1 << 20))
    assert os.listdir(tmp_path) == []


@needs_power
def test_what_cannot_be_mounted_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"mkfs\.ext4 .* failed: .+"),
        power_supply(tmp_path, size_bytes=4096),
    ):
        pass
    assert os.listdir(tmp_path) == []
