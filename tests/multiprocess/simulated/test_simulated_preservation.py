"""Items with policies of their own in jobs: who drops them, and what all see."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._engine.save.republication import delete_items
from ckpt._interop.orbax.sidecars import OrbaxSidecars
from ckpt.storage import open_root
from ckpt.storage._manifests import read_manifest
from tests.support.simulated_job import FAR, closed, managers, steps, together

# An empty tree has no file where each process has its own disk.
POLICIES: dict[str, Any] = {
    "empty": ckpt.keep.All(),
    "params": ckpt.keep.Latest(2),
    "*": ckpt.keep.Latest(1),
}


def save(mgrs: Sequence[Any], step: int, losses: Sequence[float] = (1.0, 1.0)) -> None:
    items = {
        "params": {"w": np.arange(9)},
        "opt_state": {"mu": np.ones(99)},
        "empty": {},
    }
    calls = [
        lambda m=m, v=v: m.save(step, items=items, metrics={"loss": v}).result(100)
        for m, v in zip(mgrs, losses, strict=True)
    ]
    assert steps(together(*calls)) == [step] * len(mgrs)
    together(*(mgr.wait_until_finished for mgr in mgrs))


def items_of(mgr: Any, *steps: int) -> dict[int, tuple[str, ...]]:
    return {step: ckpt.sync.metadata(f"{mgr.directory}/{step}").info.items for step in steps}


@pytest.mark.parametrize("own_disks", [False, True])
def test_all_processes_see_the_same_items(tmp_path: Path, own_disks: bool) -> None:
    mgrs = managers(
        tmp_path,
        own_disks=own_disks,
        seconds=FAR,
        keep=POLICIES,
    )
    for step in range(1, 5):
        save(mgrs, step)
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[1, 2, 3, 4]] * 2
    for mgr in mgrs:
        assert items_of(mgr, 1, 2, 3) == {
            1: ("empty",),
            2: ("empty",),
            3: ("params", "empty"),
        }
        info = ckpt.sync.metadata(f"{mgr.directory}/3").info
        assert [(each.item, each.policy) for each in info.dropped] == [("opt_state", "Latest(1)")]
    found = together(*(lambda m=m: m.restore(3, items=["opt_state"]) for m in mgrs))
    for each in found:
        assert isinstance(each, errors.ItemDroppedError)
        assert "steps that still have it: 4" in str(each)
    found = together(*(lambda m=m: m.restore(3, items=["params"]) for m in mgrs))
    assert all(np.array_equal(each["params"]["w"], np.arange(9)) for each in found)
    closed(mgrs)


def test_what_one_disk_has_lost_goes_from_the_others(tmp_path: Path) -> None:
    """As after a process was killed between its disk and that of the others."""
    mgrs = managers(tmp_path, own_disks=True, seconds=FAR)
    save(mgrs, 1)
    save(mgrs, 2)
    closed(mgrs)

    async def drop() -> None:
        storage = open_root(tmp_path / "1")
        manifest = await read_manifest(storage, "1", step=1)
        await delete_items(storage, "1", manifest, {"opt_state": "Latest(1)"}, 0, OrbaxSidecars())

    anyio.run(drop)
    mgrs = managers(tmp_path, own_disks=True, seconds=FAR, keep=POLICIES)
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[1, 2]] * 2
    save(mgrs, 3)
    for mgr in mgrs:
        assert items_of(mgr, 1, 2) == {1: ("empty",), 2: ("params", "empty")}
    closed(mgrs)


def test_an_item_that_one_process_keeps_all_keep(tmp_path: Path) -> None:
    policies = {"params": ckpt.keep.Best(1, "loss", "min"), "*": ckpt.keep.Latest(1)}
    mgrs = managers(tmp_path, own_disks=True, seconds=FAR, keep=policies)
    for step, losses in enumerate([(1.0, 5.0), (2.0, 4.0), (3.0, 6.0)]):
        save(mgrs, step, losses)
    # The best of process 0 is the first one, that of process 1 the second.
    for mgr in mgrs:
        assert items_of(mgr, 0, 1) == {0: ("params",), 1: ("params",)}
    closed(mgrs)
