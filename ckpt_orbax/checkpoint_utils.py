"""Helpers for evaluators and for restores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np

import ckpt
import ckpt.sync
from ckpt_orbax.type_handlers import NO_LAYOUTS, ArrayRestoreArgs, RestoreArgs

PLACEHOLDER = ...
_LEAST_PAUSE_SECONDS = 0.05


def construct_restore_args(
    target: Any,
    sharding_tree: Any = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> Any:
    """Return the `RestoreArgs` that give leaves the types, dtypes and places of a target.

    Args:
        target: A tree of arrays, `jax.ShapeDtypeStruct` or metadata.
        sharding_tree: The place of each array; None for those of the target.
        set_global_shape: True to restore to the shapes of the target.
        support_layout: Layouts are not restored; True is refused.
        strict: See `ArrayRestoreArgs`.

    Raises:
        NotImplementedError: `support_layout` is True.

    Example:
        ```python
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract_state)
        ```
    """
    if support_layout:
        raise NotImplementedError(NO_LAYOUTS)

    def of_leaf(leaf: Any, sharding: Any = None) -> Any:
        if leaf is PLACEHOLDER:
            return leaf
        if isinstance(leaf, np.ndarray | np.generic) or getattr(leaf, "kind", "").startswith(
            "numpy"
        ):
            return RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
            return ArrayRestoreArgs(
                restore_type=jax.Array,
                dtype=leaf.dtype,
                sharding=getattr(leaf, "sharding", None) if sharding is None else sharding,
                global_shape=tuple(leaf.shape) if set_global_shape else None,
                strict=strict,
            )
        return RestoreArgs(restore_type=type(leaf))

    if sharding_tree is None:
        return jax.tree.map(of_leaf, target)
    return jax.tree.map(of_leaf, target, sharding_tree)


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    *,
    min_interval_secs: float = 0,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    **_: Any,
) -> Generator[int, None, None]:
    """Yield each new step of a root; the newest one, if several are new.

    The step is pinned while the caller works with it, so that nobody deletes it.

    Args:
        checkpoint_dir: The root. It need not exist yet.
        min_interval_secs: Least time between two steps.
        seconds_to_sleep: Time between two looks.
        timeout: Seconds without a new step after which the iteration ends; None for no limit.
        timeout_fn: After `timeout`, the iteration ends only if this returns True.
        step_prefix: As in the options of the manager.
        step_format_fixed_length: As in the options of the manager.

    Example:
        ```python
        for step in ocp.checkpoint_utils.checkpoints_iterator(directory, timeout=60):
            evaluate(ocp.StandardCheckpointer().restore(f"{directory}/{step}/default"))
        ```
    """
    names = ckpt.step_names.Standard(step_prefix or "", step_format_fixed_length or 0)
    after: int | None = None
    while True:
        with ckpt.sync.watch(
            os.fspath(checkpoint_dir),
            step_names=names,
            timeout=timeout,
            min_interval=min_interval_secs,
            poll_interval=max(seconds_to_sleep, _LEAST_PAUSE_SECONDS),
            after=after,
            only_latest=True,
        ) as steps:
            for info in steps:
                assert info.step is not None
                yield (after := info.step)
        if timeout_fn is None or timeout_fn():
            return


@contextlib.contextmanager
def wait_for_new_checkpoint(
    checkpoint_dir: str | os.PathLike[str], *, until_step: int | None = None, **options: Any
) -> Iterator[int]:
    """Wait for a step, and protect it within the block; give -1 if none comes in time.

    Args:
        checkpoint_dir: The root.
        until_step: The least step to wait for; None for any.
        options: As for `checkpoints_iterator`: `timeout`, `timeout_fn` and others.

    Example:
        ```python
        with ocp.checkpoint_utils.wait_for_new_checkpoint(directory, until_step=100) as step:
            evaluate(ocp.StandardCheckpointer().restore(f"{directory}/{step}/default"))
        ```
    """
    with contextlib.closing(checkpoints_iterator(checkpoint_dir, **options)) as steps:
        yield next((step for step in steps if until_step is None or step >= until_step), -1)
