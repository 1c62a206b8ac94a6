"""A run that the tests of the command look at."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt


def state_of(step: int) -> dict[str, object]:
    """Return a small state with arrays of several dtypes, sharded and not, and plain values."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    rows = NamedSharding(mesh, PartitionSpec("model", None))
    kernel = jnp.arange(64.0).reshape(8, 8) + step
    return {
        "params": {
            "dense": {"kernel": jax.device_put(kernel, rows), "bias": jnp.ones(8, jnp.bfloat16)},
            "embed": jnp.full((16, 4), step, jnp.float16),
        },
        "opt_state": {"count": jnp.int32(step), "mu": np.zeros((8, 8), np.float32)},
        "key": jax.random.key(0),
        "epoch": step // 10,
        "name": "tiny",
    }


@pytest.fixture(scope="session")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root with the steps 10, 20 and 30, the second of which is pinned; change nothing."""
    root = tmp_path_factory.mktemp("cli") / "runs" / "a"
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in (10, 20, 30):
            mgr.save(
                step, state_of(step), metrics={"loss": 1 / step}, custom_metadata={"seen": step}
            )
        mgr.wait_until_finished()
        mgr.pin(20, "paper")
    return root


@pytest.fixture(scope="session")
def items_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint by itself, of several items, one of which is compressed."""
    path = tmp_path_factory.mktemp("cli") / "final"
    ckpt.sync.save(
        path,
        items={"model": {"w": jnp.zeros((256, 512))}, "config": {"layers": 2, "rate": 0.1}},
        formats={"w": ckpt.ArrayFormat(compression=ckpt.Zstd(3))},
    )
    return path
