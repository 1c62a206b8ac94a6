"""Data files on a local file system, written and read by TensorStore's file driver.

The files are the same as those of `data_files`. That module was faster where it was measured; this
one is for file systems on which TensorStore does better, and for comparison in the benchmark.
Direct I/O is TensorStore's own (`file_io_mode`); where the file system refuses it, files go through
the page cache.

The functions block and raise `OSError`.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.storage._local.data_files import WITHOUT_DIRECT
from ckpt.storage._local.posix import open_regular

_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
# Bytes of one read: TensorStore keeps the interpreter lock while it copies them out, 50 ms for 64
# MiB.
_PIECE_BYTES = 4 << 20
# TensorStore's generation of a file that does not exist.
_MISSING = b"\x02"


def write_block(path: Path, data: memoryview, mode: int | None = None) -> None:
    """Write a new file that holds `data`, and make it durable; see `data_files.write_block`.

    TensorStore takes bytes only, so `data` is copied once.
    """
    if not path.parent.is_dir():
        # TensorStore would make the directory again, even that of an attempt that was removed.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    written = _request(path, lambda store: store.write(_key(path), bytes(data), if_equal=_MISSING))
    if not written.generation:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    if mode is not None:
        os.chmod(path, mode & 0o666)


def read_block(
    top: Path, path: str, offset: int, target: memoryview, then: Callable[[], None] | None = None
) -> None:
    """Fill `target` with the bytes of a file below `top`; see `data_files.read_block`."""
    fd, size = open_regular(top, path)
    os.close(fd)
    end = offset + len(target)
    if end > size:
        raise EOFError(f"it has {size} bytes, {end} are needed")
    source = top / path
    for first in range(0, len(target), _PIECE_BYTES):
        part = target[first : first + _PIECE_BYTES]
        place = slice(offset + first, offset + first + len(part))
        found = _request(source, functools.partial(_read, _key(source), place)).value
        if len(found) != len(part):
            raise EOFError("it was cut short while it was read")
        part[:] = found
    if then is not None:
        then()


def _read(key: str, place: slice, store: Any) -> Any:
    return store.read(key, byte_range=place)


def _request(path: Path, request: Callable[[Any], Any]) -> Any:
    """Carry out a request, past the page cache if the file system can."""
    for mode in ("direct", "default"):
        try:
            return request(_store(mode)).result()
        except ValueError as error:
            code = _OS_ERROR.search(str(error))
            number = int(code[1]) if code else errno.EIO
            if mode == "default" or number not in WITHOUT_DIRECT:
                raise OSError(number, str(error).split(" [")[0], str(path)) from error
    raise AssertionError


def _key(path: Path) -> str:
    return os.path.abspath(path).lstrip("/")


@functools.cache
def _store(mode: str) -> Any:
    """Return the file system, with direct I/O or without; writes are durable in both."""
    import tensorstore as ts

    context = ts.Context({"file_io_mode": {"mode": mode}, "file_io_sync": True})
    return ts.KvStore.open({"driver": "file", "path": "/"}, context=context).result()
