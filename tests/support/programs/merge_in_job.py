"""One process of a job that merges two checkpoints onto a mesh of all: `merge_in_job.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt.sync
from tests.support.real_jobs import tell

folder = Path(sys.argv[1])
rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
target: Any = {"w": jax.ShapeDtypeStruct((64, 8), np.float32, sharding=rows)}
found: Any = ckpt.sync.merge({folder / "1": 0.25, folder / "2": 0.75}, like=target)
parts = [np.asarray(each.data) for each in found["w"].addressable_shards]
tell({"same": bool(parts) and all((part == 1.75).all() for part in parts)})
