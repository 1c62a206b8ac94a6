"""The seam to TensorStore: contexts, opening, waiting, and its errors.

Two facts shape this file. Cancelling an awaited future does not stop the input or output, so waits
are shielded and cancellation is looked at between them. TensorStore reports every failure as
`ValueError` with a status code in its text, so they are translated here and nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import numpy as np
import tensorstore as ts

from ckpt._format.zarr import stored_dtype, zarr_metadata
from ckpt._redaction import redact
from ckpt._runtime.futures import waker
from ckpt.errors import CorruptCheckpointError, StorageError

__all__ = [
    "as_stored",
    "open_array",
    "read_context",
    "settle",
    "translated",
]

_STATUS = re.compile(r"^([A-Z_]{5,}): ")
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_NAMED_ERRORS = {"RESOURCE_EXHAUSTED": errno.ENOSPC, "PERMISSION_DENIED": errno.EACCES}
# What a store answers when it cannot be read just now. Any other answer while a committed step is
# read says that its bytes are not what was committed.
_REFUSALS = {
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
}


def read_context() -> ts.Context:
    """Return a context that maps files: 2 to 5 times as fast as reading them, when cached."""
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "file_io_concurrency": {"limit": 16},
            "file_io_mode": {"mode": "memmap"},
        }
    )


def open_array(
    database: ts.KvStore,
    context: ts.Context,
    name: str,
    shape: Sequence[int],
    chunk: Sequence[int],
    dtype: str,
) -> ts.TensorStore:
    """Open the array stored under `name` without reading its metadata, which is known."""
    spec = {
        "driver": "zarr3",
        "metadata": zarr_metadata(shape, chunk, dtype),
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(
        spec,
        kvstore=database / f"{name}/",
        open=True,
        assume_metadata=True,
        context=context,
    ).result()


def as_stored(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return `array` as the dtype zarr has a name for; same bytes."""
    name = array.dtype.name
    return array if stored_dtype(name) == name else array.view(stored_dtype(name))


async def settle(future: Any) -> None:
    """Wait until a TensorStore future is done, however it ended, also when cancelled meanwhile."""
    if future.done():
        return
    event = anyio.Event()
    wake = waker(event)
    future.add_done_callback(lambda _: wake())
    with anyio.CancelScope(shield=True):
        await event.wait()


@contextlib.contextmanager
def translated(what: str, *, leaf: str | None = None) -> Iterator[None]:
    """Turn TensorStore's errors in the body into this library's.

    A committed step is being read, where missing bytes are damage.

    Args:
        what: What was tried, for the message.
        leaf: The leaf concerned.
    """
    try:
        yield
    except ValueError as error:
        # Also of the cause that tracebacks show: a store's answer may hold what it was asked with.
        text = redact(str(error))
        error.args = (text,)
        found = _STATUS.match(text)
        status = found[1] if found else ""
        reason = text.split(" [")[0].strip()
        code = _OS_ERROR.search(text)
        number = int(code[1]) if code else _NAMED_ERRORS.get(status)
        if status not in _REFUSALS and number in (None, errno.ENOENT):
            raise CorruptCheckpointError(
                f"cannot {what}: {reason}. The step was damaged after it was committed; restore "
                "another one",
                leaf=leaf,
            ) from error
        raise StorageError(f"cannot {what}: {reason}", errno=number, leaf=leaf) from error
