"""Runs that go wrong: what is kept of them, and the step that they go back to."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
import ckpt.sync
from ckpt._engine.restore.pipeline import restore_items
from ckpt._inspection.kept_steps import forget_steps
from ckpt._inspection.listed_steps import list_root
from ckpt._inspection.locations import root_at
from ckpt._settings import Timeouts
from ckpt._steps.index import StepIndex
from ckpt._steps.removal.recorded_policy import record_policy
from ckpt._steps.step_choice import NamedNotes
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
)
from ckpt.extensions import VitalSigns
from ckpt.keep import Healthy, Latest
from ckpt.storage._local.storage import LocalStorage
from ckpt.storage._manifests import read_manifest
from tests.support.simulated_job import closed, managers, saved, together

BIAS = np.zeros(2, np.float32)
FINITE: dict[str, Any] = {"params": {"w": np.ones(4, np.float32), "b": BIAS}, "n": 1}
ODD: dict[str, Any] = {"params": {"w": np.array([1, math.nan, 1, math.inf], np.float32), "b": BIAS}}
MASKED = FINITE | {"mask": np.full(3, -math.inf, np.float32)}
ALLOWING = Healthy(allow=["**.mask"])


def opened(root: Any, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, **({"extensions": [VitalSigns()]} | options))


def save_all(mgr: ckpt.sync.CheckpointManager, states: dict[int, Any]) -> None:
    for step, state in states.items():
        mgr.save(step, state | {"n": step}).result()
        mgr.wait_until_finished()


def kept_by(root: Path, states: dict[int, Any], **options: Any) -> list[int]:
    with opened(root, **options) as mgr:
        save_all(mgr, states)
        return mgr.all_steps()


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize("policy", [Latest(1), lambda step: False], ids=["latest", "nothing"])
def test_the_last_healthy_step_outlives_those_that_went_wrong(
    tmp_path: Path, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, keep=policy) as mgr:
        save_all(mgr, {1: FINITE, 2: FINITE, 3: ODD, 4: ODD, 5: ODD})
        assert mgr.all_steps() == [2, 5]
        (told,) = warnings(caplog, "step 2 stays")
        assert told.endswith("Step 3: 1 leaf has values that are not finite: params.w")
        save_all(mgr, {6: FINITE})
        assert mgr.all_steps() == [6]


def test_of_steps_without_vital_signs_the_newest_outlives_unhealthy_ones(tmp_path: Path) -> None:
    assert kept_by(tmp_path, {1: FINITE, 2: FINITE}, extensions=[]) == [1, 2]
    assert kept_by(tmp_path, {3: ODD, 4: ODD}, keep=Latest(1)) == [2, 4]
    # What is not known to be unhealthy protects nothing.
    assert kept_by(tmp_path, {5: ODD}, extensions=[], keep=Latest(1)) == [5]


def test_values_that_are_meant_are_no_reason_to_keep_a_step(tmp_path: Path) -> None:
    policy = ckpt.keep.Any(Latest(1), ALLOWING)
    states = {1: MASKED, 2: MASKED, 3: MASKED | ODD, 4: MASKED | ODD}
    assert kept_by(tmp_path, states, keep=policy) == [2, 4]
    assert kept_by(tmp_path, {5: MASKED}, keep=policy) == [5]


def test_the_policy_keeps_healthy_steps(tmp_path: Path) -> None:
    states = {1: FINITE, 2: ODD, 3: FINITE, 4: ODD, 5: FINITE, 6: FINITE, 7: ODD}
    assert kept_by(tmp_path / "2", states, keep=Healthy(2)) == [5, 6, 7]
    both = ckpt.keep.Any(Latest(2), Healthy())
    assert kept_by(tmp_path / "both", {1: FINITE, 2: ODD, 3: ODD}, keep=both) == [1, 2, 3]


def test_steps_whose_leaves_cannot_be_read_now_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: MASKED, 2: MASKED, 3: MASKED | ODD})
    refused: list[str] = []

    async def refusing(storage: Any, step_dir: str, **options: Any) -> Any:
        if len(refused) < 4:
            refused.append(step_dir)
            raise StorageError("too many open files", errno=errno.EMFILE)
        return await read_manifest(storage, step_dir, **options)

    with opened(tmp_path, keep=ckpt.keep.Any(Latest(1), ALLOWING)) as mgr:
        monkeypatch.setattr("ckpt._steps.step_choice.read_manifest", refusing)
        save_all(mgr, {4: MASKED | ODD})
        assert sorted(refused) == ["1", "2", "3", "4"]
        assert mgr.all_steps() == [1, 2, 3, 4]
        # Once they can be read, it is known which one to keep.
        save_all(mgr, {5: MASKED | ODD})
        assert mgr.all_steps() == [2, 5]


def test_a_run_that_went_back_past_unknown_steps_keeps_its_healthy_one(tmp_path: Path) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: FINITE, 2: FINITE})
    with opened(tmp_path, extensions=[]) as mgr:
        save_all(mgr, {3: FINITE, 4: FINITE, 9: FINITE})
    with opened(tmp_path, keep=Latest(1)) as mgr:
        assert mgr.resume(FINITE, healthy=True)[0] == 3
        # The greatest step is of unknown health, and the run is below it.
        save_all(mgr, {3: FINITE, 4: ODD})
        assert mgr.all_steps() == [3, 4, 9]
        assert mgr.latest_step(healthy=True) == 3


def test_a_pinned_healthy_step_is_enough(tmp_path: Path) -> None:
    with opened(tmp_path, keep=Latest(1)) as mgr:
        save_all(mgr, {1: FINITE})
        mgr.pin(1, "paper")
        save_all(mgr, {2: ODD, 3: ODD})
        assert mgr.all_steps() == [1, 3]


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from(["healthy", "unhealthy", "unknown", "gone"])),
        min_size=2,
        max_size=9,
    ),
    st.sampled_from([1, 2]),
)
@settings(max_examples=12, deadline=None)
def test_any_run_keeps_what_it_would_go_back_to(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, str]], n: int
) -> None:
    root = tmp_path_factory.mktemp("run")
    health: dict[int, str] = {}
    for step, kind in saves:
        with opened(root, keep=n, extensions=[VitalSigns()] * (kind != "unknown")) as mgr:
            if kind == "gone":
                for each in health.keys() & {step}:
                    mgr.delete(each)
                    del health[each]
                continue
            mgr.save(step, ODD if kind == "unhealthy" else FINITE, if_exists="replace").result()
            mgr.wait_until_finished()
            health[step] = kind
            stay = {step, *sorted(health)[-n:]}
            if "unhealthy" in (health[max(health)], kind):
                of = {kind: [s for s in health if health[s] == kind] for kind in health.values()}
                best = of.get("healthy") or of.get("unknown")
                stay |= {max(best)} if best else set()
            health = {each: health[each] for each in sorted(stay)}
            assert mgr.all_steps() == list(health)
            healthy = [each for each in health if health[each] == "healthy"]
            assert mgr.latest_step(healthy=True) == (healthy[-1] if healthy else None)


def test_the_command_and_the_list_say_what_a_run_would_do(tmp_path: Path) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: FINITE, 2: FINITE, 3: ODD, 4: ODD})

    async def plan() -> Any:
        place = await root_at(str(tmp_path))
        return await forget_steps(place, Latest(1), None, for_good=False, dry_run=True)

    planned = anyio.run(plan)
    assert {each.step: each.goes for each in planned.steps} == {
        1: True,
        2: False,
        3: True,
        4: False,
    }
    assert planned.steps[1].reasons == ["last healthy"]
    assert planned.steps[3].reasons == ["newest 1"]
    anyio.run(record_policy, LocalStorage(tmp_path, Timeouts()), Latest(2), None)

    async def listed() -> Any:
        return await list_root(await root_at(str(tmp_path)))

    found = anyio.run(listed)
    assert [each.goes_next for each in found.steps] == [True, False, True, False]


def test_the_policy_is_written_down_with_its_patterns(tmp_path: Path) -> None:
    kept_by(tmp_path, {1: FINITE}, keep=ckpt.keep.Any(Latest(3), ALLOWING))
    note = json.loads((tmp_path / ".ckpt-run" / "preservation.json").read_text())
    assert note["preservation"]["policies"][1] == {"kind": "healthy", "n": 1, "allow": ["**.mask"]}

    async def keeps() -> Any:
        return (await list_root(await root_at(str(tmp_path)))).keeps

    assert anyio.run(keeps) == "newest 3, newest healthy"


# ---------------------------------------------------------------- what a run goes back to


def test_the_newest_healthy_step_is_found_and_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: FINITE, 2: FINITE})
    with opened(tmp_path, extensions=[]) as mgr:
        save_all(mgr, {3: FINITE})
    with opened(tmp_path) as mgr:
        save_all(mgr, {4: ODD})
        assert (mgr.latest_step(), mgr.latest_step(healthy=False)) == (4, 4)
        assert mgr.latest_step(healthy=True) == mgr.latest_step(healthy=Healthy(7)) == 2
        assert mgr.restore(healthy=True)["n"] == 2
        assert mgr.restore(healthy=True, fallback=True)["n"] == 2
        (told,) = warnings(caplog, "passed over")
    assert "step 2 is the newest healthy one" in told
    assert "step 4: 1 leaf has values that are not finite: params.w | step 3: its vital" in told


def test_all_is_as_before_where_the_newest_step_is_healthy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as mgr:
        assert mgr.latest_step(healthy=True) is None
        assert mgr.resume(lambda: {"n": 0}, healthy=True) == (0, {"n": 0})
        save_all(mgr, {1: FINITE, 2: FINITE})
        step, state = mgr.resume(FINITE, healthy=True)
        assert (step, state["n"]) == (3, 2)
    assert not warnings(caplog, "passed over")


def test_a_run_that_goes_back_saves_the_same_numbers_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: FINITE, 2: FINITE, 3: ODD, 4: ODD})
    with opened(tmp_path) as mgr:
        start, state = mgr.resume(FINITE, healthy=True)
        assert (start, state["n"]) == (3, 2)
        save_all(mgr, {3: FINITE, 4: FINITE})
        # Those are whole: nothing replaces them again.
        with pytest.raises(StepExistsError):
            mgr.save(4, FINITE)
        assert mgr.latest_step(healthy=True) == 4
    assert sorted(os.listdir(tmp_path / "unhealthy")) == ["3", "4"]
    assert ckpt.sync.metadata(tmp_path / "unhealthy" / "3").info.nonfinite_leaves == 1
    assert len(warnings(caplog, "saved anew, because it was passed over as unhealthy")) == 2


def test_a_step_that_replaced_a_passed_over_one_meanwhile_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: FINITE, 2: ODD})
        mgr.resume(FINITE, healthy=True)
        with opened(tmp_path) as other:
            other.save(2, FINITE, if_exists="replace").result()
        with pytest.raises(StepExistsError):
            mgr.save(2, FINITE | {"n": 22})


def test_a_restore_does_not_make_saves_replace_what_it_has_passed_over(tmp_path: Path) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: FINITE, 2: ODD})
        assert mgr.restore(healthy=True)["n"] == 1
        with pytest.raises(StepExistsError):
            mgr.save(2, FINITE)
        # A resume does, also after it.
        assert mgr.resume(FINITE, healthy=True)[0] == 2
        mgr.save(2, FINITE).result()


def test_a_pinned_step_that_was_passed_over_stays_where_it_is(tmp_path: Path) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: FINITE, 2: ODD})
        mgr.pin(2, "look")
        assert mgr.resume(FINITE, healthy=True)[0] == 2
        with pytest.raises(
            StepExistsError, match=r"unhealthy \(1 leaf .*pinned by 'look'.*Unpin it"
        ):
            mgr.save(2, FINITE)
        assert (mgr.all_steps(), mgr.metadata(2).info.nonfinite_leaves) == ([1, 2], 1)
        assert not (tmp_path / "unhealthy").exists()
        mgr.unpin(2, "look")
        mgr.save(2, FINITE).result()
    assert os.listdir(tmp_path / "unhealthy") == ["2"]


def test_in_a_store_a_step_that_was_passed_over_is_not_replaced_unasked() -> None:
    with opened(ckpt.storage.Memory(f"memory://{uuid.uuid4().hex}/run")) as mgr:
        save_all(mgr, {1: FINITE, 2: ODD})
        assert mgr.resume(FINITE, healthy=True)[0] == 2
        with pytest.raises(StepExistsError, match=r"is unhealthy \(1 leaf .*if_exists='replace'"):
            mgr.save(2, FINITE)
        mgr.save(2, FINITE, if_exists="replace").result()
        assert mgr.latest_step(healthy=True) == 2


def before_opening(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Let something happen once, right before a step is opened that was found to be healthy."""
    found = StepIndex.found
    acted: list[int] = []

    async def found_after(self: StepIndex, wanted: int | None) -> Any:
        if wanted == step and not acted:
            acted.append(step)
            await anyio.to_thread.run_sync(act)
        return await found(self, wanted)

    monkeypatch.setattr(StepIndex, "found", found_after)


