"""Damage to checkpoints: flipped bits, cut, lost, zeroed and exchanged files, and back again.

A damage is a small value that says what it does, to which file. It is done to a copy of a
checkpoint and undone after each case, so that thousands of cases need one copy:

```python
copy = shutil.copytree(checkpoint, tmp_path / "copy")
for damage in damages_of(copy, other=another_step, seed=0):
    with damaged(copy, damage):
        try:
            found = ckpt.sync.load(copy)
        except ckpt.errors.CorruptCheckpointError:
            continue
        assert differences(expected, found) == [], damage
```

Nothing here knows the format: any directory of files will do. A damaged file is a new one in the
place of the old, so a copy made of hard links leaves its original as it is.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = [
    "Append",
    "Cut",
    "Damage",
    "Delete",
    "FlipBit",
    "Replace",
    "Zero",
    "damaged",
    "damages_of",
    "files_of",
    "same_role",
    "sampled_damages",
]

_HEX = re.compile(r"\b[0-9a-f]{32}\b")


class Damage(Protocol):
    """One damage of one file.

    Attributes:
        file: The file's path relative to the checkpoint, with `/`.
    """

    @property
    def file(self) -> str:
        """The file's path relative to the checkpoint, with `/`."""

    def apply(self, directory: str | os.PathLike[str]) -> None:
        """Do it to the checkpoint at `directory`, for good.

        Raises:
            FileNotFoundError: The file is not there.
        """


