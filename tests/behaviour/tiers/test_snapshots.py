"""A snapshot in memory outlives its process, and one that is started again goes on from it."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import InvalidArgumentError, StepNotFoundError
from ckpt.testing.compare import differences
from ckpt.tiers import SharedMemory
from tests.support.numbered_states import state_of
from tests.support.snapshots import shared_memory, steps_of, trainer

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def manager(root: Path, memory: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    tier = {"directory": str(memory), "flush": False} | options.pop("tier", {})
    return ckpt.sync.CheckpointManager(root, tiers=[SharedMemory(**tier)], **options)


def files_below(folder: Path) -> list[Path]:
    # Steps are removed meanwhile: that of `pathlib` raises where a directory goes.
    return [Path(top, name) for top, _, names in os.walk(folder) for name in names]


def test_a_killed_process_goes_on_from_its_last_snapshot(tmp_path: Path, memory: Path) -> None:
    root = tmp_path / "run"
    with trainer(root, memory, "die", 3, 4, "keep") as first:
        out, _ = first.end()
    assert [line for line in out if line] == ["start 0", "ack 3", "ack 4", "ack 5", "ack 6"]
    assert steps_of(root) == []
    with manager(root, memory) as mgr:
        assert mgr.latest_step() == 6
        assert mgr.all_steps()[-1] == 6
        step, state = mgr.resume(lambda: state_of(0))
        assert step == 7
        assert state["number"] == 6
        assert differences(state_of(6), mgr.restore()) == []
        assert mgr.verify(6).ok
        info = mgr.metadata(6).info
        assert len(info.tiers) == 1
        assert info.tiers[0].startswith(str(memory))


def test_a_clean_end_gives_the_memory_back(tmp_path: Path, memory: Path) -> None:
    with trainer(tmp_path / "run", memory, "wait", 0, 3) as run:
        run.lines(until="ack 2")
        assert files_below(memory)
        assert run.end()[1].count("Error") == 0
    assert list(memory.iterdir()) == []


def test_only_its_owner_may_read_a_snapshot(tmp_path: Path, memory: Path) -> None:
    with manager(tmp_path / "run", memory) as mgr:
        mgr.snapshot(1, state_of(1)).result()
        for path in memory.rglob("*"):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode & 0o077 == 0, (path, oct(mode))
        assert len(files_below(memory)) > 3


def test_a_snapshot_replaces_the_one_before(tmp_path: Path, memory: Path) -> None:
    with manager(tmp_path / "run", memory) as mgr:
        for step in range(6):
            mgr.snapshot(step, state_of(step)).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [5]
        # The same step once more, and an earlier one: the run has gone back.
        mgr.snapshot(5, state_of(7)).result()
        assert differences(state_of(7), mgr.restore(5)) == []
        mgr.snapshot(2, state_of(2)).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [2]
        assert differences(state_of(2), mgr.restore()) == []


def test_the_newest_place_is_read(tmp_path: Path, memory: Path) -> None:
    root = tmp_path / "run"
    with manager(root, memory) as mgr:
        mgr.save(1, state_of(1)).result()
        mgr.snapshot(2, state_of(2)).result()
        assert mgr.all_steps() == [1, 2]
        assert mgr.resume(lambda: state_of(0))[0] == 3
        mgr.save(3, state_of(3)).result()
        mgr.wait_until_finished()
        assert mgr.latest_step() == 3
        assert differences(state_of(3), mgr.restore()) == []
        assert differences(state_of(2), mgr.restore(2)) == []
        mgr.snapshot(3, state_of(3)).result()
        # The snapshot before is gone then.
        mgr.wait_until_finished()
        where = mgr.metadata(3).info.tiers
        assert [place.startswith(str(memory)) for place in where] == [True, False]
        with pytest.raises(StepNotFoundError, match="its tiers have steps 1, 3"):
            mgr.restore(17)
        mgr.delete(3)
        assert 3 not in mgr.all_steps()
    assert steps_of(root) == [1]


def test_a_torn_snapshot_is_passed_over(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    with manager(root, memory) as mgr:
        mgr.save(4, state_of(4)).result()
    with trainer(root, memory, "die", 6, 1, "keep") as first:
        first.end()
    large = max(files_below(memory), key=lambda path: path.stat().st_size)
    data = bytearray(large.read_bytes())
    data[len(data) // 2] ^= 1
    large.write_bytes(data)
    with manager(root, memory) as mgr:
        step, state = mgr.resume(lambda: state_of(0))
        assert step == 5
        assert state["number"] == 4
        [said] = [each for each in caplog.messages if "passed over" in each]
        assert "step 6" in said
        # What was passed over makes way.
        mgr.snapshot(5, state_of(5)).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [4, 5]


def test_half_a_snapshot_is_none(tmp_path: Path, memory: Path) -> None:
    with trainer(tmp_path / "run", memory, "die", 6, 1, "keep") as first:
        first.end()
    [manifest] = memory.rglob("ckpt.json")
    manifest.unlink()
    with manager(tmp_path / "run", memory) as mgr:
        assert mgr.resume(lambda: state_of(0))[0] == 0


def test_a_run_that_was_begun_anew_finds_nothing_of_the_one_before(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    with trainer(root, memory, "die", 5, 2, "keep") as first:
        first.end()
    root.rename(tmp_path / "old")
    with manager(root, memory) as mgr:
        assert mgr.resume(lambda: state_of(0))[0] == 0
        assert mgr.all_steps() == []
    [said] = [each for each in caplog.messages if "earlier run" in each]
    assert str(root) in said


def test_runs_on_one_host_do_not_meet(tmp_path: Path, memory: Path) -> None:
    with manager(tmp_path / "a", memory) as a, manager(tmp_path / "b", memory) as b:
        a.snapshot(1, state_of(1)).result()
        b.snapshot(2, state_of(2)).result()
        assert (a.all_steps(), b.all_steps()) == ([1], [2])
    assert list(memory.iterdir()) == []


def test_two_processes_of_one_run(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one is told, and saves as ever."""
    root = tmp_path / "run"
    with trainer(root, memory, "wait", 0, 2) as first:
        first.lines(until="ack 1")
        with manager(root, memory) as mgr:
            commit = mgr.snapshot(8, state_of(8))
            assert not commit
            assert commit.skipped is not None
            assert f"process {first.process.pid} takes snapshots of this run" in commit.skipped
            assert mgr.save(8, state_of(8)).result().step == 8
        first.end()
    [said] = [each for each in caplog.messages if "takes snapshots of this run" in each]
    assert "Training goes on without snapshots in memory" in said


