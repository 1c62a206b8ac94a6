"""Asyncio-first checkpoints for JAX training.

Names are loaded when they are first used, so that `import ckpt` is quick and the modules that need
neither jax nor tensorstore (`ckpt.manifest`, `ckpt.errors`, `ckpt.keep`) do not import them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Defined here, not only in the installed metadata: a program may have only the package on its path.
__version__ = "0.1.0"

if TYPE_CHECKING:
    from ckpt import coordination as coordination
    from ckpt import errors, handlers, keep, observers, save_when, surgery, sync
    from ckpt import exports as exports
    from ckpt import extensions as extensions
    from ckpt import manifest as manifest
    from ckpt import orbax as orbax
    from ckpt import step_names as step_names
    from ckpt import storage as storage
    from ckpt import testing as testing
    from ckpt import tiers as tiers
    from ckpt import types as types
    from ckpt._api.functions import (
        adopt,
        convert,
        load,
        merge,
        metadata,
        open_array,
        save,
        verify,
        watch,
    )
    from ckpt._api.manager import CheckpointManager
    from ckpt._api.resumption import abstract
    from ckpt._calls.branches import Source
    from ckpt._commit import Commit, StepInfo
    from ckpt._format.array_format import ArrayFormat, Blosc, Zstd
    from ckpt._plan.adapt import Adapt
    from ckpt._settings import Staging, Timeouts
    from ckpt._steps.step_metadata import StepMetadata
    from ckpt.errors import CheckpointError

__all__ = [
    "Adapt",
    "ArrayFormat",
    "Blosc",
    "CheckpointError",
    "CheckpointManager",
    "Commit",
    "Source",
    "Staging",
    "StepInfo",
    "StepMetadata",
    "Timeouts",
    "Zstd",
    "abstract",
    "adopt",
    "convert",
    "errors",
    "handlers",
    "keep",
    "load",
    "merge",
    "metadata",
    "observers",
    "open_array",
    "save",
    "save_when",
    "surgery",
    "sync",
    "verify",
    "watch",
]

# Modules of the reference that are not needed often enough to be among the names above.
_MODULES = (
    "coordination",
    "exports",
    "extensions",
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
    "Source": "ckpt._calls.branches",
    "Staging": "ckpt._settings",
    "StepInfo": "ckpt._commit",
    "StepMetadata": "ckpt._steps.step_metadata",
    "Timeouts": "ckpt._settings",
    "Zstd": "ckpt._format.array_format",
    "abstract": "ckpt._api.resumption",
    "adopt": "ckpt._api.functions",
    "convert": "ckpt._api.functions",
    "load": "ckpt._api.functions",
    "merge": "ckpt._api.functions",
    "metadata": "ckpt._api.functions",
    "open_array": "ckpt._api.functions",
    "save": "ckpt._api.functions",
    "verify": "ckpt._api.functions",
    "watch": "ckpt._api.functions",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__ or name in _MODULES:
        return importlib.import_module(f"ckpt.{name}")
    from ckpt._api.hints import no_attribute

    raise no_attribute("module 'ckpt'", name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
