"""A small training with all that a state may have, for tests of marks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SIZE = 16
State = dict[str, Any]
# Changes the state that a run resumes, or the inputs of its first steps.
Fault = Callable[[State], State]


def mesh_of(devices: int) -> Mesh:
    """Return a mesh whose first axis shares batches out, and whose second one shards arrays."""
    columns = 2 if devices > 1 else 1
    return Mesh(np.array(jax.devices()[:devices]).reshape(-1, columns), ("data", "model"))


def placed(state: State, mesh: Mesh) -> State:
    """Put arrays on the mesh: matrices are sharded, all others are replicated."""

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        spec = PartitionSpec(None, "model") if leaf.ndim == 2 else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        if jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        return _placing(sharding)(leaf)

    return jax.tree.map(place, state)


@functools.cache
def _placing(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return a function that is compiled once for arrays of one shape."""
    return jax.jit(lambda array: array, out_shardings=sharding)


def first_state() -> State:
    """Return the state before step 0."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "a": jax.random.normal(keys[0], (SIZE, SIZE)),
        "b": jax.random.normal(keys[1], (SIZE, SIZE)),
        "bias": jnp.ones(SIZE),
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {
        "params": params,
        "m": zeros,
        "v": zeros,
        "ema": params,
        "count": jnp.int32(0),
        "rng": keys[2],
        "data": {"position": 0},
    }


def loss(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
    """Return the loss of a small network with dropout."""
    hidden = jnp.tanh(batch @ params["a"]) * jax.random.bernoulli(key, 0.9, (SIZE,))
    return jnp.mean((hidden @ params["b"] + params["bias"] - batch) ** 2)


@jax.jit
def update(arrays: State, batch: Any, rate: Any) -> State:
    """Return the arrays of the state after a step of Adam."""
    key, own = jax.random.split(arrays["rng"])
    grads = jax.grad(loss)(arrays["params"], batch, own)
    count = arrays["count"] + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, arrays["m"], grads)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, arrays["v"], grads)
    params = jax.tree.map(
        lambda p, m, v: p - rate * (m / (1 - 0.9**count)) / (jnp.sqrt(v) + 1e-6),
        arrays["params"],
        m,
        v,
    )
    ema = jax.tree.map(lambda e, p: 0.95 * e + 0.05 * p, arrays["ema"], params)
    return {"params": params, "m": m, "v": v, "ema": ema, "count": count, "rng": key}


def batch_of(position: int) -> np.ndarray[Any, Any]:
    """Return the batch at a position of the data."""
    rows = np.random.default_rng(position).normal(size=(8, SIZE))
    return np.asarray(rows, np.float32)


def step_of(state: State, *, batch: int | None = None, rate: float | None = None) -> State:
    """Return the state after a step; a fault may take another batch or learning rate."""
    position = state["data"]["position"]
    arrays = {name: leaf for name, leaf in state.items() if name != "data"}
    rate = 1e-2 / (1 + position) if rate is None else rate
    after = update(arrays, batch_of(position if batch is None else batch), np.float32(rate))
    return {**after, "data": {"position": position + 1}}
