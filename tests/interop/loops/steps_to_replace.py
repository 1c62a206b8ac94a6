"""As levanter: steps to keep and steps to replace, and models that have gained a part."""

from __future__ import annotations

import os
from pathlib import Path

import jax.numpy as jnp

import ckpt
import ckpt.sync
from ckpt.sync import CheckpointManager
from tests.interop.loops.toy import FIRST, fresh, say, say_end, stepped

__all__ = ["before", "train"]


def before(root: Path) -> None:
    """Its own code wrote its own format: the first steps are those of an export."""
    state = fresh()
    for _ in range(FIRST):
        state = stepped(state)
    # Made by the caller, as by `mkdtemp`.
    os.makedirs(root / "start")
    ckpt.sync.save(root / "start", state)


def is_kept(step: int) -> bool:
    """Every fourth step is kept for good; the latest one always is."""
    return step % 4 == 0


def train(root: Path, until: int) -> None:
    with CheckpointManager(root / "run", keep=is_kept) as mgr:
        if mgr.latest_step() is None:
            like = ckpt.abstract(fresh() | {"more": jnp.zeros(3)})
            adapt = ckpt.Adapt(missing="keep")
            state = ckpt.sync.load(root / "start", like=like, adapt=adapt)
            # What is not stored is still a shape, and is made now.
            state["more"] = jnp.zeros(state["more"].shape)
            first = FIRST
        else:
            first, state = mgr.resume(fresh() | {"more": jnp.zeros(3)})
        for step in range(first, until):
            more = state.pop("more")
            state = stepped(state) | {"more": more + 1}
            mgr.save(step, state)
            say(step)
    say_end(state)
