"""As simply: a JSON item called `metadata`, and leaves that are left out by a placeholder."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from ckpt.sync import CheckpointManager
from tests.interop.loops.toy import FIRST, fresh, say, say_end, stepped

__all__ = ["before", "train"]


def before(root: Path) -> None:
    state = fresh()
    with ocp.CheckpointManager(root, item_names=("state", "metadata")) as mgr:
        for step in range(FIRST):
            state = stepped(state)
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state), metadata=ocp.args.JsonSave({"format": 2})
            )
            mgr.save(step, args=args)


def train(root: Path, until: int) -> None:
    with CheckpointManager(root) as mgr:
        latest = mgr.latest_step()
        assert latest is not None
        found = mgr.metadata(latest)
        if "metadata" in found.items:
            stored = mgr.restore(latest, items=["metadata"])["metadata"]
        else:
            stored = found.info.custom_metadata
        assert stored == {"format": 2}
        like = jax.tree.map(lambda _: ..., fresh()) | {"params": fresh()["params"]}
        params = mgr.restore(latest, items={"state": like})["state"]["params"]
        state = mgr.restore(latest, items={"state": fresh()})["state"]
        assert bool((params["w"] == state["params"]["w"]).all())
        for step in range(latest + 1, until):
            state = stepped(state)
            mgr.save(step, items={"state": state}, custom_metadata=stored)
            say(step)
    say_end(state)
