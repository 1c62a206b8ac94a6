"""Trees of shardings: one for every leaf of another tree, or for a branch of it as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ckpt.errors import InvalidArgumentError

# A sharding for all arrays, or a tree of shardings like theirs or like its upper part.
ShardingTree = Any


def spread(
    shardings: ShardingTree, tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[jax.sharding.Sharding | None]:
    """Return the sharding of every leaf of `tree`, in jax's order.

    Args:
        shardings: A sharding for all leaves, or a tree of shardings with the structure of `tree` or
            of its upper part: one sharding then is for a whole branch. None stands for no sharding.
        tree: The tree.
        is_leaf: As of `jax.tree.map`, for `tree`.

    Raises:
        InvalidArgumentError: The shardings do not fit the tree, or something else is among them.
    """

    def every(sharding: Any, branch: Any) -> Any:
        if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
            raise InvalidArgumentError(
                f"shardings: expected a sharding, or a tree of shardings, not "
                f"{type(sharding).__name__}: {sharding!r:.80}"
            )
        return [sharding] * len(jax.tree.leaves(branch, is_leaf=is_leaf))

    try:
        parts = jax.tree.map(every, shardings, tree, is_leaf=_is_place)
    except (ValueError, TypeError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(
            "shardings: the tree of shardings does not fit the tree of arrays: "
            f"{' '.join(str(error).split()):.300}"
        ) from error
    return [each for part in jax.tree.leaves(parts, is_leaf=_is_list) for each in part]


def _is_place(node: Any) -> bool:
    return node is None or isinstance(node, jax.sharding.Sharding)


def _is_list(node: Any) -> bool:
    return isinstance(node, list) and all(_is_place(each) for each in node)
