"""Loads a checkpoint with as many devices as XLA_FLAGS says: `load_elsewhere.py WHAT ROOT`.

Prints JSON lines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import ckpt
import ckpt.sync

what, root = sys.argv[1], Path(sys.argv[2])


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


warnings: list[str] = []
logging.getLogger("ckpt").addHandler(Handler(logging.WARNING))


def tell(line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")


def metadata() -> None:
    """Read metadata in a process that has touched no device, and must not."""
    from jax._src import xla_bridge

    found = asyncio.run(ckpt.metadata(root / "x"))
    shapes = {name: [*leaf.shape, str(leaf.dtype)] for name, leaf in found.tree.items()}
    with ckpt.sync.CheckpointManager(root / "run") as manager:
        latest = manager.latest_step()
        step = manager.metadata(latest)
    specs = {name: leaf.saved_sharding.spec for name, leaf in step.tree.items()}
    initialised = xla_bridge.backends_are_initialized()
    tell({"shapes": shapes, "latest": latest, "specs": specs, "initialised": initialised})


def restore() -> None:
    """Load without a target; tell where everything is and which bits it has."""
    import jax
    import numpy as np

    found = ckpt.sync.load(root / "x")
    lines = {}
    for name, array in found.items():
        data = jax.random.key_data(array) if name == "key" else array
        whole = np.empty(data.shape, data.dtype)
        for shard in data.addressable_shards:
            whole[shard.index] = np.asarray(shard.data)
        sharding = array.sharding
        lines[name] = {
            "devices": len(sharding.device_set),
            "spec": [*getattr(sharding, "spec", [])],
            "committed": array.committed,
            "bits": whole.tobytes().hex(),
            "dtype": str(array.dtype),
        }
    # What came back can be computed with.
    total = jax.jit(lambda tree: sum(leaf.sum() for leaf in tree))([found["rows"], found["free"]])
    tell({"arrays": lines, "warnings": warnings, "sum": float(total)})


def memory() -> None:
    """Save and load 96 MiB within a budget of 4 MiB; tell by how much the memory grew."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

    def growth(work: Any) -> tuple[int, Any]:
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        result = work()
        return status("VmHWM") - before, result

    devices = np.array(jax.devices())
    rows = NamedSharding(Mesh(devices.reshape(2, 4), ("x", "y")), P("x", "y"))
    across = NamedSharding(Mesh(devices[::-1].reshape(8), ("x",)), P(None, "x"))
    staging = ckpt.Staging(budget_bytes=4 << 20, mode="copy")
    shape = (3072, 8192)

    def part(index: Any) -> Any:
        start = index[0].start or 0
        first = index[1].start or 0
        numbers = np.arange(start, start + 1536, dtype=np.float32)[:, None]
        return numbers * 8192 + np.arange(first, first + 2048, dtype=np.float32)

    def save(number: int, tree: Any) -> None:
        manager.save(number, tree)
        manager.wait_until_finished()

    states = [{"w": jax.make_array_from_callback(shape, rows, part)}]
    with ckpt.sync.CheckpointManager(root, staging=staging) as manager:
        # Threads, contexts and code that the first save and restore of a process leave behind.
        small = {"w": jax.device_put(np.ones((64, 8192), np.float32), rows)}
        save(0, small)
        manager.restore(0)
        saved, _ = growth(lambda: save(1, states[0]))
        states.clear()
        target = {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=across)}
        restored, found = growth(lambda: manager.restore(1, like=target))
    right = True
    for shard in found["w"].addressable_shards:
        first = shard.index[1].start or 0
        for start in range(0, 3072, 512):
            wanted = np.arange(start, start + 512, dtype=np.float32)[:, None] * 8192
            wanted = wanted + np.arange(first, first + 1024, dtype=np.float32)
            right = right and bool((np.asarray(shard.data[start : start + 512]) == wanted).all())
    tell({"saved": saved, "restored": restored, "right": right})


{"metadata": metadata, "restore": restore, "memory": memory}[what]()
