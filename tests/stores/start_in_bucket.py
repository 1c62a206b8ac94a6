"""One process of a job that starts on a bucket: `start_in_bucket.py KIND URL ENDPOINT...`.

It goes to the store by the endpoint of its own number. First the job saves two steps. Then it opens
the root anew for every call of `job_starts`, and stands before and after each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt.storage
import ckpt.sync
from tests.stores import job_starts
from tests.support.real_jobs import at, tell

kind, url, *endpoints = sys.argv[1:]
endpoint = endpoints[jax.process_index()]
# TensorStore looks at it when it opens the first bucket.
os.environ["TENSORSTORE_GCS_HTTP_URL"] = endpoint
S3: dict[str, Any] = {"endpoint": endpoint, "region": "us-east-1", "credentials": "environment"}
root: Any = ckpt.storage.GCS(url) if kind == "gcs" else ckpt.storage.S3(url, **S3)
mesh = Mesh(np.array(jax.devices()), ("x",))
cut, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
FORMATS = {"packed": ckpt.ArrayFormat(compression="zstd")}


def state(factor: int) -> dict[str, Any]:
    """A state of every kind of leaf: all processes have the same values."""

    def spread(count: int, sharding: NamedSharding) -> jax.Array:
        values = np.arange(count, dtype=np.float32) * factor
        return jax.make_array_from_callback((count,), sharding, lambda index: values[index])

    return {
        "cut": spread(1 << 16, cut),
        "whole": spread(70_000, whole),
        "small": [spread(16, whole) for _ in range(8)],
        "packed": spread(30_000, whole),
        "own": jnp.arange(1000) * factor,
        "step": jnp.int32(factor),
        "numpy": np.arange(3000) * factor,
    }


def parts(state: Any) -> list[list[Any]]:
    """Return what this process has of each leaf."""
    return [
        [np.asarray(shard.data).tolist() for shard in leaf.addressable_shards]
        if isinstance(leaf, jax.Array)
        else leaf.tolist()
        for leaf in jax.tree.leaves(state)
    ]


def resume(mgr: ckpt.sync.CheckpointManager, step: int = 20, **how: Any) -> bool:
    begin, found = mgr.resume(lambda: state(0), like=state(0), **how)
    return begin == step + 1 and parts(found) == parts(state(step))


def restore(mgr: ckpt.sync.CheckpointManager, **how: Any) -> bool:
    return parts(mgr.restore(like=state(0), **how)) == parts(state(20))


CALLS: dict[str, Callable[[ckpt.sync.CheckpointManager], bool]] = {
    "resume()": resume,
    "resume(healthy=True)": lambda mgr: resume(mgr, healthy=True),
    "restore()": restore,
    "restore(broadcast_bytes=...)": lambda mgr: restore(mgr, broadcast_bytes=1 << 20),
    "latest_step()": lambda mgr: mgr.latest_step() == 20,
    "all_steps()": lambda mgr: mgr.all_steps() == [10, 20],
    "best_step()": lambda mgr: mgr.best_step("loss", "min") == 20,
    "metadata()": lambda mgr: mgr.metadata().info.step == 20,
    job_starts.ALONE: lambda mgr: jax.process_index() != 0 or mgr.latest_step() == 20,
    job_starts.DAMAGED: lambda mgr: resume(mgr, step=10),
}
assert tuple(CALLS) == job_starts.CALLS

with ckpt.sync.CheckpointManager(
    root, formats=FORMATS, extensions=[ckpt.extensions.VitalSigns()]
) as mgr:
    for step in (10, 20):
        mgr.save(step, state(step), metrics={"loss": 1 / step}, durable=True)
answers = {}
for name, call in CALLS.items():
    with ckpt.sync.CheckpointManager(root) as mgr:
        at(f"{name} opened")
        answers[name] = call(mgr)
        at(f"{name} answered")
tell(answers)
