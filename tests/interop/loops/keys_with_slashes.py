"""As trainers with Haiku: keys with slashes, in a loop of asyncio that stops at any moment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import ckpt
from tests.interop.loops.toy import FIRST, fresh, say, say_end, stepped

__all__ = ["before", "train"]


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    params = state["params"]
    return state | {"params": {"mlp/~/linear_0": params, "model.layers.0": {"w%": params["b"]}}}


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"params": state["params"]["mlp/~/linear_0"]}


def before(root: Path) -> None:
    state = fresh()
    with ocp.CheckpointManager(root) as mgr:
        for step in range(FIRST):
            state = stepped(state)
            mgr.save(step, args=ocp.args.StandardSave(renamed(state)))


def train(root: Path, until: int) -> None:
    asyncio.run(_train(root, until))


async def _train(root: Path, until: int) -> None:
    keep = ckpt.keep.Latest(2)
    async with ckpt.CheckpointManager(root, keep=keep) as mgr:
        first, found = await mgr.resume(renamed(fresh()))
        state = plain(found)
        for step in range(first, until):
            state = stepped(state)
            await mgr.save(step, renamed(state))
            say(step)
    say_end(state)