@dataclass(frozen=True, slots=True)
class FlipBit:
    """One bit becomes the other one.

    Attributes:
        file: The file.
        bit: Number of the bit: bit `bit % 8`, counted from the lowest, of byte `bit // 8`.
    """

    file: str
    bit: int

    def apply(self, directory: str | os.PathLike[str]) -> None:
        """Flip the bit; see `Damage.apply`."""
        data = bytearray(_read(directory, self.file))
        data[self.bit // 8] ^= 1 << self.bit % 8
        _put(directory, self.file, bytes(data))


@dataclass(frozen=True, slots=True)
class Cut:
    """A file ends early.

    Attributes:
        file: The file.
        size: How many of its bytes stay.
    """

    file: str
    size: int

    def apply(self, directory: str | os.PathLike[str]) -> None:
        """Cut the file; see `Damage.apply`."""
        _put(directory, self.file, _read(directory, self.file)[: self.size])


@dataclass(frozen=True, slots=True)
class Append:
    """A file goes on after its end.

    Attributes:
        file: The file.
        data: The bytes that follow.
    """

    file: str
    data: bytes

    def apply(self, directory: str | os.PathLike[str]) -> None:
        """Write the bytes behind the others; see `Damage.apply`."""
        _put(directory, self.file, _read(directory, self.file) + self.data)


@dataclass(frozen=True, slots=True)
class Delete:
    """A file is gone.

    Attributes:
        file: The file.
    """

    file: str

    def apply(self, directory: str | os.PathLike[str]) -> None:
        """Remove the file; see `Damage.apply`."""
        os.unlink(Path(directory, self.file))


@dataclass(frozen=True, slots=True)
class Zero:
    """Bytes of a file are zero, as those of a block that was never written.

    Attributes:
        file: The file.
        start: The first of them.
        count: How many; None for all that follow.
    """

    file: str
    start: int = 0
    count: int | None = None

    def apply(self, directory: str | os.PathLike[str]) -> None:
        """Zero the bytes; see `Damage.apply`."""
        data = _read(directory, self.file)
        end = len(data) if self.count is None else min(self.start + self.count, len(data))
        _put(directory, self.file, data[: self.start] + bytes(end - self.start) + data[end:])


@dataclass(frozen=True, slots=True)
class Replace:
    """A file holds what another one holds: that of another step, or another one of the same.

    Attributes:
        file: The file.
        source: Where its new content is taken from.
    """

    file: str
    source: Path

    def apply(self, directory: str | os.PathLike[str]) -> None:
        """Put the other content in its place; see `Damage.apply`."""
        _put(directory, self.file, self.source.read_bytes())


@contextlib.contextmanager
def damaged(directory: str | os.PathLike[str], damage: Damage) -> Iterator[None]:
    """Damage a checkpoint for the body of the `with`, and undo it whatever happens there.

    Raises:
        FileNotFoundError: The file that would be damaged is not there.
    """
    path = Path(directory, damage.file)
    data, status = path.read_bytes(), path.stat()
    try:
        damage.apply(directory)
        yield
    finally:
        _put(directory, damage.file, data)
        path.chmod(stat.S_IMODE(status.st_mode))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def files_of(directory: str | os.PathLike[str]) -> list[str]:
    """Return the paths of all regular files below a directory, sorted, relative and with `/`."""
    top = Path(directory)
    found = (Path(each, name) for each, _, names in os.walk(top) for name in names)
    return sorted(
        path.relative_to(top).as_posix()
        for path in found
        if path.is_file() and not path.is_symlink()
    )


def same_role(file: str, directory: str | os.PathLike[str], other: Path) -> Path | None:
    """Return the file of another checkpoint that is there what `file` is here, or None.

    Random names are not compared: of several data files the one of the same size is taken, else
    that of the same place among them.

    Args:
        file: Path relative to `directory`.
        directory: The checkpoint.
        other: The other one.
    """
    role = _HEX.sub("*", file)
    theirs = [path for path in files_of(other) if _HEX.sub("*", path) == role]
    if not theirs:
        return None
    size = Path(directory, file).stat().st_size
    fitting = [path for path in theirs if (other / path).stat().st_size == size]
    ours = [path for path in files_of(directory) if _HEX.sub("*", path) == role]
    return other / (fitting or theirs)[ours.index(file) % len(fitting or theirs)]


def damages_of(
    directory: str | os.PathLike[str],
    *,
    other: str | os.PathLike[str] | None = None,
    places: int | None = 8,
    seed: int = 0,
) -> Iterator[Damage]:
    """Yield damages of every file of a checkpoint: each kind, at several places.

    For every file: bits flipped at `places` places; cut to nothing, to half, by one byte, and at
    `places` places; a byte and a block appended; deleted; zeroed as a whole and, from `places`
    places on, by 1 byte, 512 or 4096; replaced by the file that has its role in `other`, and by
    another file of its own checkpoint. What would change nothing is left out.

    Args:
        directory: The checkpoint; every damage is of the files as they are now.
        other: Another checkpoint, best one of the same kind with other values.
        places: How many places of a file are drawn; None for every one there is.
        seed: The same seed draws the same places.
    """
    for file in _in_order(directory):
        source = random.Random(f"{seed} {_HEX.sub('*', file)}")
        yield from _of_file(Path(directory), file, other, places, source)


def sampled_damages(
    directory: str | os.PathLike[str],
    count: int,
    *,
    other: str | os.PathLike[str] | None = None,
    kinds: Collection[type[Damage]] | None = None,
    seed: int = 0,
) -> list[Damage]:
    """Return `count` damages of a checkpoint, spread evenly over its files and their kinds.

    Args:
        directory: As for `damages_of`.
        count: How many; fewer come back only where no file can be damaged so.
        other: As for `damages_of`.
        kinds: Only these, such as `(FlipBit,)`; None for all.
        seed: The same seed draws the same damages.
    """
    source = random.Random(seed)
    files = _in_order(directory)
    found: list[Damage] = []
    while files and len(found) < count:
        source.shuffle(files)
        for file in files[: count - len(found)]:
            by_kind: dict[type[Damage], list[Damage]] = {}
            for damage in _of_file(Path(directory), file, other, 4, source):
                if kinds is None or type(damage) in kinds:
                    by_kind.setdefault(type(damage), []).append(damage)
            if by_kind:
                found.append(source.choice(by_kind[source.choice(list(by_kind))]))
            else:
                files = [each for each in files if each != file]
    return found


def _in_order(directory: str | os.PathLike[str]) -> list[str]:
    """Return the files of a checkpoint in an order in which random names count last."""
    sizes = {file: Path(directory, file).stat().st_size for file in files_of(directory)}
    return sorted(sizes, key=lambda file: (_HEX.sub("*", file), sizes[file], file))


def _of_file(
    directory: Path,
    file: str,
    other: str | os.PathLike[str] | None,
    places: int | None,
    source: random.Random,
) -> Iterator[Damage]:
    data = (directory / file).read_bytes()
    size = len(data)
    for bit in _drawn(size * 8, places, source):
        yield FlipBit(file, bit)
    cuts = {0, size // 2, size - 1, *_drawn(size, places, source)}
    for length in sorted(length for length in cuts if 0 <= length < size):
        yield Cut(file, length)
    yield Append(file, b"\n")
    yield Append(file, source.randbytes(512))
    yield Delete(file)
    if any(data):
        yield Zero(file)
    for start in _drawn(size, places, source):
        count = source.choice((1, 512, 4096))
        if any(data[start : start + count]):
            yield Zero(file, start, count)
    yield from _replacements(directory, file, other, data, source.choice)


def _replacements(
    directory: Path,
    file: str,
    other: str | os.PathLike[str] | None,
    data: bytes,
    choice: Callable[[Sequence[str]], str],
) -> Iterator[Damage]:
    candidates: list[Path | None] = []
    if other is not None:
        candidates.append(same_role(file, directory, Path(other)))
    siblings = [name for name in files_of(directory) if name != file]
    if siblings:
        candidates.append(directory / choice(siblings))
    for path in candidates:
        if path is not None and path.read_bytes() != data:
            yield Replace(file, path)


def _drawn(total: int, places: int | None, source: random.Random) -> Sequence[int]:
    if places is None or places >= total:
        return range(total)
    return sorted(source.sample(range(total), places))


def _read(directory: str | os.PathLike[str], file: str) -> bytes:
    return Path(directory, file).read_bytes()


def _put(directory: str | os.PathLike[str], file: str, data: bytes) -> None:
    """Make a file anew; what else has links to the old one keeps it."""
    path = Path(directory, file)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
