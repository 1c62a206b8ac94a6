"""Saves are committed at the nearest place, and copied on behind the training."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import InvalidArgumentError, NotInRootError, StepNotFoundError
from ckpt.testing.compare import differences
from ckpt.tiers import SharedMemory, Tier
from tests.support.command import environment
from tests.support.conditions import until
from tests.support.forked_programs import run
from tests.support.numbered_states import state_of
from tests.support.snapshots import PATIENCE_S, shared_memory, steps_of


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def manager(base: Path, *, root: Any = None, **options: Any) -> ckpt.sync.CheckpointManager:
    tier = options.pop("tier", {})
    return ckpt.sync.CheckpointManager(
        base / "root" if root is None else root, tiers=[Tier(base / "disk", **tier)], **options
    )


def test_a_save_is_committed_near_and_arrives_in_the_root(tmp_path: Path) -> None:
    with manager(tmp_path) as mgr:
        for step in range(3):
            commit = mgr.save(step, state_of(step), metrics={"loss": step})
            info = commit.result()
            assert info.path == str(tmp_path / "disk" / str(step))
            commit.in_root.result(PATIENCE_S)
            assert commit.in_root.done()
            assert step in steps_of(tmp_path / "root")
        places = mgr.metadata(1).info.tiers
        assert places == (str(tmp_path / "disk"), str(tmp_path / "root"))
        assert mgr.best_step("loss", "min") == 0
        assert mgr.directory == tmp_path / "root"
    assert steps_of(tmp_path / "root") == steps_of(tmp_path / "disk") == [0, 1, 2]


def test_leaving_the_block_waits_for_the_root(tmp_path: Path) -> None:
    with manager(tmp_path) as mgr:
        commits = [mgr.save(step, state_of(step)) for step in range(4)]
    assert steps_of(tmp_path / "root") == [0, 1, 2, 3]
    assert all(commit.in_root.done() for commit in commits)


def test_each_place_keeps_what_its_policy_says(tmp_path: Path) -> None:
    tier = {"keep": ckpt.keep.Latest(2), "drain": ckpt.save_when.EverySteps(3)}
    with manager(tmp_path, tier=tier, keep=ckpt.keep.Latest(2)) as mgr:
        commits = [mgr.save(step, state_of(step)) for step in range(11)]
        mgr.wait_until_finished()
        with pytest.raises(NotInRootError, match="drain="):
            commits[4].in_root.result(PATIENCE_S)
        for step in (0, 3, 6, 9):
            commits[step].in_root.result(PATIENCE_S)
        assert set(mgr.all_steps()) >= {6, 9, 10}
        assert differences(state_of(6), mgr.restore(6)) == []
    # The last one goes on when the run ends.
    assert 10 in steps_of(tmp_path / "root")
    assert set(steps_of(tmp_path / "root")) <= {3, 6, 9, 10}
    assert set(steps_of(tmp_path / "disk")) >= {9, 10}
    with manager(tmp_path, tier=tier, keep=ckpt.keep.Latest(2)) as mgr:
        assert mgr.latest_step() == 10
        mgr.wait_until_finished()
    assert steps_of(tmp_path / "root") == [9, 10]


def test_steps_that_stay_do_not_add_up(tmp_path: Path) -> None:
    """A long run that copies few of its steps keeps only the newest of the others in mind."""
    with manager(tmp_path, tier={"drain": ckpt.save_when.EverySteps(1000)}) as mgr:
        for step in range(1, 12):
            mgr.save(step, {"w": step}).result()
        mgr.wait_until_finished()
        assert len(mgr._service.drains.greeting()) == 1  # type: ignore[attr-defined]
    with ckpt.sync.CheckpointManager(tmp_path / "root") as plain:
        assert plain.all_steps() == [11]


def test_what_is_near_is_read_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager(tmp_path) as mgr:
        for step in (1, 2):
            mgr.save(step, state_of(step)).in_root.result(PATIENCE_S)

        def break_at(place: str, step: int) -> None:
            files = (tmp_path / place / str(step)).rglob("d/*")
            large = max(files, key=lambda path: path.stat().st_size)
            data = bytearray(large.read_bytes())
            data[len(data) // 2] ^= 1
            large.unlink()
            large.write_bytes(data)

        break_at("root", 1)
        assert differences(state_of(1), mgr.restore(1)) == []
        break_at("disk", 2)
        assert differences(state_of(2), mgr.restore()) == []
        [said] = [each for each in caplog.messages if "read instead" in each]
        assert str(tmp_path / "disk") in said
        assert not mgr.verify(2).ok
        assert not mgr.verify(1).ok
        # Neither copy of step 1 is whole now.
        break_at("disk", 1)
        with pytest.raises(ckpt.errors.CorruptCheckpointError):
            mgr.restore(1)
        mgr.delete(1)
        assert mgr.all_steps() == [2]
        with pytest.raises(StepNotFoundError):
            mgr.restore(1)


def test_a_disk_that_is_lost(tmp_path: Path) -> None:
    with manager(tmp_path) as mgr:
        mgr.save(5, state_of(5))
    (tmp_path / "disk").rename(tmp_path / "lost")
    with manager(tmp_path) as mgr:
        step, state = mgr.resume(lambda: state_of(0))
        assert step == 6
        assert state["number"] == 5
        mgr.save(6, state_of(6)).in_root.result(PATIENCE_S)
    assert steps_of(tmp_path / "root") == [5, 6]
    assert steps_of(tmp_path / "disk") == [6]


def test_pins_hold_everywhere(tmp_path: Path) -> None:
    tier = {"keep": ckpt.keep.Latest(1)}
    with manager(tmp_path, tier=tier, keep=ckpt.keep.Latest(1)) as mgr:
        mgr.save(1, state_of(1)).in_root.result(PATIENCE_S)
        mgr.pin(1, "paper")
        for step in (2, 3):
            mgr.save(step, state_of(step)).in_root.result(PATIENCE_S)
        mgr.wait_until_finished()
        assert [pin.name for pin in mgr.pins()[1]] == ["paper"]
        root, disk = tmp_path / "root", tmp_path / "disk"
        until(lambda: not ((root / "2").exists() or (disk / "2").exists()))
        assert steps_of(root) == steps_of(disk) == [1, 3]
        assert mgr.unpin(1, "paper")


def test_three_places(tmp_path: Path) -> None:
    tiers = [Tier(tmp_path / "a", keep=ckpt.keep.Latest(1)), Tier(tmp_path / "b")]
    with ckpt.sync.CheckpointManager(tmp_path / "root", tiers=tiers) as mgr:
        for step in range(3):
            mgr.save(step, state_of(step)).in_root.result(PATIENCE_S)
            assert step in steps_of(tmp_path / "b")
        assert mgr.all_steps() == [0, 1, 2]
    assert steps_of(tmp_path / "root") == steps_of(tmp_path / "b") == [0, 1, 2]


def test_what_a_farther_tier_keeps_to_itself_stays_there(tmp_path: Path) -> None:
    near, far = Tier(tmp_path / "a"), Tier(tmp_path / "b", drain=ckpt.save_when.EverySteps(10))
    with ckpt.sync.CheckpointManager(tmp_path / "root", tiers=[near, far]) as mgr:
        for step in range(10, 14):
            commit = mgr.save(step, state_of(step))
            if step == 10:
                commit.in_root.result(PATIENCE_S)
            else:
                with pytest.raises(NotInRootError, match="drain="):
                    commit.in_root.result(PATIENCE_S)
    # The last one goes on when the run ends.
    assert steps_of(tmp_path / "root") == [10, 13]
    assert steps_of(tmp_path / "b") == [10, 11, 12, 13]


def test_snapshots_and_a_disk(tmp_path: Path, memory: Path) -> None:
    """With memory, a disk and a root, the newest whole state counts wherever it is."""
    tiers: list[SharedMemory | Tier] = [
        SharedMemory(directory=str(memory)),
        Tier(tmp_path / "disk"),
    ]

    def train() -> None:
        with ckpt.sync.CheckpointManager(tmp_path / "root", tiers=tiers) as mgr:
            mgr.save(1, state_of(1)).in_root.result(PATIENCE_S)
            mgr.snapshot(2, state_of(2)).result()
            assert mgr.latest_step() == 2
            assert len(mgr.metadata(1).info.tiers) == 2
            raise ValueError("the training has failed")

    with pytest.raises(ValueError, match="has failed"):
        train()
    assert steps_of(tmp_path / "root") == [1, 2]
    assert list(memory.iterdir()) == []
    with ckpt.sync.CheckpointManager(tmp_path / "root", tiers=tiers) as mgr:
        assert mgr.resume(lambda: state_of(0))[0] == 3


SCRIPT = """
import os, signal, sys
import ckpt, ckpt.sync
from tests.support.numbered_states import state_of

