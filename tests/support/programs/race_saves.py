"""Saves the steps it is told to, as fast as it can: `race_saves.py ROOT NAME`.

For every step on standard input it prints whether it won it, or found it taken.
"""

from __future__ import annotations

import os
import sys

import numpy as np

import ckpt
import ckpt.sync


def tell(line: object) -> None:
    os.write(1, f"{line}\n".encode())


root, name = sys.argv[1:]
with ckpt.sync.CheckpointManager(root) as mgr:
    tell("ready")
    for line in sys.stdin:
        step = int(line)
        state = {"name": name, "w": np.full(1 << 16, step, np.int64), "small": np.arange(step)}
        try:
            mgr.save(step, state).result()
            tell("won")
        except ckpt.errors.StepExistsError:
            tell("taken")
    tell(mgr.all_steps())
