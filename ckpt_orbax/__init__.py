"""The interface of Orbax on the engine of `ckpt`: `import ckpt_orbax as ocp`.

The names are those of `orbax.checkpoint`. Orbax is not imported, and need not be installed.
"""

from ckpt_orbax import args as args
from ckpt_orbax import checkpoint_manager as checkpoint_manager
from ckpt_orbax import checkpoint_utils as checkpoint_utils
from ckpt_orbax import checkpointers as checkpointers
from ckpt_orbax import handlers as handlers
from ckpt_orbax import metadata as metadata
from ckpt_orbax import multihost as multihost
from ckpt_orbax import options as options
from ckpt_orbax import path as path
from ckpt_orbax import policies
from ckpt_orbax import test_utils as test_utils
from ckpt_orbax import transform_utils as transform_utils
from ckpt_orbax import tree as tree
from ckpt_orbax import type_handlers as type_handlers
from ckpt_orbax import utils as utils
from ckpt_orbax import v1 as v1
from ckpt_orbax._installation import install as install
from ckpt_orbax.checkpoint_manager import *
from ckpt_orbax.checkpoint_utils import PLACEHOLDER as PLACEHOLDER
from ckpt_orbax.checkpointers import *
from ckpt_orbax.handlers import *
from ckpt_orbax.options import AsyncOptions as AsyncOptions
from ckpt_orbax.options import CheckpointManagerOptions as CheckpointManagerOptions
from ckpt_orbax.transform_utils import RestoreTransform as RestoreTransform
from ckpt_orbax.transform_utils import Transform as Transform
from ckpt_orbax.type_handlers import ArrayRestoreArgs as ArrayRestoreArgs
from ckpt_orbax.type_handlers import RestoreArgs as RestoreArgs
from ckpt_orbax.type_handlers import SaveArgs as SaveArgs

checkpoint_args = args
checkpoint_managers = policies
