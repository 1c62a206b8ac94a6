"""Helpers for tests and examples."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def erase_and_create_empty(directory: str | os.PathLike[str]) -> Path:
    """Delete a directory with all that is in it, make an empty one, and return its path.

    Example:
        ```python
        directory = ocp.test_utils.erase_and_create_empty("/tmp/checkpoints")
        ```
    """
    path = Path(directory)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
