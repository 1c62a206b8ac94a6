"""Files for other readers: a save writes those of the object that it is given, or none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt.sync
from ckpt._api import base
from ckpt._commit import Commit, CommitHooks
from ckpt._engine.plan_cache import Files, NoSidecars, Sidecars
from ckpt._engine.save.republication import delete_items
from ckpt._engine.save.save_request import SaveRequest
from ckpt._format.manifest import Manifest
from ckpt._format.manifest_head import FileEntry, digest
from ckpt._interop.orbax import sidecars
from ckpt._job.solo import SoloSave
from ckpt._plan.item_reports import ItemReport, PlannedTree
from ckpt._settings import Staging
from ckpt._steps.saves.one_shot import save_one_shot
from ckpt._steps.service import make_engine
from ckpt.storage import open_root
from ckpt.storage._manifests import read_manifest

STATE = {"w": np.arange(6.0), "b": jnp.ones(3), "n": 7}
OPT = {"m": jnp.zeros(4)}


class Listed:
    """Writes down, for each time that it is asked, what it is told."""

    def of_tree(self, item: str, tree: PlannedTree) -> ListedTree:
        return ListedTree(item, tree)

    def of_step(self, step_dir: str, manifest: Manifest) -> dict[str, bytes]:
        return {"items.txt": " ".join((step_dir, *manifest.items)).encode()}


class ListedTree:
    def __init__(self, item: str, tree: PlannedTree) -> None:
        self.item = item
        self.names = " ".join((item, *(leaf.name for leaf in tree.leaves))).encode()

    def of_structure(self) -> Files:
        return {
            f"{self.item}/names.txt": (self.names, FileEntry(len(self.names), digest(self.names)))
        }

    def of_places(self, reports: Sequence[ItemReport], created_ns: int) -> dict[str, bytes]:
        # Scalars have a chunk each, which other readers find.
        rows = sum(len(report.rows) for report in reports)
        return {f"{self.item}/chunks.txt": b"%d" % rows}


def save(root: Path, sidecars: Sidecars) -> set[str]:
    """Save a step with two items; return its files but for the arrays."""
    engine = make_engine(Staging(), (), sidecars=sidecars)
    items: dict[str, Any] = {"state": STATE, "opt": OPT}
    request = SaveRequest("1", 1, items, False, None, None, "error")
    hooks = CommitHooks(Commit(1, lambda: None))
    anyio.run(save_one_shot, engine, open_root(root), request, SoloSave(1 << 20), hooks)
    return files_of(root / "1")


def files_of(step: Path) -> set[str]:
    found = {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()}
    return {path for path in found if "/d/" not in path}


def check_whole(root: Path, **expected: Any) -> None:
    report = ckpt.sync.verify(root / "1")
    assert report.ok, report.problems
    found = ckpt.sync.load(root / "1")
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_step_without_any_is_whole(tmp_path: Path) -> None:
    assert save(tmp_path, NoSidecars()) == {"ckpt.json"}
    assert len([*tmp_path.glob("1/*/d/*")]) == 2, "one file of arrays for each item, and no others"
    check_whole(tmp_path, state=STATE, opt=OPT)


def test_a_step_has_those_of_the_object_that_is_given(tmp_path: Path) -> None:
    beside = {f"{item}/{name}.txt" for item in ("state", "opt") for name in ("names", "chunks")}
    assert save(tmp_path, Listed()) == {"ckpt.json", "items.txt", *beside}
    assert (tmp_path / "1/state/names.txt").read_text() == "state b n w"
    assert (tmp_path / "1/state/chunks.txt").read_text() == "3"
    assert (tmp_path / "1/items.txt").read_text() == "1 state opt"
    check_whole(tmp_path, state=STATE, opt=OPT)


def test_they_are_made_again_when_an_item_goes(tmp_path: Path) -> None:
    save(tmp_path, Listed())

    async def drop() -> None:
        storage = open_root(tmp_path)
        manifest = await read_manifest(storage, "1")
        await delete_items(storage, "1", manifest, {"opt": None}, 0, Listed())

    anyio.run(drop)
    left = {"ckpt.json", "items.txt", "state/names.txt", "state/chunks.txt"}
    assert files_of(tmp_path / "1") == left
    assert (tmp_path / "1/items.txt").read_text() == "1 state"
    check_whole(tmp_path, state=STATE)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_save_in_parts_has_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    monkeypatch.setattr(base, "OrbaxSidecars", Listed)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr, mgr.partial(1) as step:
        for number in range(calls):
            step.save({f"layer_{number}": np.ones(3)})
    assert files_of(tmp_path / "1") == {
        "ckpt.json",
        "items.txt",
        "default/names.txt",
        "default/chunks.txt",
    }
    assert (tmp_path / "1/default/chunks.txt").read_text() == str(calls)


def test_one_index_serves_all_saves_with_the_same_places(tmp_path: Path) -> None:
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch, ckpt.sync.CheckpointManager(tmp_path) as mgr:
        real = sidecars.database_keys
        patch.setattr(sidecars, "database_keys", lambda *args: made.append(1) or real(*args))
        for step, shape in enumerate([(8,), (8,), (8,), (9,)]):
            mgr.save(step, {"w": np.full(shape, step)}).result()
    assert len(made) == 2, "one for each structure"
