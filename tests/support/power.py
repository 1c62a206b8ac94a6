"""Cut the power of a file system while programs write to it, and look at what is left.

The file system is a real ext4 in a file, mounted through a loop device. Cutting its power drops
whatever is in the page cache and in the journal's memory, and fails every later operation with
`EIO`; mounting it again replays the journal, as after a real power cut:

```python
with power_supply(tmp_path) as disk:
    subprocess.Popen([sys.executable, "train.py", disk.root])
    ...  # until it has acknowledged a checkpoint
    disk.cut()
    ...  # end the program
    disk.restore()
    ...  # what is in disk.root now, and is it what was acknowledged?
```

This needs Linux, root, loop devices and `mkfs.ext4`; `can_cut_power` tells whether they are there.
It tears no single sectors, and a disk that forgets what it was told to flush is another matter.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Disk", "can_cut_power", "power_supply", "small_memory_disk"]

# _IOR('X', 125, __u32), and the flag that leaves the journal unflushed.
_SHUTDOWN = 2 << 30 | 4 << 16 | ord("X") << 8 | 125
_NO_LOG_FLUSH = struct.pack("I", 2)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Disk:
    """A mounted file system whose power can be cut.

    Attributes:
        root: Where it is mounted.
        image: The file it is in.
    """

    root: Path
    image: Path

    def cut(self) -> None:
        """Cut the power: what was not durable is lost, and nothing can be written any more.

        Programs that write meanwhile get `EIO`; they have to end before `restore`.
        """
        directory = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(directory, _SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(directory)

    def restore(self) -> None:
        """Mount the file system again, as after a power cut; without one, as after a shutdown.

        Raises:
            OSError: It is in use, or cannot be mounted.
        """
        _run("umount", str(self.root))
        _mount(self)


@contextlib.contextmanager
def power_supply(directory: Path, *, size_bytes: int = 256 * _MIB) -> Iterator[Disk]:
    """Make and mount a file system below `directory` for the time of the body.

    Afterwards it is unmounted and its file is removed, whatever has happened to it.

    Args:
        directory: Where its file and its mount point are made.
        size_bytes: Its size. The file is sparse.

    Raises:
        OSError: It cannot be made or mounted; see `can_cut_power`.
    """
    place = Path(tempfile.mkdtemp(prefix="power-", dir=directory))
    disk = Disk(place / "root", place / "image")
    try:
        disk.root.mkdir()
        with open(disk.image, "wb") as image:
            image.truncate(size_bytes)
        # Nothing is left to be done in the background, and no block is kept for root.
        options = ["-E", "lazy_itable_init=0,lazy_journal_init=0", "-m", "0", "-q", "-F"]
        _run("mkfs.ext4", *options, str(disk.image))
        _mount(disk)
        yield disk
    finally:
        _unmount(disk.root)
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def small_memory_disk(directory: Path, *, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of so many bytes in memory for the time of the body; to be filled up.

    Raises:
        OSError: It cannot be mounted.
    """
    root = Path(tempfile.mkdtemp(prefix="memory-", dir=directory))
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(root))
        yield root
    finally:
        _unmount(root)
        root.rmdir()


def can_cut_power() -> bool:
    """Whether file systems can be made, mounted and cut here; tries it."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            with power_supply(Path(directory), size_bytes=8 * _MIB) as disk:
                disk.cut()
                disk.restore()
        except OSError:
            return False
    return True


def _mount(disk: Disk) -> None:
    # mount makes the loop device, and has it go away with the mount.
    _run("mount", "-t", "ext4", "-o", "loop", str(disk.image), str(disk.root))


def _unmount(root: Path) -> None:
    """Unmount, also what a program still uses: it is then out of reach, and goes with its user."""
    with contextlib.suppress(OSError):
        if os.path.ismount(root):
            _run("umount", str(root))
    with contextlib.suppress(OSError):
        if os.path.ismount(root):
            _run("umount", "--lazy", str(root))


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command)} failed: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{' '.join(command)} did not end within {error.timeout} s") from error
