"""Asyncio-first checkpoints for JAX training.

Names are loaded when they are first used, so that `import ckpt` is quick and the modules that need
neither jax nor tensorstore (`ckpt.manifest`, `ckpt.errors`, `ckpt.policies`) do not import them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt import coordination as coordination
    from ckpt import errors, handlers, observers, policies, surgery, sync
    from ckpt import step_names as step_names
    from ckpt import storage as storage
    from ckpt import testing as testing
    from ckpt.commit import Commit, Progress, StepInfo
    from ckpt.errors import CheckpointError
    from ckpt.events import Event
    from ckpt.handlers.base import Handler
    from ckpt.handlers.json import JsonHandler
    from ckpt.handlers.pytree import PyTreeHandler
    from ckpt.layout.adapt import Adapt, RestoreReport
    from ckpt.layout.classes import Record
    from ckpt.layout.formats import ArrayFormat, Blosc, Zstd
    from ckpt.manager import CheckpointManager
    from ckpt.oneshot import load, metadata, save, verify
    from ckpt.settings import Staging, Timeouts
    from ckpt.stepinfo import StepMetadata
    from ckpt.watching import watch

__all__ = [
    "Adapt",
    "ArrayFormat",
    "Blosc",
    "CheckpointError",
    "CheckpointManager",
    "Commit",
    "Event",
    "Handler",
    "JsonHandler",
    "Progress",
    "PyTreeHandler",
    "Record",
    "RestoreReport",
    "Staging",
    "StepInfo",
    "StepMetadata",
    "Timeouts",
    "Zstd",
    "errors",
    "handlers",
    "load",
    "metadata",
    "observers",
    "policies",
    "save",
    "surgery",
    "sync",
    "verify",
    "watch",
]

# Modules of the reference that are not needed often enough to be among the names above.
_MODULES = ("coordination", "step_names", "storage", "testing")

_HOMES = {
    "Adapt": "ckpt.layout.adapt",
    "ArrayFormat": "ckpt.layout.formats",
    "Blosc": "ckpt.layout.formats",
    "CheckpointError": "ckpt.errors",
    "CheckpointManager": "ckpt.manager",
    "Commit": "ckpt.commit",
    "Event": "ckpt.events",
    "Handler": "ckpt.handlers.base",
    "JsonHandler": "ckpt.handlers.json",
    "Progress": "ckpt.commit",
    "PyTreeHandler": "ckpt.handlers.pytree",
    "Record": "ckpt.layout.classes",
    "RestoreReport": "ckpt.layout.adapt",
    "Staging": "ckpt.settings",
    "StepInfo": "ckpt.commit",
    "StepMetadata": "ckpt.stepinfo",
    "Timeouts": "ckpt.settings",
    "Zstd": "ckpt.layout.formats",
    "load": "ckpt.oneshot",
    "metadata": "ckpt.oneshot",
    "save": "ckpt.oneshot",
    "verify": "ckpt.oneshot",
    "watch": "ckpt.watching",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__ or name in _MODULES:
        return importlib.import_module(f"ckpt.{name}")
    raise AttributeError(f"module 'ckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
