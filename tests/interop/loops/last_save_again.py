"""As maxtext: an iterator of its own, and a last save that looks first whether it was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import ckpt.sync
from ckpt.sync import CheckpointManager
from tests.interop.loops.toy import FIRST, fresh, say, say_end, stepped

__all__ = ["before", "train"]


class Batches:
    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> float:
        self.at += 1
        return self.at / 7

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at}

    def set_state(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def before(root: Path) -> None:
    state, data = fresh(), Batches()
    with ocp.CheckpointManager(root, item_names=("items", "iter")) as mgr:
        for step in range(FIRST):
            state = stepped(state, next(data))
            args = ocp.args.Composite(
                items=ocp.args.PyTreeSave(state), iter=ocp.args.JsonSave(data.get_state())
            )
            mgr.save(step, args=args)


def train(root: Path, until: int) -> None:
    data = Batches()
    policy = ckpt.save_when.Any(ckpt.save_when.First(), ckpt.save_when.EverySteps(4))
    with CheckpointManager(root, save_when=policy, keep=ckpt.keep.Latest(2)) as mgr:
        latest = mgr.latest_step()
        assert latest is not None
        path = mgr.metadata(latest).info.path
        state = ckpt.sync.load(f"{path}/items", like=fresh())
        found = mgr.restore(latest, items=["iter"])["iter"]
        data.set_state(found)
        step = latest
        for step in range(latest + 1, until):
            state = stepped(state, next(data))
            mgr.save(step, items={"items": state, "iter": data.get_state()})
            say(step)
        if mgr.latest_step() != step:
            mgr.save(step, items={"items": state, "iter": data.get_state()}, force=True)
        mgr.save(step, items={"items": state, "iter": data.get_state()}, force=True)
    say_end(state)
