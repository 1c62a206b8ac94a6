"""A run that Orbax saved, and that goes on with ckpt.

    python docs/examples/moved_from_orbax.py --orbax --steps 500    # the old trainer
    python docs/examples/moved_from_orbax.py --steps 1000           # the new one

The new trainer loads the newest step of the old root with Orbax, once, saves it in a root of its
own, and goes on. Stop either of them at any time, with Ctrl-C or `kill -9`, and start it again: it
says at which step it goes on. The last line is that of the old trainer, had it made all the steps.
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
from ckpt import policies

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


def open_old(root: Path) -> Any:
    """Open the root of the old trainer."""
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=50, max_to_keep=3, best_fn=lambda found: found["loss"], best_mode="min"
    )
    return ocp.CheckpointManager(root.absolute(), options=options)


def restore_old(manager: Any) -> State:
    """Restore the newest step of the old trainer."""
    target = ocp.args.StandardRestore(jax.eval_shape(init_state))
    return manager.restore(manager.latest_step(), args=target)


def train_old(root: Path, steps: int) -> State:
    """Train with Orbax."""
    with open_old(root) as manager:
        latest = manager.latest_step()
        start, state = (0, init_state()) if latest is None else (latest + 1, restore_old(manager))
        print(f"resumed at step {start}" if start else "a new run", flush=True)
        for step in range(start, steps):
            state, loss = train_step(state, step)
            metrics = {"loss": float(loss)}
            manager.save(step, args=ocp.args.StandardSave(state), metrics=metrics)
    return state


def train(root: Path, old_root: Path, steps: int) -> State:
    """Train with ckpt, from the newest step of the old root if there is none in the new one."""
    last = policies.SpecificSteps([steps - 1])
    with ckpt.sync.CheckpointManager(
        root,
        save_policy=policies.AnySave(policies.FixedInterval(50), last),
        preservation=policies.BestN(3, metric="loss", mode="min"),  # and the latest
    ) as mgr:
        if mgr.latest_step() is None:
            with open_old(old_root) as old:
                step = old.latest_step()
                mgr.save(
                    step, restore_old(old), metrics=old.metrics(step), force=True, durable=True
                )
            print(f"moved step {step} from {old_root}", flush=True)
        start, state = mgr.resume(init_state)
        print(f"resumed at step {start}", flush=True)
        for step in range(start, steps):
            state, loss = train_step(state, step)
            mgr.save(step, state, metrics={"loss": loss})
        mgr.wait_until_finished()
        print(f"best: step {mgr.best_step()}", flush=True)
    return state


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default="runs/moved")
    parser.add_argument("--old-root", type=Path, default="runs/orbax")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--orbax", action="store_true", help="be the old trainer")
    args = parser.parse_args()
    if args.orbax:
        state = train_old(args.old_root, args.steps)
    else:
        state = train(args.root, args.old_root, args.steps)
    print(f"done: step {args.steps - 1}, loss {loss_of(state['params'], TEST)}")
