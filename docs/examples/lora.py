"""Fine-tuning with LoRA: every step holds the frozen base model, whose bytes are stored once.

    python docs/examples/lora.py

The first start trains a base model and saves it as one checkpoint, with its optimizer state. The
run of the adapter begins with the parameters of that, and nothing else of it. The base is the same
array objects in every step, so the steps share its files: each save prints how many bytes it wrote
and how many it shared. Stop it at any time, with Ctrl-C or `kill -9`, and start it again: it says
at which step it goes on, already its first save shares the base, and its last line is that of a
run which was never stopped.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ckpt
from ckpt.extensions import VitalSigns

Params = dict[str, jax.Array]
State = dict[str, Any]
TEST = 2**31 - 1  # the number of a batch that no step trains on
WIDTH, RANK = 512, 2
OPTIMIZER = optax.adam(1e-3)


def init_params() -> Params:
    """Return the parameters of a new base model."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"embed": (8, WIDTH), "hidden": (WIDTH, WIDTH), "out": (WIDTH,)}
    return {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def init_adapter() -> Params:
    """Return an adapter that does not change the base model yet."""
    down = jax.random.normal(jax.random.key(2), (WIDTH, RANK)) / WIDTH**0.5
    return {"down": down, "up": jnp.zeros((RANK, WIDTH))}


def fresh(base: Params) -> State:
    """Return the state of a new run that adapts this base model."""
    adapter = init_adapter()
    return {"base": base, "adapter": adapter, "opt_state": OPTIMIZER.init(adapter)}


def base_loss(params: Params, number: int | jax.Array, shift: float = 0.0) -> jax.Array:
    """Return the mean squared error on the batch of this number, always the same."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (32, 8))
    y = jnp.tanh(jnp.tanh(x @ params["embed"]) @ params["hidden"]) @ params["out"]
    return jnp.mean((y - jnp.sin(x.sum(-1) + shift)) ** 2)


def adapter_loss(adapter: Params, number: int | jax.Array, base: Params) -> jax.Array:
    """Return the error of the adapted model on a task that is slightly different."""
    hidden = base["hidden"] + adapter["down"] @ adapter["up"]
    return base_loss(base | {"hidden": hidden}, number, shift=0.5)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def train_step(loss: Any, params: Params, opt_state: Any, *inputs: Any) -> tuple[Params, Any]:
    """Make one step. What is frozen is among the inputs, and is not returned."""
    grads = jax.grad(loss)(params, *inputs)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


def pretrain(path: Path) -> None:
    """Train the base model and save it."""
    params = init_params()
    opt_state = OPTIMIZER.init(params)
    for step in range(200):
        params, opt_state = train_step(base_loss, params, opt_state, step)
    ckpt.sync.save(
        path, {"params": params, "opt_state": opt_state}, extensions=[ckpt.extensions.VitalSigns()]
    )


def report(commit: ckpt.Commit) -> None:
    """Say what a save has written; stop a run that has diverged."""
    # Waits until the step is durable. These steps are so short that the next save would begin
    # before, when there is no step yet to share with.
    info = commit.result()
    shared = info.statistics.shared_bytes
    print(f"step {info.step}: {info.nbytes - shared} bytes written, {shared} shared", flush=True)
    if info.nonfinite_leaves:
        raise SystemExit(f"step {info.step}: {info.nonfinite_leaves} arrays are not finite")


def main(root: Path, steps: int) -> None:
    """Train the adapter to the last step, from wherever its run has come to."""
    base_path = root.with_name(f"{root.name}-base")
    if not base_path.exists():
        pretrain(base_path)
    last = ckpt.save_when.Steps([steps - 1])
    with ckpt.sync.CheckpointManager(
        root,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(50), last),
        keep=3,
        custom_metadata={"base": str(base_path)},
        extensions=[ckpt.extensions.VitalSigns()],
    ) as mgr:
        # The targets are not made: `abstract` traces the functions.
        start, state = mgr.resume(
            # Only of a new run. No optimizer state of the base is read.
            lambda: fresh(ckpt.sync.load(base_path, like=ckpt.abstract(init_params), at="params")),
            like=ckpt.abstract(lambda: fresh(init_params())),
        )
        print(f"resumed at step {start}" if start else "a new run", flush=True)
        base, adapter, opt_state = state["base"], state["adapter"], state["opt_state"]
        for step in range(start, steps):
            adapter, opt_state = train_step(adapter_loss, adapter, opt_state, step, base)
            commit = mgr.save(step, {"base": base, "adapter": adapter, "opt_state": opt_state})
            if commit:  # most steps are turned down by the policy
                report(commit)
        before = ckpt.sync.metadata(base_path).tree["params"]["hidden"]
        after = mgr.metadata().tree["base"]["hidden"]
        signs = VitalSigns.of(before), VitalSigns.of(after)
        print(f"the base is what it was: {len({each and each.fingerprint for each in signs}) == 1}")
        print(f"done: step {mgr.latest_step()}, loss {adapter_loss(adapter, TEST, base)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default="runs/lora")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    main(args.root, args.steps)
