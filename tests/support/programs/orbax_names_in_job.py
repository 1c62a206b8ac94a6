"""One process of a job that saves by Orbax's names: `orbax_names_in_job.py ROOT SECONDS`.

It decides differently from the others unless the first process decides for all: it waits SECONDS
times its number before it asks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax

import ckpt_orbax as ocp
from tests.support.parts_of_states import is_right, state_of
from tests.support.real_jobs import tell

root, seconds = Path(sys.argv[1]), float(sys.argv[2])
each = ocp.checkpoint_managers
options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2)
saved = []
with ocp.CheckpointManager(root, options=options) as mngr:
    for step in range(6):
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state_of(step)), config=ocp.args.JsonSave({"step": step})
        )
        saved.append(mngr.save(step, args=args))
    listed = list(mngr.all_steps())
    target = ocp.args.StandardRestore(state_of(0))
    wanted = ocp.args.Composite(state=target, config=ocp.args.JsonRestore())
    found = mngr.restore(4, args=wanted)
    right = is_right(found.state, 4) and found.config == {"step": 4}

policy = each.ContinuousCheckpointingPolicy(minimum_interval_secs=1)
chosen = []
with ocp.v1.training.Checkpointer(root / "v1", save_decision_policy=policy) as ckptr:
    for step in range(4):
        time.sleep(seconds * jax.process_index())
        chosen.append(ckptr.save(step, state_of(step)))
    latest = max(info.step or 0 for info in ckptr.checkpoints)
    again = is_right(ckptr.load(latest, state_of(0)), latest)
tell({"saved": saved, "listed": listed, "right": right, "chosen": chosen, "again": again})
