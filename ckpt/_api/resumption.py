"""Resuming a run: the fresh state of a new run, and the target of a run that goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ckpt._arguments import refuse_orbax_argument
from ckpt._plan.adapt import Adapt
from ckpt._tree.leaf_specs import ShardingTree, is_function, spread
from ckpt.errors import InvalidArgumentError

logger = logging.getLogger("ckpt")

if TYPE_CHECKING:
    # If no target is given, type checkers cannot know the type of the saved state.
    from typing_extensions import TypeVar

    State = TypeVar("State", default=Any)
else:
    from typing import TypeVar

    State = TypeVar("State")
Fresh = TypeVar("Fresh")
# Types of leaves that tracing does not change.
_PLAIN = (int, float, complex, str, bytes, np.ndarray, np.generic, jax.ShapeDtypeStruct, type(None))


def abstract(tree: Any, shardings: ShardingTree = None) -> Any:
    """Return a target for `like=` that has shapes, dtypes and shardings, and no arrays.

    `like=state` is enough if a state exists. This function is for a state that should not be made,
    since it would take memory or time, or that is to be restored onto other devices.

    Args:
        tree: A tree of arrays; or a function without arguments that returns one, which is traced by
            `jax.eval_shape`, so that its jax arrays take no memory. The arrays of a function of
            `jax.jit` have the shardings of its `out_shardings`.
        shardings: The shardings for the restore: one sharding for all arrays, or a tree of
            shardings with the structure of `tree`, or of its upper part. None leaves the sharding
            that the arrays have.

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
        # Keys that cannot be sorted, and the code of a class, raise errors of any kind.
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


def _traced(function: Callable[[], Any]) -> Any:
    """Return the result of the function, with a shape for every jax array that it makes.

    All other leaves are returned as they are, as `equinox.filter_eval_shape` does: jax refuses some
    of them, such as the activation functions in a module, and makes jax arrays of numbers and of
    numpy arrays, which would then be restored as jax arrays.
    """
    kept: list[Any] = []
    structure: Any = None

    def arrays() -> list[Any]:
        nonlocal kept, structure
        leaves, structure = jax.tree.flatten(function())
        kept = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        return [leaf if isinstance(leaf, jax.Array) else None for leaf in leaves]

    # A function of `jax.jit` returns jax arrays only, and knows their shardings.
    is_jitted = hasattr(function, "eval_shape")
    try:
        shapes = jax.eval_shape(function if is_jitted else arrays)
    except Exception as error:
        raise InvalidArgumentError(
            f"the function {_name(function)} cannot be traced by jax.eval_shape: "
            f"{type(error).__name__}: {' '.join(str(error).split()):.200}. Pass the state that it "
            "returns instead"
        ) from error
    if is_jitted:
        return shapes
    odd = next((each for each in kept if not (isinstance(each, _PLAIN) or is_function(each))), None)
    if odd is not None:
        raise InvalidArgumentError(
            f"the function {_name(function)} cannot be traced by jax.eval_shape: it returns a leaf "
            f"of type {type(odd).__name__}, which may hold arrays that are only traced. Pass the "
            "state that it returns instead"
        )
    both = zip(shapes, kept, strict=True)
    return jax.tree.unflatten(structure, [leaf if shape is None else shape for shape, leaf in both])


def _name(function: Callable[[], Any]) -> str:
    return f"{getattr(function, '__name__', function)!s:.60}"


def fresh_state(init: Any, items: Mapping[str, Any] | None) -> Any:
    """Return the state of a new run: the given one, or the result of the given functions."""
    _check_given(init, items)
    given = {"": init} if items is None else items
    for name, each in given.items():
        refuse_orbax_argument(each, name or None)
        if isinstance(each, type):
            what = f"item {name!r}" if name else "init"
            raise InvalidArgumentError(
                f"resume(): {what} is the class {each.__name__}, and a new run needs an object: "
                f"{each.__name__}(...), or a function that returns one"
            )
    made = {name: each() if is_function(each) else each for name, each in given.items()}
    return made[""] if items is None else made


def resume_target(init: Any, items: Mapping[str, Any] | None, like: Any, adapt: Any = None) -> Any:
    """Return the target of a run that goes on; for items, a dict of targets."""
    _check_given(init, items)
    if items is None:
        return _target(init, adapt) if like is None else like
    given = like if like is not None else {}
    if not isinstance(given, Mapping) or not given.keys() <= items.keys():
        raise InvalidArgumentError(
            f"resume(like=...): expected a dict of targets for some of the items {', '.join(items)}"
        )
    adapts = adapt if isinstance(adapt, Mapping) else dict.fromkeys(items, adapt)
    return {
        name: given[name] if name in given else _target(each, adapts.get(name))
        for name, each in items.items()
    }


def source_target(init: Any, items: Mapping[str, Any] | None, like: Any, adapt: Any) -> Any:
    """Return the target of a run that begins from a checkpoint of another run.

    If the checkpoint may differ, leaves that it does not have keep the values of the fresh state,
    so the fresh state is made.
    """
    if adapt is None:
        return resume_target(init, items, like)
    fresh = fresh_state(init, items)
    if items is None:
        return fresh if like is None else like
    return resume_target(None, fresh, like)


def _target(fresh: Any, adapt: Any) -> Any:
    if not is_function(fresh):
        return fresh
    if isinstance(adapt, Adapt) and (adapt.select is not None or adapt.missing == "keep"):
        # Some leaves keep the values of the fresh state, which a traced one does not have.
        return fresh()
    try:
        return abstract(fresh)
    except InvalidArgumentError as error:
        # Checked here and not when the run begins: a run must not fail at its first restart.
        text = "%s is called for a target, which takes the memory of a second state: %s"
        logger.warning(text, _name(fresh), error)
        return fresh()


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
