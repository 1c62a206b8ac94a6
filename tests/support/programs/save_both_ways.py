"""One process of a job that saves its states twice: `save_both_ways.py ROOT`.

Steps of ROOT/shared are those of all processes, and steps of ROOT/INDEX the parts of each. Step 2
has most arrays in common with step 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync
from ckpt.coordination._jax_service import JaxDistributed
from ckpt.coordination._jobs import OwnDisks
from tests.support.real_jobs import tell
from tests.support.stateful_objects import Averages, Counter

root = Path(sys.argv[1])
index, count = jax.process_index(), jax.process_count()
devices = np.array(jax.devices())
line = Mesh(devices, ("x",))
grid = Mesh(devices.reshape(count, -1), ("x", "y"))
# Of more than two processes one has nothing of it.
few = Mesh(devices[: count + 1], ("x",))
# Of more than two processes the first one has the whole array alone.
uneven = Mesh(devices[[0, 1, 2, 4 % len(devices) or 3]].reshape(2, 2), ("x", "y"))

LEAVES: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "rows": ((512, 1024), np.float32, NamedSharding(line, P("x"))),
    "columns": ((512, 1024), np.float32, NamedSharding(line, P(None, "x"))),
    "tiles": ((512, 1024), np.float32, NamedSharding(grid, P("x", "y"))),
    "replicas": ((512, 1024), np.float32, NamedSharding(line, P())),
    "half": ((512, 1024), jnp.bfloat16, NamedSharding(grid, P("y"))),
    "few": ((512, 1024), np.int16, NamedSharding(few, P())),
    "few rows": (((count + 1) * 200, 300), np.int16, NamedSharding(few, P("x"))),
    "uneven": ((512, 1024), np.float32, NamedSharding(uneven, P("y"))),
    "small uneven": ((8, 4), np.float32, NamedSharding(uneven, P("y"))),
    "small": ((16,), np.int32, NamedSharding(line, P("x"))),
    "small half": ((16,), jnp.bfloat16, NamedSharding(line, P())),
    "zstd": ((512, 1024), np.float32, NamedSharding(grid, P("x"))),
    "blosc": ((512, 1024), np.float32, NamedSharding(line, P())),
    "scalar": ((), np.float32, NamedSharding(line, P())),
    "empty": ((8, 0), np.float32, NamedSharding(line, P())),
}


class Moments(NamedTuple):
    count: Any
    mu: Any
    nu: Any


CHANGED = ("tiles", "half", "few", "small", "zstd")


def made(name: str, step: int = 1) -> jax.Array:
    shape, dtype, sharding = LEAVES[name]
    flat = np.arange(int(np.prod(shape)), dtype=np.int64) * 7 + len(name) + step
    values = (flat % 239).astype(dtype).reshape(shape)
    return jax.make_array_from_callback(shape, sharding, values.__getitem__, dtype=dtype)


def items() -> dict[str, Any]:
    model: dict[str, Any] = {name: made(name) for name in LEAVES}
    model |= {
        "tied": model["rows"],
        "key": jax.jit(lambda: jax.random.key(3), out_shardings=NamedSharding(line, P()))(),
        "numpy": np.arange(300_000, dtype=np.int16),
        "host": jnp.full((3,), 5, jnp.int32),
    }
    scalars = [1, 1 << 70, float("nan"), 1.5j, True, "ü", b"\0", np.float32(2.5), np.str_("n")]
    optimizer = Moments(made("scalar"), (model["tiles"], [None, {}]), scalars)
    return {
        "model": model,
        "optimizer": {"state": optimizer, "f": jnp.tanh},
        "config": {"rate": 0.1, "layers": [1, None]},
        "notes": "the same everywhere",
        "counter": Counter(index),
        "averages": Averages(float(index)),
    }


FORMATS = {
    "zstd": ckpt.ArrayFormat(compression=ckpt.Zstd(level=7)),
    "blosc": ckpt.ArrayFormat(compression=ckpt.Blosc("zlib", 9, "bitshuffle")),
}
for place, job in ((root / "shared", None), (root / str(index), OwnDisks(JaxDistributed()))):
    with ckpt.sync.CheckpointManager(
        place,
        coordinator=job,
        handlers={"config": ckpt.handlers.JsonHandler()},
        formats=FORMATS,
        custom_metadata={"run": "one"},
        extensions=[ckpt.extensions.VitalSigns()],
    ) as mgr:
        saved, metrics = items(), {"loss": 0.5, "eval": {"nan": float("nan")}}
        mgr.save(1, items=saved, metrics=metrics).result(60)
        saved["model"] |= {name: made(name, 2) for name in CHANGED}
        mgr.save(2, items=saved, metrics=metrics).result(60)
tell("saved")
