"""What all processes of a simulated job must do alike, and who decides for all."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import ckpt.sync
from ckpt._format.manifest import ItemEntry
from ckpt._job.process_reports import SaveReport, same_items
from ckpt.coordination._jobs import SingleProcess
from ckpt.errors import (
    CoordinationError,
    CoordinationTimeoutError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
)
from ckpt.testing.clock import set_clock
from tests.support.simulated_job import (
    FAR,
    STATE,
    closed,
    coordinators,
    managers,
    saved,
    steps,
    storage_of,
    together,
)


def steps_in(root: Path) -> list[str]:
    return sorted(each.parent.name for each in root.rglob("ckpt.json"))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"one": STATE, "two": {"c": np.zeros(3)}}, "different trees"),
    "values": ({"one": STATE, "two": {"c": np.ones(2)}}, "leaf 'c' has one value for all"),
    "scalar": ({"one": STATE | {"b": 4}, "two": {"c": np.zeros(2)}}, "leaf 'b' has one value"),
    "more": ({"one": STATE, "two": {"c": np.zeros(2)}, "three": {"d": 1}}, "same items"),
    "fewer": ({"one": STATE}, "same items"),
    "handler": ({"one": STATE, "two": "a text"}, "same items"),
}
VALUES = ("values", "scalar")


@pytest.mark.parametrize(
    ("kind", "own_disks"),
    # On a disk of its own a process keeps values of its own.
    [(kind, own) for kind in OTHERS for own in (False, True) if not (own and kind in VALUES)],
)
def test_what_is_not_the_same_everywhere_is_not_saved(
    kind: str, own_disks: bool, tmp_path: Path
) -> None:
    mgrs = managers(tmp_path, own_disks=own_disks, seconds=FAR)
    other, text = OTHERS[kind]
    every = [{"one": STATE, "two": {"c": np.zeros(2)}}, other]
    pairs = list(zip(mgrs, every, strict=True))
    found = together(*(lambda m=m, i=i: m.save(1, items=i).result(100) for m, i in pairs))
    assert [type(each) for each in found] == [CoordinationError] * 2
    assert all(text in str(each) for each in found)
    # Nobody publishes before all are known to agree.
    assert steps_in(tmp_path) == []
    closed(mgrs)


def test_items_that_were_saved_by_other_handlers_are_not_the_same() -> None:
    one, other = (SaveReport({"a": ItemEntry(handler=name)}) for name in ("json", "text"))
    same_items([one, one])
    with pytest.raises(CoordinationError, match=r"process 1 'a' .text."):
        same_items([one, other])


def test_who_saves_another_step_is_named_with_it(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=3.0)
    found = together(*(lambda m=m, s=s: m.save(s, STATE).result(100) for s, m in enumerate(mgrs)))
    assert [type(each) for each in found] == [CoordinationTimeoutError] * 2
    assert "process 1 of 2 (host " in str(found[0])
    assert "which came to the save of step 1 last" in str(found[0])
    assert "which came to the save of step 0 last" in str(found[1])
    assert steps(saved(mgrs, 5)) == [5, 5]
    closed(mgrs)


def test_saves_are_made_in_the_order_of_their_calls_where_one_is_slow_to_begin(
    tmp_path: Path,
) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    saved(mgrs, 0)
    peers: Any = mgrs[1]._service.root.processes.peers  # type: ignore[union-attr]
    operation = peers.operation

    async def slowly(kind: str, *args: Any) -> Any:
        await anyio.sleep(0.2 if kind == "save-1" else 0.0)
        return await operation(kind, *args)

    peers.operation = slowly

    def two(mgr: Any) -> list[int]:
        commits: list[Any] = []

        async def run() -> None:
            # The second call is made while the first has not even begun.
            async with anyio.create_task_group() as tasks:
                for step in (1, 2):
                    tasks.start_soon(anyio.to_thread.run_sync, save, step)
                    await anyio.sleep(0.05)

        def save(step: int) -> None:
            commits.append(mgr.save(step, STATE))

        anyio.run(run)
        return sorted(commit.result(100).step for commit in commits)

    assert together(*(lambda m=m: two(m) for m in mgrs)) == [[1, 2]] * 2
    closed(mgrs)


def test_steps_are_published_in_the_order_of_their_saves(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    storage, order = mgrs[0]._service.storage, []
    publish = storage.publish

    async def slower_first(attempt: Any, **options: Any) -> None:
        await anyio.sleep(0.3 if attempt.step_dir == "1" else 0.0)
        await publish(attempt, **options)
        order.append(attempt.step_dir)

    storage.publish = slower_first
    commits = together(*(lambda m=m: [m.save(step, STATE) for step in (1, 2)] for m in mgrs))
    assert [[each.result(100).step for each in pair] for pair in commits] == [[1, 2]] * 2
    assert order == ["1", "2"]
    closed(mgrs)


@pytest.mark.parametrize("wanted", [False, True])
def test_the_primary_asks_its_policy_for_all(wanted: bool, tmp_path: Path) -> None:
    each = [{"save_when": lambda *_, w=w: w} for w in (wanted, not wanted)]
    mgrs = managers(tmp_path, seconds=FAR, each=each)
    assert together(*(lambda m=m: m.should_save(1) for m in mgrs)) == [wanted] * 2
    commits = together(*(lambda m=m: m.save(1, STATE) for m in mgrs))
    together(*(mgr.wait_until_finished for mgr in mgrs))
    assert [commit.stage for commit in commits] == ["done" if wanted else "skipped"] * 2
    assert len({commit.skipped for commit in commits}) == 1
    # However the policy is, a save that is forced is made.
    assert steps(saved(mgrs, 2, force=True)) == [2, 2]
    assert steps_in(tmp_path) == (["1", "2"] if wanted else ["2"])
    closed(mgrs)


def test_who_saves_while_the_primary_has_a_policy_that_does_not_is_told(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR, each=[{"save_when": lambda *_: False}, {}])
    commit, error = together(
        lambda: mgrs[0].save(1, STATE), lambda: mgrs[1].save(1, STATE).result(100)
    )
    assert commit.stage == "skipped"
    assert type(error) is CoordinationError
    assert "Give all processes the same policy" in str(error)
    closed(mgrs)


def test_the_primary_says_whether_a_save_is_under_way(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR, staging=ckpt.Staging(backlog="skip"))
    storage, called = mgrs[0]._service.storage, threading.Event()
    publish = storage.publish

    async def held(*args: Any, **options: Any) -> None:
        await anyio.to_thread.run_sync(called.wait, 20.0)
        await publish(*args, **options)

    storage.publish = held
    first = together(*(lambda m=m: m.save(1, STATE) for m in mgrs))
    second = together(*(lambda m=m: m.save(2, STATE) for m in mgrs))
    called.set()
    together(*(mgr.wait_until_finished for mgr in mgrs))
    assert [commit.stage for commit in first + second] == ["done"] * 2 + ["skipped"] * 2
    assert steps_in(tmp_path) == ["1"]
    closed(mgrs)


def test_what_the_primary_refuses_before_it_begins_is_refused_everywhere(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    assert steps(saved(mgrs, 1)) == [1, 1]
    storage, begun = mgrs[0]._service.storage, []
    begin = storage.begin
    storage.begin = lambda step_dir: begun.append(step_dir) or begin(step_dir)
    found = saved(mgrs, 1, if_exists="error")
    assert [type(each) for each in found] == [StepExistsError] * 2
    assert "process 0 of 2" in str(found[1])
    assert begun == []
    assert steps(saved(mgrs, 1, if_exists="replace")) == [1, 1]
    closed(mgrs)


def test_an_attempt_that_others_have_joined_is_discarded_as_one(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    storage = mgrs[0]._service.storage
    discard, told = storage.discard, []

    async def discards(attempt: Any, **options: Any) -> None:
        told.append(options)
        await discard(attempt, **options)

    async def publish(*_: Any, **__: Any) -> None:
        raise StorageError("no room")

    storage.discard, storage.publish = discards, publish
    assert [type(each) for each in saved(mgrs, 1)] == [StorageError] * 2
    # What the others write late must go, too.
    assert told == [{"joined": True}]
    closed(mgrs)


@pytest.mark.parametrize(("name", "path"), [("sweep", ""), ("write", "ckpt.json")])
def test_a_primary_that_moves_no_bytes_is_waited_for(name: str, path: str, tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=1.0)
    storage = mgrs[0]._service.storage
    function = getattr(storage, name)

    async def slowly(*args: Any) -> Any:
        if not path or path in args:
            await anyio.sleep(1.5)
        return await function(*args)

    setattr(storage, name, slowly)
    assert steps(saved(mgrs, 1)) == [1, 1]
    closed(mgrs)


def test_only_the_primary_keeps_the_root_tidy(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR, keep=ckpt.keep.Latest(1))
    storage = mgrs[1]._service.storage
    made: list[str] = []
    for name in ("prepare", "sweep", "remove"):
        setattr(storage, name, lambda *_, n=name: made.append(n))
    for step in (1, 2, 3):
        assert steps(saved(mgrs, step)) == [step, step]
    together(*(mgr.wait_until_finished for mgr in mgrs))
    assert made == []
    assert steps_in(tmp_path) == ["3"]
    closed(mgrs)


def test_all_know_what_was_saved_and_have_their_own_back(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    rngs = [np.random.default_rng(index) for index in range(2)]
    items = [{"state": STATE, "rng": rng} for rng in rngs]
    pairs = list(zip(mgrs, items, strict=True))
    infos = together(*(lambda m=m, i=i: m.save(1, items=i).result(100) for m, i in pairs))
    assert steps(infos) == [1, 1]
    assert infos[0] == infos[1]
    # Of the array; scalars are in the manifest.
    assert infos[0].nbytes == mgrs[1].metadata(1).info.nbytes >= 40
    found = together(*(lambda m=m: m.restore(items=["state", "rng"]) for m in mgrs))
    for rng, each in zip(rngs, found, strict=True):
        assert each["rng"].bit_generator.state == rng.bit_generator.state
        assert each["state"]["b"] == 3
    assert mgrs[1].verify(1).ok
    closed(mgrs)


def test_a_step_on_disks_of_their_own_has_one_time_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    jobs = coordinators(2, own_disks=True)
    mgrs = []
    for index, at in enumerate((1000.0, 2000.0)):
        with set_clock(lambda at=at: at):  # type: ignore[misc]
            mgrs += managers(tmp_path / str(index), jobs=jobs[index : index + 1], seconds=FAR)
    assert steps(saved(mgrs, 1)) == [1, 1]
    found = [
        json.loads((tmp_path / str(index) / "1" / "ckpt.json").read_text()) for index in (0, 1)
    ]
    assert found[0]["created_ns"] == found[1]["created_ns"] == 1000 * 10**9
    assert together(*(lambda m=m: m.pin(1, "best") for m in mgrs)) == [None, None]
    assert [list(mgr.pins()) for mgr in mgrs] == [[1], [1]]
    names = jobs[0].key_values().names
    # Values of parts of an operation go with it.
    assert [each for each in names if not each.startswith(("processes/", "ckpt/opened/"))] == []
    refused = saved(mgrs, 1)
    assert [type(each) for each in refused] == [StepExistsError] * 2
    closed(mgrs)


@pytest.mark.parametrize("index", [0, 1])
def test_a_publication_that_fails_on_one_disk_fails_on_all(index: int, tmp_path: Path) -> None:
    mgrs = managers(tmp_path, own_disks=True, seconds=FAR)

    async def publish(*_: Any, **__: Any) -> None:
        # The others have published before.
        await anyio.sleep(0.2)
        raise StorageError("no room")

    storage = mgrs[index]._service.storage
    whole, storage.publish = storage.publish, publish
    found = saved(mgrs, 1)
    assert [type(each) for each in found] == [StorageError] * 2
    assert all(str(each).endswith("no room") for each in found)
    assert together(*(mgr.latest_step for mgr in mgrs)) == [None, None]
    # What the others have is replaced.
    storage.publish = whole
    assert steps(saved(mgrs, 1)) == [1, 1]
    assert together(*(mgr.latest_step for mgr in mgrs)) == [1, 1]
    closed(mgrs)


def test_steps_of_one_number_that_are_of_different_saves_are_none(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, own_disks=True, seconds=FAR)
    for step in (1, 2):
        assert steps(saved(mgrs, step)) == [step, step]
    shutil.copytree(tmp_path / "1" / "2", tmp_path / "kept")
    together(*(lambda m=m: m.delete(2) for m in mgrs))
    assert steps(saved(mgrs, 2)) == [2, 2]
    shutil.rmtree(tmp_path / "1" / "2")
    (tmp_path / "kept").rename(tmp_path / "1" / "2")
    together(*(mgr.reload for mgr in mgrs))
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[1], [1]]
    assert [each["b"] for each in together(*(mgr.restore for mgr in mgrs))] == [3, 3]
    found = together(*(lambda m=m: m.restore(2) for m in mgrs))
    assert [type(each) for each in found] == [StepNotFoundError] * 2
    # It is no step, so it is replaced without being asked to.
    assert steps(saved(mgrs, 2, STATE | {"b": 9})) == [2, 2]
    # Nor is one that each has saved alone.
    for index in (0, 1):
        with ckpt.sync.CheckpointManager(
            tmp_path / str(index), coordinator=SingleProcess()
        ) as alone:
            alone.save(5, STATE).result(30)
    assert together(*(mgr.all_steps for mgr in mgrs)) == [[1, 2], [1, 2]]
    assert [each["b"] for each in together(*(mgr.restore for mgr in mgrs))] == [9, 9]
    closed(mgrs)


# --- What the primary looks up, it hands on -------------------------------------------------------


def reads_of(mgr: Any) -> list[str]:
    """What a manager asks its storage for from now on: lists, and files that it reads whole."""
    storage, seen = storage_of(mgr), []
    read, step_dirs = storage.read, storage.step_dirs

    async def reading(step_dir: str, path: str, limit: int) -> bytes | None:
        seen.append(f"{step_dir}/{path}")
        found: bytes | None = await read(step_dir, path, limit)
        return found

    async def listing() -> list[str]:
        seen.append("the root")
        found: list[str] = await step_dirs()
        return found

    storage.read, storage.step_dirs = reading, listing
    return seen


def test_only_the_primary_lists_the_steps_and_reads_the_manifest(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, count=3, seconds=FAR)
    saved(mgrs, 7, *[{"w": np.arange(6), "step": 7}] * 3)
    seen = [reads_of(mgr) for mgr in mgrs]
    fresh = {"w": np.zeros(6, int), "step": 0}
    for begin, state in together(*(lambda m=m: m.resume(fresh) for m in mgrs)):
        assert begin == 8
        assert state["step"] == 7
        assert state["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert {"the root", "7/ckpt.json"} <= set(seen[0])
    assert seen[1:] == [[], []]
    closed(mgrs)


@pytest.mark.parametrize("most", [0, 1 << 30])
def test_a_manifest_that_is_too_large_to_hand_on_is_read_by_each(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt._job.processes._MOST_HANDED_BYTES", most)
    mgrs = managers(tmp_path, seconds=FAR)
    saved(mgrs, 7, *[{"step": 7}] * 2)
    seen = reads_of(mgrs[1])
    assert together(*(mgr.restore for mgr in mgrs)) == [{"step": 7}] * 2
    assert ("7/ckpt.json" in seen) == (most == 0)
    closed(mgrs)


def test_a_run_begins_where_the_primary_finds_no_step(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR)
    saved(mgrs, 7, *[{"step": 7}] * 2)
    shutil.rmtree(tmp_path / "7")
    # As if what this process sees of the root were of a moment ago.
    storage = storage_of(mgrs[1])
    storage.step_dirs = lambda: ["7"]
    found = together(*(lambda m=m: m.resume(lambda: {"step": 0}) for m in mgrs))
    assert found == [(0, {"step": 0})] * 2
    closed(mgrs)
