"""`verify`: what is reported of whole steps, how it is called, and what it reads."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._engine.verify.report import Problem, VerifyReport
from ckpt._engine.verify.scanner import Scanner
from ckpt._format.manifest_head import digest
from tests.behaviour.verifying.verified_step import (
    STEP,
    Watched,
    damaged,
    flip,
    hit,
    manifest_of,
    model,
    places,
    refused,
    verified,
)
from tests.hostile.test_hostile import changed
from tests.support.manifests import change_leaf
from tests.support.paths import GOLDEN

PATIENCE_S = 120


# --- Nothing is wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [True, False])
def test_a_whole_step_is_ok(whole: Path, deep: bool) -> None:
    report = ckpt.sync.verify(whole / str(STEP), deep=deep)
    assert report.ok
    assert bool(report)
    assert report.problems == ()
    assert report.unlisted == ()
    assert (report.step, report.deep, report.path) == (STEP, deep, str(whole / str(STEP)))
    files = manifest_of(whole / str(STEP)).files
    assert report.files == len(files) + 1
    assert report.nbytes == (sum(file.size for file in files.values()) if deep else 0)
    assert report.seconds > 0
    assert "is whole" in str(report)
    assert len(str(report).splitlines()) == 1


@pytest.mark.parametrize(
    "step",
    # A virtual step says where its arrays are, which is not here.
    sorted(path.parent for path in GOLDEN.rglob("ckpt.json") if "virtual" not in path.parts),
    ids=lambda path: path.name,
)
def test_what_older_versions_wrote_is_ok(step: Path) -> None:
    for deep in (True, False):
        report = ckpt.sync.verify(step, deep=deep)
        assert report.ok, report
        assert not report.unlisted


def test_a_copy_made_with_any_tool_is_ok(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / str(STEP), tmp_path / "a")
    subprocess.run(["cp", "-r", str(whole / str(STEP)), str(tmp_path / "b")], check=True)
    for name in ("a", "b"):
        assert ckpt.sync.verify(tmp_path / name).ok


def test_files_that_the_manifest_does_not_know_are_told_and_no_problem(step: Path) -> None:
    (step / "model" / "deep").mkdir()
    (step / "model" / "deep" / "stray").write_bytes(b"x")
    (step / ".nfs0001").symlink_to("nowhere")
    for deep in (True, False):
        report = ckpt.sync.verify(step, deep=deep)
        assert report.ok
        assert report.unlisted == (".nfs0001", "model/deep/stray")
        assert "model/deep/stray" in str(report)


def test_without_deep_the_manifest_is_all_that_is_read(tmp_path: Path) -> None:
    asked = []
    for number, size in enumerate((1 << 10, 1 << 24)):
        step_dir = str(number)
        ckpt.sync.save(tmp_path / step_dir, {"w": np.ones(size, np.uint8)})
        storage = Watched(tmp_path)
        assert verified(storage, step_dir, deep=False).ok
        assert storage.bytes_read == 0
        asked.append(storage.calls)
    assert asked == [["read", "files"]] * 2


def test_deep_reads_every_byte_once(whole: Path) -> None:
    storage = Watched(whole)
    report = verified(storage, str(STEP), deep=True)
    files = manifest_of(whole / str(STEP)).files
    assert storage.bytes_read == report.nbytes == sum(file.size for file in files.values())
    assert storage.calls.count("read") == storage.calls.count("files") == 1


def test_a_file_that_the_store_refuses_is_a_problem_of_that_file(root: Path) -> None:
    step = root / str(STEP)
    bad = next(file for file, _ in places(step, "large")).relative_to(step).as_posix()
    (step / "notes" / "text.txt").unlink()
    report = verified(Watched(root, lambda path: path == bad), str(STEP), deep=True)
    assert damaged(report) == {bad, "notes/text.txt"}
    (step / bad).unlink()
    assert hit(report) == refused(root)
    assert all("broken" in each.message for each in report.problems if each.file == bad)
    # A store that cannot list: what is read is still compared.
    report = verified(Watched(root, lambda path: path == ""), str(STEP), deep=True)
    assert damaged(report) == {".", bad, "notes/text.txt"}
    # Or cannot give the manifest.
    report = verified(Watched(root, lambda path: path == "ckpt.json"), str(STEP), deep=True)
    assert damaged(report) == {"ckpt.json"}


# --- How it runs ----------------------------------------------------------------------------------


def test_every_way_to_call_it_gives_the_same(root: Path) -> None:
    trio = pytest.importorskip("trio")
    file, offset = next(places(root / str(STEP), "large"))
    flip(file, offset)

    async def main() -> list[VerifyReport]:
        async with ckpt.CheckpointManager(root, mode="r") as mgr:
            return [
                await ckpt.verify(root / str(STEP)),
                await mgr.verify(),
                await mgr.verify(STEP, deep=True),
            ]

    reports = [*asyncio.run(main()), *trio.run(main), ckpt.sync.verify(root / str(STEP))]
    with ckpt.sync.CheckpointManager(root) as mgr:
        reports += [mgr.verify(), mgr.verify(np.int64(STEP))]
    assert {report.problems for report in reports} == {reports[0].problems}
    assert all(hit(report) == {("model", "large")} for report in reports)
    assert {report.step for report in reports} == {STEP}


def test_the_latest_step_is_the_default(root: Path) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(9, {"w": np.ones(3)}).result()
        assert mgr.verify().step == 9
        assert mgr.verify(STEP).step == STEP


def test_it_writes_nothing(whole: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        found = [whole, *whole.rglob("*")]
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in found}

    before = state()
    with ckpt.sync.CheckpointManager(whole, mode="r") as mgr:
        mgr.verify()
    ckpt.sync.verify(whole / str(STEP))
    assert state() == before


def test_a_manager_tells_its_observers_and_the_log(
    whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[ckpt.types.Event] = []
    caplog.set_level(logging.INFO, logger="ckpt")
    with ckpt.sync.CheckpointManager(whole, mode="r", observers=[events.append]) as mgr:
        report = mgr.verify()
    assert {(event.operation, event.step) for event in events} == {("verify", STEP)}
    reads = [event for event in events if event.phase == "read"]
    assert sum(event.nbytes for event in reads) == report.nbytes
    assert len({event.lane for event in reads}) > 1
    opened, record = [each for each in caplog.records if each.levelno >= logging.INFO]
    assert "1 step" in opened.getMessage()
    assert "verified" in record.getMessage()
    assert "0 problems" in record.getMessage()


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_a_step_that_is_deleted_or_replaced_meanwhile_is_an_error(root: Path, what: str) -> None:
    other = ckpt.sync.CheckpointManager(root)
    done: list[str] = []

    def interfere(event: ckpt.types.Event) -> None:
        # On the thread that reads: it goes on once the step is gone.
        if event.operation == "verify" and not done:
            done.append(what)
            if what == "deleted":
                other.delete(STEP)
            else:
                other.save(STEP, {"w": np.ones(3)}, if_exists="replace", force=True).result()

    with other, ckpt.sync.CheckpointManager(root, observers=[interfere]) as mgr:
        with pytest.raises(errors.StepDeletedError) as caught:
            mgr.verify(STEP)
        assert caught.value.step == STEP
        assert what in caught.value.message
        done.clear()
        if what == "replaced":
            # Of the latest step the one that is there now is taken.
            other.save(STEP, model(), if_exists="replace", force=True).result()
            assert mgr.verify().ok


def scanners() -> list[Scanner]:
    return [each for each in gc.get_objects() if isinstance(each, Scanner)]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancelling_stops_the_reading_and_gives_the_memory_back(whole: Path, backend: str) -> None:
    begun, held = threading.Event(), threading.Event()
    events: list[ckpt.types.Event] = []

    def hold(event: ckpt.types.Event) -> None:
        events.append(event)
        begun.set()
        assert held.wait(PATIENCE_S)

    async def main() -> None:
        async with ckpt.CheckpointManager(whole, mode="r", observers=[hold]) as mgr:
            with anyio.fail_after(PATIENCE_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(mgr.verify)
                    # The caller's loop goes on while the library's own is held.
                    await anyio.to_thread.run_sync(begun.wait)
                    tasks.cancel_scope.cancel()
                    # Let it reach the library's loop before that one goes on.
                    with anyio.CancelScope(shield=True):
                        for _ in range(10):
                            await checkpoint()
                    held.set()
            until_cancelled = len(events)
            assert all(not scanner._regions for scanner in scanners())
            assert (await mgr.verify()).ok
            assert until_cancelled < (len(events) - until_cancelled) / 2

    anyio.run(main, backend=backend)


BOUNDED = """
import sys
from pathlib import Path
import ckpt
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
ckpt.sync.verify(sys.argv[1])
before = peak()
report = ckpt.sync.verify(sys.argv[2])
print(len(report.problems), report.nbytes >> 20, peak() - before)
"""


def test_a_large_file_takes_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    # One chunk of 64 MiB in one file, and one file of a handler as large.
    nbytes = 64 << 20
    ckpt.sync.save(tmp_path / "small", {"w": np.ones(1000)})
    ckpt.sync.save(tmp_path / "large", items={"blob": b"x", "tree": {"w": np.ones(9)}})

    def grow(document: dict[str, Any]) -> None:
        whole = digest(bytes(nbytes))
        length = {"shape": [nbytes], "chunks": [nbytes]}
        change_leaf(
            document["items"]["tree"], 0, dtype="uint8", offsets=[0], digests=[whole], **length
        )
        [path] = document["items"]["tree"]["data_files"]
        for name in (f"tree/{path}", "blob/data.bin"):
            os.truncate(tmp_path / "large" / name, 0)
            os.truncate(tmp_path / "large" / name, nbytes)
            document["files"][name].update(size=nbytes, digest=whole)

    changed(tmp_path / "large", grow)
    flip(tmp_path / "large" / "tree" / manifest_of(tmp_path / "large").items["tree"].data_files[0])
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    problems, read, grown = map(int, done.stdout.split())
    assert (problems, read) == (1, 128)
    assert grown < 40


def test_reports_and_problems_are_plain_values() -> None:
    problem = Problem("model/d/ab", "model", "layers.0.w", "was changed")
    assert str(problem) == "model/d/ab: item 'model', leaf 'layers.0.w': was changed"
    assert str(Problem("ckpt.json", None, None, "is cut")) == "ckpt.json: is cut"
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.file = "x"  # type: ignore[misc]
    assert problem == dataclasses.replace(problem)
