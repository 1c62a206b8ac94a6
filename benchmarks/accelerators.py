"""Saves and restores from an accelerator, side by side, and the section of the page about them.

    python -m benchmarks.accelerators --record gpu.json                 # measures, and writes that
    python -m benchmarks.accelerators --page docs/explanation/performance-tables.md  # shows it

The scenarios are those of `python -m benchmarks`, with states as large as an accelerator holds.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from benchmarks import blocked, first_save, heartbeat, machine, overlap, results, tables, throughput
from benchmarks.__main__ import default_dir
from benchmarks.figures import write_between
from benchmarks.processes import in_new_process
from benchmarks.report import heading, title
from benchmarks.rounds import Setting
from benchmarks.trainer import state_shapes
from benchmarks.workloads import Shapes, Workload, f32

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.results import Results, Scenario

START, END = "<!-- bench:accelerator:start -->", "<!-- bench:accelerator:end -->"
RECORD = Path("docs/explanation/performance/accelerator.json")
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
_SCENARIOS: Mapping[str, tuple[Callable[[Setting], Scenario], int]] = {
    overlap.NAME: (_overlap, 5),
    _MIXED.name: (partial(throughput.run, workload=_MIXED), 3),
    blocked.NAME: (blocked.run, 5),
    first_save.NAME: (first_save.run, 3),
    heartbeat.NAME: (heartbeat.run, 3),
}


def measure(
    record: Path, directory: Path | None, smoke: bool, names: Sequence[str] = tuple(_SCENARIOS)
) -> None:
    """Runs scenarios, each in a process of its own; writes the record after each."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=directory or default_dir()) as place:
        facts = in_new_process(machine.facts, Path(place))
        done: list[Scenario] = []
        for name in names:
            run, rounds = _SCENARIOS[name]
            setting = Setting(_PEERS, 1 if smoke else rounds, smoke, Path(place, name))
            done.append(in_new_process(run, setting))
            results.Results(smoke, datetime.now(UTC).date().isoformat(), facts, done).write(record)


def markdown(run: Results) -> str:
    """Returns the tables of a run, with the facts needed to read them."""
    blocks = [heading(run)]
    for scenario in run.scenarios:
        blocks += [f"### {title(scenario)}, on an accelerator", tables.of(scenario)]
    return "\n\n".join(blocks) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures on an accelerator, or shows on a page what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, default=RECORD, help="default: %(default)s")
    parser.add_argument("--page", type=Path, help="measures nothing: makes the tables of this page")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device")
    parser.add_argument("--dir", type=Path, help="the folder to write checkpoints in")
    chosen = parser.parse_args(arguments)
    if chosen.page is None:
        measure(chosen.record, chosen.dir, chosen.smoke)
    else:
        write_between(chosen.page, START, END, markdown(results.read(chosen.record)))


if __name__ == "__main__":
    main()
