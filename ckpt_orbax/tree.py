"""Helpers for trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

shaped: Any = jax.ShapeDtypeStruct


def to_shape_dtype_struct(
    arr: Any, dtype: Any = None, scalar_dtype: Any = None, support_format: bool = False
) -> Any:
    """Return a leaf as a `jax.ShapeDtypeStruct`, with its place; Python numbers stay.

    Args:
        arr: An array, a `jax.ShapeDtypeStruct`, a leaf of metadata, or a Python number.
        dtype: Another dtype.
        scalar_dtype: `int` or `float`, for numbers.
        support_format: Without effect.

    Example:
        ```python
        abstract_state = jax.tree.map(ocp.tree.to_shape_dtype_struct, state)
        ```
    """
    if isinstance(arr, int | float | str):
        return arr if scalar_dtype is None or isinstance(arr, str) else scalar_dtype(arr)
    if isinstance(arr, np.ndarray | np.generic):
        return shaped(arr.shape, arr.dtype if dtype is None else np.dtype(dtype))
    sharding = getattr(arr, "sharding", None)
    kind = arr.dtype if dtype is None else dtype
    return shaped(tuple(arr.shape), kind, sharding=sharding)


def serialize_tree(tree: Any, keep_empty_nodes: bool = True) -> Any:
    """Return a tree with dicts in place of its classes and named tuples, and lists for tuples.

    Args:
        tree: Any tree of jax.
        keep_empty_nodes: Empty ones are kept: those of a class are None.

    Example:
        ```python
        assert ocp.tree.serialize_tree({"pair": (1, 2)}) == {"pair": [1, 2]}
        ```
    """
    entries, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda each: each is not tree)
    if not entries:
        return {} if isinstance(tree, Mapping) else tree if type(tree) in (list, tuple) else None
    if not entries[0][0]:
        return tree
    values = [serialize_tree(value) for _, value in entries]
    keys = [_key_name(path[0]) for path, _ in entries]
    is_sequence = isinstance(entries[0][0][0], jax.tree_util.SequenceKey)
    return values if is_sequence else dict(zip(keys, values, strict=True))


def leaf_path(path: tuple[Any, ...]) -> str:
    """Return the leaf path of `ckpt` for a key path of jax."""
    return ".".join(
        str(_key_name(key)).replace("%", "%25").replace(".", "%2E").replace("/", "%2F")
        for key in path
    )


def _key_name(key: Any) -> Any:
    """Return what stands in a key of jax: a key of a dict, a name, or a position."""
    return next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name))
