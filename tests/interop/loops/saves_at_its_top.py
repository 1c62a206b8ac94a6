"""As nanodo: boxes of Flax and a Grain iterator, and a loop that saves at its top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain.python as grain
import orbax.checkpoint as ocp
from flax import linen as nn

import ckpt
from ckpt.sync import CheckpointManager
from tests.interop.loops.toy import FIRST, fresh, say, say_end, stepped

__all__ = ["before", "train"]


def batches() -> Any:
    sampler = grain.SequentialSampler(1000, shard_options=grain.NoSharding())
    return iter(grain.DataLoader(data_source=range(1000), sampler=sampler, worker_count=0))


def boxed(state: Any) -> Any:
    params: Any = {name: nn.Partitioned(each, (None,)) for name, each in state["params"].items()}
    return state | {"params": params}


def plain(state: Any) -> Any:
    return state | {"params": {name: each.value for name, each in state["params"].items()}}


def before(root: Path) -> None:
    state, data = boxed(fresh()), batches()
    with ocp.CheckpointManager(root, item_names=("state", "data")) as mgr:
        for step in range(FIRST):
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=grain.PyGrainCheckpointSave(data)
            )
            mgr.save(step, args=args)
            state = boxed(stepped(plain(state), float(next(data))))


def train(root: Path, until: int) -> None:
    state, data, first = boxed(fresh()), batches(), 0
    with CheckpointManager(root, keep=ckpt.keep.Latest(3)) as mgr:
        if mgr.latest_step() is not None:
            found = mgr.restore(items={"state": state, "data": data})
            state, data = found["state"], found["data"]
            first = int(state["step"])
        for step in range(first, until):
            if step % 2 == 0 or step == first:
                mgr.save(step, items={"state": state, "data": data})
            say(step)
            state = boxed(stepped(plain(state), float(next(data))))
    say_end(plain(state))
