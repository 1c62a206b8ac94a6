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
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PyTree = Any
Shapes = Any  # a PyTree of jax.ShapeDtypeStruct


@dataclass(frozen=True, slots=True)
class Workload:
    """A named state: `shapes(smoke)` describes it, `make` allocates it.

    `shapes` is called where there are as many devices as the workload asks for.
    """

    name: str
    summary: str
    shapes: Callable[[bool], Shapes]
    devices: int = 1


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the description of one f32 leaf."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def int32() -> jax.ShapeDtypeStruct:
    """Returns the description of a counter."""
    return jax.ShapeDtypeStruct((), jnp.int32)


def make(shapes: Shapes) -> PyTree:
    """Returns device arrays of these shapes: random floats, zero integers, all pages touched."""
    random = np.random.default_rng(0)
    # The copies belong to jax: an alias of numpy's memory could not be donated.
    return jax.block_until_ready(
        jax.tree.map(
            lambda leaf: jax.device_put(_random(random, leaf), leaf.sharding, may_alias=False),
            shapes,
        )
    )


def _random(random: np.random.Generator, leaf: jax.ShapeDtypeStruct) -> Any:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return np.zeros(leaf.shape, leaf.dtype)
    return random.standard_normal(leaf.shape, np.float32).astype(leaf.dtype, copy=False)


@partial(jax.jit, donate_argnums=0)
def _advance_leaf(leaf: jax.Array) -> jax.Array:
    return -leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf + 1


def advance(tree: PyTree) -> PyTree:
    """Returns the state with every leaf changed, and donates the old one: one run, one memory."""
    return jax.block_until_ready(jax.tree.map(_advance_leaf, tree))


def shapes_bytes(shapes: Shapes) -> int:
    """Returns the bytes that arrays of these shapes take."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def large_shapes(smoke: bool) -> Shapes:
    """Returns 512 MiB (smoke: 12 MiB) in equal large leaves."""
    count, rows = (12, 256) if smoke else (96, 1365)
    return {f"block_{i:03d}": {"kernel": f32(rows, 1024)} for i in range(count)}


def small_shapes(smoke: bool) -> Shapes:
    """Returns 5,000 (smoke: 200) leaves of 4 KiB."""
    return leaf_shapes(200 if smoke else 5000)


def leaf_shapes(count: int) -> Shapes:
    """Returns this many leaves of 4 KiB in groups of 50."""
    return {
        f"layer_{group:04d}": {f"leaf_{i:02d}": f32(1024) for i in range(min(50, count - start))}
        for group, start in enumerate(range(0, count, 50))
    }


def transformer_shapes(smoke: bool, params_dtype: Any = jnp.float32) -> Shapes:
    """Returns params, both f32 Adam moments and counters of a decoder, about 200 (smoke: 4) MiB."""
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

    moments = {
        "embedding": f32(vocabulary, width),
        "layers": {f"layer_{i:02d}": layer() for i in range(layers)},
        "norm": {"scale": f32(width), "bias": f32(width)},
    }
    return {
        "params": jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, params_dtype), moments
        ),
        "adam": {"count": int32(), "mu": moments, "nu": moments},
        "step": int32(),
    }


def sharded(shapes: Shapes) -> Shapes:
    """Returns the shapes spread over all devices as FSDP does it.

    The first axis that the number of devices divides is split; a leaf without one is replicated.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("data",))

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        split = next((i for i, n in enumerate(leaf.shape) if n % mesh.size == 0), None)
        axes = () if split is None else (*[None] * split, "data")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, shapes)


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload("large", "f32 in equal large leaves", large_shapes),
            Workload("small", "f32 leaves of 4 KiB", small_shapes),
            Workload("transformer", "a decoder, f32, with both Adam moments", transformer_shapes),
            Workload(
                "transformer_bf16",
                "a decoder with bf16 params and both Adam moments in f32",
                lambda smoke: transformer_shapes(smoke, jnp.bfloat16),
            ),
            Workload(
                "transformer_sharded",
                "the same, sharded over 8 CPU devices",
                lambda smoke: sharded(transformer_shapes(smoke, jnp.bfloat16)),
                devices=8,
            ),
        )
    }
)
