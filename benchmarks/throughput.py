"""Save, blocked and restore times of all peers, and what the machine gives without a library.

Two rows are floors: no restore can be expected to be faster. `memcpy` copies the bytes of the state
into host memory that was touched before, on one thread. `device_put` reads the same bytes from one
file in the page cache into such memory, and puts the whole list of arrays onto the devices in one
call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from benchmarks import workloads
from benchmarks.peers import read_all, split, write_all
from benchmarks.rounds import Log, Setting, drop, in_turn, opened, timed, timed_save, warm
from benchmarks.workloads import PyTree, abstract, check_equal, size_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.peers import Peer
    from benchmarks.results import Scenario

KIND = "throughput"
BLOCKED, BLOCKED_SMALL = "blocked", "blocked_small"
MEMCPY, DEVICE_PUT = FLOORS = ("memcpy", "device_put")


def run(setting: Setting, workload: workloads.Workload) -> Scenario:
    """Returns the samples of one workload; call it in a fresh process."""
    tree = workloads.make(workload.shapes(setting.smoke))
    floors = _Floors(tree, setting.directory)
    log = Log(workload.name, setting.rounds)
    with opened(setting.peers, setting.directory) as running:
        for turn in range(setting.rounds + 1):
            for name, peer in in_turn(running, turn):
                tree, seconds = _one_turn(peer, tree, 2 * turn, check=turn == 0)
                log.add(turn, name, seconds)
            for name, seconds in floors.measure().items():
                log.add(turn, name, seconds)
    return log.result(KIND, workload.summary, tree)


def run_blocked_small(setting: Setting) -> Scenario:
    """Returns how long `save()` blocks for a state of very many small leaves.

    Only the call is looked at: what it does per leaf, in Python, stops the train loop. Peers
    without an asynchronous save are left out.
    """
    tree = workloads.make(workloads.leaf_shapes(300 if setting.smoke else 10_000))
    log = Log(BLOCKED_SMALL, setting.rounds)
    with opened(setting.asynchronous, setting.directory) as running:
        for turn, name, peer in log.turns(running):
            tree = workloads.advance(tree)
            blocked, committed = timed_save(peer, turn, tree)
            if turn == 0:
                restored = peer.restore(turn, peer.target(tree))
                check_equal(peer.as_jax(restored, tree), tree)
            peer.delete(turn)
            log.add(turn, name, {"blocked": blocked, "committed": committed})
    return log.result(BLOCKED, "f32 leaves of 4 KiB", tree)


def _one_turn(
    peer: Peer, tree: PyTree, step: int, *, check: bool
) -> tuple[PyTree, dict[str, float]]:
    tree, seconds = save_and_restore(peer, tree, step, check=check)
    drop(peer.place(step))
    seconds["restore_cold"] = _restore_seconds(peer, tree, step)
    peer.delete(step)
    if not peer.is_asynchronous:
        return tree, seconds | {"blocked": seconds["save"]}

    tree = workloads.advance(tree)
    seconds["blocked"], _ = timed_save(peer, step + 1, tree)
    peer.delete(step + 1)
    return tree, seconds


def save_and_restore(
    peer: Peer, tree: PyTree, step: int, *, check: bool
) -> tuple[PyTree, dict[str, float]]:
    """Saves the next state and restores it from the page cache; returns it with the seconds."""
    # Every save meets bytes and buffers that no save has seen before, as in training.
    tree = workloads.advance(tree)
    seconds = {"save": timed_save(peer, step, tree)[1]}
    warm(peer.place(step))
    seconds["restore"] = _restore_seconds(peer, tree, step, check=check)
    return tree, seconds


def _restore_seconds(peer: Peer, tree: PyTree, step: int, *, check: bool = False) -> float:
    target = peer.target(tree)
    seconds, restored = timed(lambda: jax.block_until_ready(peer.restore(step, target)))
    if check:
        check_equal(peer.as_jax(restored, tree), tree)
    return seconds


class _Floors:
    """Keeps one warm buffer and one file of the state's bytes."""

    def __init__(self, tree: PyTree, directory: Path) -> None:
        self._leaves = jax.tree.leaves(abstract(tree))
        # Zeros would be mapped, not touched.
        self._source = np.full(size_bytes(tree), 1, np.uint8)
        self._buffer = np.full(size_bytes(tree), 2, np.uint8)
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "floor"
        views = split(self._source, self._leaves)
        for leaf, view in zip(jax.tree.leaves(tree), views, strict=True):
            np.copyto(view, np.asarray(leaf))
        write_all(self._file, [self._source])

    def measure(self) -> dict[str, dict[str, float]]:
        """Returns the seconds of one round, by floor and measure."""
        copied, _ = timed(lambda: np.copyto(self._buffer, self._source))
        read, _ = timed(lambda: read_all(self._file, self._buffer.data))
        put, _ = timed(self._put)
        return {
            MEMCPY: {"restore": copied},
            DEVICE_PUT: {"restore": read + put, "read": read, "put": put},
        }

    def _put(self) -> None:
        placement: Any = [leaf.sharding for leaf in self._leaves]
        if len(set(placement)) == 1:
            placement = placement[0]
        views = split(self._buffer, self._leaves)
        # may_alias would let the arrays share the buffer that the next round overwrites.
        jax.block_until_ready(jax.device_put(views, placement, may_alias=False))
