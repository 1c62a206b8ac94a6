"""A training for drills: `train_for_drill.py ROOT [FAULT [tier]]`.

Each step waits for a moment, so that a drill can kill it before it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np

import ckpt.sync

root, fault = sys.argv[1], (*sys.argv[2:], "")[0]
if fault == "fails":
    sys.exit("no GPU was found")


def fresh() -> dict[str, Any]:
    seed = time.time_ns() if fault == "without seed" else 0
    return {"w": np.random.default_rng(seed).normal(size=8), "m": np.zeros(8), "step": 0}


# An agent of a tier is one more process.
tiers = [ckpt.tiers.Tier(f"{root}-near")] if "tier" in sys.argv[3:] else []
every = ckpt.save_when.Steps([11] if fault == "saves nothing" else range(0, 12, 3))
options: dict[str, Any] = {"save_when": every, "trash": f"{root}-trash", "keep": 2, "tiers": tiers}
with ckpt.sync.CheckpointManager(root, **options) as mgr:
    start, state = mgr.resume(fresh())
    if fault == "does not resume":
        start, state = 0, fresh()
    if fault == "stale" and start:
        state["m"] = state["m"] * 0.5
    sys.stdout.write(f"devices: {jax.device_count()}\n")
    sys.stdout.flush()
    for step in range(start, 12):
        if fault == "dies" and start:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "two managers":
            with ckpt.sync.CheckpointManager(f"{root}-other") as other:
                other.mark(step, state)
        if fault != "no mark":
            mgr.mark(step, state)
            time.sleep(0.1)
        m = 0.9 * state["m"] + np.sin(state["w"])
        state = {"w": state["w"] - 0.1 * m, "m": m, "step": step + 1}
        mgr.save(step, state)
        ckpt.sync.save(f"{root}-once", state, if_exists="replace")
