"""One process of a job whose snapshots have copies on peers: `peers_in_job.py ROOT JSON`.

The JSON is an object:

    hosts      the folder that is the memory of the host of each process
    snapshots  how many snapshots are taken
    first      their first step; None goes on from where `resume` does
    steps      which steps instead, in their order; in between None stands `at("pause")`, and
               "wait" waits until all parts are on peers
    wait_for   `commits` or `nothing` before the next one is taken; else all parts are on peers
    no_peers   whether snapshots have no copies at all
    flush      whether the last one is written to the root in the end
    distance   as of `PeerCopies`
    addresses  likewise, of each process
    endpoints  of a store, one for each process; None for a root on a disk
    kind       of that store
    saves      whether the first step is saved to the root, too
    ports      as of `PeerCopies`, of each process
    boot_ids   files that tell which machine each process is on
    seconds    after how long an agent that does not answer is ended
    full       a process that can write nothing more after its first snapshot
    delete     a step that is deleted in the end
    look       whether to count the snapshots on its host all the time
    then       `end`, `raise`, or `wait` to be killed

It tells the step that `resume` has given, whether the state is that of this step, where that was
found, why snapshots were not taken, and the most snapshots that its host has had at a time, if it
looks: its own, and those that it holds. It prints `start STEP RIGHT`, `agent PID`, `saved STEP`,
and `held STEP` when that one is on all peers.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import ckpt
import ckpt.storage
import ckpt.sync
from ckpt._tiers import peer_replication
from ckpt._tiers.agent import client
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
host = Path(given["hosts"][index])
if given.get("boot_ids"):
    peer_replication._BOOT_ID = Path(given["boot_ids"][index])
client.ANSWER_SECONDS = given.get("seconds", 200.0)
most = {"own": 0, "held": 0}


def look() -> None:
    """Note how many snapshots are in memory."""
    while True:
        for name, pattern in (("own", "ckpt-*/*/steps/*"), ("held", "ckpt-*/*/held/*/*")):
            there = [each.name for each in host.glob(pattern) if each.name.isdecimal()]
            most[name] = max(most[name], len(there))
        time.sleep(0.002)


def say(*what: object) -> None:
    os.write(1, (" ".join(map(str, what)) + "\n").encode())


if given.get("look"):
    threading.Thread(target=look, daemon=True).start()
count = jax.process_count()
peers = ckpt.tiers.PeerCopies(
    address=(given.get("addresses") or ["127.0.0.1"] * count)[index],
    port=(given.get("ports") or [0] * count)[index],
    distance=given.get("distance"),
)
memory = ckpt.tiers.SharedMemory(
    directory=str(host),
    peers=None if given.get("no_peers") else peers,
    flush=bool(given.get("flush")),
)
limits = ckpt.Timeouts(coordination=200.0)
with ckpt.sync.CheckpointManager(root, tiers=[memory], timeouts=limits) as mgr:
    start, state = mgr.resume(lambda: state_of(0), like=state_of(0))
    found = mgr.latest_step()
    places = [] if found is None else list(mgr.metadata(found).info.tiers)
    right = start == 0 or is_right(state, start - 1)
    say("start", start, right)
    say("agent", mgr._service._agent._process.pid)  # type: ignore[attr-defined]
    first = start if given.get("first") is None else given["first"]
    commits = []
    if given.get("saves"):
        mgr.save(first, state_of(first)).result()
        first += 1
    for step in given.get("steps") or range(first, first + given["snapshots"]):
        if step is None:
            at("pause")
            continue
        if step == "wait":
            mgr.wait_until_finished()
            continue
        commits.append(mgr.snapshot(step, state_of(step)))
        if given.get("wait_for") == "commits" and commits[-1]:
            commits[-1].result()
            say("saved", step)
        if given.get("wait_for"):
            continue
        mgr.wait_until_finished()
        if given.get("full") == index:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
        if commits[-1]:
            say("held", step)
    mgr.wait_until_finished()
    if given.get("delete") is not None:
        mgr.delete(given["delete"])
    skipped = [commit.skipped for commit in commits if not commit]
    steps = mgr.all_steps()
    tell(
        {
            "start": start,
            "right": right,
            "places": places,
            "steps": steps,
            "skipped": skipped,
            "most": most,
        }
    )
    if given["then"] == "wait":
        at("the end")
    if given["then"] == "raise":
        raise RuntimeError("on purpose")
