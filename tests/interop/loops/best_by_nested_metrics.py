"""As kauldron: the best steps by a metric in a group, and an evaluator that follows the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import ckpt.sync
from ckpt.sync import CheckpointManager
from tests.interop.loops.toy import FIRST, fresh, say, say_end, stepped

__all__ = ["before", "train"]


def metrics_of(step: int) -> dict[str, Any]:
    return {"eval": {"loss": abs(step - 6) / 10}, "train": {"loss": 1 / (step + 1)}}


def loss(metrics: Any) -> float:
    return float(metrics["eval"]["loss"])


def before(root: Path) -> None:
    state = fresh()
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=loss, best_mode="min")
    with ocp.CheckpointManager(root, options=options) as mgr:
        for step in range(FIRST):
            state = stepped(state)
            mgr.save(step, args=ocp.args.StandardSave(state), metrics=metrics_of(step))


def train(root: Path, until: int) -> None:
    best = ckpt.keep.Best(2, metric=loss, mode="min")
    with CheckpointManager(root, keep=best) as mgr:
        first, state = mgr.resume(fresh())
        for step in range(first, until):
            state = stepped(state)
            mgr.save(step, state, metrics=metrics_of(step))
            say(step)
        mgr.wait_until_finished()
        steps = mgr.all_steps()
        ours = [step for step in steps if step >= FIRST]
        assert len(ours) <= 3, steps
        assert mgr.best_step() == min(steps, key=lambda step: loss(metrics_of(step)))
    seen = [info.step for info in ckpt.sync.watch(root, until=steps[-1])]
    assert seen == steps
    say_end(state)