def test_a_healthy_step_that_is_deleted_before_it_is_opened_gives_way_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: FINITE, 2: FINITE})
        before_opening(monkeypatch, 2, lambda: shutil.rmtree(tmp_path / "2"))
        assert mgr.restore(healthy=True)["n"] == 1


def test_a_healthy_step_that_is_replaced_while_it_is_read_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[int] = []
    with opened(tmp_path) as mgr, opened(tmp_path) as writer:
        save_all(mgr, {1: FINITE, 2: FINITE})

        async def restored(context: Any, wanted: Any) -> Any:
            if not replaced:
                replaced.append(2)
                save = partial(writer.save, 2, FINITE | {"n": 22}, if_exists="replace")
                await anyio.to_thread.run_sync(lambda: save().result())
            return await restore_items(context, wanted)

        monkeypatch.setattr("ckpt._engine.restore.pipeline.restore_items", restored)
        assert mgr.restore(healthy=True)["n"] == 22


def test_meant_values_do_not_hide_a_step(tmp_path: Path) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: MASKED, 2: MASKED | ODD})
        assert mgr.latest_step(healthy=True) is None
        assert mgr.latest_step(healthy=ALLOWING) == 1
        with pytest.raises(StepNotFoundError, match=r"'\*\*\.msk' fits none .*is it '\*\*\.mask'"):
            mgr.restore(healthy=Healthy(allow=["**.msk"]))


