"""Places nearer than the root of a run, for `CheckpointManager(root, tiers=[...])`.

This module needs neither jax nor tensorstore.
"""

from __future__ import annotations

from ckpt._tiers.settings import PeerCopies, SharedMemory, Tier

__all__ = ["PeerCopies", "SharedMemory", "Tier"]


def __dir__() -> list[str]:
    return __all__
