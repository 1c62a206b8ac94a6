"""Saves of a state that mostly stays the same, as in a run that trains an adapter.

    python -m benchmarks.unchanged              # rewrites the table of the page
    python -m benchmarks.unchanged --mib 64     # prints a table of a smaller state

The page is docs/explanation/unchanged.md.

Each case runs in new processes, in turn with the others. The first save of a process is cold, so
later saves are compared with those of the same state where nothing is shared.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.__main__ import default_dir
from benchmarks.machine import facts
from benchmarks.processes import cpu_devices, in_new_process
from benchmarks.report import update_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CASES", "markdown", "measured"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "unchanged.md"
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


def measured(kind: str, shares: bool, nbytes: int, place: Path) -> list[Row]:
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
    root = ckpt.storage.Local(place, hard_links=shares)
    with ckpt.sync.CheckpointManager(root, keep=ckpt.keep.Latest(1)) as mgr:
        for step in range(SAVES):
            kept = base if kind == "same" else {name: jnp.copy(w) for name, w in base.items()}
            state = kept | {f"w{leaf}": made(leaf, step) for leaf in range(count, LEAVES)}
            jax.block_until_ready(state)
            began = time.perf_counter()
            commit = mgr.save(step, state)
            blocked = time.perf_counter() - began
            info = commit.result()
            durable = time.perf_counter() - began
            shared = info.statistics.shared_bytes
            rows.append({"blocked": blocked, "durable": durable, "written": nbytes - shared})
            mgr.wait_until_finished()
    return rows


def markdown(runs: Mapping[str, Sequence[Sequence[Row]]], nbytes: int, where: str) -> str:
    """Returns the table.

    Args:
        runs: By case the saves of every run.
        nbytes: The bytes of the state.
        where: The machine.
    """
    count = len(next(iter(runs.values())))
    lines = [
        f"{nbytes >> 20} MiB in {LEAVES} arrays; medians of {count} runs; {where}.",
        "",
        "| state | save | blocked | durable | written |",
        "|---|---|---:|---:|---:|",
    ]
    for case, found in runs.items():
        saves = [("first", [run[0] for run in found]), ("second", [run[1] for run in found])]
        saves.append(("later", [row for run in found for row in run[2:]]))
        for name, rows in saves:
            median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            lines.append(
                f"| {case} | {name} | {1e3 * median['blocked']:.0f} ms | "
                f"{1e3 * median['durable']:.0f} ms | {median['written'] / nbytes:.0%} |"
            )
            case = ""
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all cases, and rewrites the table of the page or prints it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--mib", type=int, help="size of the state; the page has 2048")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(arguments)
    nbytes = (chosen.mib or 2048) << 20
    runs: dict[str, list[list[Row]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=default_dir()) as top, cpu_devices(1):
        machine = in_new_process(facts, Path(top))
        for _ in range(chosen.rounds):
            for case, (kind, shares) in CASES.items():
                place = Path(top) / "run"
                runs[case].append(in_new_process(measured, kind, shares, nbytes, place))
                shutil.rmtree(place)
    where = f"{machine['cores']} cores, {machine['file_system']}"
    table = markdown(runs, nbytes, where)
    if chosen.mib:
        sys.stdout.write(table)
        return
    PAGE.write_text(update_page(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    sys.stderr.write(f"wrote {PAGE}\n")


if __name__ == "__main__":
    main()
