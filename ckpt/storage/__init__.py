"""Places for checkpoints. `Local`, `S3`, `GCS` and `Memory` take settings that a URL cannot hold.

A store of another package follows `Store`; `ckpt.testing.conformance` checks whether it does.
"""

from __future__ import annotations

from ckpt.storage._local.config import Local
from ckpt.storage._object.config import GCS, S3, Memory
from ckpt.storage._resolve import open_root
from ckpt.storage._store import CopiesObjects, Store, StoredObject, StoreLimits, Swap

__all__ = [
    "GCS",
    "S3",
    "CopiesObjects",
    "Local",
    "Memory",
    "Store",
    "StoreLimits",
    "StoredObject",
    "Swap",
    "open_root",
]


def __dir__() -> list[str]:
    return __all__
