"""One process of a job whose snapshots have copies on peers: `peers_in_job.py ROOT JSON`.

The JSON is an object:

    hosts      the folder that is the memory of the host of each process
    snapshots  how many snapshots are taken
    first      their first step; None goes on from where `resume` does
    distance   as of `PeerCopies`
    addresses  likewise, of each process
    endpoints  of a store, one for each process; None for a root on a disk
    kind       of that store
    saves      whether the first step is saved to the root, too
    then       `end`, `wait` to be killed, or `raise`

It tells the step that `resume` has given, whether the state is that of this step, where that was
found, and why snapshots were not taken.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp

import ckpt
import ckpt.storage
import ckpt.sync
from tests.support.parts_of_states import is_right, state_of
from tests.support.real_jobs import at, tell

root: Any = sys.argv[1]
given = json.loads(sys.argv[2])
logging.basicConfig(level=logging.DEBUG if given.get("debug") else logging.INFO)
jnp.zeros(1).block_until_ready()
index = jax.process_index()
if given.get("endpoints"):
    endpoint = given["endpoints"][index]
    # TensorStore looks at it when it opens the first bucket.
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = endpoint
    S3: dict[str, Any] = {"region": "us-east-1", "credentials": "environment"}
    is_gcs = given["kind"] == "gcs"
    root = ckpt.storage.GCS(root) if is_gcs else ckpt.storage.S3(root, endpoint=endpoint, **S3)
addresses = given.get("addresses") or ["127.0.0.1"] * jax.process_count()
peers = ckpt.tiers.PeerCopies(address=addresses[index], distance=given.get("distance"))
memory = ckpt.tiers.SharedMemory(directory=given["hosts"][index], peers=peers)
limits = ckpt.Timeouts(coordination=30.0)
with ckpt.sync.CheckpointManager(root, tiers=[memory], timeouts=limits) as mgr:
    start, state = mgr.resume(lambda: state_of(0), like=state_of(0))
    found = mgr.latest_step()
    places = [] if found is None else list(mgr.metadata(found).info.tiers)
    right = start == 0 or is_right(state, start - 1)
    first = start if given.get("first") is None else given["first"]
    skipped = []
    if given.get("saves"):
        mgr.save(first, state_of(first)).result()
        first += 1
    for step in range(first, first + given["snapshots"]):
        commit = mgr.snapshot(step, state_of(step))
        if commit:
            commit.result()
        else:
            skipped.append(commit.skipped)
        if given.get("all", True):
            # All parts are on their peers then.
            mgr.wait_until_finished()
    if given.get("delete") is not None:
        mgr.delete(given["delete"])
    steps = mgr.all_steps()
    tell({"start": start, "right": right, "places": places, "steps": steps, "skipped": skipped})
    if given["then"] == "wait":
        at("the end")
    if given["then"] == "raise":
        raise RuntimeError("on purpose")
