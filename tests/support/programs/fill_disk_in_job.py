"""One process of a job whose disk becomes full: `fill_disk_in_job.py ROOT`.

It saves arrays that span the processes, and looks at no commit. Tells for every call of `save`
whether it has raised, and what.
"""

from __future__ import annotations

import contextlib
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync
from tests.support.real_jobs import tell

rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))


def state(step: int) -> dict[str, jax.Array]:
    values = np.random.default_rng(step).random((512, 256), dtype=np.float32)
    return {"w": jax.make_array_from_callback(values.shape, rows, values.__getitem__)}


told = []
manager = ckpt.sync.CheckpointManager(sys.argv[1])
for step in range(40):
    try:
        commit = manager.save(step, state(step))
    except ckpt.CheckpointError as error:
        told.append({"step": step, "error": str(error), "kind": type(error).__name__})
        break
    told.append({"step": step})
with contextlib.suppress(ckpt.CheckpointError):
    # Saves that were under way.
    manager.close()
tell(told)
