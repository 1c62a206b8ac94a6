"""The newer interface of Orbax: `import ckpt_orbax.v1 as ocp`."""

from ckpt_orbax import multihost as multihost
from ckpt_orbax import path as path
from ckpt_orbax import tree as tree
from ckpt_orbax.checkpoint_utils import PLACEHOLDER as PLACEHOLDER
from ckpt_orbax.utils import is_checkpoint_finalized
from ckpt_orbax.v1 import context
from ckpt_orbax.v1 import errors as errors
from ckpt_orbax.v1 import handlers as handlers
from ckpt_orbax.v1 import partial as partial
from ckpt_orbax.v1 import training as training
from ckpt_orbax.v1._calls import AsyncResponse as AsyncResponse
from ckpt_orbax.v1._calls import CheckpointMetadata as CheckpointMetadata
from ckpt_orbax.v1.context import Context as Context
from ckpt_orbax.v1.handlers import CheckpointableHandler as CheckpointableHandler
from ckpt_orbax.v1.handlers import StatefulCheckpointable as StatefulCheckpointable
from ckpt_orbax.v1.saving import *

is_orbax_checkpoint = is_checkpoint_finalized
options = context
