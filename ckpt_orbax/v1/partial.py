"""Saves of one tree in several calls."""

from __future__ import annotations

import os
from typing import Any

import ckpt.sync
from ckpt_orbax.v1 import _calls

PathLike = str | os.PathLike[str]

# Managers and saves that are not finalized yet, by path.
_OPEN: dict[str, tuple[ckpt.sync.CheckpointManager, Any]] = {}


def save(path: PathLike, state: Any, *, custom_metadata: Any = None) -> None:
    """Save a part of a tree; nothing is there to load before `finalize`.

    What is not finalized when the process ends is lost.

    Args:
        path: Path of the checkpoint.
        state: The part. Its dicts are merged with those of earlier parts; it may only add keys.
        custom_metadata: JSON values to keep with the checkpoint; those of the first call count.

    Raises:
        FileExistsError: There is something at the path.
        ValueError: An earlier part has something at a path of this one.

    Example:
        ```python
        v1.partial.save(path, {"params": state["params"]})
        v1.partial.save(path, {"opt_state": state["params"]})
        v1.partial.finalize(path)
        ```
    """
    key = os.fspath(path)
    if key not in _OPEN:
        if os.path.exists(key):
            raise FileExistsError(f"{key} exists: v1.delete(path) deletes it")
        manager = _calls.manager_at(key)
        _OPEN[key] = manager, manager.partial(0, custom_metadata=custom_metadata)
    _OPEN[key][1].save(items={_calls.STATE: state})


def save_async(path: PathLike, state: Any, **options: Any) -> _calls.ThreadResponse:
    """Take a snapshot of a part, and return once it is safe; see `save`.

    Example:
        ```python
        response = v1.partial.save_async(path, {"params": state["params"]})
        response.result()
        v1.partial.finalize(path)
        ```
    """
    save(path, state, **options)
    return _calls.ThreadResponse(lambda: None)


def finalize(path: PathLike) -> None:
    """Make a checkpoint of the parts.

    Raises:
        FileNotFoundError: No part was saved.

    Example:
        ```python
        v1.partial.save(path, state)
        v1.partial.finalize(path)
        ```
    """
    key = os.fspath(path)
    if key not in _OPEN:
        raise FileNotFoundError(f"{key}: v1.partial.save has saved no part in this process")
    manager, parts = _OPEN.pop(key)
    with manager:
        parts.finalize()
