"""As tunix: the states of NNX models, saved by Orbax's v1, and a part of them restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from orbax.checkpoint import v1 as ocp

import ckpt
from ckpt import Adapt
from ckpt.sync import CheckpointManager
from tests.interop.loops.toy import FIRST, say, say_end

__all__ = ["before", "train"]


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.lora = nnx.LoRA(8, 2, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.lora(self.inner(x))


def improve(model: Model) -> None:
    grads = nnx.grad(lambda it: jnp.mean((it(jnp.ones((2, 4))) - 1) ** 2))(model)
    state = jax.tree.map(lambda x, g: x - 0.1 * g, nnx.state(model, nnx.Param), grads)
    nnx.update(model, state)


def before(root: Path) -> None:
    model = Model(nnx.Rngs(0))
    with ocp.training.Checkpointer(root) as theirs:
        for step in range(FIRST):
            improve(model)
            theirs.save(step, nnx.state(model, nnx.Param), force=True)


def train(root: Path, until: int) -> None:
    model = Model(nnx.Rngs(1))
    with CheckpointManager(root, keep=ckpt.keep.Latest(2)) as mgr:
        first, state = mgr.resume(nnx.state(model, nnx.Param))
        nnx.update(model, state)
        lora = mgr.restore(like=nnx.state(model, nnx.LoRAParam), adapt=Adapt(extra="ignore"))
        assert len(jax.tree.leaves(lora)) == 2
        for step in range(first, until):
            improve(model)
            mgr.save(step, nnx.state(model, nnx.Param))
            say(step)
    say_end(nnx.state(model, nnx.Param))
