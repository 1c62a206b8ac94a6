"""A simulation of jobs larger than any machine; the planner and the primary's work are real.

    python docs/explanation/scaling/scale_simulation.py           # every case; writes RESULTS
    python docs/explanation/scaling/scale_simulation.py --smoke   # a small one, only shown

Devices are made up. One process plans its own share by the real planner; the records of all
processes hold as many chunks as the plan says, with made-up digests, and are packed, read, joined,
indexed and encoded by the real code. No byte of an array is there, and nothing is sent.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckpt._format.manifest import ItemEntry, Manifest, decode, encode
from ckpt._format.manifest_head import FileEntry, digest
from ckpt._interop.orbax.database_index import DatabaseIndex
from ckpt._interop.orbax.sidecars import database_keys
from ckpt._job.division import Division, ProcessGroup
from ckpt._job.process_reports import (
    ProcessReport,
    disagreement,
    line_fingerprint,
    tree_fingerprint,
)
from ckpt._plan.item_reports import ROW, ChunkTable, ItemReport, PlannedTree
from ckpt._plan.save_plan import WHOLE, SavePlan, plan_save
from ckpt._tree.leaf_specs import LeafSpec
from docs.explanation.scaling.fake_devices import devices_of

RESULTS = Path(__file__).with_name("simulation.json")
DEVICES_EACH = 8
BUDGET = 4 << 30


@dataclass(frozen=True)
class Case:
    """A job of hosts with eight devices each.

    Attributes:
        name: What it is called.
        hosts: Processes.
        shards: Devices over which a matrix is cut; the rest of the mesh replicates it.
        matrices: How many leaves are cut.
        vectors: How many small leaves are on all devices.
        rows: Length of the axis of the matrices that is cut; the other is 4096 float32.
    """

    name: str
    hosts: int
    shards: int
    matrices: int
    vectors: int
    rows: int


CASES = [
    *(
        Case("large model", hosts, min(hosts * 8, 1000), 600, 600, 160_000)
        for hosts in (1, 10, 100, 1000, 10_000)
    ),
    *(
        Case("many leaves", hosts, min(hosts * 8, 16), 40_000, 60_000, 320)
        for hosts in (1, 10, 100, 1000, 10_000)
    ),
]
SMOKE = Case("smoke", 20, 16, 30, 30, 1600)


def specs_of(case: Case) -> list[LeafSpec]:
    """Returns what the leaves of a case are."""
    devices = devices_of(case.hosts, DEVICES_EACH).reshape(-1, case.shards)
    mesh = Mesh(devices, ("data", "fsdp"))
    cut = NamedSharding(mesh, PartitionSpec("fsdp"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    matrix = LeafSpec("jax", "float32", (case.rows, 4096), cut)
    vector = LeafSpec("jax", "float32", (4096,), everywhere)
    return [matrix] * case.matrices + [vector] * case.vectors


def run(case: Case) -> dict[str, Any]:
    """Returns times of the processor in seconds, and bytes, of one case."""
    specs = specs_of(case)
    names = [f"params.layer_{number:06}.kernel" for number in range(len(specs))]
    found: dict[str, Any] = {
        "name": case.name,
        "hosts": case.hosts,
        "shards": case.shards,
        "leaves": len(specs),
    }
    base = _peak_bytes()
    group = ProcessGroup(0, case.hosts)
    with _timed(found, "plan"):
        plan = plan_save(names, specs, BUDGET, Division(group) if case.hosts > 1 else WHOLE)
    found["plan_peak_bytes"] = _peak_bytes() - base
    found["bytes"] = plan.nbytes
    found["share_chunks"] = sum(len(batch.chunks) for batch in plan.batches)
    found["share_files"] = len(plan.batches)
    found["share_bytes"] = sum(batch.nbytes for batch in plan.batches)
    with _timed(found, "outline"):
        # A process alone is compared with no other.
        tree = tree_fingerprint(plan, []) if plan.group else line_fingerprint([], 1)
    packed = [report.pack() for report in _reports(plan, tree, case.hosts)]
    with _timed(found, "pack"):
        next(iter(_reports(plan, tree, case.hosts))).pack()
    found["record_bytes"] = max(map(len, packed))
    found["records_bytes"] = sum(map(len, packed))
    base = _peak_bytes()
    with _timed(found, "unpack"):
        reports = [ProcessReport.unpack(each) for each in packed]
        assert disagreement(reports) is None
    with _timed(found, "join"):
        stored = ChunkTable.merged(plan.leaves, [report.written for report in reports])
        planned = PlannedTree([], plan.leaves, [None] * len(specs))
        entry = planned.filled(ItemEntry(handler="pytree"), stored)
        keys = list(database_keys(plan.leaves, stored))
    found["chunks"] = sum(len(report.written.rows) for report in reports)
    del packed, reports
    with _timed(found, "index"):
        database = DatabaseIndex(keys).encode(stored.data_files, "t", bytes(16), 0)
    found["index_bytes"] = len(database.tree)
    manifest = manifest_of(entry, case)
    with _timed(found, "encode"):
        data = encode(manifest)
    found["manifest_bytes"] = len(data)
    found["primary_peak_bytes"] = _peak_bytes() - base
    del stored, entry, keys, database, manifest
    with _timed(found, "decode"):
        decode(data, where="ckpt.json")
    return found


def _reports(plan: SavePlan, tree: Any, hosts: int) -> Iterator[ProcessReport]:
    """Yields the reports of all processes: every chunk once, one process after the other."""
    counts = [int(np.prod(leaf.grid)) if leaf.has_chunks else 0 for leaf in plan.leaves]
    leaves = np.repeat(np.arange(len(counts)), counts)
    firsts = np.repeat(np.cumsum([0, *counts[:-1]]), counts)
    numbers = np.arange(len(leaves)) - firsts
    rng = np.random.default_rng(0)
    none = line_fingerprint([], hosts)
    for host in range(hosts):
        mine = slice(host * len(leaves) // hosts, (host + 1) * len(leaves) // hosts)
        rows = np.zeros(len(leaves[mine]), ROW)
        rows["leaf"], rows["number"] = leaves[mine], numbers[mine]
        files = max(-(-len(rows) // 64), 1)
        rows["file"] = np.arange(len(rows)) // 64
        rows["offset"] = np.arange(len(rows)) % 64 * (1 << 20)
        digests = rng.integers(0, 256, (len(rows), 16), np.uint8)
        paths = tuple(f"d/{digest(b'%d.%d' % (host, file))}" for file in range(files))
        yield ProcessReport(ItemReport(paths, rows, digests), tree, none)


def manifest_of(item: ItemEntry, case: Case) -> Manifest:
    files = {
        f"default/{path}": FileEntry(size=64 << 20, digest=path[2:]) for path in item.data_files
    }
    return Manifest(
        format="ckpt", version=1, step=1, attempt="0" * 32, unnamed=True, items={"default": item},
        created_ns=0, committed_ns=0, writer={}, process_count=case.hosts, files=files,
    )  # fmt: skip


class _timed:
    def __init__(self, found: dict[str, Any], name: str) -> None:
        self._found, self._name = found, name

    def __enter__(self) -> None:
        self._began = time.process_time()

    def __exit__(self, *_: object) -> None:
        self._found[self._name] = time.process_time() - self._began


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Runs every case in a process of its own, since the peak of memory is that of a process."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--smoke", action="store_true", help="one small case, only shown")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.smoke or chosen.case is not None:
        case = SMOKE if chosen.smoke else CASES[chosen.case]
        sys.stdout.write(json.dumps(run(case)) + "\n")
        return
    done = []
    for number in range(len(CASES)):
        command = [sys.executable, __file__, "--case", str(number)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        sys.stdout.write(output)
        done.append(json.loads(output))
    RESULTS.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
