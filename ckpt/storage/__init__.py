"""Where checkpoints are kept. `S3`, `GCS` and `Memory` say what a URL has no room for.

A store of another package follows `Storage`, and `ckpt.testing.conformance.stores` tries it.
"""

from __future__ import annotations

from ckpt.storage._base import Attempt, Storage
from ckpt.storage._object.config import GCS, S3, Memory

__all__ = ["GCS", "S3", "Attempt", "Memory", "Storage"]