disk, root, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
tier = ckpt.tiers.Tier(disk, bytes_per_second=float(sys.argv[4]))
mgr = ckpt.sync.CheckpointManager(root, tiers=[tier])
mgr.__enter__()
latest = mgr.latest_step()
first = 0 if latest is None else latest + 1
for step in range(first, first + count):
    mgr.save(step, state_of(step)).result()
    os.write(1, f"ack {step}\\n".encode())
os.kill(os.getpid(), signal.SIGKILL)
"""


def trained(script: str, top: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a trainer, and what its agent has to copy then, to the end."""
    return run("-c", script, top / "disk", top / "root", *arguments, env=environment({}))


def test_steps_are_copied_on_when_the_trainer_is_killed(tmp_path: Path) -> None:
    done = trained(SCRIPT, tmp_path, 3, 1e9)
    assert done.returncode == -signal.SIGKILL
    assert "ack 2" in done.stdout
    assert steps_of(tmp_path / "root") == [0, 1, 2]


def test_the_next_run_goes_on_with_what_waits(tmp_path: Path) -> None:
    """Trainer and agent are killed together, as with their host."""
    # 7.5 MiB a step: none of them arrives.
    end = "os.kill(os.getpid(), signal.SIGKILL)"
    script = SCRIPT.replace(end, f"os.kill(mgr._service._agent._process.pid, 9)\n{end}")
    trained(script, tmp_path, 2, 1e5)
    assert steps_of(tmp_path / "root") == []
    assert steps_of(tmp_path / "disk") == [0, 1]
    with manager(tmp_path) as mgr:
        assert mgr.latest_step() == 1
    assert steps_of(tmp_path / "root") == [0, 1]


