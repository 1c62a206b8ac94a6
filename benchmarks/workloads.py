"""The states that are saved and restored: real sizes, and small ones for smoke runs.

A workload is a function from `smoke` to a PyTree of device arrays. Values are random, because
zeros would flatter every peer that compresses. `advance` gives the next state of a run: each
save must meet bytes that differ from those of the save before, as in training. `Trainer` is a small
real train loop, and `check_equal` tells whether a restore gave back every bit.
"""

from __future__ import annotations

import time
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
COUNTER = jax.ShapeDtypeStruct((), jnp.int32)


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


def abstract(tree: PyTree) -> PyTree:
    """Returns the restore target of a tree: shape, dtype and sharding of each leaf."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def size_bytes(tree: PyTree) -> int:
    """Returns the bytes of all leaves, or of arrays of these shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def check_equal(restored: PyTree, expected: PyTree) -> None:
    """Compares two trees bit by bit.

    Raises:
        TypeError: A leaf is not a JAX array.
        ValueError: A peer gave back something else; its times would mean nothing.
    """
    wants = jax.tree.leaves_with_path(expected)
    gots = jax.tree.leaves(restored)
    structures: list[Any] = [jax.tree.structure(tree) for tree in (restored, expected)]
    if structures[0] != structures[1]:
        raise ValueError("the restored tree has another structure")
    for (path, want), got in zip(wants, gots, strict=True):
        place = jax.tree_util.keystr(path)
        if not isinstance(got, jax.Array):
            raise TypeError(f"{place} was restored as {type(got).__name__}, not as a jax.Array")
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            raise ValueError(f"{place} was restored as {got.dtype}{list(got.shape)}")
        if not got.sharding.is_equivalent_to(want.sharding, want.ndim):
            raise ValueError(f"{place} was restored onto {got.sharding}")
        if np.asarray(got).tobytes() != np.asarray(want).tobytes():
            raise ValueError(f"{place} was restored with other values")


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
        "adam": {"count": COUNTER, "mu": moments, "nu": moments},
        "step": COUNTER,
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


def _sharded_transformer(smoke: bool) -> Shapes:
    return sharded(transformer_shapes(smoke, "bfloat16"))


# New processes get them: nothing in it is a lambda.
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
                partial(transformer_shapes, params_dtype="bfloat16"),
            ),
            Workload(
                "transformer_sharded",
                "the same, sharded over 8 CPU devices",
                _sharded_transformer,
                devices=8,
            ),
        )
    }
)


_BATCH = 8
_SETTLING_STEPS = 3


def trainer_shapes(smoke: bool) -> Shapes:
    """Returns 384 MiB (smoke: 12 MiB) of `state_shapes`."""
    return state_shapes(4, 256) if smoke else state_shapes(24, 1365)


def state_shapes(layers: int, rows: int, columns: int = 1024) -> Shapes:
    """Returns params, both moments, and a counter."""
    params = {f"layer_{i:02d}": f32(rows, columns) for i in range(layers)}
    return {"params": params, "mu": params, "nu": params, "step": COUNTER}


def _loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    hidden = batch
    for i, name in enumerate(sorted(params)):
        kernel = params[name].T if i % 2 else params[name]
        # Divided by the root of the width, values keep their size and gradients do not vanish.
        hidden = jnp.tanh(hidden @ kernel / kernel.shape[0] ** 0.5)
    return jnp.mean((hidden - jnp.roll(batch, 1, axis=0)) ** 2)


@partial(jax.jit, donate_argnums=0)
def train_step(state: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
    """Returns the next state, in the memory of the old one, and the loss.

    A deep network, its gradient and Adam. It is bound by memory and arithmetic alike, as a step
    with a small batch is, and leaves no buffer of the state untouched.
    """
    loss, gradients = jax.value_and_grad(_loss)(state["params"], batch)

    def update(
        param: jax.Array, gradient: jax.Array, mu: jax.Array, nu: jax.Array
    ) -> tuple[jax.Array, ...]:
        mu = 0.9 * mu + 0.1 * gradient
        nu = 0.99 * nu + 0.01 * gradient * gradient
        return param - 1e-3 * mu / (jnp.sqrt(jnp.abs(nu)) + 1e-8), mu, nu

    updated = jax.tree.map(update, state["params"], gradients, state["mu"], state["nu"])
    params, mu, nu = ({layer: values[i] for layer, values in updated.items()} for i in range(3))
    return {"params": params, "mu": mu, "nu": nu, "step": state["step"] + 1}, loss


class Trainer:
    """A train loop: holds the state and times every step."""

    def __init__(self, shapes: Shapes) -> None:
        """Make the state, of `state_shapes`, and the data."""
        self.state = make(shapes)
        width = self.state["params"]["layer_00"].shape[0]
        batches = jax.random.normal(jax.random.key(1), (16, _BATCH, width))
        self._batches = list(jax.block_until_ready(batches))
        self._taken = 0

    def step(self) -> float:
        """Trains one step and returns its seconds."""
        batch = self._batches[self._taken % len(self._batches)]
        self._taken += 1
        start = time.perf_counter()
        self.state, _ = jax.block_until_ready(train_step(self.state, batch))
        return time.perf_counter() - start

    def undisturbed(self, steps: int) -> list[float]:
        """Returns the seconds of this many steps while nothing is saved."""
        for _ in range(_SETTLING_STEPS):
            self.step()
        return [self.step() for _ in range(steps)]

    def until(self, finished: Callable[[int], bool]) -> list[float]:
        """Trains until `finished(steps taken)`; returns the seconds of every step."""
        times: list[float] = []
        while not finished(len(times)):
            times.append(self.step())
        return times
