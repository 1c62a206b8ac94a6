"""What the calls of v1 have in common: items, targets, answers, descriptions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import dataclasses
import datetime
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import ckpt
import ckpt.sync
from ckpt_orbax import _items
from ckpt_orbax.metadata import nested_metrics
from ckpt_orbax.tree import serialize_tree
from ckpt_orbax.v1.context import Context
from ckpt_orbax.v1.handlers import HandledCheckpointable, handler_of

STATE = "state"
_RESERVED = ("metrics", "metadata", "AUTO")


class AsyncResponse:
    """A save that goes on.

    Example:
        ```python
        response = v1.save_async(path, state)
        response.result()
        ```
    """

    def __init__(
        self, commit: ckpt.Commit, answer: Any = None, settle: Callable[[], None] | None = None
    ) -> None:
        """Take the commit of a save, the answer if it succeeds, and what to call if it fails."""
        self._commit, self._answer, self._settle = commit, answer, settle

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return the answer.

        Raises:
            CheckpointError: The save has failed.
            CommitTimeoutError: It takes longer than `timeout` seconds, and goes on.

        Example:
            ```python
            response.result()
            ```
        """
        try:
            self._commit.result(timeout)
        except ckpt.errors.CheckpointError:
            if self._commit.done() and self._settle is not None:
                self._settle()
            raise
        return self._answer

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Call a function with the answer, on a thread of the library, once the save has succeeded.

        Example:
            ```python
            response.on_complete(print)
            ```
        """
        answer = self._answer
        self._commit.add_done_callback(
            lambda done: None if done.exception() is not None else callback(answer)
        )


class ThreadResponse:
    """A load or a deletion that goes on in a thread of its own.

    Example:
        ```python
        state = v1.load_async(path).result()
        ```
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        """Start the call, with the settings of the block around."""
        executor = concurrent.futures.ThreadPoolExecutor(1)
        self._future = executor.submit(contextvars.copy_context().run, call)
        executor.shutdown(wait=False)

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return the answer, or raise the error.

        Example:
            ```python
            response.result()
            ```
        """
        return self._future.result(timeout)

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Call a function with the answer, in that thread, once the call has succeeded.

        Example:
            ```python
            response.on_complete(print)
            ```
        """
        self._future.add_done_callback(
            lambda done: None if done.exception() is not None else callback(done.result())
        )


class OneName:
    """Names of steps of a manager whose only step is the checkpoint at a path."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self, _: int) -> str:
        """Return the name."""
        return self._name

    def step(self, name: str) -> int | None:
        """Return 0 for the name."""
        return 0 if name == self._name else None


def manager_at(path: str | os.PathLike[str]) -> ckpt.sync.CheckpointManager:
    """Return a manager whose step 0 is the checkpoint at a path."""
    root, _, name = os.fspath(path).rstrip("/").rpartition("/")
    return ckpt.sync.CheckpointManager(root or ".", step_names=OneName(name), keep=None)


@dataclasses.dataclass
class CheckpointMetadata:
    """A checkpoint, or a step of a root.

    Attributes:
        step: The step; None for a checkpoint that is none.
        path: Its path.
        metadata: Its tree, or a dict of one for each item; None in lists.
        metrics: Its metrics; None if it has none.
        custom_metadata: What was given as `custom_metadata`.
        init_timestamp_nsecs: Begin of its save, in Unix nanoseconds.
        commit_timestamp_nsecs: Time of its commit, in Unix nanoseconds.
    """

    step: int | None = None
    path: Any = None
    metadata: Any = None
    metrics: Any = None
    custom_metadata: Any = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None

    @property
    def time(self) -> datetime.datetime:
        """Time of its commit (UTC)."""
        seconds = (self.commit_timestamp_nsecs or 0) / 1e9
        return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)


def items_to_save(given: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Return what `ckpt` saves.

    Raises:
        ValueError: A name is reserved.
    """
    found = {}
    for name, item in given.items():
        if name in _RESERVED:
            raise ValueError(f"the name {name!r} of an item is reserved: {', '.join(_RESERVED)}")
        handler = context.checkpointables.registry.of_object(name, item)
        if handler is not None:
            item = HandledCheckpointable(handler, item)
        elif context.array.saving.storage_options.dtype is not None:
            dtype = context.array.saving.storage_options.dtype
            item = jax.tree.map(partial(_cast, dtype), item)
        found[name] = item
    return found


