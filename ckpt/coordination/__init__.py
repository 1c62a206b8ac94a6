"""Several processes of one job: who they are, what they share, and what they do together.

A manager finds its job by itself: that of `jax.distributed` where that was initialized, else this
process alone. Another one is an object with the methods of `Coordinator`, given as
`CheckpointManager(coordinator=...)`.
"""

from __future__ import annotations

from ckpt.coordination._base import Coordinator, KeyValues
from ckpt.coordination._jax_service import JaxDistributed
from ckpt.coordination._jobs import OwnDisks, SingleProcess, default_coordinator
from ckpt.coordination._memory import MemoryKeyValues

__all__ = [
    "Coordinator",
    "JaxDistributed",
    "KeyValues",
    "MemoryKeyValues",
    "OwnDisks",
    "SingleProcess",
    "default_coordinator",
]


def __dir__() -> list[str]:
    return __all__
