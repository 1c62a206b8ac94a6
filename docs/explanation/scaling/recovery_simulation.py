"""A simulation: what the real code does in jobs of 8 to 1,000 hosts that lose some.

    python docs/explanation/scaling/recovery_simulation.py           # every job; writes RESULTS
    python docs/explanation/scaling/recovery_simulation.py --smoke   # a small one, only shown

Devices are made up, as in `scale_simulation`. The planner makes the part of a process, as it is in
the memory of a host and in the root, and the manifest of each; the processes agree by the real code
in made-up time (`coordination_service`); which losses cost a part is tried with random hosts.
`scale_report` makes times and bytes of it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from ckpt._format.manifest import ItemEntry, decode, encode
from ckpt._format.manifest_head import OWN_DISKS, digest
from ckpt._job.division import Division, ProcessGroup
from ckpt._job.processes import _MOST_HANDED_BYTES as MOST_HANDED_BYTES
from ckpt._plan.item_reports import ChunkTable, ItemReport, PlannedTree
from ckpt._plan.save_plan import plan_save
from docs.explanation.scaling import coordination_service, pull_rate
from docs.explanation.scaling.coordination_service import Talk
from docs.explanation.scaling.recovery_model import held, pulls, rack_of
from docs.explanation.scaling.scale_simulation import (
    BUDGET,
    DEVICES_EACH,
    Case,
    manifest_of,
    run,
    specs_of,
)

RESULTS = Path(__file__).with_name("recovery.json")
HOSTS = (8, 64, 256, 1000)
# Random hosts that are lost at once, and how often that is tried.
LOST = (2, 4, 8, 16, 32)
TRIALS = 5000
# Of what `scale_simulation` finds; peaks of memory would be those of all jobs before.
_KEPT = (
    "name",
    "hosts",
    "shards",
    "bytes",
    "share_files",
    "share_bytes",
    "manifest_bytes",
    "decode",
)
# As many hosts as the smallest job has hold one replica.
_REPLICA_HOSTS = 8


def cases_of(hosts: int) -> list[Case]:
    """Returns the jobs of so many hosts."""
    all_devices = hosts * DEVICES_EACH
    replica = _REPLICA_HOSTS * DEVICES_EACH
    return [
        Case("8 GiB a host", hosts, all_devices, 64, 64, 1024 * all_devices),
        Case("1 TB", hosts, all_devices, 60, 60, 1_024_000),
        Case("replicas", hosts, replica, 64, 64, 1024 * replica),
    ]


def simulated(case: Case) -> dict[str, Any]:
    """Returns what was planned and said for one job; bytes, and seconds."""
    planned = run(case)
    found = {name: planned[name] for name in _KEPT} | own_part(case)
    handed = found["manifest_bytes"]
    if handed * (case.hosts - 1) > MOST_HANDED_BYTES:
        handed = 0
    found |= {"replicas": case.hosts * DEVICES_EACH // case.shards, "handed": handed}
    said = {
        "root": _from_root(case.hosts, handed),
        "memory": _from_memory(case.hosts),
        "copies": _rounds(case.hosts),
        "exchange": _exchanges(case.hosts),
    }
    return found | {name: talk._asdict() for name, talk in said.items()}


def own_part(case: Case) -> dict[str, Any]:
    """Returns what a process has in memory: what its devices hold, and a manifest of its own."""
    specs = specs_of(case)
    names = [f"params.layer_{number:06}.kernel" for number in range(len(specs))]
    plan = plan_save(names, specs, BUDGET, Division(ProcessGroup(0, case.hosts, "local")))
    rng = np.random.default_rng(0)
    digests = [[rng.bytes(16).hex() for _ in batch.chunks] for batch in plan.batches]
    paths = [f"d/{digest(b'%d' % number)}" for number in range(len(plan.batches))]
    report = ItemReport.of(plan.batches, paths, digests)
    stored = ChunkTable.merged(plan.leaves, [report], own_disks=True)
    planned = PlannedTree([], plan.leaves, [None] * len(specs))
    entry = planned.filled(ItemEntry(handler="pytree"), stored)
    data = encode(replace(manifest_of(entry, case), requires=[OWN_DISKS]))
    began = time.process_time()
    decode(data, where="ckpt.json")
    return {
        "part_bytes": sum(batch.nbytes for batch in plan.batches),
        "part_manifest_bytes": len(data),
        "part_decode": time.process_time() - began,
    }


def losses(hosts: int, distance: int, lost: int, trials: int) -> int:
    """Returns how many of some random losses have cost a part of the state."""
    chosen = random.Random(f"{hosts} {distance} {lost}")
    return sum(
        pulls(held(hosts, distance, set(chosen.sample(range(hosts), lost)))) is None
        for _ in range(trials)
    )


# Jobs of as many hosts say the same.
_from_memory = cache(coordination_service.from_memory)
_rounds = cache(coordination_service.rounds)
_exchanges = cache(coordination_service.exchanges)


@cache
def _from_root(hosts: int, handed: int) -> Talk:
    # Digests, which are most of a manifest, cannot be compressed.
    return coordination_service.from_root(hosts, np.random.default_rng(0).bytes(handed))


def main() -> None:
    """Simulates every job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one small job, only shown")
    if parser.parse_args().smoke:
        sys.stdout.write(json.dumps(simulated(cases_of(16)[0])) + "\n")
        return
    jobs = []
    for hosts in HOSTS:
        for case in cases_of(hosts):
            jobs.append(simulated(case))
            sys.stdout.write(json.dumps(jobs[-1]) + "\n")
    chances = [
        {"hosts": hosts, "distance": distance, "lost": lost, "trials": TRIALS}
        | {"parts_lost": losses(hosts, distance, lost, TRIALS)}
        for hosts in HOSTS
        for distance in (1, rack_of(hosts))
        for lost in LOST
        if lost < hosts
    ]
    done = {"pull_rate": pull_rate.measured(), "jobs": jobs, "chances": chances}
    RESULTS.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
