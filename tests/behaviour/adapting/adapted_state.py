"""The state that the tests of `ckpt.Adapt` restore in other shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ckpt
import ckpt.sync
from ckpt import Adapt
from ckpt.testing.compare import differences


def counted(*shape: int, start: int = 0, dtype: Any = np.float32) -> Any:
    return np.arange(start, start + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def model() -> dict[str, Any]:
    """Three layers, an embedding, an optimizer that mirrors them, counters."""
    params = {
        "embed": counted(6, 4, start=500),
        "layers": [{"w": counted(4, 8, start=100 * n), "b": counted(8, start=n)} for n in range(3)],
    }
    return {
        "params": params,
        "opt": {"mu": jax.tree.map(lambda leaf: leaf + 0.5, params), "count": jnp.int32(9)},
        "step": 7,
    }


def load(path: Path, like: Any = None, **options: Any) -> Any:
    return ckpt.sync.load(path, like=like, adapt=Adapt(**options))


def same(found: Any, wanted: Any) -> None:
    """The same to the bit, but for the order of keys, of which targets have their own."""
    one, other = (jax.tree.map(lambda leaf: leaf, tree) for tree in (wanted, found))
    assert differences(one, other) == []


def zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * 0, tree)


def resized(array: Any, shape: tuple[int, ...]) -> Any:
    whole = np.zeros(shape, array.dtype)
    common = tuple(slice(min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    whole[common] = array[common]
    return whole
