"""Save, blocked and restore times of all peers, round by round in one process.

Peers take turns inside every round (A B C, A B C), so that a slow minute of the machine falls
on all of them. A timed part starts from a flushed disk and a collected heap.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from benchmarks import workloads
from benchmarks.peers import PEERS, Peer
from benchmarks.results import Sample, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

PyTree = Any
ValueT = TypeVar("ValueT")


def run(
    workload: workloads.Workload,
    *,
    peers: Sequence[str],
    rounds: int,
    smoke: bool,
    directory: Path,
) -> Scenario:
    """Returns the samples of one workload; call it in a fresh process.

    Args:
        workload: The state to save.
        peers: Names from `PEERS`, in the order in which they take turns.
        rounds: Measured rounds; one more runs before them and is kept apart.
        smoke: Whether to use the small size.
        directory: An empty directory on the disk to measure.
    """
    tree = workloads.make(workload.shapes(smoke))
    samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in peers}
    with opened(peers, directory) as running:
        for turn in range(rounds + 1):
            for name, peer in running.items():
                tree, seconds = _one_turn(peer, tree, 2 * turn, check=turn == 0)
                for measure, value in seconds.items():
                    samples[name][measure].append(value)
                report_turn(workload.name, turn, rounds, name, seconds)
    return Scenario(
        name=workload.name,
        kind="throughput",
        summary=workload.summary,
        leaves=len(jax.tree.leaves(tree)),
        size_bytes=workloads.size_bytes(tree),
        measures=collected(samples),
    )


def _one_turn(
    peer: Peer, tree: PyTree, step: int, *, check: bool
) -> tuple[PyTree, dict[str, float]]:
    # Every save meets bytes and buffers that no save has seen before, as in training.
    tree = workloads.advance(tree)
    seconds: dict[str, float] = {}
    seconds["save"], _ = timed(lambda: peer.save(step, tree))
    like = workloads.abstract(tree)
    seconds["restore"], restored = timed(lambda: jax.block_until_ready(peer.restore(step, like)))
    if check:
        check_equal(restored, tree)
    del restored
    peer.delete(step)
    if not peer.is_asynchronous:
        return tree, seconds | {"blocked": seconds["save"]}

    tree = workloads.advance(tree)
    seconds["blocked"], pending = timed(lambda: peer.save_async(step + 1, tree))
    pending.wait()
    peer.delete(step + 1)
    return tree, seconds


def timed(action: Callable[[], ValueT]) -> tuple[float, ValueT]:
    """Returns the seconds an action took and its value; the disk is flushed before, untimed."""
    settle()
    start = time.perf_counter()
    value = action()
    return time.perf_counter() - start, value


def settle() -> None:
    """Pays what earlier work left behind, so that the next timed part does not."""
    gc.collect()
    os.sync()


def check_equal(restored: PyTree, expected: PyTree) -> None:
    """Compares two trees bit by bit.

    Raises:
        ValueError: A peer gave back something else; its times would mean nothing.
    """
    wants, structure = jax.tree.flatten_with_path(expected)
    gots, restored_structure = jax.tree.flatten(restored)
    if restored_structure != structure:
        raise ValueError("the restored tree has another structure")
    for (path, want), got in zip(wants, gots, strict=True):
        place = jax.tree_util.keystr(path)
        if not isinstance(got, jax.Array):
            raise TypeError(f"{place} was restored as {type(got).__name__}, not as a jax.Array")
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            raise ValueError(f"{place} was restored as {got.dtype}{list(got.shape)}")
        if not got.sharding.is_equivalent_to(want.sharding, want.ndim):
            raise ValueError(f"{place} was restored onto {got.sharding}")
        if np.asarray(got).tobytes() != np.asarray(want).tobytes():
            raise ValueError(f"{place} was restored with other values")


@contextmanager
def opened(peers: Sequence[str], directory: Path) -> Iterator[dict[str, Peer]]:
    """Gives the named peers, each in a new directory of its own, and closes them."""
    with ExitStack() as stack:
        running = {}
        for name in peers:
            place = directory / name
            place.mkdir(parents=True)
            running[name] = stack.enter_context(closing(PEERS[name].open(place)))
        yield running


def collected(samples: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Sample]]:
    """Returns the samples of each peer and measure, the first round apart."""
    return {
        peer: {measure: Sample.of(values) for measure, values in measures.items()}
        for peer, measures in samples.items()
    }


def report_turn(
    scenario: str, turn: int, rounds: int, peer: str, seconds: dict[str, float]
) -> None:
    """Tells the person who waits how far the run is."""
    label = f"round {turn}/{rounds}" if turn else "first round"
    figures = "  ".join(f"{measure} {value:.3f}" for measure, value in seconds.items())
    sys.stderr.write(f"{scenario}, {label}, {peer}: {figures}\n")
