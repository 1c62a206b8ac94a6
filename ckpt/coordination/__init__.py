"""Several processes of one job: who they are, what they share, and what they do together.

A manager finds its job by itself: that of `jax.distributed` where that was initialized, else this
process alone. Another one is an object with the methods of `Coordinator`, given as
`CheckpointManager(coordinator=...)`.
"""

from __future__ import annotations

from ckpt.coordination.base import Coordinator, KeyValues
from ckpt.coordination.default import default_coordinator
from ckpt.coordination.jax_service import JaxDistributed
from ckpt.coordination.memory import MemoryKeyValues
from ckpt.coordination.own_disks import OwnDisks
from ckpt.coordination.single import SingleProcess

__all__ = [
    "Coordinator",
    "JaxDistributed",
    "KeyValues",
    "MemoryKeyValues",
    "OwnDisks",
    "SingleProcess",
    "default_coordinator",
]
