"""The interface of Orbax on the engine of `ckpt`: `import ckpt_orbax as ocp`.

The names are those of `orbax.checkpoint`. Orbax is not imported, and need not be installed.
"""

from ckpt_orbax import (
    args,
    checkpoint_manager,
    checkpoint_utils,
    checkpointers,
    handlers,
    metadata,
    multihost,
    options,
    path,
    test_utils,
    transform_utils,
    tree,
    type_handlers,
    utils,
    v1,
)
from ckpt_orbax import args as checkpoint_args
from ckpt_orbax import policies as checkpoint_managers
from ckpt_orbax._installation import install
from ckpt_orbax.checkpoint_manager import (
    CheckpointManager,
    CheckpointManagerOptions,
    StepAlreadyExistsError,
)
from ckpt_orbax.checkpoint_utils import PLACEHOLDER
from ckpt_orbax.checkpointers import (
    AsyncCheckpointer,
    Checkpointer,
    PyTreeCheckpointer,
    StandardCheckpointer,
)
from ckpt_orbax.handlers import (
    ArrayCheckpointHandler,
    AsyncCheckpointHandler,
    BasePyTreeCheckpointHandler,
    CheckpointHandler,
    CheckpointHandlerRegistry,
    CompositeCheckpointHandler,
    DefaultCheckpointHandlerRegistry,
    JaxRandomKeyCheckpointHandler,
    JsonCheckpointHandler,
    NumpyRandomKeyCheckpointHandler,
    ProtoCheckpointHandler,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
)
from ckpt_orbax.options import AsyncOptions
from ckpt_orbax.transform_utils import RestoreTransform, Transform
from ckpt_orbax.type_handlers import ArrayRestoreArgs, RestoreArgs, SaveArgs

__all__ = [
    "PLACEHOLDER",
    "ArrayCheckpointHandler",
    "ArrayRestoreArgs",
    "AsyncCheckpointHandler",
    "AsyncCheckpointer",
    "AsyncOptions",
    "BasePyTreeCheckpointHandler",
    "CheckpointHandler",
    "CheckpointHandlerRegistry",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "Checkpointer",
    "CompositeCheckpointHandler",
    "DefaultCheckpointHandlerRegistry",
    "JaxRandomKeyCheckpointHandler",
    "JsonCheckpointHandler",
    "NumpyRandomKeyCheckpointHandler",
    "ProtoCheckpointHandler",
    "PyTreeCheckpointHandler",
    "PyTreeCheckpointer",
    "RestoreArgs",
    "RestoreTransform",
    "SaveArgs",
    "StandardCheckpointHandler",
    "StandardCheckpointer",
    "StepAlreadyExistsError",
    "Transform",
    "args",
    "checkpoint_args",
    "checkpoint_manager",
    "checkpoint_managers",
    "checkpoint_utils",
    "checkpointers",
    "handlers",
    "install",
    "metadata",
    "multihost",
    "options",
    "path",
    "test_utils",
    "transform_utils",
    "tree",
    "type_handlers",
    "utils",
    "v1",
]
