"""The names of files are those of `docs/reference/format.md`: every one is used, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import ckpt
import ckpt.sync
from ckpt.handlers import JsonHandler
from tests.support.faults import FaultyFiles
from tests.support.file_names import HEX, check
from tests.support.snapshots import shared_memory

# Of a tree, of JSON, and of the text that a handler writes.
STEP = {
    *("ckpt.json", "_CHECKPOINT_METADATA", "commit_success.txt", "orbax.checkpoint"),
    *("metrics/metrics", f"model/d/{HEX}", "model/manifest.ocdbt", "model/_METADATA"),
    *("model/_sharding", "model/_strings.json", "model/array_metadatas/process_0"),
    *("config/metadata", "note/metadata", "note/text.txt"),
}
FINITE = {"w": np.ones(64)}
ODD = {"w": np.full(64, np.nan)}


def items() -> dict[str, Any]:
    model = {"w": jnp.ones((64, 64)), "name": "tiny"}
    return {"model": model, "config": {"layers": 2}, "note": "by hand"}


def names(root: Path) -> list[str]:
    return [str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()]


def test_those_of_a_step(tmp_path: Path) -> None:
    handlers = {"config": JsonHandler()}
    with ckpt.sync.CheckpointManager(tmp_path, handlers=handlers) as mgr:
        mgr.save(1, items=items(), metrics={"loss": 1.0})
    check(names(tmp_path / "1"), STEP)


def test_those_of_a_root(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "keep": ckpt.keep.All(),
        "custom_metadata": {"run": 1},
        "extensions": [ckpt.extensions.VitalSigns()],
    }
    with FaultyFiles(tmp_path, sync=False) as files:
        with ckpt.sync.CheckpointManager(tmp_path, **options, trash="trash") as mgr:
            for step in (1, 2, 3, 4):
                mgr.save(step, FINITE if step < 4 else ODD)
            mgr.wait_until_finished()
            (tmp_path / "1" / "mine").write_text("of others")
            mgr.delete(1)
        with ckpt.sync.CheckpointManager(tmp_path, **options) as mgr:
            mgr.resume(FINITE, healthy=True)
            for step in (4, 5, 6):
                mgr.save(step, FINITE).result()
            mgr.delete(2)
            mgr.restore(4)
            mgr.save(5, FINITE, if_exists="replace").result()
        with ckpt.sync.CheckpointManager(tmp_path, **options) as mgr:
            # It comes to the step 6 again, which was left behind.
            step, state = mgr.resume(FINITE)
            mgr.save(step, state).result()
            mgr.pin(5, "paper")
        (tmp_path / "6" / "ckpt.json").write_text("damaged")
        with ckpt.sync.CheckpointManager(tmp_path, **options) as mgr:
            step, state = mgr.resume(FINITE)
            mgr.save(step, state).result()
    found = {"/".join(Path(name).parts[:2]) for name in names(tmp_path)}
    check(
        found,
        {
            *(r"[3456]/[^/]+", "1.others/mine", "trash/1", "unhealthy/4", "abandoned/6"),
            *("damaged/6", "metadata/_ROOT_METADATA", r"\.ckpt-pins/5\.paper"),
            *(r"\.ckpt-run/preservation\.json", r"\.ckpt-run/went-back", rf"\.ckpt-trash/{HEX}"),
        },
    )
    # These are gone at the end.
    made = {each.path.partition("/")[0] for each in files.operations}
    made |= {(each.target or "").partition("/")[0] for each in files.operations}
    for pattern in (
        rf"3\.orbax-checkpoint-tmp-{HEX}",
        rf"2\.orbax-checkpoint-tmp-{HEX}\.trash",
        rf"\.ckpt-lease-{HEX}",
        rf"\.ckpt-clock-{HEX}",
    ):
        assert [name for name in made if re.fullmatch(pattern, name)], pattern


def test_that_of_a_run_with_snapshots(tmp_path: Path) -> None:
    with (
        shared_memory() as memory,
        ckpt.sync.CheckpointManager(
            tmp_path / "run", tiers=[ckpt.tiers.SharedMemory(directory=str(memory))]
        ) as mgr,
    ):
        mgr.snapshot(1, FINITE).result()
        mgr.save(1, FINITE).result()
    note = tmp_path / "run" / ".ckpt-run" / "id"
    assert re.fullmatch(HEX, note.read_text())