def test_leaves_of_several_items_are_named_with_their_item(tmp_path: Path) -> None:
    with opened(tmp_path) as mgr:
        items = {"model": {"mask": MASKED["mask"]}, "ema": ODD["params"], "note": "x"}
        mgr.save(1, items=items).result()
        with pytest.raises(StepNotFoundError, match="not finite: model:mask, ema:w"):
            mgr.restore(healthy=True)
        allow = Healthy(allow=["**.mask", "w"])
        assert mgr.latest_step(healthy=allow) == 1
        for allowed in (["model:mask", "ema:w"], ["model:**", "ema:*"]):
            assert mgr.latest_step(healthy=Healthy(allow=allowed)) == 1
        for others in (["ema:mask", "w"], ["model:mask", "model:w"], ["model:", "ema:"]):
            assert mgr.latest_step(healthy=Healthy(allow=others)) is None
        state = items | {"note": ""}
        assert mgr.resume(items=state, healthy=allow)[0] == 2


def test_without_a_healthy_step_a_restore_says_what_there_is(tmp_path: Path) -> None:
    with opened(tmp_path) as mgr:
        with pytest.raises(StepNotFoundError, match="has no committed step"):
            mgr.restore(healthy=True)
        save_all(mgr, {7: ODD})
    with opened(tmp_path, extensions=[]) as mgr:
        save_all(mgr, dict.fromkeys(range(10, 17), FINITE))
        assert mgr.latest_step(healthy=True) is None
        calls = (lambda: mgr.restore(healthy=True), lambda: mgr.resume(FINITE, healthy=True))
        for call in calls:
            with pytest.raises(StepNotFoundError) as caught:
                call()
            text = str(caught.value)
            assert "none of its 8 steps is known to be healthy: step 16: its vital signs" in text
            assert "save with extensions=[ckpt.extensions.VitalSigns()]" in text
            assert "and 3 more" in text
        # Nothing was moved, and nothing makes way.
        with pytest.raises(StepExistsError):
            mgr.save(16, FINITE)


