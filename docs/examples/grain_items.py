"""Four items in each step: model, Grain data iterator, configuration and PRNG key.

    python docs/examples/grain_items.py --rate 0.01

Stop it at any time, with Ctrl-C or `kill -9`, and start it again: it says at which step it goes
on, reads the batches that come next, and its last line is that of a run which was never stopped. A
resumed run keeps the configuration it was started with, whatever `--rate` says now.
"""

import argparse
import dataclasses
import functools
from collections.abc import Iterator

import grain
import jax
import jax.numpy as jnp
import numpy as np

import ckpt


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run is started with."""

    rate: float
    noise: float = 0.01


def read(size: int) -> Iterator[np.ndarray]:
    """Return batches of records without end, shuffled anew in each epoch."""
    records = list(np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32))
    return iter(
        grain.MapDataset.source(records).seed(0).shuffle().repeat().batch(size).to_iter_dataset()
    )


def init_model() -> dict[str, jax.Array]:
    """Return the model of a new run."""
    return {"w": jnp.zeros(8)}


@jax.jit
def loss_of(model: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return the mean squared error."""
    return jnp.mean((x @ model["w"] - jnp.sin(x.sum(-1))) ** 2)


@functools.partial(jax.jit, static_argnames="config", donate_argnums=0)
def train_step(
    model: dict[str, jax.Array], x: jax.Array, key: jax.Array, config: Config
) -> dict[str, jax.Array]:
    """Make one step on a noisy batch."""
    x += config.noise * jax.random.normal(key, x.shape)
    return jax.tree.map(lambda w, g: w - config.rate * g, model, jax.grad(loss_of)(model, x))


def main(root: str, steps: int, rate: float) -> None:
    """Train to the last step, from wherever the run has come to."""
    last = ckpt.save_when.Steps([steps - 1])
    with ckpt.sync.CheckpointManager(
        root,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(50), last),
        keep=3,
    ) as mgr:
        fresh = {
            "model": init_model,
            "data": read(size=16),
            "config": Config(rate),
            "key": jax.random.key(0),
        }
        start, run = mgr.resume(items=fresh)
        model, data, config, key = run["model"], run["data"], run["config"], run["key"]
        print(f"resumed at step {start}" if start else "a new run", config, flush=True)
        for step in range(start, steps):
            key, noise = jax.random.split(key)
            model = train_step(model, next(data), noise, config)
            mgr.save(step, items={"model": model, "data": data, "config": config, "key": key})
    print(f"done: step {steps - 1}, loss {loss_of(model, next(read(size=1000)))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/grain")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.01)
    args = parser.parse_args()
    main(args.root, args.steps, args.rate)
