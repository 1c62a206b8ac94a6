"""One process of a job with tiers: `tiers_in_job.py ROOT JSON`.

The JSON is an object:

    disk       a directory for a `Tier`; None for none
    hosts      the folder that is the memory of the host of each process; None for no `SharedMemory`
    saves      how many steps are saved, each of which is awaited in the root if `in_root` is true
    snapshots  how many snapshots are taken after that
    kept       `kept_seconds` of the memory
    raises     the process that raises an error in the end; None for none
    then       `end`, or `wait` to be killed

It prints `start STEP RIGHT`, `agent PID`, and `snapshot STEP` for each that all processes have. It
tells where it has begun.
"""

from __future__ import annotations

import json
import logging
import os
import sys

import jax
import jax.numpy as jnp

import ckpt
import ckpt.sync
from tests.support.parts_of_states import is_right, state_of
from tests.support.real_jobs import at, tell

logging.basicConfig(level=logging.INFO)
root, given = sys.argv[1], json.loads(sys.argv[2])
jnp.zeros(1).block_until_ready()
index = jax.process_index()
tiers: list[ckpt.tiers.Tier | ckpt.tiers.SharedMemory] = []
if given.get("hosts"):
    tiers.append(
        ckpt.tiers.SharedMemory(
            directory=given["hosts"][index], kept_seconds=given.get("kept", 60.0)
        )
    )
if given.get("disk"):
    tiers.append(ckpt.tiers.Tier(given["disk"], keep=ckpt.keep.Latest(2)))
limits = ckpt.Timeouts(coordination=200.0)
with ckpt.sync.CheckpointManager(root, tiers=tiers, timeouts=limits) as mgr:
    start, state = mgr.resume(lambda: state_of(0), like=state_of(0))
    found = mgr.latest_step()
    places = [] if found is None else list(mgr.metadata(found).info.tiers)
    right = start == 0 or is_right(state, start - 1)
    os.write(1, f"start {start} {right}\n".encode())
    os.write(1, f"agent {mgr._service._agent._process.pid}\n".encode())  # type: ignore[attr-defined]
    step = start
    for _ in range(given.get("saves", 0)):
        commit = mgr.save(step, state_of(step))
        commit.result()
        if given.get("in_root"):
            commit.in_root.result(60.0)
        step += 1
    for _ in range(given.get("snapshots", 0)):
        mgr.snapshot(step, state_of(step)).result()
        os.write(1, f"snapshot {step}\n".encode())
        step += 1
    mgr.wait_until_finished()
    tell({"start": start, "right": right, "places": places})
    if given.get("raises") == index:
        raise RuntimeError("on purpose")
    if given["then"] == "wait":
        at("the end")
