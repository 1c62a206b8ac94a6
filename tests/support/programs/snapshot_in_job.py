"""One process of a job that takes snapshots: `snapshot_in_job.py ROOT DIRECTORY THEN [flush]`.

It tells the step that `resume` has given, and whether the state is that of this step; takes the
snapshots of two more steps, saves the first of them, and then ends (`end`), or waits to be killed
(`wait`). With `flush` its agents write the last snapshot then, in both cases.
"""

from __future__ import annotations

import sys

import jax.numpy as jnp

import ckpt
import ckpt.sync
from tests.support.parts_of_states import is_right, state_of
from tests.support.real_jobs import at, tell

root, directory, then, *more = sys.argv[1:]
jnp.zeros(1).block_until_ready()
memory = ckpt.tiers.SharedMemory(directory=directory, flush="flush" in more)
# A host that is lost takes its memory along: here each process has a folder of its own.
limits = ckpt.Timeouts(coordination=200.0)
with ckpt.sync.CheckpointManager(root, tiers=[memory], timeouts=limits) as mgr:
    start, state = mgr.resume(lambda: state_of(0), like=state_of(0))
    found = mgr.latest_step()
    places = [] if found is None else list(mgr.metadata(found).info.tiers)
    right = start == 0 or is_right(state, start - 1)
    for step in (start, start + 1):
        commit = mgr.snapshot(step, state_of(step))
        assert commit, commit.skipped
        commit.result()
        if step == start:
            mgr.save(step, state_of(step)).result()
    mgr.wait_until_finished()
    steps = mgr.all_steps()
    tell({"start": start, "right": right, "places": places, "steps": steps})
    if then == "wait":
        at("the end")
