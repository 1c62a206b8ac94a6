"""Save on one mesh of devices, and resume on another.

    export XLA_FLAGS=--xla_force_host_platform_device_count=8    # eight devices on the CPU
    python docs/examples/another_mesh.py --mesh 4x2
    python docs/examples/another_mesh.py --mesh 2x2

Stop the first one before its end, with Ctrl-C or `kill -9`; the second one goes on where it was,
on half as many devices. The parameters and the optimizer state are sharded over the whole mesh, and
gathered for the computation. So the last line does not depend on the mesh, nor on how often the
run was stopped.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt

State = dict[str, Any]
TEST = 2**31 - 1  # the number of a batch that no step trains on
OPTIMIZER = optax.adam(1e-2)
PLACES = {"hidden": P("x", "y"), "out": P(("x", "y"))}


def init_state() -> State:
    """Return the state of a new run."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "hidden": jax.random.normal(keys[0], (8, 64)),
        "out": jax.random.normal(keys[1], (64,)),
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


def loss_of(params: dict[str, jax.Array], number: int | jax.Array) -> jax.Array:
    """Return the mean squared error on the batch of this number, always the same."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (32, 8))
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - jnp.sin(x.sum(-1))) ** 2)


def main(root: str, steps: int, shape: tuple[int, ...]) -> None:
    """Train to the last step, from wherever the run has come to, on whatever mesh."""
    mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))
    whole = NamedSharding(mesh, P())
    # A tree of shardings. Those of Adam's moments are at the same names as those of the parameters.
    shardings = jax.tree.map_with_path(
        lambda path, _: NamedSharding(mesh, PLACES.get(getattr(path[-1], "key", ""), P())),
        jax.eval_shape(init_state),
    )

    @functools.partial(jax.jit, out_shardings=shardings, donate_argnums=0)
    def train_step(state: State, number: int) -> State:
        params = jax.lax.with_sharding_constraint(state["params"], whole)
        grads = jax.lax.with_sharding_constraint(jax.grad(loss_of)(params, number), whole)
        updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    fresh = jax.jit(init_state, out_shardings=shardings)
    last = ckpt.save_when.Steps([steps - 1])
    with ckpt.sync.CheckpointManager(
        root,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(50), last),
        keep=3,
    ) as mgr:
        start, state = mgr.resume(fresh, like=ckpt.abstract(init_state, shardings))
        print(f"resumed at step {start}" if start else "a new run", flush=True)
        print(state["params"]["hidden"].sharding, flush=True)
        for step in range(start, steps):
            state = train_step(state, step)
            mgr.save(step, state)
    params = jax.device_put(state["params"], jax.devices()[0])
    print(f"done: step {steps - 1}, loss {loss_of(params, TEST)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/mesh")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--mesh", default="4x2")
    args = parser.parse_args()
    main(args.root, args.steps, tuple(map(int, args.mesh.split("x"))))
