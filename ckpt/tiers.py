"""Places nearer than the root of a run, for `CheckpointManager(root, tiers=[...])`.

This module needs neither jax nor tensorstore.
"""

from __future__ import annotations

from ckpt._tiers.settings import SharedMemory

__all__ = ["SharedMemory"]


def __dir__() -> list[str]:
    return __all__
