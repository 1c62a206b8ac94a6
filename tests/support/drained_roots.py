"""Roots between which steps are drained, and how they are looked at."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

import ckpt
from ckpt._conversion.copies.step_copy import Pace, at_once
from ckpt._conversion.copies.step_location import StepLocation
from ckpt._runtime.loop import call_once
from ckpt._tiers.drains.drain import DrainResult, drain_step
from ckpt.storage._resolve import open_root
from ckpt.testing.compare import differences

__all__ = [
    "assert_whole",
    "attempts",
    "cut",
    "drain",
    "drained",
    "items_of",
    "made",
    "saved_at",
    "sizes_below",
]

_ITEMS = 6


def items_of(step: int) -> dict[str, Any]:
    """The items of a step: some files of 800 kB, and some small ones."""
    return {f"item_{n}": {"w": np.arange(100_000.0) + step + n, "n": n} for n in range(_ITEMS)}


def made(root: Any, *steps: int) -> Any:
    """Save steps; return the root."""
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in steps:
            mgr.save(step, items=items_of(step)).result()
    return root


async def drain(source: Any, target: Any, step: int, pace: Pace = at_once) -> DrainResult:
    """Drain a step."""
    storage = open_root(target)
    await storage.prepare()
    places = StepLocation(open_root(source), str(step)), StepLocation(storage, str(step))
    return await drain_step(step, *places, pace)


def drained(source: Any, target: Any, step: int) -> DrainResult:
    """Drain a step on a loop of its own."""
    return call_once(partial(drain, source, target, step))


def cut(source: Any, target: Any, step: int, nbytes: int) -> None:
    """Drain a step, and cancel that once so many bytes were moved."""

    async def main() -> None:
        with anyio.CancelScope() as scope:
            left = nbytes

            async def pace(size: int) -> None:
                nonlocal left
                left -= size
                if left < 0:
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()

            await drain(source, target, step, pace)
        assert scope.cancelled_caught

    call_once(main)


def saved_at(step_dir: Path) -> str:
    """The id of the save in a step directory."""
    return str(json.loads((step_dir / "ckpt.json").read_bytes())["created_ns"])


def assert_whole(root: Any, *steps: int) -> None:
    """Assert that a root has exactly these steps, and every byte of them."""
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        assert mgr.all_steps() == list(steps)
        for step in steps:
            report = mgr.verify(step)
            assert report.ok, str(report)
            assert not differences(mgr.restore(step), items_of(step))


def attempts(root: Path) -> list[str]:
    """The attempts in a root, and what is being removed."""
    return [name for name in os.listdir(root) if ".orbax-checkpoint-tmp-" in name]


def sizes_below(top: Path) -> dict[str, int]:
    """The files below a directory, and their sizes."""
    files = (path for path in top.rglob("*") if path.is_file())
    return {str(path.relative_to(top)): path.stat().st_size for path in files}
