"""As brax: one checkpoint at a path that is replaced, with a file of its own beside the arrays."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

import ckpt.sync
from tests.interop.loops.toy import FIRST, fresh, say, say_end, stepped

__all__ = ["before", "train"]


def before(root: Path) -> None:
    state = fresh()
    for step in range(FIRST):
        state = stepped(state)
        ocp.PyTreeCheckpointer().save(root / str(step), state, force=True)
        (root / str(step) / "config.json").write_text(json.dumps({"hidden": 8}))


def train(root: Path, until: int) -> None:
    latest = max(int(path.name) for path in root.iterdir() if path.name.isdigit())
    # A tree without a target, as numpy arrays; then as the state that it was.
    found = jax.tree.map(np.asarray, ckpt.sync.load(root / str(latest)))
    state = jax.tree.unflatten(jax.tree.structure(fresh()), jax.tree.leaves(found))
    state = ckpt.sync.load(root / str(latest), like=state)
    assert json.loads((root / str(latest) / "config.json").read_text()) == {"hidden": 8}
    for step in range(latest + 1, until):
        state = stepped(state)
        target = root / str(step)
        ckpt.sync.save(target, state, if_exists="replace")
        (target / "config.json").write_text(json.dumps({"hidden": 8}))
        say(step)
    say_end(state)
