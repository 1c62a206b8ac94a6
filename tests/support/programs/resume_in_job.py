"""One process of a job that starts its run twice: `resume_in_job.py ROOT`.

It tells of every form of the fresh state where the arrays are at the first and the second start.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync
from tests.support.real_jobs import tell

root = Path(sys.argv[1])
count = jax.device_count()
auto = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,))
explicit = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Explicit,))


def constrained() -> Any:
    rows = jax.lax.with_sharding_constraint(jnp.ones((8, 4)), NamedSharding(auto, P("x")))
    return {"rows": rows, "weak": jnp.asarray(2.5)}


def put() -> Any:
    rows = jax.device_put(jnp.ones((8, 4)), NamedSharding(explicit, P("x")))
    mine = jax.device_put(jnp.ones(3), jax.local_devices()[1])
    return {"rows": rows, "mine": mine, "free": jnp.ones(3)}


def places(tree: Any) -> dict[str, list[str]]:
    return {
        name: [
            str(sorted(device.id for device in array.sharding.device_set)),
            str([part for part in getattr(array.sharding, "spec", []) if part]),
            f"{array.committed} {array.weak_type} {array.sharding.is_fully_addressable}",
        ]
        for name, array in tree.items()
    }


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


warnings: list[str] = []
logging.getLogger("ckpt").addHandler(Handler(logging.WARNING))
found: dict[str, Any] = {}
forms: dict[str, Any] = {
    "jitted": jax.jit(constrained),
    "jitted with shardings": jax.jit(constrained, out_shardings=NamedSharding(auto, P())),
    "put": put,
}
for name, init in forms.items():
    starts = []
    for like in (None, None, ckpt.abstract(init), jax.eval_shape(init)):
        with ckpt.sync.CheckpointManager(root / name) as mgr:
            step, state = mgr.resume(init, like=like)
            starts.append(places(state))
            if not step:
                mgr.save(0, state)
    found[name] = starts
tell({"found": found, "warnings": warnings})
