"""Flax NNX and Optax in an asyncio program, and an evaluator that follows the run.

    python docs/examples/nnx_async.py               # train
    python docs/examples/nnx_async.py --evaluate    # in another terminal

Stop the trainer at any time, with Ctrl-C or `kill -9`, and start it again: it says at which step
it goes on, and its last line is that of a run which was never stopped. The evaluator prints the
loss of every saved step, reads no optimizer state, and ends with the last step of the run.
"""

import argparse
import asyncio

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import ckpt

TEST = 2**31 - 1  # the number of a batch that no step trains on


class Model(nnx.Module):
    """A small perceptron."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Make fresh layers."""
        self.hidden = nnx.Linear(8, 64, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Predict."""
        return self.out(nnx.relu(self.hidden(x)))


def make() -> tuple[Model, nnx.Optimizer[Model]]:
    """Return the fresh model and its optimizer."""
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def loss_of(model: Model, number: int | jax.Array) -> jax.Array:
    """Return the mean squared error on the batch of this number, always the same."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (32, 8))
    return jnp.mean((model(x) - jnp.sin(x.sum(-1, keepdims=True))) ** 2)


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer[Model], number: int) -> None:
    """Update the model and the optimizer in place."""
    optimizer.update(model, nnx.grad(loss_of)(model, number))


async def train(root: str, steps: int) -> None:
    """Train to the last step, from wherever the run has come to."""
    model, optimizer = make()
    run = {"model": model, "optimizer": optimizer}
    async with ckpt.CheckpointManager(
        root,
        save_when=ckpt.save_when.Any(
            ckpt.save_when.EverySteps(50), ckpt.save_when.Steps([steps - 1])
        ),
        keep=3,
    ) as mgr:
        start, state = await mgr.resume(nnx.state(run))
        nnx.update(run, state)
        print(f"resumed at step {start}" if start else "a new run", flush=True)
        for step in range(start, steps):
            train_step(model, optimizer, step)
            await mgr.save(step, nnx.state(run))  # returns when the snapshot is safe
    print(f"done: step {steps - 1}, loss {loss_of(model, TEST)}")


async def evaluate(root: str, steps: int) -> None:
    """Print the loss of every step that the trainer saves, until it has saved the last one."""
    model = Model(nnx.Rngs(0))
    async for info in ckpt.watch(root, until=steps - 1, poll_interval=0.2):
        target = {"model": nnx.state(model), "optimizer": ...}  # `...`: not read
        state = await ckpt.load(info.path, like=target)
        nnx.update(model, state["model"])
        print(f"step {info.step}: loss {loss_of(model, TEST)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/nnx")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--evaluate", action="store_true")
    args = parser.parse_args()
    asyncio.run((evaluate if args.evaluate else train)(args.root, args.steps))
