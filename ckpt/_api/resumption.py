"""Resuming a run: the fresh state of a run that begins, and the target of one that goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ckpt._tree.leaf_specs import is_function
from ckpt._tree.shardings import ShardingTree, spread
from ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    # Without a target, type checkers cannot know what was saved.
    from typing_extensions import TypeVar

    State = TypeVar("State", default=Any)
else:
    from typing import TypeVar

    State = TypeVar("State")
Fresh = TypeVar("Fresh")


def abstract(tree: Any, shardings: ShardingTree = None) -> Any:
    """Return a target for `like=` that has shapes, dtypes and shardings, and no arrays.

    `like=state` is enough where a state exists. This is for a state that should not be made, since
    it would take memory or time, or that is to be restored onto other devices.

    Args:
        tree: A tree of arrays; or a function without arguments that returns one, which is traced by
            `jax.eval_shape` and allocates nothing.
        shardings: Where the arrays are to be restored: a sharding for all, or a tree of shardings
            with the structure of `tree`, or of its upper part. None leaves the sharding that the
            arrays have.

    Returns:
        The tree, with a `jax.ShapeDtypeStruct` for every jax array, and for every numpy array that
        is given a sharding. Everything else stays.

    Raises:
        InvalidArgumentError: The function cannot be traced, or the shardings do not fit the tree.

    Example:
        ```python
        state = mgr.restore(like=ckpt.abstract(init_state))
        ```
    """
    found = _traced(tree) if is_function(tree) else tree
    try:
        leaves, structure = jax.tree.flatten(found)
    except Exception as error:
        # Of keys that cannot be sorted, or of the code of a class.
        raise InvalidArgumentError(f"jax cannot flatten the tree: {error!s:.300}") from error
    places = spread(shardings, found) if shardings is not None else [None] * len(leaves)
    return jax.tree.unflatten(structure, map(_abstract_leaf, leaves, places))


def _abstract_leaf(leaf: Any, sharding: jax.sharding.Sharding | None) -> Any:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return leaf
    if sharding is None and isinstance(leaf, np.ndarray | np.generic):
        return leaf
    if sharding is None and getattr(leaf, "committed", True):
        sharding = getattr(leaf, "sharding", None)
    weak = bool(getattr(leaf, "weak_type", False))
    struct: Any = jax.ShapeDtypeStruct
    return struct(shape, dtype, sharding=sharding, weak_type=weak)


def _traced(function: Any) -> Any:
    try:
        return jax.eval_shape(function)
    except Exception as error:
        raise InvalidArgumentError(
            f"the function {getattr(function, '__qualname__', function)!s:.60} cannot be traced by "
            f"jax.eval_shape: {type(error).__name__}: {' '.join(str(error).split()):.200}. Pass "
            "the state that it returns instead"
        ) from error


def fresh_state(init: Any, items: Mapping[str, Any] | None) -> Any:
    """Return the state of a run that begins: what was given, or what the given functions return."""
    _check_given(init, items)
    if items is None:
        return init() if is_function(init) else init
    return {name: each() if is_function(each) else each for name, each in items.items()}


def resume_target(init: Any, items: Mapping[str, Any] | None, like: Any) -> Any:
    """Return the target of a run that goes on; of items, a dict of targets."""
    _check_given(init, items)
    if items is None:
        return _target(init) if like is None else like
    given = like if like is not None else {}
    if not isinstance(given, Mapping) or not given.keys() <= items.keys():
        raise InvalidArgumentError(
            f"resume(like=...): expected a dict of targets for some of the items {', '.join(items)}"
        )
    return {name: given[name] if name in given else _target(each) for name, each in items.items()}


def _target(fresh: Any) -> Any:
    return abstract(fresh) if is_function(fresh) else fresh


def _check_given(init: Any, items: Mapping[str, Any] | None) -> None:
    if (init is None) == (items is None):
        raise InvalidArgumentError(
            "resume(): pass the fresh state, or a function that returns it; or items={name: ...}, "
            "and not both"
        )
    given: object = items
    if items is not None and not (isinstance(given, Mapping) and given):
        raise InvalidArgumentError(
            "resume(items=...): expected a dict of item names to fresh objects, or to functions "
            "that return them"
        )
