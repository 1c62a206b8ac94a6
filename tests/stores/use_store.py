"""A process of its own on a bucket: `use_store.py HOW ROOT`, with the root as JSON.

`races` saves the steps that it is told on its input, and prints `won` or `taken`; `saves` saves one
step; `watches` restores every step it is handed, and prints what it found, until step 99.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import ckpt
import ckpt.storage
import ckpt.sync

SIZE = 50_000


def tell(line: object) -> None:
    os.write(1, f"{line}\n".encode())


def root_of(described: str) -> Any:
    kind, options = json.loads(described)
    return getattr(ckpt.storage, kind)(**options)


def state(name: str, step: int) -> dict[str, Any]:
    return {"name": name, "step": step, "w": np.full(SIZE, step)}


def race(root: Any, name: str) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        tell("ready")
        for line in sys.stdin:
            try:
                mgr.save(int(line), state(name, int(line))).result()
                tell("won")
            except ckpt.errors.StepExistsError:
                tell("taken")
        tell(mgr.all_steps())


def save(root: Any, step: str) -> None:
    with ckpt.sync.CheckpointManager(root, timeouts=ckpt.Timeouts(lease=1.0)) as mgr:
        tell("ready")
        sys.stdin.readline()
        mgr.save(int(step), state("child", int(step))).result()
        tell("saved")


def watch(root: Any) -> None:
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        tell("ready")
        for info in ckpt.sync.watch(root, poll_interval=0.05, timeout=60):
            assert info.step is not None
            found = mgr.restore(info.step)
            tell(f"{info.step} {found['step']} {int(found['w'].sum())}")
            if info.step == 99:
                break


if __name__ == "__main__":
    how, place, *rest = sys.argv[1:]
    programs: dict[str, Callable[..., None]] = {"races": race, "saves": save, "watches": watch}
    programs[how](root_of(place), *rest)
