"""As the examples of Flax: a root of files of msgpack, by functions without a manager."""

from __future__ import annotations

from pathlib import Path

import flax
from flax.training import checkpoints

import ckpt
from ckpt import step_names
from ckpt.sync import CheckpointManager
from tests.interop.loops.toy import FIRST, fresh, say, say_end, stepped

__all__ = ["before", "train"]


def before(root: Path) -> None:
    flax.config.update("flax_use_orbax_checkpointing", False)
    state = fresh()
    for step in range(FIRST):
        state = stepped(state)
        checkpoints.save_checkpoint(root, state, step, keep=2)


def train(root: Path, until: int) -> None:
    names = step_names.Standard("checkpoint")
    keep = ckpt.keep.Latest(2)
    with CheckpointManager(root, step_names=names, keep=keep) as mgr:
        first, state = mgr.resume(fresh())
        assert first >= FIRST
        for step in range(first, until):
            state = stepped(state)
            mgr.save(step, state)
            say(step)
    say_end(state)
