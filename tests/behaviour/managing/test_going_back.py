"""A run that went back: its new steps are what it goes on from, and what it left stays readable."""

from __future__ import annotations

import contextlib
import logging
import shutil
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import ckpt
import ckpt.sync
from ckpt._conversion.copies.step_copy import ByteCounter, StepCopier
from ckpt._conversion.copies.step_location import StepLocation
from ckpt._conversion.copies.steps import CopiedStep, CopyRules, copy_step
from ckpt._format.manifest import decode, encode
from ckpt._format.manifest_head import ReplacedSave
from ckpt._runtime.loop import call_once
from ckpt.errors import StepExistsError
from ckpt.storage import open_root
from ckpt.storage._manifests import read_manifest
from ckpt.tiers import SharedMemory, Tier
from tests.support.command import ckpt_command
from tests.support.simulated_job import closed, managers, together
from tests.support.snapshots import PATIENCE_S, shared_memory


def manager(root: Path | str, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, **options)


def state(value: float) -> dict[str, Any]:
    return {"w": np.full(10, float(value))}


def run_a(root: Path | str, **options: Any) -> None:
    with manager(root, **options) as mgr:
        for step in range(5):
            mgr.save(step, state(step))


def go_back(mgr: ckpt.sync.CheckpointManager, to: int = 2) -> None:
    """Save the step after the one that the run goes back to, and end there."""
    mgr.restore(to)
    mgr.save(to + 1, state(to + 1.5), if_exists="replace").in_root.result(PATIENCE_S)


def resumed(mgr: ckpt.sync.CheckpointManager, **options: Any) -> tuple[int, float]:
    start, found = mgr.resume(state(-1), **options)
    return start, float(found["w"][0])


def test_a_run_that_went_back_goes_on_from_its_new_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_a(tmp_path)
    with manager(tmp_path) as mgr:
        go_back(mgr)
    with manager(tmp_path) as mgr:
        assert resumed(mgr) == (4, 3.5)
        assert mgr.latest_step() == 3
        assert mgr.restore()["w"][0] == 3.5
        assert mgr.metadata().info.step == 3
        # Nothing is lost.
        assert mgr.all_steps() == [0, 1, 2, 3, 4]
        assert mgr.restore(4)["w"][0] == 4
    (line,) = {each.message for each in caplog.records if each.levelno == logging.WARNING}
    assert "step 3 is the latest" in line
    assert "It left steps 4 behind: restore one by its number" in line


def test_one_that_goes_on_comes_to_the_numbers_again(tmp_path: Path) -> None:
    run_a(tmp_path)
    with manager(tmp_path) as mgr:
        go_back(mgr, 1)
    with manager(tmp_path) as mgr:
        start, _ = resumed(mgr)
        for step in range(start, 6):
            mgr.save(step, state(step + 0.5)).result(PATIENCE_S)
            assert mgr.latest_step() == step
    with manager(tmp_path) as mgr:
        assert [mgr.restore(step)["w"][0] for step in range(6)] == [0, 1, 2.5, 3.5, 4.5, 5.5]
        assert resumed(mgr) == (6, 5.5)
    # What was there is kept aside.
    aside = [each.name.partition(".")[0] for each in (tmp_path / "abandoned").iterdir()]
    assert sorted(name for name in aside if name) == ["3", "4"]


def test_a_run_may_go_back_again_and_again(tmp_path: Path) -> None:
    run_a(tmp_path)
    for to in (3, 1, 2, 0):
        with manager(tmp_path) as mgr:
            go_back(mgr, to)
        with manager(tmp_path) as mgr:
            assert resumed(mgr) == (to + 2, to + 1.5)


def test_steps_between_two_others_count_as_well(tmp_path: Path) -> None:
    with manager(tmp_path) as mgr:
        for step in (0, 10, 20):
            mgr.save(step, state(step))
    with manager(tmp_path) as mgr:
        mgr.restore(10)
        mgr.save(15, state(15))
    with manager(tmp_path) as mgr:
        assert resumed(mgr) == (16, 15)


