"""States that the processes of a job have in parts, and that tell their step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync


def state_of(step: int) -> dict[str, Any]:
    """Return the state of a step: an array over all devices, one on each, and a number."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows, everywhere = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    full = _rows_of(step)
    return {
        "w": jax.make_array_from_callback((48, 64), rows, lambda place: full[place]),
        "b": jax.make_array_from_callback((64,), everywhere, lambda place: full[0][place]),
        "step": step,
    }


def is_right(state: Any, step: int) -> bool:
    """Tell whether a state is that of a step, in all that this process has of it."""
    wanted = state_of(step)
    return int(state["step"]) == step and all(
        np.array_equal(a.data, b.data)
        for name in ("w", "b")
        for a, b in zip(
            state[name].addressable_shards, wanted[name].addressable_shards, strict=True
        )
    )


def steps_of(root: Path) -> list[int]:
    """Return the steps of a root, each of which must be whole and hold what its number says."""
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        steps = mgr.all_steps()
        for step in steps:
            assert mgr.verify(step, deep=True).ok, f"step {step} is damaged"
            found = mgr.restore(step)
            wanted = _rows_of(step)
            assert np.array_equal(found["w"], wanted), f"step {step} holds another array"
            assert np.array_equal(found["b"], wanted[0]), f"step {step} holds another copy"
            assert found["step"] == step
        return steps


def _rows_of(step: int) -> np.ndarray[Any, Any]:
    return np.arange(3072, dtype=np.float32).reshape(48, 64) + step
