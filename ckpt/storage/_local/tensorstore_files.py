"""Data files on a local file system, written and read by TensorStore's file driver.

The files are the same as those of `data_files`. That module was faster where it was measured; this
one is for file systems on which TensorStore does better, and for comparison in the benchmark.
All bytes go through the page cache: TensorStore's direct I/O (`file_io_mode`) is for reads alone,
and they take 1.5 to 2 times as long with it. What a write has left there is dropped.

The functions block and raise `OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from ckpt.storage._local import data_files
from ckpt.storage._local.posix import open_regular

_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
# Bytes of one read: TensorStore keeps the interpreter lock while it copies them out, 50 ms for 64
# MiB.
_PIECE_BYTES = 4 << 20


def write_block(path: Path, data: memoryview, mode: int | None = None) -> None:
    """Write a new file that holds `data`, and make it durable; see `data_files.write_block`.

    A key-value write takes bytes only, which would be a copy. An array write takes memory as it is.
    """
    if not data:
        # An array without elements has no chunk, and so no file.
        data_files.write_block(path, data, mode)
        return
    # Imported late: lists of steps write no arrays, and need neither.
    import numpy as np
    import tensorstore as ts

    # Made here: TensorStore would replace a file of that name, and make its directory again, even
    # that of an attempt that was removed.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if mode is not None:
            os.fchmod(fd, mode & 0o666)
        with _errors_of(path):
            array = ts.open(_array_of(path, len(data))).result()
            block = np.frombuffer(data, np.uint8)
            array.write(block, can_reference_source_data_indefinitely=True).result()
        if hasattr(os, "posix_fadvise"):
            # Pages that the next file can have: fresh ones cost up to ten times as much.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _array_of(path: Path, nbytes: int) -> dict[str, Any]:
    """Return the spec of an array whose only chunk is a file; its metadata is never written."""
    return {
        "driver": "zarr",
        "kvstore": {"driver": "kvstack", "layers": [{"exact": "0", "base": _file(path)}]},
        "metadata": {"shape": [nbytes], "chunks": [nbytes], "dtype": "|u1", "compressor": None},
        "open": True,
        "assume_metadata": True,
    }


def _file(path: Path) -> dict[str, Any]:
    """Return the spec of a file, which is written durably, and in its place.

    A lock and a name until then are not needed: nobody reads the files of an attempt.
    """
    place = {"driver": "file", "path": os.path.abspath(path)}
    return place | {"file_io_sync": True, "file_io_locking": {"mode": "non_atomic"}}


def read_block(
    top: Path, path: str, offset: int, target: memoryview, then: Callable[[], None] | None = None
) -> None:
    """Fill `target` with the bytes of a file below `top`; see `data_files.read_block`."""
    fd, size = open_regular(top, path)
    os.close(fd)
    end = offset + len(target)
    if end > size:
        raise EOFError(f"it has {size} bytes, {end} are needed")
    import tensorstore as ts

    source = top / path
    file = ts.KvStore.open(_file(source)).result()
    for first in range(0, len(target), _PIECE_BYTES):
        part = target[first : first + _PIECE_BYTES]
        place = slice(offset + first, offset + first + len(part))
        with _errors_of(source):
            found = file.read("", byte_range=place).result().value
        if len(found) != len(part):
            raise EOFError("it was cut short while it was read")
        part[:] = found
    if then is not None:
        then()


@contextlib.contextmanager
def _errors_of(path: Path) -> Generator[None]:
    """Turn errors of TensorStore, which are those of Python for wrong values, into `OSError`."""
    try:
        yield
    except ValueError as error:
        code = _OS_ERROR.search(str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, str(error).split(" [")[0], str(path)) from error
