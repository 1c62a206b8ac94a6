"""Training lost per save: what an asynchronous save costs a donating train step.

Blocked time alone flatters a peer that keeps views of the buffers: the runtime then copies them
inside the next step. Lost time is the blocked time plus, for every step until the commit, the
time it took beyond the median undisturbed step. Noise can make single steps faster, so the sum
is signed.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from benchmarks import workloads
from benchmarks.measure import check_equal, collected, opened, report_turn, settle
from benchmarks.results import Scenario

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.peers import Peer

PyTree = Any

NAME = "overlap"
_SETTLING_STEPS = 3
_UNDISTURBED_STEPS = 15
# A save that commits within a step may still have made the next ones slower.
_LEAST_STEPS_AFTER_SAVE = 3


def run(*, peers: Sequence[str], rounds: int, smoke: bool, directory: Path) -> Scenario:
    """Returns what saves cost a train step; call it in a fresh process.

    Peers without an asynchronous save are left out. See `benchmarks.measure.run` for the
    arguments.
    """
    state = workloads.make(state_shapes(smoke))
    samples: dict[str, dict[str, list[float]]] = {}
    with opened(peers, directory) as every:
        running = {name: peer for name, peer in every.items() if peer.is_asynchronous}
        for turn in range(rounds + 1):
            for name, peer in running.items():
                state, seconds = _one_turn(peer, state, turn, check=turn == 0)
                for measure, value in seconds.items():
                    samples.setdefault(name, defaultdict(list))[measure].append(value)
                report_turn(NAME, turn, rounds, name, seconds)
    return Scenario(
        name=NAME,
        kind="overlap",
        summary="params and both Adam moments under a donating train step",
        leaves=len(jax.tree.leaves(state)),
        size_bytes=workloads.size_bytes(state),
        measures=collected(samples),
    )


def state_shapes(smoke: bool) -> workloads.Shapes:
    """Returns 384 MiB (smoke: 12 MiB): params, both moments, and a counter."""
    count, rows = (4, 256) if smoke else (24, 1365)
    params = {f"layer_{i:02d}": workloads.f32(rows, 1024) for i in range(count)}
    return {"params": params, "mu": params, "nu": params, "step": workloads.int32()}


@partial(jax.jit, donate_argnums=0)
def train_step(state: PyTree) -> PyTree:
    """Returns the next state; every buffer is read and written once, in place."""

    def update(param: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, ...]:
        gradient = 0.1 * param
        mu = 0.9 * mu + 0.1 * gradient
        nu = 0.99 * nu + 0.01 * gradient * gradient
        return param - 1e-3 * mu / (jnp.sqrt(jnp.abs(nu)) + 1e-8), mu, nu

    updated = jax.tree.map(update, state["params"], state["mu"], state["nu"])
    params, mu, nu = ({layer: values[i] for layer, values in updated.items()} for i in range(3))
    return {"params": params, "mu": mu, "nu": nu, "step": state["step"] + 1}


def _timed_step(state: PyTree) -> tuple[PyTree, float]:
    start = time.perf_counter()
    state = jax.block_until_ready(train_step(state))
    return state, time.perf_counter() - start


def _undisturbed(state: PyTree) -> tuple[PyTree, float]:
    times = []
    for _ in range(_SETTLING_STEPS + _UNDISTURBED_STEPS):
        state, seconds = _timed_step(state)
        times.append(seconds)
    return state, statistics.median(times[_SETTLING_STEPS:])


def _one_turn(
    peer: Peer, state: PyTree, step: int, *, check: bool
) -> tuple[PyTree, dict[str, float]]:
    settle()
    state, undisturbed = _undisturbed(state)
    expected = jax.block_until_ready(jax.tree.map(jnp.copy, state)) if check else None

    start = time.perf_counter()
    pending = peer.save_async(step, state)
    blocked = time.perf_counter() - start
    times: list[float] = []
    committed = None
    while committed is None or len(times) < _LEAST_STEPS_AFTER_SAVE:
        state, seconds = _timed_step(state)
        times.append(seconds)
        if committed is None and pending.done():
            committed = time.perf_counter() - start
    pending.wait()

    if expected is not None:
        check_equal(peer.restore(step, workloads.abstract(expected)), expected)
    peer.delete(step)
    slowdown = sum(seconds - undisturbed for seconds in times)
    return state, {
        "lost": blocked + slowdown,
        "blocked": blocked,
        "slowdown": slowdown,
        "worst_step": max(times),
        "undisturbed_step": undisturbed,
        "committed": committed,
    }
