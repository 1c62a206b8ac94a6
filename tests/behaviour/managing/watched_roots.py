"""Roots to watch: saving into them, asking for pins, and the programs that do so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

import ckpt
import ckpt.sync
from tests.support.forked_programs import Forked, program
from tests.support.paths import PROGRAMS

PATIENCE_S = 120
BACKENDS = ["asyncio", "trio"]
QUICK = 0.02


def state(number: int) -> dict[str, np.ndarray]:
    return {"w": np.full(100, number)}


def save(root: Path, *steps: int, **how: Any) -> None:
    with ckpt.sync.CheckpointManager(root, step_names=how.pop("step_names", None)) as mgr:
        for step in steps:
            mgr.save(step, state(step), **how)


def pinned(root: Path) -> set[int]:
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        return set(mgr.pins())


def steps_of(root: Path, **how: Any) -> list[int | None]:
    """What both kinds of watch give; they must give the same."""

    async def main() -> list[int | None]:
        return [info.step async for info in ckpt.watch(root, **how)]

    found = [info.step for info in ckpt.sync.watch(root, **how)]
    for backend in BACKENDS:
        assert anyio.run(main, backend=backend) == found
    assert pinned(root) == set()
    return found


@contextlib.contextmanager
def child(name: str, *args: object) -> Iterator[Forked]:
    """Run a real trainer or evaluator."""
    with program(PROGRAMS / f"{name}.py", *args) as process:
        try:
            yield process
        finally:
            process.kill()