def test_a_place_that_cannot_be_reached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on; what cannot be copied stays, and is named."""
    timeouts = ckpt.Timeouts(exit=1.0)
    with manager(tmp_path, timeouts=timeouts) as mgr:
        mgr.save(0, state_of(0)).in_root.result(PATIENCE_S)
        (tmp_path / "root").rename(tmp_path / "away")
        (tmp_path / "root").write_text("in the way")
        commits = [mgr.save(step, state_of(step)) for step in (1, 2)]
        for commit in commits:
            assert commit.result().step == commit.step
    with pytest.raises(NotInRootError):
        commits[1].in_root.result(0)
    assert [each for each in caplog.messages if "steps 1, 2 were not copied" in each]
    (tmp_path / "root").unlink()
    (tmp_path / "away").rename(tmp_path / "root")
    with manager(tmp_path) as mgr:
        assert mgr.all_steps() == [0, 1, 2]
    assert steps_of(tmp_path / "root") == [0, 1, 2]


def test_a_step_that_cannot_be_copied_is_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the log, by observers and by who waits for it, once and at once; the run goes on."""
    events: list[ckpt.types.Event] = []
    with manager(tmp_path, observers=[events.append]) as mgr:
        mgr.save(1, state_of(1)).in_root.result(PATIENCE_S)
        with ckpt.sync.CheckpointManager(tmp_path / "root") as other:
            other.save(2, state_of(7)).result()
        commit = mgr.save(2, state_of(2))
        assert commit.result().step == 2
        with pytest.raises(NotInRootError, match="step 2"):
            commit.in_root.result(PATIENCE_S)
        # Said by the time at which who waits for it hears of it.
        [said] = [each for each in caplog.records if "NOT copied" in each.getMessage()]
        mgr.save(3, state_of(3)).in_root.result(PATIENCE_S)
    text = said.getMessage()
    assert said.levelname == "ERROR"
    assert text.startswith(f"step 2 of {tmp_path}/disk was NOT copied to {tmp_path}/root: ")
    assert text.endswith("the newest durable step there is 1")
    ends = [each for each in events if each.operation == "drain"]
    assert [(each.step, each.outcome) for each in ends] == [(1, "ok"), (2, "failed"), (3, "ok")]
    assert ends[1].reason
    assert ends[1].reason in text
    assert len([each for each in caplog.messages if "NOT copied" in each]) == 1
    assert not [each for each in caplog.messages if "in time" in each]


