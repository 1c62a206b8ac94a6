"""Several processes of one job: their numbers, their shared values, and their joint operations.

A manager finds its job by itself: the job of `jax.distributed` if that was initialized, else this
process alone. For another job, pass an object with the methods of `Coordinator` as
`CheckpointManager(coordinator=...)`.
"""

from __future__ import annotations

from ckpt.coordination._base import Coordinator, KeyValues
from ckpt.coordination._jax_service import JaxDistributed
from ckpt.coordination._jobs import MemoryKeyValues, OwnDisks, SingleProcess, default_coordinator

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
