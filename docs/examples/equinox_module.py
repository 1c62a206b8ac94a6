"""An Equinox module with Optax: modules are saved as they are, with their functions left out.

    python docs/examples/equinox_module.py

Stop it at any time, with Ctrl-C or `kill -9`, and start it again: it says at which step it goes
on, and its last line is that of a run which was never stopped.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import ckpt

TEST = 2**31 - 1  # the number of a batch that no step trains on
OPTIMIZER = optax.adam(1e-2)


@eqx.filter_jit
def loss_of(model: eqx.nn.MLP, number: int | jax.Array) -> jax.Array:
    """Return the mean squared error on the batch of this number, always the same."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (32, 8))
    return jnp.mean((jax.vmap(model)(x)[:, 0] - jnp.sin(x.sum(-1))) ** 2)


@eqx.filter_jit(donate="all")
def train_step(
    model: eqx.nn.MLP, opt_state: optax.OptState, number: jax.Array
) -> tuple[eqx.nn.MLP, optax.OptState]:
    """Make one step."""
    grads = eqx.filter_grad(loss_of)(model, number)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state


def init() -> tuple[eqx.nn.MLP, optax.OptState]:
    """Return the state of a new run."""
    model = eqx.nn.MLP(8, 1, width_size=64, depth=2, key=jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


def main(root: str, steps: int) -> None:
    """Train to the last step, from wherever the run has come to."""
    last = ckpt.save_when.Steps([steps - 1])
    with ckpt.sync.CheckpointManager(
        root,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(50), last),
        keep=3,
    ) as mgr:
        # Called for a new run only. The activation functions in the module are not stored: a run
        # that goes on takes them from here as well.
        start, (model, opt_state) = mgr.resume(init)
        print(f"resumed at step {start}" if start else "a new run", flush=True)
        for step in range(start, steps):
            model, opt_state = train_step(model, opt_state, jnp.asarray(step))
            mgr.save(step, (model, opt_state))
    print(f"done: step {steps - 1}, loss {loss_of(model, TEST)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/equinox")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    main(args.root, args.steps)