def test_a_damaged_healthy_step_is_passed_over_only_with_fallback(tmp_path: Path) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: FINITE, 2: FINITE, 3: ODD})
        for data in (tmp_path / "2" / "default" / "d").iterdir():
            data.write_bytes(bytes(len(data.read_bytes())))
        with pytest.raises(CorruptCheckpointError):
            mgr.restore(healthy=True)
        assert mgr.restore(healthy=True, fallback=True)["n"] == 1
        mgr.delete(1)
        with pytest.raises(CorruptCheckpointError):
            mgr.resume(FINITE, healthy=True)


def test_a_step_whose_leaves_cannot_be_read_is_not_allowed(tmp_path: Path) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: FINITE, 2: MASKED})
    manifest = tmp_path / "2" / "ckpt.json"
    data = manifest.read_bytes()
    manifest.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with opened(tmp_path, mode="r") as mgr:
        assert mgr.latest_step(healthy=ALLOWING) == 1


@pytest.mark.parametrize("healthy", ["yes", 1, None, ["**.mask"]])
def test_wrong_arguments_are_refused_in_a_new_run_too(tmp_path: Path, healthy: Any) -> None:
    with opened(tmp_path) as mgr:
        for call in (mgr.latest_step, mgr.restore, lambda **given: mgr.resume(FINITE, **given)):
            with pytest.raises(InvalidArgumentError, match="healthy="):
                call(healthy=healthy)
        save_all(mgr, {1: FINITE})
        with pytest.raises(InvalidArgumentError, match="leave the step out"):
            mgr.restore(1, healthy=True)


