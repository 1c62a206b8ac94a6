"""The golden roots of every feature of the format stay readable, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from make_golden_features import GOLDEN, MODEL, MODEL_FOLDER, NAMES, TEXTS, own_state, state

import ckpt
import ckpt.sync
from ckpt.testing.compare import differences
from tests.support.manifests import document_of, rewrite
from tests.support.trees import P

# Each root with its steps.
ROOTS = {
    "run": (1, 2, 3),
    "partial": (5,),
    "names": (1, 2),
    "tiers/root": (1, 2),
    "tiers/disk": (1, 2),
    "branch": (1, 2, 3),
    "texts": (1,),
    "simulated": (1, 2),
    "disks/0": (1, 2),
    "disks/1": (1, 2),
    "parts/root": (1,),
    "job": (1, 2),
}


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy, since managers that write tidy up."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def expected(root: str, step: int) -> dict[str, Any]:
    """What a step of a root was saved from."""
    if root.split("/")[0] in ("tiers", "branch", "texts", "simulated", "disks", "parts"):
        return own_state(step)
    found = state(step)
    return {"params": found["params"], "opt": found["opt"]} if root == "partial" else found


def on_host(tree: Any) -> Any:
    """Arrays as numpy arrays, in the order of keys that jax has."""

    def moved(leaf: Any) -> Any:
        return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(moved, tree)


def managed(path: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    names = NAMES if path.name == "names" else None
    return ckpt.sync.CheckpointManager(path, step_names=names, **options)


@pytest.mark.parametrize("root", ROOTS)
def test_every_step_comes_back_and_is_whole(root: str) -> None:
    with managed(GOLDEN / root, mode="r") as mgr:
        assert tuple(mgr.all_steps()) == ROOTS[root]
        for step in ROOTS[root]:
            report = mgr.verify(step, deep=True)
            assert report.ok, str(report)
            found = mgr.restore(step)
            found = found["state"] if root == "run" else found
            assert differences(on_host(expected(root, step)), on_host(found)) == []


@pytest.mark.parametrize("root", ["tiers/root", "job", "run", "names"])
def test_a_run_goes_on_in_it(root: str, golden: Path) -> None:
    latest = ROOTS[root][-1]
    with managed(golden / root) as mgr:
        if root == "run":
            mgr.save(latest + 1, items=mgr.restore(latest), durable=True)
        else:
            mgr.save(latest + 1, mgr.restore(latest), durable=True)
        assert mgr.verify(latest + 1, deep=True).ok
        assert mgr.all_steps() == [*ROOTS[root], latest + 1]


def test_a_run_on_tiers_goes_on(golden: Path) -> None:
    tier = ckpt.tiers.Tier(golden / "tiers/disk")
    with ckpt.sync.CheckpointManager(golden / "tiers/root", tiers=[tier]) as mgr:
        assert mgr.latest_step() == 2
        assert mgr.metadata(2).info.tiers == (str(tier.path), str(golden / "tiers/root"))
        assert differences(own_state(2), mgr.restore()) == []


def test_a_run_that_went_back_goes_on_from_its_new_step(golden: Path) -> None:
    left = document_of(golden / "branch/3")["created_ns"]
    assert document_of(golden / "branch/2")["left_behind"] == [left]
    with managed(golden / "branch") as mgr:
        assert mgr.latest_step() == 2
        start, found = mgr.resume(own_state(0))
        assert (start, found["step"]) == (3, 2)
        mgr.save(3, own_state(3), durable=True)
    assert (golden / "branch/abandoned/3").is_dir()


def test_what_is_kept_with_steps_comes_back() -> None:
    with managed(GOLDEN / "run", mode="r") as mgr:
        assert mgr.root_metadata() == {"project": "golden"}
        assert [pin.name for pin in mgr.pins()[2]] == ["paper"]
        assert mgr.metrics(2) == {"loss": 0.5, "eval/top1": 2.0}
        assert [each.item for each in mgr.metadata(1).info.dropped] == ["notes"]
        assert mgr.restore(3, items=["notes"]) == {"notes": "step 3"}
        assert mgr.metadata(3).info.statistics.shared_bytes > 250_000
        signs = ckpt.extensions.VitalSigns.of(mgr.metadata(3).items["state"]["params"]["w"])
        assert signs is not None
        assert signs.absmax == 66.0
    assert ckpt.sync.metadata(GOLDEN / "partial/5").info.custom_metadata == {"parts": 2}


def test_metrics_that_are_no_numbers_are_seen_by_those_who_rank_steps() -> None:
    seen = []
    with managed(GOLDEN / "texts", mode="r") as mgr:
        assert mgr.metrics(1) == {"loss": 0.5}
        assert mgr.best_step(lambda metrics: seen.append(metrics) or 1.0, "min") == 1
    assert seen[0] == TEXTS


def test_arrays_of_a_mesh_are_described_and_come_onto_it() -> None:
    saved = ckpt.sync.metadata(GOLDEN / "run/3").items["state"]["frozen"].saved_sharding
    assert (saved.kind, saved.axis_names, saved.axis_sizes) == ("named", ["x"], [4])
    saved = ckpt.sync.metadata(GOLDEN / "job/2").tree["params"]["w"].saved_sharding
    assert (saved.kind, saved.axis_names, saved.axis_sizes) == ("named", ["x"], [4])
    target = ckpt.abstract(state(2))
    found = ckpt.sync.load(GOLDEN / "job/2", like=target)
    assert found["params"]["w"].sharding == target["params"]["w"].sharding
    assert found["params"]["w"].sharding.spec == P("x")


def test_a_virtual_step_reads_the_files_that_it_names(golden: Path) -> None:
    step = golden / "virtual/run/0"
    manifest = document_of(step)
    for source in manifest["sources"].values():
        assert source["folder"] == MODEL_FOLDER
        source["folder"] = str(golden / "virtual")
    rewrite(step, manifest)
    assert ckpt.sync.verify(step, deep=True).ok
    found = ckpt.sync.load(step)
    assert {name: np.asarray(array).tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in MODEL.items()
    }
    with ckpt.sync.CheckpointManager(golden / "virtual/run", mode="r") as mgr:
        assert mgr.all_steps() == [0]
    assert ckpt.sync.metadata(step).info.custom_metadata == {"made by": "golden"}
