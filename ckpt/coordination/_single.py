"""A job of one process."""

from __future__ import annotations

from ckpt.coordination._base import KeyValues
from ckpt.coordination._memory import MemoryKeyValues

__all__ = ["SingleProcess"]


class SingleProcess:
    """This process is alone; nothing is shared."""

    @property
    def process_index(self) -> int:
        """0."""
        return 0

    @property
    def process_count(self) -> int:
        """1."""
        return 1

    def key_values(self) -> KeyValues:
        """Return values that nobody else sees."""
        return MemoryKeyValues()
