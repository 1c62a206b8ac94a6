"""What vital signs cost a save: without them, taken by the host, and taken by the devices.

Each case runs in new processes, in turn with the others, and its first saves are left out: they
touch memory for the first time, and compile.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.results import machine_facts
from benchmarks.rounds import in_new_process, in_new_processes, timed_commit
from benchmarks.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LEAVES, FIRST, SAVES = 16, 2, 6
DTYPES = ("float32", "bfloat16")
# What the table says of each way, and the switch.
WAYS: Mapping[str, Any] = {"none": None, "host": "host", "devices": "device"}


def _measured(dtype: str, way: str, nbytes: int, place: Path) -> list[float]:
    """Returns the medians of blocked, durable and processor seconds."""
    import jax
    import jax.numpy as jnp

    import ckpt.sync

    shape = (nbytes // LEAVES // jnp.dtype(dtype).itemsize // 1024, 1024)
    keys = jax.random.split(jax.random.key(0), LEAVES)
    rows: list[tuple[float, float, float]] = []
    with (
        tempfile.TemporaryDirectory(dir=place) as top,
        ckpt.sync.CheckpointManager(
            ckpt.storage.Local(top, hard_links=False),
            keep=ckpt.keep.Latest(1),
            extensions=[ckpt.extensions.VitalSigns(WAYS[way])] if WAYS[way] else [],
        ) as mgr,
    ):
        for step in range(FIRST + SAVES):
            state = [jax.random.normal(key, shape, dtype) + step for key in keys]
            jax.block_until_ready(state)
            began = time.process_time()
            blocked, durable, _ = timed_commit(partial(mgr.save, step, state))
            rows.append((blocked, durable, time.process_time() - began))
            mgr.wait_until_finished()
    return [statistics.median(each) for each in zip(*rows[FIRST:], strict=True)]


def vital_signs(place: Path, *, rounds: int = 3, mib: int = 512) -> str:
    """Returns what vital signs cost, by dtype and by who takes them."""
    machine = in_new_process(machine_facts, place)
    calls = {
        (dtype, way): partial(_measured, dtype, way, mib << 20, place)
        for dtype in DTYPES
        for way in WAYS
    }
    rows = []
    for key, medians in in_new_processes(calls, rounds).items():
        times = [f"{1e3 * statistics.median(each):.0f} ms" for each in zip(*medians, strict=True)]
        rows.append((*key, *times))
    return (
        f"{mib} MiB in {LEAVES} arrays; medians of {rounds} runs of {SAVES} saves; "
        f"{machine['cores']} cores, {machine['file_system']}, arrays on {machine['devices']}.\n\n"
        + table(("dtype", "taken by", "blocked", "durable", "processor"), rows)
    )
