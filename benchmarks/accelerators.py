"""Saves and restores from an accelerator, side by side, and the section of the page about them.

    JAX_PLATFORMS=cuda python -m benchmarks.accelerators     # measures, and writes the record
    python -m benchmarks.pages accelerator --write           # shows it on the page

The scenarios are those of `python -m benchmarks`, with states as large as an accelerator holds.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from benchmarks import event_loop, first_calls, overlap, results, tables, throughput
from benchmarks.report import heading, title
from benchmarks.rounds import Setting, default_dir
from benchmarks.scenarios import ScenarioKind, measured
from benchmarks.workloads import Shapes, Workload, f32, state_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.results import Scenario

RECORD = "docs/explanation/performance/accelerator.json"
_PEERS = ("ckpt", "orbax")


def mixed_shapes(smoke: bool) -> Shapes:
    """Returns 1.25 GiB (smoke: 20 MiB): bf16 params, both Adam moments in f32."""
    count, width = (2, 1024) if smoke else (8, 4096)
    params = jax.ShapeDtypeStruct((width, width), jnp.bfloat16)
    return {
        f"layer_{i:02d}": {"params": params, "mu": f32(width, width), "nu": f32(width, width)}
        for i in range(count)
    }


def _overlap(setting: Setting) -> Scenario:
    setting = replace(setting, peers=(*setting.peers, "ckpt, mode=device"))
    return overlap.run(
        setting, state_shapes(*((2, 256, 256) if setting.smoke else (16, 4096, 4096)))
    )


_MIXED = Workload("mixed", "bf16 params with both Adam moments in f32", mixed_shapes)
_SCENARIOS: Mapping[str, ScenarioKind] = {
    overlap.NAME: ScenarioKind(_overlap, 5),
    _MIXED.name: ScenarioKind(partial(throughput.run, workload=_MIXED), 3),
    throughput.BLOCKED_SMALL: ScenarioKind(throughput.run_blocked_small, 5),
    first_calls.SAVE: ScenarioKind(first_calls.run_save, 3, makes_processes=True),
    event_loop.HEARTBEAT: ScenarioKind(partial(event_loop.run, name=event_loop.HEARTBEAT), 3),
}


def accelerator(place: Path, *, record: str = RECORD) -> str:
    """Returns the tables of the recorded run, with the facts needed to read them."""
    run = results.read(Path(record))
    blocks = [heading(run)]
    for scenario in run.scenarios:
        blocks += [f"### {title(scenario)}, on an accelerator", tables.of(scenario)]
    return "\n\n".join(blocks)


def main() -> None:
    """Measures on an accelerator, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, default=RECORD, help="default: %(default)s")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device")
    parser.add_argument("--dir", type=Path, default=default_dir(), help="where to write steps")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=chosen.dir) as place:
        run, failed = measured(_SCENARIOS, Setting(_PEERS, 0, chosen.smoke, Path(place)))
    run.write(chosen.record)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
