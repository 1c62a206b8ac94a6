"""Write the golden roots of every feature of the format, on purpose.

    python tests/unit/format/make_golden_features.py

What it writes is committed as `golden/v1-features/` and is never written again; see
`make_golden.py`. Started with a folder, it is one process of the job that writes `job`.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import ckpt
import ckpt.sync
from ckpt.tiers import Tier
from tests.support.manifests import document_of, rewrite
from tests.support.real_jobs import run_processes
from tests.support.simulated_job import closed, coordinators, managers, together

# Metrics that are no numbers, among others.
TEXTS = {"split": "valid", "top": [0.5, "x", [1.0, math.inf]], "eval": {"by": ["a"]}, "loss": 0.5}
GOLDEN = Path(__file__).parent / "golden" / "v1-features"
# Stands in the manifest of the virtual step for the folder of the model.
MODEL_FOLDER = "/golden"
MODEL: dict[str, np.ndarray[Any, Any]] = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(4, dtype=np.float16),
}
NAMES = ckpt.step_names.Standard(prefix="run", digits=4)
STEPS = (1, 2, 3)


def placed(values: Any, *spec: Any) -> jax.Array:
    """Return an array on a mesh of all devices, of this process or of the job."""
    line = Mesh(np.array(jax.devices()), ("x",))
    values = np.asarray(values)
    return jax.make_array_from_callback(
        values.shape, NamedSharding(line, P(*spec)), values.__getitem__
    )


def state(step: int) -> dict[str, Any]:
    """Return a state of which `frozen` never changes, and the rest does in each step."""
    return {
        "frozen": placed(np.arange(70_000) % 251, "x"),
        "params": {
            "w": placed(np.arange(64, dtype=np.float32).reshape(8, 8) + step, "x"),
            "b": placed(np.full(3, step, np.int8)),
        },
        "opt": (np.arange(5) * step, step),
    }


def own_state(step: int) -> dict[str, Any]:
    """Return a state of numpy, which processes on disks of their own have alike."""
    return {"w": np.arange(10.0) + step, "step": step}


def job() -> None:
    """Save two steps in a real job, with something that each process has for itself."""
    with ckpt.sync.CheckpointManager(sys.argv[1]) as mgr:
        for step in STEPS[:2]:
            mgr.save(step, state(step), custom_metadata={"processes": jax.process_count()})


def write(base: Path) -> None:
    """Write all roots into a folder."""
    with ckpt.sync.CheckpointManager(
        base / "run",
        extensions=[ckpt.extensions.VitalSigns()],
        custom_metadata={"project": "golden"},
    ) as mgr:
        for step in STEPS:
            items = {"state": state(step), "notes": f"step {step}"}
            metrics = {"loss": 1 / step, "eval": {"top1": step}}
            mgr.save(step, items=items, metrics=metrics, durable=True)
        mgr.delete(1, item="notes")
        mgr.pin(2, "paper")
    with (
        ckpt.sync.CheckpointManager(base / "partial") as mgr,
        mgr.partial(5, custom_metadata={"parts": 2}) as part,
    ):
        part.save({"params": state(5)["params"]})
        part.save({"opt": state(5)["opt"]})
    squeezed = {"frozen": ckpt.ArrayFormat(compression="zstd")}
    with ckpt.sync.CheckpointManager(base / "names", step_names=NAMES, formats=squeezed) as mgr:
        for step in STEPS[:2]:
            mgr.save(step, state(step), durable=True)
    with ckpt.sync.CheckpointManager(base / "tiers/root", tiers=[Tier(base / "tiers/disk")]) as mgr:
        for step in STEPS[:2]:
            mgr.save(step, own_state(step)).in_root.result(60)
    with ckpt.sync.CheckpointManager(base / "branch") as mgr:
        for step in STEPS:
            mgr.save(step, own_state(step), durable=True)
        mgr.restore(STEPS[0])
        mgr.save(STEPS[1], own_state(STEPS[1]), if_exists="replace", durable=True)
    with ckpt.sync.CheckpointManager(base / "texts") as mgr:
        mgr.save(1, own_state(1), metrics=TEXTS, durable=True)
    for name, own_disks in (("simulated", False), ("disks", True)):
        mgrs = managers(base / name, own_disks=own_disks, seconds=60)
        for step in STEPS[:2]:
            calls = [lambda m=m, s=step: m.save(s, own_state(s)).result(60) for m in mgrs]
            assert all(info.step == step for info in together(*calls))
        closed(mgrs)
    mgrs = [
        ckpt.sync.CheckpointManager(
            base / "parts/root", coordinator=each, tiers=[Tier(base / "parts/disk")]
        )
        for each in coordinators(2)
    ]
    together(*(lambda m=m: m.save(1, own_state(1)).in_root.result(60) for m in mgrs))
    closed(mgrs)
    results = run_processes(2, Path(__file__).resolve(), base / "job", devices_per_process=2)
    assert [each.code for each in results] == [0, 0], results
    (base / "virtual").mkdir()
    save_file(MODEL, base / "virtual/model.safetensors", {"made by": "golden"})
    ckpt.sync.adopt(base / "virtual/model.safetensors", base / "virtual/run", step=0)
    assert ckpt.sync.verify(base / "virtual/run/0").first_digests
    folder = base / "virtual/run/0"
    manifest = document_of(folder)
    for source in manifest["sources"].values():
        source["folder"] = MODEL_FOLDER
    rewrite(folder, manifest)


def main() -> None:
    """Write those that are new; one that is there is on the disks of users, and stays as it is."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for root in Path(folder).iterdir():
            if not (GOLDEN / root.name).exists():
                shutil.copytree(root, GOLDEN / root.name)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        job()
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
        main()
