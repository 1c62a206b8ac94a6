"""Helpers that programs use."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ckpt_orbax.path.step import TMP_DIR_SUFFIX as TMP_DIR_SUFFIX
from ckpt_orbax.path.step import checkpoint_steps as checkpoint_steps
from ckpt_orbax.path.step import get_save_directory as get_save_directory
from ckpt_orbax.path.step import is_checkpoint_finalized as is_checkpoint_finalized
from ckpt_orbax.path.step import step_from_checkpoint_name as step_from_checkpoint_name
from ckpt_orbax.tree import to_shape_dtype_struct as to_shape_dtype_struct


def fully_replicated_host_local_array_to_global_array(arr: jax.Array) -> Any:
    """Return an array that every device has whole, such as one of `jax.pmap`, as one of all.

    Example:
        ```python
        ocp.utils.fully_replicated_host_local_array_to_global_array(state["params"]["w"])
        ```
    """
    local = np.asarray(arr.addressable_data(0))
    whole = local if local.shape == arr.shape else local[0]
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    everywhere: Any = jax.sharding.PartitionSpec
    return multihost_utils.host_local_array_to_global_array(whole, mesh, everywhere())
