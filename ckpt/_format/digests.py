"""Digests of bytes, whole or piece by piece: xxh3_128."""

from __future__ import annotations

import mmap
from typing import Protocol

import xxhash


class Digester(Protocol):
    """A digest that is taken piece by piece."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Add these bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all of them, as `digest` would."""


def new_digest() -> Digester:
    digester: Digester = xxhash.xxh3_128()
    return digester


def digest(data: bytes | bytearray | memoryview | mmap.mmap) -> str:
    """Return the xxh3_128 of `data` as 32 hex digits.

    Source: https://xxhash.com; a checksum against accidents, not against tampering.
    """
    return xxhash.xxh3_128_hexdigest(memoryview(data))
