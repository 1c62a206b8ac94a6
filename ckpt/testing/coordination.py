"""The key-value store of a simulated job: several managers in one process, for tests."""

from __future__ import annotations

from ckpt.coordination._jobs import MemoryKeyValues

__all__ = ["MemoryKeyValues"]
