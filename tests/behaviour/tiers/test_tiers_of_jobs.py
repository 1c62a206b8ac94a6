"""Several processes save to disks of their own, and their agents make one step of the root."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._settings import Timeouts
from ckpt._tiers.agent.flush import JobPart, flush_of_job
from ckpt.coordination import OwnDisks
from ckpt.errors import InvalidArgumentError, NotInRootError, StorageError
from ckpt.storage._local.storage import LocalStorage
from ckpt.testing.compare import differences
from ckpt.tiers import PeerCopies, SharedMemory, Tier
from tests.support.simulated_job import FAR, closed, coordinators, together
from tests.support.snapshots import PATIENCE_S, shared_memory


# Arrays of numpy, which all processes have alike.
def state_of(step: int) -> dict[str, Any]:
    return {"b": np.full(3, step, np.int8), "step": step, "w": np.arange(200_000) + step}


Managers = Sequence[ckpt.sync.CheckpointManager]


def managers(base: Path, count: int = 2, **options: Any) -> list[ckpt.sync.CheckpointManager]:
    tier = Tier(base / "disk", **options.pop("tier", {}))
    return [
        ckpt.sync.CheckpointManager(
            base / "root",
            coordinator=job,
            tiers=[tier],
            timeouts=Timeouts(coordination=FAR),
            **options,
        )
        for job in coordinators(count)
    ]


def steps_of(root: Path) -> list[int]:
    """Return the steps of a root, all of which must be whole and hold what their number says."""
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        steps = mgr.all_steps()
        for step in steps:
            assert mgr.verify(step, deep=True).ok
            assert differences(state_of(step), mgr.restore(step)) == []
        return steps


def parts_at(base: Path, process: int) -> list[int]:
    names = (path.name for path in disk(base, process).iterdir())
    return sorted(int(name) for name in names if name.isdecimal())


def disk(base: Path, process: int, count: int = 2) -> Path:
    return base / "disk" / f"process_{process}-of-{count}"


def saved(mgrs: Managers, step: int) -> list[Any]:
    """Have all save a step; return the commits."""
    commits = together(*(lambda m=m: m.save(step, state_of(step)) for m in mgrs))
    for commit in commits:
        commit.result(PATIENCE_S)
    return commits


def test_the_parts_of_all_become_a_step_of_the_root(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, 3)
    for step in range(3):
        commits = saved(mgrs, step)
        for process, commit in enumerate(commits):
            assert commit.result().path == str(disk(tmp_path, process, 3) / str(step))
            commit.in_root.result(PATIENCE_S)
        assert step in steps_of(tmp_path / "root")
        # Any program can read it, and it is whole.
        assert differences(state_of(step), ckpt.sync.load(tmp_path / "root" / str(step))) == []
    places = together(*(lambda m=m: m.metadata(1).info.tiers for m in mgrs))
    assert places == [
        (str(disk(tmp_path, process, 3)), str(tmp_path / "root")) for process in range(3)
    ]
    closed(mgrs)
    with ckpt.sync.CheckpointManager(tmp_path / "root") as mgr:
        assert mgr.all_steps() == [0, 1, 2]
        assert mgr.verify(2, deep=True).ok
    # Nothing of the meetings stays but what has become of the steps.
    assert not list((tmp_path / "root").glob(".ckpt-join-parts/*"))


def test_a_job_goes_on_from_its_disks(tmp_path: Path) -> None:
    mgrs = managers(tmp_path)
    for step in range(2):
        for commit in saved(mgrs, step):
            commit.in_root.result(PATIENCE_S)
    closed(mgrs)
    # What is read comes from the disks.
    for path in (tmp_path / "root" / "1").glob("default/d/*"):
        path.write_bytes(b"")
    mgrs = managers(tmp_path)
    found = together(*(lambda m=m: m.resume(lambda: state_of(0)) for m in mgrs))
    assert [start for start, _ in found] == [2, 2]
    assert [differences(state_of(1), state) for _, state in found] == [[], []]
    closed(mgrs)


def test_a_disk_that_is_lost_is_made_up_for_by_the_root(tmp_path: Path) -> None:
    mgrs = managers(tmp_path)
    for commit in saved(mgrs, 4):
        commit.in_root.result(PATIENCE_S)
    closed(mgrs)
    shutil.rmtree(disk(tmp_path, 1))
    mgrs = managers(tmp_path)
    found = together(*(lambda m=m: m.resume(lambda: state_of(0)) for m in mgrs))
    assert [start for start, _ in found] == [5, 5]
    assert [differences(state_of(4), state) for _, state in found] == [[], []]
    for commit in saved(mgrs, 5):
        commit.in_root.result(PATIENCE_S)
    closed(mgrs)
    assert steps_of(tmp_path / "root") == [4, 5]


@pytest.mark.parametrize("process", [0, 1])
def test_a_disk_that_is_lost_with_a_part_that_waits_keeps_no_step_waiting(
    process: int, tmp_path: Path
) -> None:
    mgrs = managers(tmp_path)
    for commit in saved(mgrs, 4):
        commit.in_root.result(PATIENCE_S)
    closed(mgrs)
    shutil.rmtree(tmp_path / "root" / "4")
    shutil.rmtree(disk(tmp_path, process))
    mgrs = managers(tmp_path)
    assert together(*(m.all_steps for m in mgrs)) == [[], []]
    for commit in saved(mgrs, 5):
        commit.in_root.result(PATIENCE_S)
    closed(mgrs)
    assert steps_of(tmp_path / "root") == [5]


def test_the_primary_decides_what_is_copied_on(tmp_path: Path) -> None:
    tier = {"drain": ckpt.save_when.EverySteps(3), "keep": ckpt.keep.Latest(2)}
    mgrs = managers(tmp_path, tier=tier, keep=ckpt.keep.Latest(3))
    commits = [saved(mgrs, step) for step in range(8)]
    for step in (0, 3, 6):
        for commit in commits[step]:
            commit.in_root.result(PATIENCE_S)
    for commit in commits[4]:
        with pytest.raises(NotInRootError, match="drain="):
            commit.in_root.result(PATIENCE_S)
    together(*(m.wait_until_finished for m in mgrs))
    closed(mgrs)
    # The newest goes on when the run ends.
    assert 7 in steps_of(tmp_path / "root")
    assert set(steps_of(tmp_path / "root")) <= {0, 3, 6, 7}
    assert len(steps_of(tmp_path / "root")) <= 4
    assert parts_at(tmp_path, 0) == parts_at(tmp_path, 1)
    assert set(parts_at(tmp_path, 0)) >= {6, 7}


def test_a_policy_that_fails_lets_no_process_wait(tmp_path: Path) -> None:
    def fails(*given: Any) -> bool:
        raise RuntimeError("on purpose")

    mgrs = managers(tmp_path, tier={"drain": fails})
    for commit in saved(mgrs, 1):
        with pytest.raises(NotInRootError, match="on purpose"):
            commit.in_root.result(PATIENCE_S)
    closed(mgrs)


def test_what_a_run_has_left_is_copied_by_the_next(tmp_path: Path) -> None:
    root = tmp_path / "root"
    mgrs = managers(tmp_path)
    for commit in saved(mgrs, 1):
        commit.in_root.result(PATIENCE_S)
    closed(mgrs)
    shutil.rmtree(root / "1")
    mgrs = managers(tmp_path)
    assert together(*(m.all_steps for m in mgrs)) == [[1], [1]]
    closed(mgrs)
    assert steps_of(root) == [1]
    assert differences(state_of(1), ckpt.sync.load(root / "1")) == []


def test_parts_of_a_job_of_another_size_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mgrs = managers(tmp_path)
    saved(mgrs, 1)
    closed(mgrs)
    # Of no job.
    (tmp_path / "disk" / "process_0-of-7").write_text("")
    mgrs = managers(tmp_path, 3)
    assert together(*(m.all_steps for m in mgrs)) == [[1]] * 3
    closed(mgrs)
    with ckpt.sync.CheckpointManager(tmp_path / "root", tiers=[Tier(tmp_path / "disk")]) as mgr:
        assert mgr.all_steps() == [1]
    said = [
        each.message for each in caplog.records if "steps of a job of 2 processes" in each.message
    ]
    assert ["this one has 3" in each for each in said] == [True, False]
    assert all(str(tmp_path / "disk") in each for each in said)


def test_a_flush_that_cannot_be_offered_leaves_nothing(tmp_path: Path) -> None:
    mgrs = managers(tmp_path)
    saved(mgrs, 1)
    closed(mgrs)
    memory, root = tmp_path / "memory", tmp_path / "other"
    shutil.copytree(disk(tmp_path, 0), memory / "steps")
    root.mkdir()
    (root / ".ckpt-join-offers").write_text("in the way")
    target = LocalStorage(root, Timeouts())
    with pytest.raises(StorageError, match="ckpt-join-offers"):
        anyio.run(flush_of_job, JobPart(memory, 0, 2), target, -1, 5.0)
    assert [path.name for path in memory.iterdir()] == ["steps"]


def test_what_a_job_cannot_have(tmp_path: Path) -> None:
    jobs = coordinators(2)

    def refused(*tiers: Tier, job: Any = jobs[0]) -> str:
        with pytest.raises(InvalidArgumentError) as caught:
            ckpt.sync.CheckpointManager(tmp_path / "root", coordinator=job, tiers=list(tiers))
        return str(caught.value)

    assert "one Tier at most" in refused(Tier(tmp_path / "a"), Tier(tmp_path / "b"))
    assert "expected a directory" in refused(Tier("s3://bucket/run"))
    assert "OwnDisks" in refused(Tier(tmp_path / "a"), job=OwnDisks(jobs[0]))
    mgrs = managers(tmp_path)
    for commit in saved(mgrs, 1):
        commit.in_root.result(PATIENCE_S)
    with pytest.raises(InvalidArgumentError, match="prefetch"):
        mgrs[0].prefetch(1)
    closed(mgrs)


def test_arrays_of_all_kinds_come_back(tmp_path: Path) -> None:
    mgrs = managers(tmp_path)
    state = {
        "same": np.arange(300_000, dtype=np.int16),
        "other": [np.float32(3), 4, None, "text", 2.5],
    }
    for step in range(3):
        state["other"] = [np.float32(step), step, None, "text", 2.5]
        commits = together(*(lambda m=m, s=step: m.save(s, state) for m in mgrs))
        for commit in commits:
            commit.in_root.result(PATIENCE_S)
    closed(mgrs)
    assert differences(state, ckpt.sync.load(tmp_path / "root" / "2")) == []


def with_copies(base: Path, memory: Path, *copies: PeerCopies) -> list[ckpt.sync.CheckpointManager]:
    """Return a manager of each process, with snapshots in memory that has copies on peers."""
    return [
        ckpt.sync.CheckpointManager(
            base,
            coordinator=job,
            tiers=[SharedMemory(directory=str(memory), peers=peers)],
            timeouts=Timeouts(coordination=FAR),
        )
        for job, peers in zip(coordinators(len(copies)), copies, strict=True)
    ]


def test_a_process_that_is_alone_has_no_peers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with shared_memory() as memory:
        closed(with_copies(tmp_path, memory, PeerCopies()))
    assert "this process is alone, so there are no peers" in caplog.text


def test_no_process_has_its_copies_at_itself(tmp_path: Path) -> None:
    copies = pytest.raises(InvalidArgumentError, match="each would have its copies at itself")
    with shared_memory() as memory, copies:
        with_copies(tmp_path, memory, PeerCopies(distance=4), PeerCopies(distance=4))


def test_a_port_that_another_program_has_is_told_and_stops_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with shared_memory() as memory, socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        other.listen()
        address, port = other.getsockname()
        mgrs = with_copies(tmp_path, memory, PeerCopies(address=address, port=port), PeerCopies())
        states = together(*(lambda m=m: m.resume(lambda: state_of(0)) for m in mgrs))
        assert [start for start, _ in states] == [0, 0]
        closed(mgrs)
    assert f"it cannot listen at {address}:{port}" in caplog.text


def test_an_agent_is_told_how_long_it_keeps_the_memory_of_a_dead_process(tmp_path: Path) -> None:
    with shared_memory() as memory:
        tier = SharedMemory(directory=str(memory), kept_seconds=7.0)
        with ckpt.sync.CheckpointManager(tmp_path, tiers=[tier]) as mgr:
            agent: Any = mgr._service._agent  # type: ignore[attr-defined]
            assert agent._setup.snapshots.kept_seconds == 7.0
