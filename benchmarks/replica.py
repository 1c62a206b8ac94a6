"""One process of a job of `benchmarks.replicas`: `replica.py ENDPOINT URL BYTES...`.

It restores once for every BYTES, with so many for shared reads (0: each for itself), and tells how
many seconds each took.
"""

from __future__ import annotations

import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt.storage
import ckpt.sync
from tests.support.real_jobs import at, tell

endpoint, url, *sizes = sys.argv[1:]
store = ckpt.storage.S3(url, endpoint=endpoint, region="us-east-1", credentials="environment")
everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec())
seconds = []
with ckpt.sync.CheckpointManager(store, mode="r") as mgr:
    shapes = mgr.metadata(1).items["default"]
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes
    )
    for number, size in enumerate(map(int, sizes)):
        at(f"round {number}")
        began = time.perf_counter()
        found = mgr.restore(1, like, broadcast_bytes=size or None)
        jax.block_until_ready(found)
        seconds.append(time.perf_counter() - began)
        del found
    at(f"round {len(sizes)}")
tell(seconds)
