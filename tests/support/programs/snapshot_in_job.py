"""One process of a job that takes snapshots: `snapshot_in_job.py ROOT DIRECTORY THEN`.

It tells the step that `resume` has given, and whether the state is that of this step; takes the
snapshots of two more steps, saves the first of them, and then ends (`end`), or waits to be killed
(`wait`).
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync
from tests.support.real_jobs import at, tell

root, directory, then = sys.argv[1:4]
mesh = Mesh(np.array(jax.devices()), ("x",))
rows, everywhere = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())


def state_of(step: int) -> dict[str, Any]:
    full = np.arange(4096, dtype=np.float32).reshape(64, 64) + step
    return {
        "w": jax.make_array_from_callback((64, 64), rows, lambda place: full[place]),
        "b": jax.make_array_from_callback((64,), everywhere, lambda place: full[0][place]),
        "step": step,
    }


def is_right(state: Any, step: int) -> bool:
    wanted = state_of(step)
    return int(state["step"]) == step and all(
        np.array_equal(a.data, b.data)
        for name in ("w", "b")
        for a, b in zip(
            state[name].addressable_shards, wanted[name].addressable_shards, strict=True
        )
    )


jnp.zeros(1).block_until_ready()
memory = ckpt.tiers.SharedMemory(directory=directory)
# A host that is lost takes its memory along: here each process has a folder of its own.
limits = ckpt.Timeouts(coordination=30.0)
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
