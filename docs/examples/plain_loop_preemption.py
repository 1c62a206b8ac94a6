"""A plain training loop that saves one last step when the machine is taken away.

    python docs/examples/plain_loop_preemption.py

Send it SIGTERM, as a scheduler does, or press Ctrl-C: it saves the step it is at, whatever the
save policy says, and ends. Start it again: it goes on with the next step, so nothing is computed
twice, and its last line is that of a run which was never stopped.
"""

import argparse
import functools
import signal

import jax
import jax.numpy as jnp

import ckpt

State = dict[str, jax.Array]
TEST = 2**31 - 1  # the number of a batch that no step trains on


def init_state() -> State:
    """Return the state of a new run."""
    return {"w": jnp.zeros(8), "momentum": jnp.zeros(8)}


def loss_of(w: jax.Array, number: int | jax.Array) -> jax.Array:
    """Return the mean squared error on the batch of this number, always the same."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (32, 8))
    return jnp.mean((x @ w - jnp.sin(x.sum(-1))) ** 2)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: State, number: int) -> State:
    """Make one step."""
    momentum = 0.9 * state["momentum"] + jax.grad(loss_of)(state["w"], number)
    return {"w": state["w"] - 1e-3 * momentum, "momentum": momentum}


def main(root: str, steps: int) -> None:
    """Train to the last step, from wherever the run has come to."""
    with ckpt.sync.CheckpointManager(
        root,
        save_when=ckpt.save_when.Any(
            ckpt.save_when.EverySteps(1000),
            ckpt.save_when.Steps([steps - 1]),
            ckpt.save_when.Preempted((signal.SIGTERM, signal.SIGINT)),
        ),
        keep=3,
    ) as mgr:
        start, state = mgr.resume(init_state)
        print(f"resumed at step {start}" if start else "a new run", flush=True)
        for step in range(start, steps):
            state = train_step(state, step)
            mgr.save(step, state)
            if mgr.reached_preemption(step):
                print(f"preempted: saving step {step}", flush=True)
                return  # leaving the block waits for the commit
            if step % 100 == 0:
                print(f"step {step}", flush=True)
    print(f"done: step {steps - 1}, loss {loss_of(state['w'], TEST)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/preemption")
    parser.add_argument("--steps", type=int, default=20_000)
    args = parser.parse_args()
    main(args.root, args.steps)
