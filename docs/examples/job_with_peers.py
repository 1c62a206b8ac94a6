"""A job of several processes that goes on from the memory of its hosts, whatever is killed.

    python docs/examples/job_with_peers.py [--processes 3]

Each process stands for a host. Every twentieth step is a snapshot: each process keeps its part in
shared memory, and a copy of the part of its neighbour. Only every thousandth step is saved to the
root. Kill any of the processes with `kill -9`: the job is started again, as a scheduler would do
it, and says from which step it goes on. With `--hosts DIR` each process has its memory in a folder
there, `host-0` and so on. Remove one of them as well, and that host is lost with its memory.

Its last line is that of a run which was never stopped.
"""

import argparse
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt

State = dict[str, jax.Array]
TEST = 2**31 - 1  # the number of a batch that no step trains on
GRACE_SECONDS = 5.0


def loss_of(w: jax.Array, number: int | jax.Array) -> jax.Array:
    """Return the mean squared error on the batch of this number, always the same."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (32, 12))
    return jnp.mean((x @ w - jnp.sin(x.sum(-1))) ** 2)


def train(args: argparse.Namespace) -> None:
    """Be one process of the job: train to the last step, from wherever the run has come to."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        args.coordinator, args.processes, args.process, coordinator_bind_address=args.coordinator
    )
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = NamedSharding(mesh, P("x"))

    @functools.partial(jax.jit, out_shardings={"w": rows, "momentum": rows})
    def init_state() -> State:
        return {"w": jnp.zeros(12), "momentum": jnp.zeros(12)}

    @functools.partial(jax.jit, out_shardings={"w": rows, "momentum": rows}, donate_argnums=0)
    def train_step(state: State, number: int) -> State:
        momentum = 0.9 * state["momentum"] + jax.grad(loss_of)(state["w"], number)
        return {"w": state["w"] - 1e-3 * momentum, "momentum": momentum}

    # On a cluster, the address of this host: PeerCopies(address="10.0.0.7").
    memory = ckpt.tiers.SharedMemory(
        directory=args.memory, peers=ckpt.tiers.PeerCopies(), kept_seconds=60
    )
    with ckpt.sync.CheckpointManager(args.root, tiers=[memory]) as mgr:
        start, state = mgr.resume(init_state)
        if args.process == 0:
            print(f"resumed at step {start}" if start else "a new run", flush=True)
        for step in range(start, args.steps):
            state = train_step(state, step)
            if step % args.save_every == args.save_every - 1 or step == args.steps - 1:
                mgr.save(step, state)
            elif step % 20 == 19:
                mgr.snapshot(step, state)
            if step % 100 == 99 and args.process == 0:
                # Until here nothing can be lost by the loss of one host.
                mgr.wait_until_finished()
                print(f"step {step}", flush=True)
        loss = jax.jit(loss_of, out_shardings=NamedSharding(mesh, P()))(state["w"], TEST)
        if args.process == 0:
            print(f"done: step {args.steps - 1}, loss {loss}", flush=True)


def start_all(args: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Start all processes of the job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    found = []
    for process in range(args.processes):
        memory = "/dev/shm"
        if args.hosts:
            memory = str(Path(args.hosts, f"host-{process}"))
            Path(memory).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, "--root", args.root, "--steps", str(args.steps)]
        command += ["--save-every", str(args.save_every)]
        command += ["--processes", str(args.processes), "--process", str(process)]
        command += ["--memory", memory, "--coordinator", coordinator]
        found.append(subprocess.Popen(command))
    print("processes", *(each.pid for each in found), flush=True)
    return found


def supervise(args: argparse.Namespace) -> None:
    """Keep the job running until it is done: if one process dies, end all, and start them again."""
    running: list[subprocess.Popen[bytes]] = []

    def terminate(number: int, frame: object) -> None:
        # As a scheduler does it: a notice to all processes, and a little later the end.
        for each in running:
            each.terminate()
        ends = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < ends and any(each.poll() is None for each in running):
            time.sleep(0.1)
        for each in running:
            each.kill()
        sys.exit(143)

    signal.signal(signal.SIGTERM, terminate)
    while True:
        running[:] = start_all(args)
        while all(each.poll() is None for each in running):
            time.sleep(0.05)
        if not any(each.returncode for each in running):
            # The others end, too.
            for each in running:
                each.wait()
        if not any(each.returncode for each in running):
            return
        for each in running:
            each.kill()
            each.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/peers")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--save-every", type=int, default=1000, help="steps from save to save")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--hosts", help="a folder for the memory of each host")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.process is None:
        supervise(given)
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        train(given)
