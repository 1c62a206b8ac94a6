"""The states that are saved and restored: real sizes, and small ones for smoke runs.

A workload is a function from `smoke` to a PyTree of device arrays. Values are random, because
zeros would flatter every peer that compresses. `advance` gives the next state of a run: each
save must meet bytes that differ from those of the save before, as in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PyTree = Any
Shapes = Any  # a PyTree of jax.ShapeDtypeStruct


@dataclass(frozen=True, slots=True)
class Workload:
    """A named state: `shapes(smoke)` describes it, `make` allocates it."""

    name: str
    summary: str
    shapes: Callable[[bool], Shapes]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the description of one f32 leaf."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def int32() -> jax.ShapeDtypeStruct:
    """Returns the description of a counter."""
    return jax.ShapeDtypeStruct((), jnp.int32)


def make(shapes: Shapes) -> PyTree:
    """Returns device arrays of these shapes: random floats, zero integers, all pages touched."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    values = [
        jax.random.normal(key, leaf.shape, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.block_until_ready(jax.tree.unflatten(structure, values))


@partial(jax.jit, donate_argnums=0)
def _advance_leaf(leaf: jax.Array) -> jax.Array:
    return -leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf + 1


def advance(tree: PyTree) -> PyTree:
    """Returns the state with every leaf changed, and donates the old one: one run, one memory."""
    return jax.block_until_ready(jax.tree.map(_advance_leaf, tree))


def abstract(tree: PyTree) -> Shapes:
    """Returns the restore target of a tree: shape, dtype and sharding of each leaf."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def size_bytes(tree: PyTree) -> int:
    """Returns the bytes of all leaves."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def large_shapes(smoke: bool) -> Shapes:
    """Returns 512 MiB (smoke: 12 MiB) in equal large leaves."""
    count, rows = (12, 256) if smoke else (96, 1365)
    return {f"block_{i:03d}": {"kernel": f32(rows, 1024)} for i in range(count)}


def small_shapes(smoke: bool) -> Shapes:
    """Returns 5,000 (smoke: 200) leaves of 4 KiB in groups of 50."""
    groups = 4 if smoke else 100
    return {
        f"layer_{group:03d}": {f"leaf_{i:02d}": f32(1024) for i in range(50)}
        for group in range(groups)
    }


def transformer_shapes(smoke: bool) -> Shapes:
    """Returns params, both Adam moments and counters of a decoder, about 200 (smoke: 4) MiB."""
    vocabulary, width, layers = (1024, 128, 1) if smoke else (8192, 512, 4)

    def layer() -> Shapes:
        return {
            "attention": {
                "query": {"kernel": f32(width, 8, width // 8), "bias": f32(8, width // 8)},
                "key": {"kernel": f32(width, 8, width // 8), "bias": f32(8, width // 8)},
                "value": {"kernel": f32(width, 8, width // 8), "bias": f32(8, width // 8)},
                "out": {"kernel": f32(8, width // 8, width), "bias": f32(width)},
            },
            "mlp": {
                "up": {"kernel": f32(width, 4 * width), "bias": f32(4 * width)},
                "down": {"kernel": f32(4 * width, width), "bias": f32(width)},
            },
            "norm_1": {"scale": f32(width), "bias": f32(width)},
            "norm_2": {"scale": f32(width), "bias": f32(width)},
        }

    params = {
        "embedding": f32(vocabulary, width),
        "layers": {f"layer_{i:02d}": layer() for i in range(layers)},
        "norm": {"scale": f32(width), "bias": f32(width)},
    }
    return {
        "params": params,
        "adam": {"count": int32(), "mu": params, "nu": params},
        "step": int32(),
    }


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload("large", "f32 in equal large leaves", large_shapes),
            Workload("small", "f32 leaves of 4 KiB", small_shapes),
            Workload("transformer", "a decoder with both Adam moments", transformer_shapes),
        )
    }
)
