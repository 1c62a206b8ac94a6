"""Helpers for trees."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

_shaped: Any = jax.ShapeDtypeStruct


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
        return _shaped(arr.shape, arr.dtype if dtype is None else np.dtype(dtype))
    sharding = getattr(arr, "sharding", None)
    kind = arr.dtype if dtype is None else dtype
    return _shaped(tuple(arr.shape), kind, sharding=sharding)
