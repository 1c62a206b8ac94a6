"""Flax Linen with a `TrainState`, metrics, and the model of the best step.

    python docs/examples/linen_train_state.py           # train
    python docs/examples/linen_train_state.py --best    # the loss of the best step

Stop the trainer at any time, with Ctrl-C or `kill -9`, and start it again: it says at which step
it goes on, and its last line is that of a run which was never stopped. With `--best` it loads the
step with the smallest loss, without its optimizer state.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import ckpt

TEST = 2**31 - 1  # the number of a batch that no step trains on


class Model(nn.Module):
    """A small perceptron."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Predict."""
        return nn.Dense(1)(nn.relu(nn.Dense(64)(x)))[:, 0]


def make() -> TrainState:
    """Return the state of a new run."""
    model = Model()
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


def loss_of(params: optax.Params, state: TrainState, number: jax.Array | int) -> jax.Array:
    """Return the mean squared error on the batch of this number, always the same."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (32, 8))
    return jnp.mean((state.apply_fn({"params": params}, x) - jnp.sin(x.sum(-1))) ** 2)


@partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState) -> tuple[TrainState, jax.Array]:
    """Make one step."""
    loss, grads = jax.value_and_grad(loss_of)(state.params, state, state.step)
    return state.apply_gradients(grads=grads), loss


def train(root: str, steps: int) -> None:
    """Train to the last step, from wherever the run has come to."""
    with ckpt.sync.CheckpointManager(
        root,
        save_when=ckpt.save_when.EverySteps(50),
        keep=ckpt.keep.Best(3, metric="loss", mode="min"),  # and the latest
    ) as mgr:
        _, state = mgr.resume(make)  # the state counts its steps itself
        print(f"resumed after step {state.step}" if state.step else "a new run", flush=True)
        while state.step < steps:
            state, loss = train_step(state)
            mgr.save(state.step, state, metrics={"loss": loss}, force=state.step == steps)
    print(f"done: step {state.step}, loss {loss_of(state.params, state, TEST)}")


def best(root: str) -> None:
    """Load the best step as an evaluator does: `...` stands for what is not read."""
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        step = mgr.best_step("loss", "min")
        state = mgr.restore(step, like=jax.eval_shape(make).replace(opt_state=...))
    print(f"best: step {step}, loss {loss_of(state.params, state, TEST)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/linen")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--best", action="store_true")
    args = parser.parse_args()
    if args.best:
        best(args.root)
    else:
        train(args.root, args.steps)
