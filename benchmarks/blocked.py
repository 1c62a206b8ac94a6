"""Blocked time of `save()` for a state of very many small leaves.

Only the call is looked at: what it does per leaf, in Python, stops the train loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from benchmarks import workloads
from benchmarks.results import Scenario
from benchmarks.rounds import Log, Setting, in_turn, opened, timed_save
from benchmarks.trees import check_equal, size_bytes

if TYPE_CHECKING:
    from benchmarks.peers import Peer

PyTree = Any

NAME = "blocked_small"
KIND = "blocked"


def run(setting: Setting) -> Scenario:
    """Returns how long `save()` blocks; peers without an asynchronous save are left out."""
    tree = workloads.make(workloads.leaf_shapes(300 if setting.smoke else 10_000))
    log = Log(NAME, setting.rounds)
    with opened(setting.asynchronous, setting.directory) as running:
        for turn in range(setting.rounds + 1):
            for name, peer in in_turn(running, turn):
                tree = workloads.advance(tree)
                log.add(turn, name, _one_turn(peer, tree, turn, check=turn == 0))
    return Scenario(
        name=NAME,
        kind=KIND,
        summary="f32 leaves of 4 KiB",
        leaves=len(jax.tree.leaves(tree)),
        size_bytes=size_bytes(tree),
        measures=log.samples(),
    )


def _one_turn(peer: Peer, tree: PyTree, step: int, *, check: bool) -> dict[str, float]:
    blocked, committed = timed_save(peer, step, tree)
    if check:
        check_equal(peer.as_jax(peer.restore(step, peer.target(tree)), tree), tree)
    peer.delete(step)
    return {"blocked": blocked, "committed": committed}
