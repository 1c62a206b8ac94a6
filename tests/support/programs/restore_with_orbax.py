"""One process of a job in which Orbax restores a step: `restore_with_orbax.py ROOT STEP`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt.sync
from tests.support.real_jobs import tell

root, step = Path(sys.argv[1]), int(sys.argv[2])
line = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
NAMES = ("rows", "large rows", "columns", "tiles", "replicas", "half")


def target(stored: Any) -> jax.ShapeDtypeStruct:
    # None of these shardings is the one that it was saved with, but that of the rows.
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=line)


def differs(found: jax.Array, expected: jax.Array) -> bool:
    pairs = zip(found.addressable_shards, expected.addressable_shards, strict=True)
    return any(not np.array_equal(one.data, other.data) for one, other in pairs)


with ocp.CheckpointManager(root, item_handlers=ocp.StandardCheckpointHandler()) as manager:
    about = manager.item_metadata(step)
    wanted = {name: target(about[name]) for name in NAMES}
    args = ocp.args.PyTreeRestore(
        item=wanted,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=True,
    )
    steps = sorted(manager.all_steps())
with ocp.CheckpointManager(root, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
    found = manager.restore(step, args=args)
names = ckpt.sync.metadata(root / str(step)).tree
plain: Any = ckpt.sync.load(root / str(step), like={name: wanted.get(name, ...) for name in names})
problems = [name for name in NAMES if differs(found[name], plain[name])]
tell({"steps": steps, "problems": problems, "names": sorted(found)})
