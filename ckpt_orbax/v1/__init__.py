"""The newer interface of Orbax: `import ckpt_orbax.v1 as ocp`."""

from collections.abc import Callable
from typing import Any

from ckpt_orbax import multihost, path, tree
from ckpt_orbax.checkpoint_utils import PLACEHOLDER
from ckpt_orbax.utils import is_checkpoint_finalized as is_orbax_checkpoint
from ckpt_orbax.v1 import context as options
from ckpt_orbax.v1 import errors, handlers, training
from ckpt_orbax.v1._calls import AsyncResponse, CheckpointMetadata
from ckpt_orbax.v1.context import Context
from ckpt_orbax.v1.handlers import CheckpointableHandler, StatefulCheckpointable
from ckpt_orbax.v1.saving import (
    checkpointables_metadata,
    deprecated,
    load,
    load_checkpointables,
    metadata,
    save,
    save_async,
    save_checkpointables,
    save_checkpointables_async,
)

save_pytree: Callable[..., Any] = deprecated("save", save)
save_pytree_async: Callable[..., Any] = deprecated("save_async", save_async)
load_pytree: Callable[..., Any] = deprecated("load", load)
pytree_metadata: Callable[..., Any] = deprecated("metadata", metadata)

__all__ = [
    "PLACEHOLDER",
    "AsyncResponse",
    "CheckpointMetadata",
    "CheckpointableHandler",
    "Context",
    "StatefulCheckpointable",
    "checkpointables_metadata",
    "errors",
    "handlers",
    "is_orbax_checkpoint",
    "load",
    "load_checkpointables",
    "load_pytree",
    "metadata",
    "multihost",
    "options",
    "path",
    "pytree_metadata",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
    "training",
    "tree",
]
