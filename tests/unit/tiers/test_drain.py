"""The drain of one step: whole or not at all, never over another, gone on with where it was cut."""

from __future__ import annotations

import contextlib
import errno
import itertools
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt import errors
from ckpt._runtime.loop import call_once
from ckpt._tiers.drains.drain import missing
from ckpt.storage._resolve import open_root
from tests.support.drained_roots import (
    assert_whole,
    attempts,
    cut,
    drain,
    drained,
    made,
    sizes_below,
)
from tests.support.faults import Fail, FaultyFiles, at


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return Path(made(tmp_path / "near", 1, 2))


@pytest.fixture(params=["disk", "memory"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return tmp_path / "far" if request.param == "disk" else f"memory://{uuid.uuid4().hex}/far"


def swept(root: Path) -> None:
    call_once(open_root(root).sweep)


def test_a_step_is_copied_whole_with_its_pins_and_passed_over_afterwards(
    near: Path, far: Any
) -> None:
    with ckpt.sync.CheckpointManager(near) as mgr:
        mgr.pin(2, "paper")
    done = drained(near, far, 2)
    assert (done.outcome, done.nbytes > 4_800_000) == ("copied", True)
    assert_whole(far, 2)
    with ckpt.sync.CheckpointManager(far, mode="r") as mgr:
        assert [each.name for each in mgr.pins()[2]] == ["paper"]
    again = drained(near, far, 2)
    assert (again.outcome, again.nbytes) == ("there", 0)
    assert_whole(near, 1, 2)


def test_another_step_in_its_place_stays(near: Path, far: Any) -> None:
    with ckpt.sync.CheckpointManager(far) as mgr:
        mgr.save(1, {"mine": np.ones(3)}).result()
    done = drained(near, far, 1)
    assert done.outcome == "blocked"
    assert "already exists" in (done.reason or "")
    with ckpt.sync.CheckpointManager(far, mode="r") as mgr:
        assert list(mgr.restore(1)) == ["mine"]


def test_a_deleted_step_and_a_damaged_one_are_passed_over(near: Path, far: Any) -> None:
    assert drained(near, far, 3).outcome == "deleted"
    file = next(path for path in (near / "1").rglob("d/*") if path.stat().st_size > 1000)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = drained(near, far, 1)
    assert done.outcome == "damaged"
    assert str(file.relative_to(near)) in (done.reason or "")
    with ckpt.sync.CheckpointManager(far) as mgr:
        assert mgr.all_steps() == []


def test_a_copy_that_was_damaged_there_is_made_again(near: Path, tmp_path: Path) -> None:
    drained(near, tmp_path / "far", 1)
    next((tmp_path / "far" / "1").rglob("d/*")).unlink()
    assert drained(near, tmp_path / "far", 1).outcome == "copied"
    assert_whole(tmp_path / "far", 1)


def test_a_drain_that_was_cut_goes_on_with_the_files_that_are_whole(
    near: Path, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    cut(near, far, 1, 3_300_000)
    (left,) = attempts(far)
    whole = sizes_below(near / "1")
    copied = {path: size for path, size in sizes_below(far / left).items() if size > 100_000}
    assert 1 <= len(copied) <= 5
    assert copied.items() <= whole.items()
    with ckpt.sync.CheckpointManager(far, mode="r") as mgr:
        assert mgr.all_steps() == []
    with FaultyFiles(far) as files:
        done = drained(near, far, 1)
    assert done.outcome == "copied"
    assert done.nbytes <= sum(whole.values()) - sum(copied.values())
    assert_whole(far, 1)
    # The one that was cut may have died before it had synced them.
    synced = {each.path for each in files.operations if each.name == "fsync"}
    assert {f"{left}/{path}" for path in copied} <= synced
    # What was not taken over is what a sweep removes.
    swept(far)
    assert attempts(far) == []


def test_it_goes_on_after_several_cuts(near: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    for _ in range(4):
        # Of which the files that are taken over are a part, for they are read.
        cut(near, far, 1, 3_300_000)
    assert drained(near, far, 1).outcome == "copied"
    assert_whole(far, 1)


@pytest.mark.parametrize("how", ["flipped", "short", "long"])
def test_a_file_that_was_not_whole_is_copied_again(near: Path, tmp_path: Path, how: str) -> None:
    far = tmp_path / "far"
    cut(near, far, 1, 3_300_000)
    (left,) = attempts(far)
    for path, size in sizes_below(far / left).items():
        data = bytearray((far / left / path).read_bytes())
        if size:
            data[size // 2] ^= how == "flipped"
        changed = {"flipped": data, "short": data[:-1], "long": data + b"x"}
        (far / left / path).write_bytes(changed[how])
    done = drained(near, far, 1)
    assert done.nbytes >= sum(sizes_below(near / "1").values()) - 10_000
    assert_whole(far, 1)


def test_what_another_save_of_that_step_left_is_not_taken(near: Path, tmp_path: Path) -> None:
    """A writer that died in the same place had other files."""
    far, other = tmp_path / "far", Path(made(tmp_path / "other", 1))
    cut(other, far, 1, 3_300_000)
    done = drained(near, far, 1)
    assert done.nbytes >= sum(sizes_below(near / "1").values()) - 10_000
    assert_whole(far, 1)


def test_a_live_attempt_is_left_alone(near: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"

    async def main() -> None:
        storage = open_root(far)
        await storage.prepare()
        attempt = await storage.begin("1")
        for path in (near / "1").rglob("d/*"):
            data = memoryview(path.read_bytes())
            await storage.write_block(attempt, str(path.relative_to(near / "1")), data)
        before = sizes_below(far)
        await drain(near, far, 1)
        live = {path: size for path, size in sizes_below(far).items() if attempt.id in path}
        assert live.items() <= before.items()
        assert len(live) == len(before)
        await storage.discard(attempt)

    call_once(main)
    assert_whole(far, 1)


def test_a_fault_at_any_operation_shows_nothing_by_halves(near: Path, tmp_path: Path) -> None:
    """And the next drain finishes, whatever the one before has left."""
    shutil.rmtree(near / "2")
    resumed = 0
    for number in itertools.count(1, 9):
        far = tmp_path / f"far-{number}"
        fault = at(number, Fail(errno.EIO))
        with FaultyFiles(far, fault, sync=False) as files, contextlib.suppress(errors.StorageError):
            assert drained(near, far, 1).outcome == "copied"
        if not files.met:
            break
        with ckpt.sync.CheckpointManager(far, mode="r") as mgr:
            assert all(mgr.verify(step).ok for step in mgr.all_steps())
        done = drained(near, far, 1)
        assert done.outcome in ("copied", "there")
        resumed += 0 < done.nbytes < 4_000_000
        assert_whole(far, 1)
        shutil.rmtree(far)
    assert number > 100
    assert resumed > 2


def test_a_full_disk_is_not_kept_full(near: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    written = 0

    def plan(operation: Any) -> Fail | None:
        nonlocal written
        written += operation.name == "pwrite"
        return Fail(errno.ENOSPC) if written > 4 and operation.name == "pwrite" else None

    with FaultyFiles(far, plan), pytest.raises(errors.StorageError) as caught:
        drained(near, far, 1)
    assert caught.value.errno == errno.ENOSPC
    assert sizes_below(far) == {}


def test_what_is_missing(near: Path, far: Any) -> None:
    def found(wanted: list[int] | None = None) -> list[int]:
        async def main() -> list[int]:
            return await missing(open_root(near), open_root(far), wanted)

        return call_once(main)

    assert found() == [2, 1]
    assert found([1, 7]) == [1]
    drained(near, far, 1)
    assert found() == [2]
    drained(near, far, 2)
    assert found() == []
    with ckpt.sync.CheckpointManager(near) as mgr:
        mgr.save(2, {"w": np.zeros(3)}, if_exists="replace").result()
    assert found() == [2]