def test_asyncio_programs_have_it_too(tmp_path: Path) -> None:
    async def run() -> None:
        async with ckpt.CheckpointManager(tmp_path, extensions=[VitalSigns()]) as mgr:
            await mgr.save(1, FINITE, durable=True)
            await mgr.save(2, ODD, durable=True)
            assert await mgr.latest_step(healthy=True) == 1
            assert (await mgr.restore(healthy=True))["n"] == 1
            assert (await mgr.resume(FINITE, healthy=True))[0] == 2

    anyio.run(run)


def test_only_manifests_of_unhealthy_steps_are_read_and_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: FINITE, 2: ODD, 3: FINITE, 4: ODD})
    read: list[str] = []

    async def counted(storage: Any, step_dir: str, **options: Any) -> Any:
        read.append(step_dir)
        return await read_manifest(storage, step_dir, **options)

    monkeypatch.setattr("ckpt._steps.step_choice.read_manifest", counted)
    with opened(tmp_path) as mgr:
        for _ in range(3):
            assert mgr.latest_step(healthy=True) == 3
        assert sorted(read) == ["2", "4"]
        # What takes the place of a step is another one.
        mgr.save(2, MASKED, if_exists="replace").result()
        assert mgr.latest_step(healthy=Healthy(allow=["**"])) == 4
    assert sorted(read) == ["2", "2", "4"]


def test_looks_at_the_same_time_do_not_make_each_other_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as mgr:
        save_all(mgr, {1: MASKED, 2: MASKED})

    async def run() -> None:
        storage = (await root_at(str(tmp_path))).storage
        found = await StepIndex(storage).refresh()
        leaves, is_reading, may_go_on = NamedNotes(storage), anyio.Event(), anyio.Event()

        async def slow(storage: Any, step_dir: str, **options: Any) -> Any:
            manifest = await read_manifest(storage, step_dir, **options)
            if step_dir == "2":
                is_reading.set()
                await may_go_on.wait()
            return manifest

        async def look_at_all() -> None:
            steps = await leaves.saved_steps(found.values())
            assert [each.nonfinite for each in steps] == [("mask",), ("mask",)]

        monkeypatch.setattr("ckpt._steps.step_choice.read_manifest", slow)
        await leaves.saved_steps([found[1]])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look_at_all)
            await is_reading.wait()
            # A list from before there were steps.
            await leaves.saved_steps([])
            may_go_on.set()

    anyio.run(run)


# ---------------------------------------------------------------- jobs of several processes


