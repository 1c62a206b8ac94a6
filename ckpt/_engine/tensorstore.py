"""The seam to TensorStore: its contexts and its errors.

TensorStore reports every failure as `ValueError` with a status code in its text; this is where such
errors become this library's.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt._redaction import redact
from ckpt.errors import CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    import tensorstore as ts

_STATUS = re.compile(r"^([A-Z_]{5,}): ")
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_NAMED_ERRORS = {"RESOURCE_EXHAUSTED": errno.ENOSPC, "PERMISSION_DENIED": errno.EACCES}
# The answers of a store that cannot be read at the moment. Any other answer while a committed step
# is read means that its bytes are not what was committed.
_REFUSALS = {
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
}


def new_context() -> ts.Context:
    """Return a context without a cache; memory stores are shared within a context only."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})


@contextlib.contextmanager
def translated(what: str, *, leaf: str | None = None) -> Iterator[None]:
    """Turn TensorStore's errors in the body into this library's.

    It is for reading committed steps, where missing bytes mean damage.

    Args:
        what: What is tried, for the message.
        leaf: The leaf concerned.
    """
    try:
        yield
    except ValueError as error:
        # Also in the cause, which tracebacks show: a store may repeat secrets of the request.
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
