"""What is said of a restore by a job is what each of its processes reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
from ckpt._inspection.locations import checkpoint_at
from ckpt._inspection.restores.explanation import explain_restore
from ckpt._inspection.restores.placements import TargetMesh
from ckpt._inspection.restores.read_volume import RestoreExplanation
from tests.support.real_jobs import run_processes

# Axes of a mesh, and the spec of each leaf.
CASES: list[tuple[dict[str, int], dict[str, list[list[str]]]]] = [
    ({"x": 8}, {"rows": [["x"]], "columns": [[], ["x"]], "packed": [["x"]], "small": [["x"]]}),
    ({"x": 2, "y": 4}, {"rows": [["y"]], "columns": [["y"], ["x"]], "packed": [[], ["y", "x"]]}),
    ({"x": 4, "y": 2}, {"rows": [["y"]], "columns": [["x"]], "packed": [["y"], ["x"]]}),
    ({"x": 8}, {}),
]

JAX = ("rows", "columns", "packed", "everywhere", "small")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that this process has saved from 8 devices."""
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    large = np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024)
    tree: dict[str, Any] = {
        name: jax.device_put(large, rows) for name in ("rows", "columns", "packed", "everywhere")
    }
    tree |= {"small": jax.device_put(large[:8, :8], rows), "host": large[:300]}
    found = tmp_path_factory.mktemp("explained") / "x"
    formats = {
        "packed": ckpt.ArrayFormat(compression="zstd", chunk_bytes=100_000),
        "columns": ckpt.ArrayFormat(chunk_bytes=1 << 17, split_axes=(1,)),
    }
    ckpt.sync.save(found, tree, formats=formats)
    (found.parent / "cases.json").write_text(json.dumps(CASES))
    return found


def told(found: RestoreExplanation) -> list[list[int]]:
    return [[process.read, process.requests] for process in found.processes]


@pytest.mark.parametrize("processes", [2, 4])
def test_each_process_reads_what_was_said(path: Path, processes: int) -> None:
    each = 8 // processes
    results = run_processes(processes, "restore_counted.py", path, devices_per_process=each)
    checkpoint = anyio.run(checkpoint_at, str(path))
    for number, (axes, specs) in enumerate(CASES):
        chosen = [(name, tuple(map(tuple, spec))) for name, spec in specs.items()]
        mesh = TargetMesh(axes, [*chosen, *((name, ()) for name in JAX if name not in specs)])
        found = explain_restore(checkpoint, mesh, processes=processes)
        read = [result.value["onto meshes"][number] for result in results]
        assert told(found) == read, (axes, specs)
        assert all(process.devices == each for process in found.processes)
    own = anyio.run(checkpoint_at, str(path.parent / f"by {processes}"))
    assert own.opened.manifest.process_count == processes
    found = explain_restore(own)
    assert told(found) == [result.value["as saved"][:2] for result in results]
    # A little that lies between chunks is read with them.
    together = sum(result.value["as saved"][2] for result in results)
    assert found.shared <= together <= found.shared + 4096 * found.requests
    assert found.shared < found.read
    assert [process.devices for process in found.processes] == [each] * processes
