"""One process of a job that restores onto meshes and counts its reads: `restore_counted.py PATH`.

The cases are a JSON file beside the checkpoint: axes of a mesh, and a spec for every leaf.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
from tests.support.counted_reads import Reads
from tests.support.real_jobs import tell

path = Path(sys.argv[1])
reads = Reads(SimpleNamespace(setattr=setattr))


def counted(axes: dict[str, int], specs: dict[str, list[list[str]]]) -> list[int]:
    """Restore onto a mesh of all devices; return bytes and requests."""
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
    stored = ckpt.sync.metadata(path)

    def place(leaf: Any) -> NamedSharding:
        spec = [tuple(over) or None for over in specs.get(leaf.name, [])]
        return NamedSharding(mesh, P(*spec))

    like = stored.target(place)
    reads.take()
    ckpt.sync.load(path, like=like)
    requests = len(reads.parts)
    return [reads.take(), requests]


def saved() -> list[int]:
    """Save together with the others, and restore as saved.

    Returns the bytes and requests of a restore by itself, and the bytes of a shared one.
    """
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))
    whole = np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024)
    tree = {
        name: jax.make_array_from_callback(
            whole.shape, NamedSharding(mesh, P(*spec)), whole.__getitem__
        )
        for name, spec in (("tiles", ("x", "y")), ("rows", ("x",)), ("everywhere", ()))
    }
    tree["own"] = jax.device_put(whole, jax.local_devices()[-1])
    with ckpt.sync.CheckpointManager(path.parent / f"by {jax.process_count()}") as mgr:
        mgr.save(1, tree)
        mgr.wait_until_finished()
        reads.take()
        mgr.restore(1)
        requests, alone = len(reads.parts), reads.take()
        mgr.restore(1, broadcast_bytes=64 << 20)
    return [alone, requests, reads.take()]


cases = json.loads((path.parent / "cases.json").read_text())
tell({"onto meshes": [counted(*case) for case in cases], "as saved": saved()})
