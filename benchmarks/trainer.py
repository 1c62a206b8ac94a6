"""A small real train step: a deep network, its gradient and Adam, donating its state.

It is bound by memory and arithmetic alike, as a step with a small batch is, and leaves no buffer
of the state untouched.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from benchmarks import workloads

if TYPE_CHECKING:
    from collections.abc import Callable

PyTree = Any

_BATCH = 8
_SETTLING_STEPS = 3


def usual_shapes(smoke: bool) -> workloads.Shapes:
    """Returns 384 MiB (smoke: 12 MiB) of `state_shapes`."""
    return state_shapes(4, 256) if smoke else state_shapes(24, 1365)


def state_shapes(layers: int, rows: int, columns: int = 1024) -> workloads.Shapes:
    """Returns params, both moments, and a counter."""
    params = {f"layer_{i:02d}": workloads.f32(rows, columns) for i in range(layers)}
    return {"params": params, "mu": params, "nu": params, "step": workloads.int32()}


def _loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    hidden = batch
    for i, name in enumerate(sorted(params)):
        kernel = params[name].T if i % 2 else params[name]
        # Divided by the root of the width, values keep their size and gradients do not vanish.
        hidden = jnp.tanh(hidden @ kernel / kernel.shape[0] ** 0.5)
    return jnp.mean((hidden - jnp.roll(batch, 1, axis=0)) ** 2)


@partial(jax.jit, donate_argnums=0)
def train_step(state: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
    """Returns the next state, in the memory of the old one, and the loss."""
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

    def __init__(self, shapes: workloads.Shapes) -> None:
        """Make the state, of `state_shapes`, and the data."""
        self.state = workloads.make(shapes)
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


def typical(times: list[float]) -> float:
    """Returns the median step."""
    return statistics.median(times)
