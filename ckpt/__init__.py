"""Asyncio-first checkpoints for JAX training.

Names are loaded when they are first used, so that `import ckpt` is quick and the modules that need
neither jax nor tensorstore (`ckpt.manifest`, `ckpt.errors`, `ckpt.policies`) do not import them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt import errors, observers, policies, sync
    from ckpt.commit import Commit, Progress, StepInfo
    from ckpt.errors import CheckpointError
    from ckpt.events import Event
    from ckpt.handlers.base import Handler
    from ckpt.layout.structure import Record
    from ckpt.manager import CheckpointManager
    from ckpt.oneshot import load, metadata, save
    from ckpt.settings import Staging
    from ckpt.stepinfo import LeafInfo, StepMetadata

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "Commit",
    "Event",
    "Handler",
    "LeafInfo",
    "Progress",
    "Record",
    "Staging",
    "StepInfo",
    "StepMetadata",
    "errors",
    "load",
    "metadata",
    "observers",
    "policies",
    "save",
    "sync",
]

_HOMES = {
    "CheckpointError": "ckpt.errors",
    "CheckpointManager": "ckpt.manager",
    "Commit": "ckpt.commit",
    "Event": "ckpt.events",
    "Handler": "ckpt.handlers.base",
    "LeafInfo": "ckpt.stepinfo",
    "Progress": "ckpt.commit",
    "Record": "ckpt.layout.structure",
    "Staging": "ckpt.settings",
    "StepInfo": "ckpt.commit",
    "StepMetadata": "ckpt.stepinfo",
    "load": "ckpt.oneshot",
    "metadata": "ckpt.oneshot",
    "save": "ckpt.oneshot",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__:
        return importlib.import_module(f"ckpt.{name}")
    raise AttributeError(f"module 'ckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
