"""A run that Orbax began, and that goes on with ckpt in the same directory.

    python docs/examples/moved_from_orbax.py --orbax --steps 500    # the old trainer
    python docs/examples/moved_from_orbax.py --steps 1000           # the new one

Stop either of them at any time, with Ctrl-C or `kill -9`, and start it or the other one
again: both say where they go on. The last line is the same, whoever made the steps.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import ckpt

State = dict[str, Any]
TEST = 2**31 - 1  # the number of a batch that no step trains on
OPTIMIZER = optax.adam(1e-2)


def init_state() -> State:
    """Return the state of a new run."""
    params = {"w": jnp.zeros(8), "b": jnp.zeros(())}
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


def loss_of(params: dict[str, jax.Array], number: int) -> jax.Array:
    """Return the mean squared error on the batch of this number, always the same."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (32, 8))
    return jnp.mean((x @ params["w"] + params["b"] - jnp.sin(x.sum(-1))) ** 2)


@partial(jax.jit, donate_argnums=0)
def train_step(state: State, number: int) -> tuple[State, jax.Array]:
    """Make one step."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], number)
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, loss


def train_old(root: Path, steps: int) -> State:
    """Train with Orbax."""
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=50, best_fn=lambda found: found["loss"], best_mode="min"
    )
    with ocp.CheckpointManager(root.absolute(), options=options) as manager:
        latest = manager.latest_step()
        start, state = 0, init_state()
        if latest is not None:
            target = ocp.args.StandardRestore(jax.eval_shape(init_state))
            start, state = latest + 1, manager.restore(latest, args=target)
        print(f"resumed at step {start}" if start else "a new run", flush=True)
        for step in range(start, steps):
            state, loss = train_step(state, step)
            metrics = {"loss": float(loss)}
            manager.save(step, args=ocp.args.StandardSave(state), metrics=metrics)
    return state


def train(root: Path, steps: int) -> State:
    """Train with ckpt, from the newest step, whoever wrote it."""
    last = ckpt.save_when.Steps([steps - 1])
    with ckpt.sync.CheckpointManager(
        root,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(50), last),
        keep=ckpt.keep.Best(3, metric="loss", mode="min"),  # the latest, and all of Orbax
    ) as mgr:
        start, state = mgr.resume(init_state)
        print(f"resumed at step {start}" if start else "a new run", flush=True)
        for step in range(start, steps):
            state, loss = train_step(state, step)
            mgr.save(step, state, metrics={"loss": loss})
        mgr.wait_until_finished()
        print(f"best: step {mgr.best_step()}", flush=True)
    return state


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default="runs/moved")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--orbax", action="store_true", help="be the old trainer")
    args = parser.parse_args()
    state = (train_old if args.orbax else train)(args.root, args.steps)
    print(f"done: step {args.steps - 1}, loss {loss_of(state['params'], TEST)}")
