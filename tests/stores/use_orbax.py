"""A process in which Orbax is on a bucket of GCS, by gcsfs: `use_orbax.py WHAT ROOT [STEP]`.

What it has found is printed as JSON: the sums of arrays, by their paths.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import v1

import ckpt.orbax

what, root = sys.argv[1], sys.argv[2]
step = int(sys.argv[3]) if len(sys.argv) > 3 else 0
NAMES = ckpt.orbax.NameFormat()


def sums(tree: Any) -> dict[str, float]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(jnp.sum(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def managed(**options: Any) -> ocp.CheckpointManager:
    options = {"step_name_format": NAMES, "enable_async_checkpointing": False, **options}
    return ocp.CheckpointManager(
        epath.Path(root),
        options=ocp.CheckpointManagerOptions(**options),
        item_handlers=ocp.StandardCheckpointHandler(),
    )


def state(number: int) -> dict[str, Any]:
    return {"w": jnp.arange(1000.0) + number, "opt": {"step": jnp.int32(number)}}


def manager() -> Any:
    best = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
    with managed(**best) as mgr:
        about = mgr.item_metadata(step)
        return {
            "steps": sorted(mgr.all_steps()),
            "latest": mgr.latest_step(),
            "best": mgr.best_step(),
            "metrics": mgr.metrics(step),
            "shape": list(about["w"].shape),
            "plain": sums(mgr.restore(step)),
            "target": sums(mgr.restore(step, args=ocp.args.StandardRestore(state(0)))),
        }


def paths() -> Any:
    """Give the path of the step to each of the interfaces that take one."""
    folder = NAMES.find_step(root, step).path
    with ocp.StandardCheckpointer() as standard, ocp.PyTreeCheckpointer() as tree:
        return {
            "standard": sums(standard.restore(folder / "default")),
            "target": sums(standard.restore(folder / "default", state(0))),
            "tree": sums(tree.restore(folder / "default")),
            "v1": sums(v1.load(folder)),
            "v1 metadata": list(v1.metadata(folder).metadata["w"].shape),
        }


def newer() -> Any:
    names = ckpt.orbax.NameFormat(reads_from=root)
    with v1.training.Checkpointer(epath.Path(root), step_name_format=names) as checkpointer:
        return {
            "steps": [each.step for each in checkpointer.checkpoints],
            "metrics": [each.metrics for each in checkpointer.checkpoints],
            "state": sums(checkpointer.load(step, checkpointable_name="default")),
        }


def save() -> Any:
    with managed() as mgr:
        latest = mgr.latest_step()
        before = None if latest is None else sums(mgr.restore(latest))
        mgr.save(step, args=ocp.args.StandardSave(state(step)), metrics={"loss": float(step)})
    return {"before": before}


def keep_two() -> Any:
    with managed(max_to_keep=2) as mgr:
        mgr.save(step, args=ocp.args.StandardSave(state(step)))
        mgr.wait_until_finished()
        return {"steps": sorted(mgr.all_steps())}


found = {each.__name__: each for each in (manager, paths, newer, save, keep_two)}[what]()
os.write(1, json.dumps(found).encode())
