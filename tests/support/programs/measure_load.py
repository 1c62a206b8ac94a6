"""Restores a checkpoint and tells how much memory that took: `measure_load.py PATH BUDGET`.

All that is done once in a process was done before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import ckpt

path, budget = Path(sys.argv[1]), int(sys.argv[2])


def status(field: str) -> int:
    """Return a figure of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def restore(where: Path) -> None:
    staging = ckpt.Staging(budget_bytes=budget)
    with ckpt.sync.CheckpointManager(where, read_only=True, staging=staging) as mgr:
        jax.block_until_ready(mgr.restore())


jnp.zeros(3).block_until_ready()
restore(path.parent / "warm")
# The peak counts from here on.
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
restore(path)
os.write(1, f"{status('VmHWM') - before}\n".encode())
# At once: a thread of the runtime that still lets go of arrays may abort an interpreter that ends.
os._exit(0)