def test_no_room(tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of(1)
    with manager(tmp_path / "run", memory, tier={"budget_bytes": 8 * MIB}) as mgr:
        for step in range(3):
            commit = mgr.snapshot(step, state)
            assert not commit
            assert "the budget is 8 MiB" in str(commit.skipped)
        assert mgr.all_steps() == []
        mgr.save(3, state).result()
        mgr.snapshot(4, {"w": np.ones(9)}).result()
        assert mgr.all_steps() == [3, 4]
    assert len([each for each in caplog.messages if "was not kept in memory" in each]) == 1


@pytest.mark.parametrize("what", ["a file", "open to others", "a link"])
def test_a_folder_that_is_not_ours(
    what: str, tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = memory / f"ckpt-{os.getuid()}"
    if what == "a file":
        place.write_text("mine")
    elif what == "a link":
        place.symlink_to(tmp_path)
    else:
        place.mkdir(mode=0o777)
        place.chmod(0o777)
    with manager(tmp_path / "run", memory) as mgr:
        assert not mgr.snapshot(1, state_of(1))
        mgr.save(2, state_of(2)).result()
        assert mgr.all_steps() == [2]
    [said] = [each for each in caplog.messages if "cannot keep snapshots" in each]
    assert str(place) in said


def test_what_does_not_change_is_kept_once(tmp_path: Path, memory: Path) -> None:
    frozen = {f"w{n}": jnp.full((MIB // 4,), n, jnp.float32) for n in range(8)}
    with manager(tmp_path / "run", memory) as mgr:
        shared = []
        for step in range(4):
            info = mgr.snapshot(step, {"base": frozen, "step": jnp.full(9, step)}).result()
            shared.append(info.statistics.shared_bytes)
        assert shared[0] == 0
        assert min(shared[1:]) >= 8 * MIB
        # A save to the root shares with the save before, not with a snapshot.
        assert mgr.save(4, {"base": frozen}).result().statistics.shared_bytes == 0
        assert differences({"base": frozen, "step": jnp.full(9, 3)}, mgr.restore(3)) == []


def test_the_caller_may_donate_what_it_has_passed(tmp_path: Path, memory: Path) -> None:
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    with manager(tmp_path / "run", memory) as mgr:
        w = jnp.zeros(MIB)
        for step in range(20):
            commit = mgr.snapshot(step, {"w": w})
            w = add(w)
            if step % 5 == 4:
                commit.result()
                assert float(mgr.restore(step)["w"].sum()) == step * MIB


@pytest.mark.anyio
async def test_with_asyncio(tmp_path: Path, memory: Path) -> None:
    tier = SharedMemory(directory=str(memory), flush=False)
    async with ckpt.CheckpointManager(tmp_path / "run", tiers=[tier]) as mgr:
        commit = await mgr.snapshot(3, items={"params": state_of(3), "note": "text"})
        info = await commit
        assert info.step == 3
        assert await mgr.latest_step() == 3
        found = await mgr.restore()
        assert found["note"] == "text"
        assert differences(state_of(3), found["params"]) == []
    assert list(memory.iterdir()) == []


def test_wrong_arguments(tmp_path: Path) -> None:
    make = ckpt.sync.CheckpointManager
    with make(tmp_path / "a") as mgr, pytest.raises(InvalidArgumentError, match="no tier in mem"):
        mgr.snapshot(1, {"w": 1})
    for tiers, text in [
        (SharedMemory(), r"tiers=\[SharedMemory"),
        (["/nvme"], "a list of tiers"),
        ("/nvme", "a list of tiers"),
        ([SharedMemory(), SharedMemory()], "one SharedMemory is enough"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            make(tmp_path / "a", tiers=tiers)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="mode='r'"):
        make(tmp_path / "a", tiers=[SharedMemory()], mode="r")
    with pytest.raises(InvalidArgumentError, match="memory://"):
        make("memory://here/run", tiers=[SharedMemory()])
    for options, text in [
        ({"budget_bytes": 0}, "budget_bytes"),
        ({"grace_seconds": -1}, "grace_seconds"),
        ({"kept_seconds": -1}, "kept_seconds"),
        ({"peers": "10.0.0.7"}, r"ckpt.tiers.PeerCopies\(address="),
        ({"directory": "shm"}, "an absolute path"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            SharedMemory(**options)  # type: ignore[arg-type]


def test_errors_of_snapshots_reach_their_owner(tmp_path: Path, memory: Path) -> None:
    with manager(tmp_path / "run", memory) as mgr:
        with pytest.raises(ckpt.errors.UnsupportedLeafError):
            mgr.snapshot(1, {"w": object()})
        logging.getLogger("ckpt").debug("and it goes on")
        mgr.snapshot(2, {"w": np.ones(3)}).result()
