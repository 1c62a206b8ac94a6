"""Saves of a state that mostly stays the same, as in a run that trains an adapter.

Each case runs in new processes, in turn with the others. The first save of a process is cold, so
later saves are compared with those of the same state where nothing is shared.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.results import machine_facts
from benchmarks.rounds import cpu_devices, in_new_process, in_new_processes, timed_commit
from benchmarks.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LEAVES, CHANGED = 64, 3
SAVES = 5
# How the arrays of the base are made for each save, and whether steps may share files.
CASES: Mapping[str, tuple[str, bool]] = {
    "95 % the same arrays": ("same", True),
    "95 % other arrays with the same values": ("equal", True),
    "nothing the same": ("none", True),
    "nothing the same, `hard_links=False`": ("none", False),
    "95 % the same arrays, `hard_links=False`": ("same", False),
}
Row = dict[str, float]


def _measured(kind: str, shares: bool, nbytes: int, place: Path) -> list[Row]:
    """Returns the seconds and bytes of each save of a run, in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import ckpt
    import ckpt.sync

    count = 0 if kind == "none" else LEAVES - CHANGED
    values = np.random.default_rng(0).standard_normal(nbytes // LEAVES // 4).astype(np.float32)

    def made(leaf: int, step: int) -> Any:
        return jnp.array(values * np.float32(1 + leaf + 100 * step))

    base = {f"w{leaf}": made(leaf, 0) for leaf in range(count)}
    rows = []
    with (
        tempfile.TemporaryDirectory(dir=place) as top,
        ckpt.sync.CheckpointManager(
            ckpt.storage.Local(top, hard_links=shares), keep=ckpt.keep.Latest(1)
        ) as mgr,
    ):
        for step in range(SAVES):
            kept = base if kind == "same" else {name: jnp.copy(w) for name, w in base.items()}
            state = kept | {f"w{leaf}": made(leaf, step) for leaf in range(count, LEAVES)}
            jax.block_until_ready(state)
            blocked, durable, info = timed_commit(partial(mgr.save, step, state))
            written = nbytes - info.statistics.shared_bytes
            rows.append({"blocked": blocked, "durable": durable, "written": written})
            mgr.wait_until_finished()
    return rows


def unchanged(place: Path, *, rounds: int = 5, mib: int = 2048) -> str:
    """Returns what saves cost of which most arrays are those of the step before."""
    nbytes = mib << 20
    calls = {
        case: partial(_measured, kind, shares, nbytes, place)
        for case, (kind, shares) in CASES.items()
    }
    with cpu_devices(1):
        machine = in_new_process(machine_facts, place)
        runs = in_new_processes(calls, rounds)
    where = f"{machine['cores']} cores, {machine['file_system']}"
    rows = []
    for case, found in runs.items():
        saves = [("first", [run[0] for run in found]), ("second", [run[1] for run in found])]
        saves.append(("later", [row for run in found for row in run[2:]]))
        for name, those in saves:
            median = {key: statistics.median(row[key] for row in those) for key in those[0]}
            times = [f"{1e3 * median[key]:.0f} ms" for key in ("blocked", "durable")]
            rows.append((case, name, *times, f"{median['written'] / nbytes:.0%}"))
            case = ""
    head = ("state", "save", "blocked", "durable", "written")
    return (
        f"{mib} MiB in {LEAVES} arrays; medians of {rounds} runs; {where}.\n\n{table(head, rows)}"
    )