def test_going_back_within_one_program_counts_as_well(tmp_path: Path) -> None:
    with manager(tmp_path) as mgr:
        for step in range(5):
            mgr.save(step, state(step))
        go_back(mgr)
        assert mgr.latest_step() == 3


def test_a_partial_save_counts_as_well(tmp_path: Path) -> None:
    run_a(tmp_path)
    with manager(tmp_path) as mgr:
        mgr.restore(2)
        with mgr.partial(3, if_exists="replace") as part:
            part.save({"model": state(3.5)})
    with manager(tmp_path) as mgr:
        assert mgr.latest_step() == 3


def test_whoever_goes_on_from_an_old_branch_is_the_newest(tmp_path: Path) -> None:
    run_a(tmp_path)
    with manager(tmp_path) as mgr:
        go_back(mgr)
    with manager(tmp_path) as mgr:
        mgr.restore(4)
        mgr.save(5, state(5.25))
    with manager(tmp_path) as mgr:
        assert resumed(mgr) == (6, 5.25)


def test_without_the_new_steps_the_old_ones_count(tmp_path: Path) -> None:
    run_a(tmp_path)
    with manager(tmp_path) as mgr:
        go_back(mgr)
    with manager(tmp_path) as mgr:
        mgr.delete(3)
        assert resumed(mgr) == (5, 4)


@pytest.mark.parametrize("restores", [None, 3])
def test_a_program_that_changes_an_older_step_leaves_nothing_behind(
    tmp_path: Path, restores: int | None
) -> None:
    run_a(tmp_path)
    with manager(tmp_path) as mgr:
        if restores is not None:
            mgr.restore(restores)
        mgr.save(3, state(30), if_exists="replace")
    with manager(tmp_path) as mgr:
        assert resumed(mgr) == (5, 4)


def test_retention_keeps_the_step_to_go_on_from(tmp_path: Path) -> None:
    run_a(tmp_path)
    with manager(tmp_path) as mgr:
        go_back(mgr)
    with manager(tmp_path, keep=ckpt.keep.Latest(1)) as mgr:
        # By a program that adds a step, and has restored nothing.
        mgr.save(0, state(0), if_exists="replace")
    with manager(tmp_path) as mgr:
        assert resumed(mgr) == (4, 3.5)


def test_the_newest_steps_of_the_new_branch_are_kept_beside_those_of_before(
    tmp_path: Path,
) -> None:
    with manager(tmp_path) as mgr:
        for step in (0, 10, 20, 30):
            mgr.save(step, state(step))
    with manager(tmp_path, keep=ckpt.keep.Latest(2)) as mgr:
        mgr.restore(0)
        for step in (1, 2, 3):
            mgr.save(step, state(step)).result(PATIENCE_S)
        mgr.wait_until_finished()
        assert mgr.all_steps() == [2, 3, 20, 30]
        for step in (40, 50):
            mgr.save(step, state(step)).result(PATIENCE_S)
    with manager(tmp_path) as mgr:
        assert mgr.all_steps() == [40, 50]


def test_damage_leads_to_the_step_before_on_the_same_branch(tmp_path: Path) -> None:
    run_a(tmp_path)
    with manager(tmp_path) as mgr:
        go_back(mgr)
    for file in (tmp_path / "3").rglob("d/*"):
        data = bytearray(file.read_bytes())
        file.write_bytes(bytes(255 - byte for byte in data))
    with manager(tmp_path) as mgr:
        assert resumed(mgr, fallback=True) == (3, 2)


def test_healthy_steps_of_a_branch_that_was_left_are_passed_over(tmp_path: Path) -> None:
    run_a(tmp_path, extensions=[ckpt.extensions.VitalSigns()])
    with manager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        go_back(mgr)
    with manager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        assert mgr.latest_step(healthy=True) == 3
        assert resumed(mgr, healthy=True) == (4, 3.5)


