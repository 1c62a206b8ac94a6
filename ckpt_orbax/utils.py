"""Helpers that programs use."""

from __future__ import annotations

import os
from typing import Any

import ckpt
import ckpt.sync
from ckpt_orbax.tree import to_shape_dtype_struct as to_shape_dtype_struct

# End of the names of directories that Orbax has not finished.
TMP_DIR_SUFFIX = ".orbax-checkpoint-tmp"


def checkpoint_steps(checkpoint_dir: str | os.PathLike[str], **_: Any) -> list[int]:
    """Return the steps of a root, ascending.

    Example:
        ```python
        print(ocp.utils.checkpoint_steps(directory))
        ```
    """
    with ckpt.sync.CheckpointManager(os.fspath(checkpoint_dir), mode="r") as mgr:
        return mgr.all_steps()


def is_checkpoint_finalized(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is a whole checkpoint.

    Example:
        ```python
        assert ocp.utils.is_checkpoint_finalized(directory / "100")
        ```
    """
    try:
        ckpt.sync.metadata(os.fspath(path))
    except ckpt.errors.CheckpointError:
        return False
    return True
