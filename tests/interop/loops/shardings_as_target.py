"""As big_vision: the last step beside every fourth, and shardings alone as the target."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
from ckpt.sync import CheckpointManager
from tests.interop.loops.toy import FIRST, fresh, say, say_end, stepped

__all__ = ["before", "train"]


def before(root: Path) -> None:
    state = fresh()
    with ocp.CheckpointManager(root) as mgr:
        for step in range(FIRST):
            state = stepped(state)
            mgr.save(step, args=ocp.args.StandardSave(state))


def train(root: Path, until: int) -> None:
    every = NamedSharding(Mesh(jax.devices(), ("data",)), P())
    keep = ckpt.keep.Any(ckpt.keep.Latest(1), ckpt.keep.EverySteps(4))
    with CheckpointManager(root, keep=keep) as mgr:
        latest = mgr.latest_step()
        assert latest is not None
        found = mgr.restore(latest, mgr.metadata(latest).target(every))
        state = jax.tree.unflatten(jax.tree.structure(fresh()), jax.tree.leaves(found))
        assert all(leaf.sharding == every for leaf in jax.tree.leaves(state))
        for step in range(latest + 1, until):
            state = stepped(state)
            mgr.save(step, state)
            say(step)
    say_end(state)
