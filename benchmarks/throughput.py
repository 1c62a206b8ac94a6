"""Save, blocked and restore times of all peers, and what the machine gives without a library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from benchmarks import pagecache, workloads
from benchmarks.floors import Floors
from benchmarks.results import Scenario
from benchmarks.rounds import Log, Setting, in_turn, opened, timed, timed_save
from benchmarks.trees import check_equal, size_bytes

if TYPE_CHECKING:
    from benchmarks.peers import Peer

PyTree = Any

KIND = "throughput"


def run(setting: Setting, workload: workloads.Workload) -> Scenario:
    """Returns the samples of one workload; call it in a fresh process."""
    tree = workloads.make(workload.shapes(setting.smoke))
    floors = Floors(tree, setting.directory)
    log = Log(workload.name, setting.rounds)
    with opened(setting.peers, setting.directory) as running:
        for turn in range(setting.rounds + 1):
            for name, peer in in_turn(running, turn):
                tree, seconds = _one_turn(peer, tree, 2 * turn, check=turn == 0)
                log.add(turn, name, seconds)
            for name, seconds in floors.measure().items():
                log.add(turn, name, seconds)
    return Scenario(
        name=workload.name,
        kind=KIND,
        summary=workload.summary,
        leaves=len(jax.tree.leaves(tree)),
        size_bytes=size_bytes(tree),
        measures=log.samples(),
    )


def _one_turn(
    peer: Peer, tree: PyTree, step: int, *, check: bool
) -> tuple[PyTree, dict[str, float]]:
    tree, seconds = save_and_restore(peer, tree, step, check=check)
    pagecache.drop(peer.place(step))
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
    pagecache.warm(peer.place(step))
    seconds["restore"] = _restore_seconds(peer, tree, step, check=check)
    return tree, seconds


def _restore_seconds(peer: Peer, tree: PyTree, step: int, *, check: bool = False) -> float:
    target = peer.target(tree)
    seconds, restored = timed(lambda: jax.block_until_ready(peer.restore(step, target)))
    if check:
        check_equal(peer.as_jax(restored, tree), tree)
    return seconds
