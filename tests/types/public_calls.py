"""What type checkers know of the public calls; `nox -s types` runs two of them on this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict, assert_type

import jax

import ckpt


class State(TypedDict):
    """A state with a type of its own."""

    w: jax.Array
    count: int


def init_state() -> State:
    """Return a fresh state."""
    return {"w": jax.numpy.zeros(2), "count": 0}


async def manager(root: Path, state: State) -> None:
    """An asyncio trainer."""
    async with ckpt.CheckpointManager(root) as mgr:
        assert_type(mgr, ckpt.CheckpointManager)
        assert_type(await mgr.latest_step(), int | None)
        assert_type(await mgr.all_steps(), list[int])
        # What is resumed has the type of the fresh state.
        start, resumed = await mgr.resume(init_state)
        assert_type(start, int)
        assert_type(resumed, State)
        assert_type(await mgr.restore(like=state), State)
        commit = await mgr.save(1, state)
        assert_type(commit, ckpt.Commit)
        assert_type(await commit, ckpt.StepInfo)
        assert_type(await mgr.save(2, state, durable=True), ckpt.StepInfo | None)
        assert_type(await mgr.metadata(1), ckpt.StepMetadata)
        assert_type(await mgr.metrics(1), dict[str, float])
        async for info in mgr.watch():
            assert_type(info, ckpt.StepInfo)


async def one_shot(path: Path, state: State) -> None:
    """Single checkpoints."""
    assert_type(await ckpt.save(path, state), ckpt.StepInfo)
    assert_type(await ckpt.save(path, state, durable=False), ckpt.Commit)
    assert_type(await ckpt.load(path, state), State)
    assert_type(await ckpt.metadata(path), ckpt.StepMetadata)


def plain(root: Path, state: State) -> None:
    """A plain trainer."""
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert_type(mgr, ckpt.sync.CheckpointManager)
        start, resumed = mgr.resume(init_state)
        assert_type(start, int)
        assert_type(resumed, State)
        assert_type(mgr.save(1, state), ckpt.Commit)
        assert_type(mgr.save(1, state).result(), ckpt.StepInfo)
        assert_type(mgr.save(2, state, durable=True), ckpt.StepInfo | None)
        assert_type(mgr.restore(like=state), State)
        assert_type(mgr.latest_step(), int | None)
        assert_type(mgr.steps(), list[ckpt.StepInfo])
        assert_type(mgr.directory, Path | str)
    assert_type(ckpt.sync.load(root, state), State)


def anything(root: Path) -> Any:
    """Without a target, nothing is known of what comes back."""
    return ckpt.sync.load(root)