def test_an_evaluator_of_the_latest_step_goes_the_way_of_the_run(tmp_path: Path) -> None:
    run_a(tmp_path)
    with ckpt.sync.watch(tmp_path, timeout=0, only_latest=True) as watch:
        assert next(watch).step == 4
        with manager(tmp_path) as mgr:
            go_back(mgr, 1)
        with ckpt.sync.watch(tmp_path, timeout=0, only_latest=True) as another:
            assert [info.step for info in another] == [2]
        assert next(watch).step == 2
        with manager(tmp_path) as mgr:
            start, _ = resumed(mgr)
            mgr.save(start, state(3.5)).result(PATIENCE_S)
            assert next(watch).step == 3
            mgr.save(6, state(6.5)).result(PATIENCE_S)
            assert next(watch).step == 6
            # Nothing says any more that step 4 was left behind.
            for step in (2, 3):
                mgr.delete(step)
        assert list(watch) == []


def test_an_evaluator_that_waits_for_a_number_waits_for_that_of_the_run(tmp_path: Path) -> None:
    run_a(tmp_path)
    with manager(tmp_path) as mgr:
        go_back(mgr)
    with ckpt.sync.watch(tmp_path, until=4, poll_interval=0.02, pin=False) as watch:
        assert [next(watch).step for _ in range(5)] == [0, 1, 2, 3, 4]
        with manager(tmp_path) as mgr:
            start, _ = resumed(mgr)
            mgr.save(start, state(4.5))
        assert [info.step for info in watch] == [4]


def test_the_last_healthy_step_of_the_new_branch_stays(tmp_path: Path) -> None:
    run_a(tmp_path, extensions=[ckpt.extensions.VitalSigns()])
    options: dict[str, Any] = {
        "extensions": [ckpt.extensions.VitalSigns()],
        "keep": ckpt.keep.Latest(1),
    }
    with manager(tmp_path, **options) as mgr:
        go_back(mgr, 0)
        mgr.save(2, state(np.nan), if_exists="replace")
    with manager(tmp_path, **options) as mgr:
        # By a program that adds a step, and has restored nothing.
        mgr.save(0, state(0), if_exists="replace")
    with manager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        assert resumed(mgr, healthy=True) == (2, 1.5)


def test_a_copied_root_is_resumed_alike(tmp_path: Path) -> None:
    run_a(tmp_path / "run")
    with manager(tmp_path / "run") as mgr:
        go_back(mgr)
    ckpt_command("cp", tmp_path / "run", tmp_path / "copy")
    with manager(tmp_path / "copy") as mgr:
        assert resumed(mgr) == (4, 3.5)


def test_processes_of_a_job_agree(tmp_path: Path) -> None:
    run_a(tmp_path)
    with manager(tmp_path) as mgr:
        go_back(mgr)
    found = managers(tmp_path, 2, seconds=PATIENCE_S)
    assert together(*(partial(resumed, mgr) for mgr in found)) == [(4, 3.5)] * 2
    closed(found)


@pytest.mark.parametrize("lost", ["nothing", "disk", "root is behind"])
def test_of_several_places_the_branch_decides_as_well(tmp_path: Path, lost: str) -> None:
    tiers = [Tier(tmp_path / "disk")]
    run_a(tmp_path / "root", tiers=tiers)
    if lost == "root is behind":
        old = shutil.copytree(tmp_path / "root", tmp_path / "old")
    with manager(tmp_path / "root", tiers=tiers) as mgr:
        go_back(mgr)
    if lost == "disk":
        shutil.rmtree(tmp_path / "disk")
    if lost == "root is behind":
        # The host was not lost, and nothing of the new branch has arrived.
        shutil.rmtree(tmp_path / "root")
        shutil.copytree(old, tmp_path / "root")
    with manager(tmp_path / "root", tiers=tiers, keep=ckpt.keep.Latest(1)) as mgr:
        assert mgr.latest_step() == 3
        assert resumed(mgr) == (4, 3.5)
        mgr.save(4, state(4.5)).in_root.result(PATIENCE_S)
    assert ckpt.sync.load(tmp_path / "root" / "4")["w"][0] == 4.5


