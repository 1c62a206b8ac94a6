"""Helpers that programs use."""

from ckpt_orbax.path.step import TMP_DIR_SUFFIX as TMP_DIR_SUFFIX
from ckpt_orbax.path.step import checkpoint_steps as checkpoint_steps
from ckpt_orbax.path.step import get_save_directory as get_save_directory
from ckpt_orbax.path.step import is_checkpoint_finalized as is_checkpoint_finalized
from ckpt_orbax.path.step import step_from_checkpoint_name as step_from_checkpoint_name
from ckpt_orbax.tree import to_shape_dtype_struct as to_shape_dtype_struct