def test_who_waits_for_a_step_that_vanishes_hears_of_it_at_once(tmp_path: Path) -> None:
    """Nothing is left to be decided about it."""

    def remove(event: ckpt.types.Event) -> None:
        if (event.operation, event.phase, event.step) == ("save", "end", 2):
            shutil.rmtree(tmp_path / "disk" / "2")

    with manager(tmp_path, observers=[remove]) as mgr:
        mgr.save(1, state_of(1)).in_root.result(PATIENCE_S)
        with pytest.raises(NotInRootError, match="deleted before it was copied"):
            mgr.save(2, state_of(2)).in_root.result(PATIENCE_S)
        mgr.save(3, state_of(3)).in_root.result(PATIENCE_S)
    assert steps_of(tmp_path / "root") == [1, 3]


def test_a_step_that_cannot_be_copied_is_heard_after_the_trainer(tmp_path: Path) -> None:
    """Then its agent says so: nobody else does."""
    with ckpt.sync.CheckpointManager(tmp_path / "root") as other:
        other.save(1, state_of(7)).result()
    script = SCRIPT.replace("latest = mgr.latest_step()", "latest = 0")
    done = trained(script, tmp_path, 1, 1e5)
    assert "step 1 was NOT copied on: " in done.stderr
    assert done.stderr.count("copied") == 1


def test_a_last_step_that_cannot_go_on_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its policy does not want it in the root, but for the end of the run."""
    with manager(
        tmp_path, tier={"drain": ckpt.save_when.EverySteps(9)}, timeouts=ckpt.Timeouts(exit=1)
    ) as mgr:
        mgr.save(0, state_of(0)).in_root.result(PATIENCE_S)
        (tmp_path / "root").rename(tmp_path / "away")
        (tmp_path / "root").write_text("in the way")
        mgr.save(1, state_of(1)).result()
    assert [each for each in caplog.messages if "steps 1 were not copied" in each]


@pytest.mark.anyio
async def test_with_asyncio(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "disk")
    async with ckpt.CheckpointManager(tmp_path / "root", tiers=[tier]) as mgr:
        commit = await mgr.save(3, items={"params": {"w": jnp.ones(9)}, "note": "text"})
        await commit
        await commit.in_root
        found = await mgr.restore(items=["params"])
        assert np.array_equal(found["params"]["w"], np.ones(9))
    with ckpt.sync.CheckpointManager(tmp_path / "root") as plain:
        assert plain.restore()["note"] == "text"
        commit = plain.save(4, {"w": 1})
        commit.result()
        # Without tiers it is there at once.
        commit.in_root.result(0)


def test_wrong_arguments(tmp_path: Path) -> None:
    make = ckpt.sync.CheckpointManager
    for tiers, text in [
        ([Tier(tmp_path / "a"), SharedMemory()], "the nearest place comes first"),
        ([Tier(tmp_path / "a"), Tier(tmp_path / "a")], "is there twice"),
        ([Tier(tmp_path / "root")], "is there twice"),
        ([Tier("memory://here/run")], "memory://"),
        (Tier(tmp_path / "a"), r"a list: tiers=\[Tier"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            make(tmp_path / "root", tiers=tiers)  # type: ignore[arg-type]
    for options, text in [
        ({"bytes_per_second": 0}, "bytes_per_second"),
        ({"most_waiting": 0}, "most_waiting"),
        ({"drain": 3}, "save policy 3"),
        ({"keep": 0}, "keep"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            Tier(tmp_path, **options)  # type: ignore[arg-type]
