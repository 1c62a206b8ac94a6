"""Where checkpoints are kept. `S3`, `GCS` and `Memory` say what a URL has no room for."""

from __future__ import annotations

from ckpt.storage.configs import GCS, S3, Memory

__all__ = ["GCS", "S3", "Memory"]
