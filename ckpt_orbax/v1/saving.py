"""The functions of v1: one checkpoint at a path."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ckpt
import ckpt.sync
from ckpt_orbax import _items
from ckpt_orbax.v1 import _calls
from ckpt_orbax.v1._calls import STATE, AsyncResponse, CheckpointMetadata, ThreadResponse
from ckpt_orbax.v1.context import current
from ckpt_orbax.v1.errors import InvalidLayoutError

__all__ = [
    "checkpointables_metadata",
    "delete",
    "delete_async",
    "load",
    "load_async",
    "load_checkpointables",
    "load_checkpointables_async",
    "load_pytree",
    "load_pytree_async",
    "metadata",
    "pytree_metadata",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
]

PathLike = str | os.PathLike[str]


def save(path: PathLike, state: Any, *, checkpointable_name: str = STATE, **options: Any) -> None:
    """Save a tree; return when it is on disk.

    Args:
        path: Path of the checkpoint.
        state: The tree.
        checkpointable_name: Its name in the checkpoint.
        options: `overwrite=True` to replace a checkpoint that is there; `custom_metadata=`, JSON
            values to keep with it.

    Raises:
        ValueError: There is something at the path, and `overwrite` is False.

    Example:
        ```python
        v1.save(path, state)
        ```
    """
    save_checkpointables(path, {checkpointable_name: state}, **options)


def save_checkpointables(
    path: PathLike, checkpointables: Mapping[str, Any], **options: Any
) -> None:
    """Save several items by name; `overwrite` and `custom_metadata` as for `save`.

    Example:
        ```python
        v1.save_checkpointables(path, {"model": state, "config": {"lr": 0.1}})
        ```
    """
    _started(path, checkpointables, **options).result()


def save_async(
    path: PathLike, state: Any, *, checkpointable_name: str = STATE, **options: Any
) -> AsyncResponse:
    """Take a snapshot of a tree, and return once it is safe; options as for `save`.

    Example:
        ```python
        response = v1.save_async(path, state)
        response.result()
        ```
    """
    return AsyncResponse(_started(path, {checkpointable_name: state}, **options))


def save_checkpointables_async(
    path: PathLike, checkpointables: Mapping[str, Any], **options: Any
) -> AsyncResponse:
    """Take a snapshot of several items, and return once it is safe; options as for `save`.

    Example:
        ```python
        v1.save_checkpointables_async(path, {"model": state}).result()
        ```
    """
    return AsyncResponse(_started(path, checkpointables, **options))


def _started(
    path: PathLike,
    given: Mapping[str, Any],
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> ckpt.Commit:
    context = current()
    try:
        return ckpt.sync.save(
            os.fspath(path),
            items=_calls.items_to_save(given, context),
            if_exists="replace" if overwrite else "error",
            custom_metadata=custom_metadata,
            durable=False,
            timeout=float(context.asynchronous.timeout_secs),
        )
    except ckpt.errors.StepExistsError as error:
        raise ValueError(f"{os.fspath(path)} exists: pass overwrite=True") from error


def _stored(path: PathLike) -> ckpt.StepMetadata:
    try:
        return ckpt.sync.metadata(os.fspath(path))
    except ckpt.errors.NotACheckpointError as error:
        raise InvalidLayoutError(str(error)) from error


def load(
    path: PathLike, abstract_state: Any = None, *, checkpointable_name: str | None = "AUTO"
) -> Any:
    """Load a tree, onto a target if one is given.

    Args:
        path: Path of the checkpoint: also a step, or a checkpoint of another library.
        abstract_state: The target; `...` skips a leaf. None loads the tree as it was saved.
        checkpointable_name: Its name in the checkpoint; by default the one tree that is there.

    Raises:
        InvalidLayoutError: There is no checkpoint.
        ValueError: There is no such item, there are several trees, or the target does not fit.

    Example:
        ```python
        state = v1.load(path, abstract_state)
        ```
    """
    stored = _stored(path)
    name = _calls.the_name(checkpointable_name, stored)
    return _loaded(path, {name: abstract_state}, stored)[name]


def load_checkpointables(
    path: PathLike, abstract_checkpointables: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Load several items by name.

    Args:
        path: Path of the checkpoint.
        abstract_checkpointables: Targets by name, or None for each that is to be as it was saved.
            None loads all items.

    Raises:
        InvalidLayoutError: There is no checkpoint.
        KeyError: There is no such item.

    Example:
        ```python
        found = v1.load_checkpointables(path, {"model": abstract_state})
        ```
    """
    return _loaded(path, abstract_checkpointables, _stored(path))