def _cast(dtype: Any, leaf: Any) -> Any:
    return leaf.astype(dtype) if hasattr(leaf, "astype") else leaf


def wanted_items(
    asked: Mapping[str, Any], stored: ckpt.StepMetadata, context: Context
) -> dict[str, _items.Wanted]:
    """Return what a load asks of each item."""
    found = {}
    for name, like in asked.items():
        kind = handler_of(stored.info.path, name)
        handler = context.checkpointables.registry.of_stored(name, like, kind)
        if handler is not None:
            found[name] = _items.handled(HandledCheckpointable(handler, like))
        elif isinstance(stored.items.get(name), ckpt.types.ItemInfo):
            found[name] = _items.Wanted(like)
        elif like is None:
            found[name] = _items.Wanted(result=serialize_tree)
        else:
            is_resized = context.array.loading.enable_padding_and_truncation
            is_partial = context.pytree.loading.partial_load
            adapt = ckpt.Adapt(
                resize="both" if is_resized else None,
                extra="ignore" if is_partial else "error",
            )
            found[name] = _items.Wanted(jax.tree.map(_target, like), adapt)
    return found


def _target(leaf: Any) -> Any:
    """Return a leaf of a target; what has a shape and a dtype and no place is an array of numpy."""
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    if (
        not is_array
        or hasattr(leaf, "sharding")
        or isinstance(leaf, np.ndarray | np.generic | type)
    ):
        return leaf
    # One value, which looks like an array of this shape and takes no memory.
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def deprecated(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function under its old name, which warns."""

    def old(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"Use `{name}` instead.", DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return old


def check_whole(name: str | None) -> None:
    """Refuse to delete one item of a checkpoint."""
    if name is not None:
        raise NotImplementedError(
            f"checkpointable_name={name!r}: items are not deleted by themselves. Delete the whole, "
            "or let ckpt.CheckpointManager drop items of old steps: ckpt.keep"
        )


def the_name(asked: str | None, stored: ckpt.StepMetadata) -> str:
    """Return the name of the item that `load` loads.

    Raises:
        ValueError: There is no such item, or there are several trees.
    """
    trees = [n for n, item in stored.items.items() if not isinstance(item, ckpt.types.ItemInfo)]
    if asked not in (None, "AUTO"):
        if asked not in stored.items:
            raise ValueError(
                f"{stored.info.path} has no item {asked!r}; it has {list(stored.items)}"
            )
        return str(asked)
    if STATE in trees:
        return STATE
    if len(trees) != 1:
        raise ValueError(f"{stored.info.path} has the trees {trees}: pass checkpointable_name=")
    return trees[0]


def described(stored: ckpt.StepMetadata, name: str | None, context: Context) -> CheckpointMetadata:
    """Return the description of a checkpoint: of one item, or of all."""
    info = stored.info
    found: Any = {each: _abstract(stored, each, context) for each in stored.items}
    return CheckpointMetadata(
        info.step,
        Path(info.path) if "://" not in info.path else info.path,
        found if name is None else found[name],
        nested_metrics(info.metrics) or None,
        info.custom_metadata or {},
        int(info.created.timestamp() * 1e9),
        int(info.committed.timestamp() * 1e9),
    )


def _abstract(stored: ckpt.StepMetadata, name: str, context: Context) -> Any:
    kind = handler_of(stored.info.path, name)
    handler = context.checkpointables.registry.of_stored(name, None, kind) if kind else None
    if handler is None:
        return serialize_tree(stored.items[name])
    return asyncio.run(handler.metadata(Path(stored.info.path, name)))
