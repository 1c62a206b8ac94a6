"""Temporary replacements of the functions through which Python code reaches files.

If the arguments concern the watched directory, a replacement makes a `FileOperation` of them, and
passes it on together with a function that carries it out. All other calls go straight to the
original.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from ckpt.storage._local import posix
from tests.support.faults.plans import FileOperation

__all__ = ["intercepted", "path_of"]

# Functions of `os` by the kind of their arguments. Not every platform has all of them.
_OF_A_PATH = (
    *("chmod", "listdir", "lstat", "mkdir", "open", "remove", "rmdir", "scandir", "stat"),
    *("truncate", "unlink", "utime"),
)
_OF_TWO_PATHS = ("link", "rename", "replace", "symlink")
_OF_A_DESCRIPTOR = ("fdatasync", "fstat", "fsync", "ftruncate", "posix_fallocate")
_OF_BYTES = ("pread", "pwrite", "read", "write")
_OF_BUFFERS = ("preadv", "pwritev", "readv", "writev")

_DIRECT: int = getattr(os, "O_DIRECT", 0)
_SECTOR = 4096

_readlink = os.readlink
_lseek = os.lseek
_real_fstat = os.fstat


class Locate(Protocol):
    """Returns a path or a descriptor relative to the watched directory; None outside."""

    def __call__(self, path: object, dir_fd: int | None = None) -> str | None:
        """Return the relative path."""


# Performs an operation; see `FaultyFiles.perform`.
Perform = Callable[[FileOperation, Callable[[int | None], Any], Any], Any]
Replacement = Callable[..., Any]


def path_of(path: Any, dir_fd: int | None = None) -> str:
    """Return the absolute path of a path, as an `os` function takes it, or of a descriptor.

    Raises:
        OSError: The descriptor does not exist.
        TypeError, ValueError: The value is neither a path nor a descriptor.
    """
    if isinstance(path, int):
        if sys.platform == "darwin":
            found = fcntl.fcntl(path, fcntl.F_GETPATH, bytes(1024))
            return os.fsdecode(found.rstrip(b"\0"))
        return _readlink(f"/proc/self/fd/{path}")
    text = os.fsdecode(path)
    base = "" if dir_fd is None or os.path.isabs(text) else path_of(dir_fd)
    return os.path.abspath(os.path.join(base, text))


@contextlib.contextmanager
def intercepted(locate: Locate, perform: Perform) -> Iterator[None]:
    """Replace the functions during the body, and restore them afterwards."""
    with contextlib.ExitStack() as stack:
        for owner, name, make in _places():
            original = getattr(owner, name, None)
            if original is not None:
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, make(name, original, locate, perform))
        yield


def _places() -> Iterator[tuple[Any, str, Callable[..., Replacement]]]:
    for names, make in (
        (_OF_A_PATH, _of_a_path),
        (_OF_TWO_PATHS, _of_two_paths),
        (_OF_A_DESCRIPTOR, _of_a_descriptor),
        (_OF_BYTES, _of_bytes),
        (_OF_BUFFERS, _of_buffers),
    ):
        for name in names:
            yield os, name, make
    yield fcntl, "flock", _of_a_descriptor
    yield posix, "renameat2", _of_renameat2
    # The same function has two names.
    yield builtins, "open", _of_open
    yield io, "open", _of_open


def _of_a_path(name: str, original: Replacement, locate: Locate, perform: Perform) -> Replacement:
    def replacement(path: Any = ".", *args: Any, **options: Any) -> Any:
        where = locate(path, options.get("dir_fd"))
        if where is None:
            return original(path, *args, **options)
        operation = FileOperation(name, where, fd=path if isinstance(path, int) else None)
        if name == "open":
            operation.flags = args[0] if args else options.get("flags", 0)
        if name == "truncate":
            operation.nbytes = args[0] if args else options.get("length")
        return perform(operation, lambda _: original(path, *args, **options), None)

    return replacement


def _of_two_paths(
    name: str, original: Replacement, locate: Locate, perform: Perform
) -> Replacement:
    def replacement(src: Any, dst: Any, *args: Any, **options: Any) -> Any:
        # The first argument of symlink is a text, and one descriptor is for the second argument.
        is_text = name == "symlink"
        source = None if is_text else locate(src, options.get("src_dir_fd"))
        target = locate(dst, options.get("dir_fd" if is_text else "dst_dir_fd"))
        if source is None and target is None:
            return original(src, dst, *args, **options)
        first = source if source is not None else os.fsdecode(src)
        second = target if target is not None else path_of(dst, options.get("dst_dir_fd"))
        operation = FileOperation(name, first, second)
        return perform(operation, lambda _: original(src, dst, *args, **options), None)

    return replacement


def _of_a_descriptor(
    name: str, original: Replacement, locate: Locate, perform: Perform
) -> Replacement:
    def replacement(fd: Any, *args: Any, **options: Any) -> Any:
        number = fd if isinstance(fd, int) else fd.fileno() if hasattr(fd, "fileno") else None
        where = None if number is None else locate(number)
        if where is None:
            return original(fd, *args, **options)
        operation = FileOperation(name, where, fd=number)
        if name == "posix_fallocate":
            operation.offset, operation.nbytes = args
        elif name == "ftruncate":
            (operation.nbytes,) = args
        return perform(operation, lambda _: original(fd, *args, **options), None)

    return replacement


def _of_bytes(name: str, original: Replacement, locate: Locate, perform: Perform) -> Replacement:
    def replacement(fd: int, what: Any, *rest: int) -> Any:
        where = locate(fd)
        if where is None:
            return original(fd, what, *rest)
        offset = rest[0] if rest else _position(fd, name)
        operation = FileOperation(name, where, fd=fd, offset=offset)
        if name.endswith("read"):
            operation.nbytes = what
            return perform(
                operation,
                lambda limit: original(fd, what if limit is None else limit, *rest),
                None,
            )
        return _write(operation, [what], lambda data: original(fd, data[0], *rest), perform)

    return replacement


def _of_buffers(name: str, original: Replacement, locate: Locate, perform: Perform) -> Replacement:
    def replacement(fd: int, buffers: Sequence[Any], *rest: Any, **options: Any) -> Any:
        where = locate(fd)
        if where is None:
            return original(fd, buffers, *rest, **options)
        given = options.get("offset", rest[0] if rest else None)
        offset = _position(fd, name) if given is None else given
        operation = FileOperation(name, where, fd=fd, offset=offset)
        if "write" in name:
            return _write(
                operation, buffers, lambda data: original(fd, data, *rest, **options), perform
            )
        operation.nbytes = sum(memoryview(each).nbytes for each in buffers)
        return perform(
            operation,
            lambda limit: original(fd, _cut(buffers, _possible(fd, limit)), *rest, **options),
            None,
        )

    return replacement


def _write(
    operation: FileOperation,
    buffers: Iterable[Any],
    call: Callable[[list[memoryview]], int],
    perform: Perform,
) -> Any:
    """Perform a write of buffers, and record the bytes that were written."""
    views = _cut(buffers, None)
    operation.data = data = b"".join(views)

    def write(limit: int | None) -> int:
        written = call(_cut(views, _possible(operation.fd, limit)))
        operation.data = data[:written]
        return written

    return perform(operation, write, None)


def _possible(fd: int | None, limit: int | None) -> int | None:
    """Return a limit that is possible for a file: direct I/O moves whole sectors."""
    if fd is None or limit is None or not fcntl.fcntl(fd, fcntl.F_GETFL) & _DIRECT:
        return limit
    return max(limit // _SECTOR, 1) * _SECTOR


def _cut(buffers: Iterable[Any], limit: int | None) -> list[memoryview]:
    """Return views of the first `limit` bytes of some buffers."""
    parts = []
    for each in buffers:
        part = memoryview(each).cast("B")
        if limit is not None:
            part = part[:limit]
            limit -= len(part)
        parts.append(part)
    return parts


def _position(fd: int, name: str) -> int:
    """Return the offset of the next byte that will be read or written."""
    if "write" in name and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
        return _real_fstat(fd).st_size
    return _lseek(fd, 0, os.SEEK_CUR)


def _of_renameat2(
    name: str, original: Replacement, locate: Locate, perform: Perform
) -> Replacement:
    def replacement(source: Path, target: Path, flags: int) -> int:
        first, second = locate(source), locate(target)
        if first is None and second is None:
            return int(original(source, target, flags))
        operation = FileOperation(name, first or str(source), second or str(target), flags=flags)

        def call(_: int | None) -> int:
            code = int(original(source, target, flags))
            if code:
                raise OSError(code, os.strerror(code), str(target))
            return 0

        try:
            return int(perform(operation, call, None))
        except OSError as error:
            return error.errno or 0

    return replacement


class _File(io.FileIO):
    """A file whose reads and writes go through functions of `os`, and are therefore seen."""

    def readinto(self, buffer: Any) -> int:
        return os.readv(self.fileno(), [buffer])

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            return self.readall()
        return os.read(self.fileno(), size)

    def readall(self) -> bytes:
        parts = []
        while part := os.read(self.fileno(), io.DEFAULT_BUFFER_SIZE):
            parts.append(part)
        return b"".join(parts)

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)

    def truncate(self, size: int | None = None) -> int:
        length = self.tell() if size is None else size
        os.ftruncate(self.fileno(), length)
        return length


def _of_open(name: str, original: Replacement, locate: Locate, perform: Perform) -> Replacement:
    def replacement(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[str, int], int] | None = None,
    ) -> Any:
        if locate(file) is None:
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        kind = mode.replace("b", "").replace("t", "")
        raw = _File(file, kind, closefd, opener or _open)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffered: Any
        if "+" in mode:
            buffered = io.BufferedRandom(raw, size)
        else:
            buffered = (io.BufferedReader if "r" in mode else io.BufferedWriter)(raw, size)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)

    return replacement


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, 0o666)
