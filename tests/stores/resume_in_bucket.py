"""One process of a job that resumes from a bucket: `resume_in_bucket.py ROOT`."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt.storage
import ckpt.sync
from tests.support.real_jobs import tell

line = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))


def init() -> dict[str, jax.Array]:
    return {"w": jnp.zeros(4096, device=line), "step": jnp.int32(0)}


with ckpt.sync.CheckpointManager(ckpt.storage.GCS(sys.argv[1])) as mgr:
    begin, state = mgr.resume(init)
    mine = [np.asarray(shard.data).tolist() for shard in state["w"].addressable_shards]
    at = [shard.index[0].start or 0 for shard in state["w"].addressable_shards]
    expected = [list(range(start, start + len(part))) for start, part in zip(at, mine, strict=True)]
    tell({"begin": begin, "same": mine == expected, "step": int(state["step"])})
