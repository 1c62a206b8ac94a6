"""Places for checkpoints. `S3`, `GCS` and `Memory` say what a URL has no room for.

A store of another package follows `Storage`; `ckpt.testing.conformance` tells whether it does.
"""

from __future__ import annotations

from ckpt.storage._base import Attempt, Storage
from ckpt.storage._object.config import GCS, S3, Memory

__all__ = ["GCS", "S3", "Attempt", "Memory", "Storage"]
