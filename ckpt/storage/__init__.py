"""Places for checkpoints. `Local`, `S3`, `GCS`, `Memory` say what a path or URL has no room for.

A store of another package follows `Storage`; `ckpt.testing.conformance` tells whether it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.storage._base import Attempt, Storage
from ckpt.storage._local.config import Local
from ckpt.storage._object.config import GCS, S3, Memory

if TYPE_CHECKING:
    from ckpt.storage._resolve import open_root

__all__ = ["GCS", "S3", "Attempt", "Local", "Memory", "Storage", "open_root"]


def __getattr__(name: str) -> Any:
    # It imports every kind of storage, and TensorStore with them.
    if name == "open_root":
        from ckpt.storage._resolve import open_root

        return open_root
    raise AttributeError(f"module 'ckpt.storage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
