"""Values of any length in a store of short values: compressed, and in parts if they are long.

A value is stored as a head, and the parts that the head names. The parts are stored before the
head, under a unique name, so a process that sees the head can read all of them.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable

from ckpt.errors import CoordinationError

# gRPC takes messages of up to 4 MB by default, and a service that sends long messages keeps all
# others waiting.
PART_BYTES = 1 << 20
_WORTH_COMPRESSING = 512
_PLAIN, _COMPRESSED, _IN_PARTS = b"p", b"z", b"n"

Part = tuple[str, bytes]


def split(value: bytes) -> tuple[bytes, list[Part]]:
    """Return the head of a value, and the parts to be stored before it, by name."""
    body = _PLAIN + value
    if len(value) >= _WORTH_COMPRESSING:
        compressed = zlib.compress(value, 1)
        if len(compressed) < len(value):
            body = _COMPRESSED + compressed
    if len(body) <= PART_BYTES:
        return body, []
    name = secrets.token_hex(8)
    pieces = [body[at : at + PART_BYTES] for at in range(0, len(body), PART_BYTES)]
    parts = [(f"{name}/{number}", piece) for number, piece in enumerate(pieces)]
    return _IN_PARTS + f"{name} {len(parts)}".encode(), parts


def join(head: bytes, read: Callable[[str], bytes]) -> bytes:
    """Return the value of a head; `read` returns a part by its name.

    Raises:
        CoordinationError: `split` did not write the head or a part.
    """
    try:
        if head[:1] == _IN_PARTS:
            name, count = head[1:].decode().split(" ")
            head = b"".join(read(f"{name}/{number}") for number in range(int(count)))
        if head[:1] == _PLAIN:
            return head[1:]
        if head[:1] == _COMPRESSED:
            return zlib.decompress(head[1:])
    except (ValueError, zlib.error):
        pass
    raise CoordinationError(
        f"a value that the processes share is not understood ({head[:80]!r}); all processes of a "
        "job have to run the same version of this library"
    )
