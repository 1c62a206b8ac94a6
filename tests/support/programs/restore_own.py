"""One process of a job that restores what `save_both_ways.py` has saved: `restore_own.py ROOT`."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt.sync
from tests.support.real_jobs import tell
from tests.support.stateful_objects import Averages, Counter

rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
target = jax.ShapeDtypeStruct((512, 1024), np.float32, sharding=rows)
with ckpt.sync.CheckpointManager(Path(sys.argv[1]), mode="r") as mgr:
    found = mgr.restore(
        1,
        items={
            "model": {"tiles": target, "zstd": target},
            "counter": Counter(99),
            "averages": Averages(99.0),
        },
        adapt={"model": ckpt.Adapt(extra="ignore")},
    )
shards = [
    [str(shard.index), float(np.asarray(shard.data).sum())]
    for name in ("tiles", "zstd")
    for shard in found["model"][name].addressable_shards
]
tell(
    {
        "counter": found["counter"].count,
        "averages": found["averages"].means.tolist(),
        "shards": shards,
    }
)
