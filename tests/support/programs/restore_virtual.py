"""One process of a job that shares the reads of a virtual step, and verifies it: `... ROOT`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt.sync
from tests.support.real_jobs import tell

everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P())
expected = np.arange(3000 * 700, dtype=np.float32).reshape(3000, 700)
like: Any = {"w": jax.ShapeDtypeStruct(expected.shape, np.float32, sharding=everywhere)}
same = []
with ckpt.sync.CheckpointManager(sys.argv[1]) as mgr:
    for _ in ("without digests", "with digests"):
        found: Any = mgr.restore(0, like=like, broadcast_bytes=64 << 20)
        same += [np.array_equal(each.data, expected) for each in found["w"].addressable_shards]
        whole = mgr.verify(0).ok
tell({"same": bool(same) and all(same), "whole": whole})
