"""Fine-tuning with LoRA: a base model from another checkpoint, and an adapter with its own run.

    python docs/examples/lora.py

The first start trains a base model and saves it as one checkpoint, with its optimizer state. Every
start loads the parameters of the base model, and nothing else of it, and resumes the run of the
adapter, which does not store them again. Stop it at any time, with Ctrl-C or `kill -9`, and start
it again: it says at which step it goes on, and its last line is that of a run which was never
stopped.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ckpt
from ckpt import policies

Params = dict[str, jax.Array]
State = dict[str, Any]
TEST = 2**31 - 1  # the number of a batch that no step trains on
OPTIMIZER = optax.adam(1e-2)


def init_params() -> Params:
    """Return the parameters of a new base model."""
    keys = jax.random.split(jax.random.key(0))
    return {"hidden": jax.random.normal(keys[0], (8, 64)), "out": jax.random.normal(keys[1], (64,))}


def init_adapter() -> Params:
    """Return an adapter that does not change the base model yet."""
    return {"down": jax.random.normal(jax.random.key(2), (8, 2)), "up": jnp.zeros((2, 64))}


def fresh(params: Params) -> State:
    """Return the state of a new run that trains these parameters."""
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


def base_loss(params: Params, number: int | jax.Array, shift: float = 0.0) -> jax.Array:
    """Return the mean squared error on the batch of this number, always the same."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (32, 8))
    return jnp.mean(
        (jnp.tanh(x @ params["hidden"]) @ params["out"] - jnp.sin(x.sum(-1) + shift)) ** 2
    )


def adapter_loss(adapter: Params, number: int | jax.Array, base: Params) -> jax.Array:
    """Return the error of the adapted model on a task that is slightly different."""
    hidden = base["hidden"] + adapter["down"] @ adapter["up"]
    return base_loss(base | {"hidden": hidden}, number, shift=0.5)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(loss: Any, state: State, *inputs: Any) -> State:
    """Make one step."""
    grads = jax.grad(loss)(state["params"], *inputs)
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def pretrain(path: Path) -> None:
    """Train the base model and save it."""
    state = fresh(init_params())
    for step in range(200):
        state = train_step(base_loss, state, step)
    ckpt.sync.save(path, state)


def main(root: Path, steps: int) -> None:
    """Train the adapter to the last step, from wherever its run has come to."""
    base_path = root.with_name(f"{root.name}-base")
    if not base_path.exists():
        pretrain(base_path)
    # No optimizer state is read. The target is not made either: `abstract` traces the function.
    base = ckpt.sync.load(base_path, like=ckpt.abstract(init_params), at="params")
    last = policies.SpecificSteps([steps - 1])
    with ckpt.sync.CheckpointManager(
        root,
        save_policy=policies.AnySave(policies.FixedInterval(50), last),
        preservation=policies.LatestN(3),
        metadata={"base": str(base_path)},
    ) as mgr:
        start, state = mgr.resume(lambda: fresh(init_adapter()))
        print(f"resumed at step {start}" if start else "a new run", flush=True)
        for step in range(start, steps):
            state = train_step(adapter_loss, state, step, base)
            mgr.save(step, state)
    print(f"done: step {steps - 1}, loss {adapter_loss(state['params'], TEST, base)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default="runs/lora")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    main(args.root, args.steps)
