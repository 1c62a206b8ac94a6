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
    from ckpt import exports as exports
    from ckpt import manifest as manifest
    from ckpt import orbax as orbax
    from ckpt import step_names as step_names
    from ckpt import storage as storage
    from ckpt import testing as testing
    from ckpt import tiers as tiers
    from ckpt import types as types
    from ckpt._api.adoption import adopt
    from ckpt._api.branches import Source
    from ckpt._api.conversion import convert
    from ckpt._api.manager import CheckpointManager
    from ckpt._api.merge import merge
    from ckpt._api.oneshot import load, metadata, save, save_async, verify
    from ckpt._api.resumption import abstract
    from ckpt._api.stored_array import open_array
    from ckpt._api.watch import watch
    from ckpt._commit import Commit, Progress, StepInfo
    from ckpt._events import Event
    from ckpt._format.array_format import ArrayFormat, Blosc, Zstd
    from ckpt._plan.adapt import Adapt, RestoreReport
    from ckpt._settings import Staging, Timeouts
    from ckpt._steps.step_metadata import StepMetadata
    from ckpt._tree.classes import UnknownNode
    from ckpt.errors import CheckpointError
    from ckpt.handlers._base import Handler

__all__ = [
    "Adapt",
    "ArrayFormat",
    "Blosc",
    "CheckpointError",
    "CheckpointManager",
    "Commit",
    "Event",
    "Handler",
    "Progress",
    "RestoreReport",
    "Source",
    "Staging",
    "StepInfo",
    "StepMetadata",
    "Timeouts",
    "UnknownNode",
    "Zstd",
    "abstract",
    "adopt",
    "convert",
    "errors",
    "handlers",
    "load",
    "merge",
    "metadata",
    "observers",
    "open_array",
    "policies",
    "save",
    "save_async",
    "surgery",
    "sync",
    "verify",
    "watch",
]

# Modules of the reference that are not needed often enough to be among the names above.
_MODULES = (
    "coordination",
    "exports",
    "manifest",
    "orbax",
    "step_names",
    "storage",
    "testing",
    "tiers",
    "types",
)

_HOMES = {
    "Adapt": "ckpt._plan.adapt",
    "ArrayFormat": "ckpt._format.array_format",
    "Blosc": "ckpt._format.array_format",
    "CheckpointError": "ckpt.errors",
    "CheckpointManager": "ckpt._api.manager",
    "Commit": "ckpt._commit",
    "Event": "ckpt._events",
    "Handler": "ckpt.handlers._base",
    "Progress": "ckpt._commit",
    "UnknownNode": "ckpt._tree.classes",
    "RestoreReport": "ckpt._plan.adapt",
    "Source": "ckpt._api.branches",
    "Staging": "ckpt._settings",
    "StepInfo": "ckpt._commit",
    "StepMetadata": "ckpt._steps.step_metadata",
    "Timeouts": "ckpt._settings",
    "Zstd": "ckpt._format.array_format",
    "abstract": "ckpt._api.resumption",
    "adopt": "ckpt._api.adoption",
    "convert": "ckpt._api.conversion",
    "load": "ckpt._api.oneshot",
    "merge": "ckpt._api.merge",
    "metadata": "ckpt._api.oneshot",
    "open_array": "ckpt._api.stored_array",
    "save": "ckpt._api.oneshot",
    "save_async": "ckpt._api.oneshot",
    "verify": "ckpt._api.oneshot",
    "watch": "ckpt._api.watch",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Its import takes longer than that of this package.
        from importlib.metadata import version

        return version("ckpt-jax")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__ or name in _MODULES:
        return importlib.import_module(f"ckpt.{name}")
    raise AttributeError(f"module 'ckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