def test_a_root_that_is_behind_gets_the_step_to_go_on_from(tmp_path: Path) -> None:
    tiers = [Tier(tmp_path / "disk")]
    run_a(tmp_path / "root", tiers=tiers)
    old = shutil.copytree(tmp_path / "root", tmp_path / "old")
    with manager(tmp_path / "root", tiers=tiers) as mgr:
        mgr.delete(1)
        mgr.restore(0)
        mgr.save(1, state(1.5)).in_root.result(PATIENCE_S)
    shutil.rmtree(tmp_path / "root")
    shutil.rmtree(old / "1")
    old.rename(tmp_path / "root")
    with manager(tmp_path / "root", tiers=tiers, keep=ckpt.keep.Latest(1)) as mgr:
        assert mgr.latest_step() == 1
    assert ckpt.sync.load(tmp_path / "root" / "1")["w"][0] == 1.5


def test_a_disk_of_the_branch_that_was_left_does_not_decide(tmp_path: Path) -> None:
    run_a(tmp_path / "root", tiers=[Tier(tmp_path / "disk")])
    with manager(tmp_path / "root", tiers=[Tier(tmp_path / "other")]) as mgr:
        go_back(mgr)
    with manager(tmp_path / "root", tiers=[Tier(tmp_path / "disk")]) as mgr:
        assert resumed(mgr) == (4, 3.5)
        assert mgr.restore(4)["w"][0] == 4


@pytest.mark.parametrize("fails", [False, True])
def test_a_snapshot_of_the_new_branch_counts_as_well(tmp_path: Path, fails: bool) -> None:
    run_a(tmp_path)
    (tmp_path / "3").rename(tmp_path / "gone")
    with shared_memory() as memory:
        with (
            contextlib.suppress(ZeroDivisionError),
            manager(tmp_path, tiers=[SharedMemory(directory=str(memory))]) as mgr,
        ):
            mgr.restore(2)
            mgr.snapshot(3, state(3.5)).result(PATIENCE_S)
            assert mgr.latest_step() == 3
            if fails:
                raise ZeroDivisionError
        # It was written when the run ended.
        with manager(tmp_path) as mgr:
            assert resumed(mgr) == (4, 3.5)


def test_in_a_store_only_overwriting_replaces_what_was_left_behind() -> None:
    store = f"memory://{uuid.uuid4().hex}/run"
    run_a(store)
    with manager(store) as mgr:
        go_back(mgr)
    with manager(store) as mgr:
        assert resumed(mgr) == (4, 3.5)
        with pytest.raises(StepExistsError, match="went back behind it"):
            mgr.save(4, state(4.5))
        assert mgr.restore(4)["w"][0] == 4
        mgr.save(4, state(4.5), if_exists="replace").result(PATIENCE_S)
        assert mgr.restore()["w"][0] == 4.5


@pytest.mark.parametrize(("kind", "outcome"), [("abandoned", "blocked"), ("", "copied")])
def test_a_copy_into_a_store_replaces_only_what_was_overwritten(
    tmp_path: Path, kind: Any, outcome: str
) -> None:
    store = f"memory://{uuid.uuid4().hex}/run"
    run_a(store)
    run_a(tmp_path)

    async def copied() -> CopiedStep:
        there = await read_manifest(open_root(store), "4")
        file = tmp_path / "4" / "ckpt.json"
        made = decode(file.read_bytes(), where="4")
        made = replace(made, replaces=[ReplacedSave(there.created_ns, there.committed_ns, kind)])
        file.write_bytes(encode(made))
        source, target = (StepLocation(open_root(each), "4") for each in (tmp_path, store))
        copier = StepCopier(ByteCounter())
        try:
            rules = CopyRules(replaces_older=True)
            return await copy_step(copier, source, 4, target, rules)
        finally:
            copier.close()

    assert call_once(copied).outcome == outcome