def _loaded(
    path: PathLike, asked: Mapping[str, Any] | None, stored: ckpt.StepMetadata
) -> dict[str, Any]:
    asked = dict.fromkeys(stored.items) if asked is None else asked
    wanted = _calls.wanted_items(asked, stored, current())
    return _items.loaded_items(partial(ckpt.sync.load, os.fspath(path)), lambda: stored, wanted)


def metadata(path: PathLike, checkpointable_name: str | None = "AUTO") -> CheckpointMetadata:
    """Return what is stored of a tree, without its arrays.

    Example:
        ```python
        print(v1.metadata(path).metadata["params"]["w"].shape)
        ```
    """
    stored = _stored(path)
    name = _calls.the_name(checkpointable_name, stored)
    return _calls.described(stored, name, current())


def checkpointables_metadata(path: PathLike) -> CheckpointMetadata:
    """Return what is stored of all items, without their arrays.

    Example:
        ```python
        print(v1.checkpointables_metadata(path).metadata.keys())
        ```
    """
    return _calls.described(_stored(path), None, current())


def load_async(path: PathLike, abstract_state: Any = None, **options: Any) -> ThreadResponse:
    """Load a tree in a thread; see `load`.

    Example:
        ```python
        state = v1.load_async(path, abstract_state).result()
        ```
    """
    return ThreadResponse(partial(load, path, abstract_state, **options))


def load_checkpointables_async(
    path: PathLike, abstract_checkpointables: Mapping[str, Any] | None = None
) -> ThreadResponse:
    """Load several items in a thread; see `load_checkpointables`.

    Example:
        ```python
        found = v1.load_checkpointables_async(path).result()
        ```
    """
    return ThreadResponse(partial(load_checkpointables, path, abstract_checkpointables))


def delete(
    path: PathLike, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> bool:
    """Delete a checkpoint; return True if there was one.

    Args:
        path: Its path.
        checkpointable_name: Single items are not deleted; a name is refused.
        missing_ok: True if there may be none.

    Raises:
        FileNotFoundError: There is nothing, and `missing_ok` is False.
        InvalidLayoutError: It is no checkpoint.
        NotImplementedError: There is a `checkpointable_name`.

    Example:
        ```python
        v1.delete(path)
        ```
    """
    _calls.check_whole(checkpointable_name)
    try:
        _stored(path)
    except InvalidLayoutError:
        if "://" in os.fspath(path) or os.path.exists(path):
            raise
        if missing_ok:
            return False
        raise FileNotFoundError(f"there is nothing at {os.fspath(path)}") from None
    with _calls.manager_at(path) as manager:
        manager.delete(0)
    return True


def delete_async(path: PathLike, **options: Any) -> ThreadResponse:
    """Delete a checkpoint in a thread; see `delete`.

    Example:
        ```python
        v1.delete_async(path).result()
        ```
    """
    return ThreadResponse(partial(delete, path, **options))


save_pytree: Callable[..., Any] = _calls.deprecated("save", save)
save_pytree_async: Callable[..., Any] = _calls.deprecated("save_async", save_async)
load_pytree: Callable[..., Any] = _calls.deprecated("load", load)
pytree_metadata: Callable[..., Any] = _calls.deprecated("metadata", metadata)
load_pytree_async: Callable[..., Any] = _calls.deprecated("load_async", load_async)