@pytest.mark.parametrize("own_disks", [False, True], ids=["shared", "own disks"])
def test_all_processes_of_a_job_go_back_to_the_same_step(tmp_path: Path, own_disks: bool) -> None:
    mgrs = managers(
        tmp_path, own_disks=own_disks, extensions=[VitalSigns()], keep=Latest(1), seconds=20.0
    )
    for step, state in {1: FINITE, 2: FINITE, 3: ODD}.items():
        saved(mgrs, step, state | {"n": step})
        together(*(mgr.wait_until_finished for mgr in mgrs))
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[2, 3]] * 2
    assert together(*(lambda m=m: m.latest_step(healthy=True) for m in mgrs)) == [2, 2]
    assert together(*(lambda m=m: m.restore(healthy=True)["n"] for m in mgrs)) == [2, 2]
    assert together(*(lambda m=m: m.resume(FINITE, healthy=True)[0] for m in mgrs)) == [3, 3]
    if not own_disks:
        (found,) = {info.step for info in saved(mgrs, 3, FINITE)}
        assert found == 3
        assert (tmp_path / "unhealthy" / "3").is_dir()
    closed(mgrs)


def test_odd_values_on_one_disk_alone_count_for_all(tmp_path: Path) -> None:
    # Large arrays that every process has for itself are not compared when they are saved.
    good, bad = {"w": np.ones(300_000, np.float32)}, {"w": np.full(300_000, np.nan, np.float32)}
    mgrs = managers(
        tmp_path, own_disks=True, extensions=[VitalSigns()], keep=Latest(1), seconds=20.0
    )
    for step, second in {1: good, 2: bad, 3: bad}.items():
        saved(mgrs, step, good, second)
        together(*(mgr.wait_until_finished for mgr in mgrs))
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[1, 3]] * 2
    for healthy, step in ((True, 1), (Healthy(allow=["b"]), 1), (Healthy(allow=["w"]), 3)):
        found = together(*(lambda m=m, h=healthy: m.latest_step(healthy=h) for m in mgrs))
        assert found == [step, step]
    restored = together(*(lambda m=m: m.restore(healthy=True)["w"][0] for m in mgrs))
    assert restored == [1, 1]
    closed(mgrs)


@pytest.mark.parametrize("masked", [0, 1], ids=["on the first disk", "on the second disk"])
def test_meant_values_on_one_disk_do_not_stand_for_wrong_ones_on_another(
    tmp_path: Path, masked: int
) -> None:
    def arrays(mask: float, weights: float) -> dict[str, Any]:
        # Large enough not to be compared when they are saved.
        return {
            each: np.full(300_000, value, np.float32)
            for each, value in (("mask", mask), ("w", weights))
        }

    allowing = Healthy(allow=["mask"])
    mgrs = managers(
        tmp_path,
        own_disks=True,
        extensions=[VitalSigns()],
        keep=ckpt.keep.Any(Latest(1), allowing),
        seconds=20.0,
    )
    for step, wrong in {1: 1.0, 2: math.nan, 3: math.nan}.items():
        states = [arrays(-math.inf, 1.0), arrays(2.0, wrong)]
        saved(mgrs, step, *(states if masked == 0 else states[::-1]))
        together(*(mgr.wait_until_finished for mgr in mgrs))
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[1, 3]] * 2
    assert together(*(lambda m=m: m.latest_step(healthy=allowing) for m in mgrs)) == [1, 1]
    for error in together(*(lambda m=m: m.restore(healthy=True) for m in mgrs)):
        assert isinstance(error, StepNotFoundError)
        assert "step 3: 2 leaves have values that are not finite" in str(error)
    closed(mgrs)


def test_all_processes_go_on_from_another_step_where_one_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mgrs = managers(tmp_path, extensions=[VitalSigns()], seconds=20.0)
    for step in (1, 2):
        saved(mgrs, step, FINITE | {"n": step})
    before_opening(monkeypatch, 2, lambda: shutil.rmtree(tmp_path / "2"))
    assert together(*(lambda m=m: m.restore(healthy=True)["n"] for m in mgrs)) == [1, 1]
    closed(mgrs)


def test_a_job_without_a_healthy_step_hears_it_everywhere(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, extensions=[VitalSigns()], seconds=20.0)
    saved(mgrs, 1, ODD)
    for error in together(*(lambda m=m: m.restore(healthy=True) for m in mgrs)):
        assert isinstance(error, StepNotFoundError)
        assert "params.w" in str(error)
    closed(mgrs)
