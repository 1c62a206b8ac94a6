"""However a process ends, its last snapshot becomes a step of the root."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._settings import Timeouts
from ckpt._tiers.agent.flush import flush
from ckpt.errors import CheckpointError
from ckpt.storage._local.storage import LocalStorage
from ckpt.tiers import SharedMemory, Tier
from tests.support.numbered_states import state_of
from tests.support.snapshots import (
    PATIENCE_S,
    children_of,
    shared_memory,
    steps_of,
    trainer,
    wait_for,
)

TERM = signal.SIGTERM


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


@pytest.mark.parametrize("then", ["die", "raise", "exit"])
def test_the_last_snapshot_is_written(then: str, tmp_path: Path, memory: Path) -> None:
    root = tmp_path / "run"
    with trainer(root, memory, then, 3, 4) as run:
        _, err = run.end()
    assert steps_of(root) == [6]
    # The user hears of it, from whoever is left to say it.
    said = "wrote the snapshot of step 6" if then == "raise" else "wrote step 6"
    assert said in err
    # It is a step like any other.
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.resume(lambda: state_of(0))[0] == 7


def test_a_signal_without_a_handler_ends_it(tmp_path: Path, memory: Path) -> None:
    with trainer(tmp_path / "run", memory, "hold", 3, 2) as run:
        run.lines(until="held")
        run.process.send_signal(TERM)
        assert "wrote step 4" in run.end()[1]
        assert run.process.returncode == -TERM
    assert steps_of(tmp_path / "run") == [4]


@pytest.mark.parametrize("option", ["handled", "preempt", "loop"])
def test_a_signal_while_the_interpreter_is_held(option: str, tmp_path: Path, memory: Path) -> None:
    """The agent hears of it at once, though no handler can run."""
    root = tmp_path / "run"
    # A loop of asyncio is asked by a thread, which needs the interpreter: a compile lets it run.
    then = "compile" if option == "loop" else "hold"
    with trainer(root, memory, then, 3, 2, option) as run:
        run.lines(until="held")
        run.process.send_signal(TERM)
        wait_for(root, 4)
        assert run.process.poll() is None, "it was to survive its signal"
        run.kill()
        run.end()
    assert steps_of(root) == [4]


def test_a_loop_still_hears_of_signals(tmp_path: Path, memory: Path) -> None:
    with trainer(tmp_path / "run", memory, "wait", 3, 2, "loop") as run:
        run.lines(until="ack 4")
        run.process.send_signal(TERM)
        wait_for(tmp_path / "run", 4)
        out, _ = run.end()
    assert "heard by the loop" in out


def test_a_run_that_ends_well_after_a_signal(tmp_path: Path, memory: Path) -> None:
    """It was told to end, and may not have saved."""
    with trainer(tmp_path / "run", memory, "wait", 3, 2, "preempt") as run:
        run.lines(until="ack 4")
        run.process.send_signal(TERM)
        assert "wrote the snapshot of step 4" in run.end()[1]
        assert run.process.returncode == 0
    assert steps_of(tmp_path / "run") == [4]
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "memory and disk"])
def test_a_clean_end_keeps_what_a_crash_would(disk: bool, tmp_path: Path, memory: Path) -> None:
    """The newest snapshot, also if it is all that there is; the next run goes on from there."""
    root = tmp_path / "run"
    for first, kind in [(1, "snapshot"), (4, "save")]:
        with ckpt.sync.CheckpointManager(root, tiers=_tiers(tmp_path, memory, disk=disk)) as mgr:
            assert mgr.resume(lambda: state_of(0))[0] in (0, first)
            getattr(mgr, kind)(first, state_of(first)).result()
            for step in (first + 1, first + 2):
                mgr.snapshot(step, state_of(step)).result()
        assert list(memory.iterdir()) == []
        assert steps_of(root)[-1] == first + 2
    assert steps_of(root) == [3, 4, 6]
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.resume(lambda: state_of(0))[0] == 7


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "memory and disk"])
def test_a_clean_end_writes_no_snapshot_before_the_last_step(
    disk: bool, tmp_path: Path, memory: Path
) -> None:
    tiers = _tiers(tmp_path, memory, disk=disk)
    with ckpt.sync.CheckpointManager(tmp_path / "run", tiers=tiers) as mgr:
        mgr.snapshot(1, state_of(1)).result()
        # From the disk it comes to the root behind the end.
        mgr.save(2, state_of(2)).result()
    assert steps_of(tmp_path / "run") == [2]
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("last", ["save", "snapshot"])
def test_a_clean_end_names_the_step_that_it_gives_up(
    last: str, tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where flush is off; a snapshot that is older than the last step is no loss."""
    tier = SharedMemory(directory=str(memory), flush=False)
    with ckpt.sync.CheckpointManager(tmp_path / "run", tiers=[tier]) as mgr:
        mgr.snapshot(1, state_of(1)).result()
        mgr.save(2, state_of(2)).result()
        getattr(mgr, last)(3, state_of(3)).result()
    said = [each for each in caplog.records if each.levelname == "WARNING"]
    if last == "save":
        assert said == []
    else:
        [only] = said
        assert "the snapshot of step 3 is given up" in only.getMessage()
    assert list(memory.iterdir()) == []


def _tiers(tmp_path: Path, memory: Path, *, disk: bool) -> list[SharedMemory | Tier]:
    near = SharedMemory(directory=str(memory))
    return [near, Tier(tmp_path / "disk")] if disk else [near]


def test_a_newer_step_of_the_root_is_enough(tmp_path: Path, memory: Path) -> None:
    root = tmp_path / "run"
    tier = SharedMemory(directory=str(memory))

    def train() -> None:
        with ckpt.sync.CheckpointManager(root, tiers=[tier]) as mgr:
            mgr.snapshot(1, state_of(1)).result()
            mgr.save(2, state_of(2)).result()
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        train()
    assert steps_of(root) == [2]
    assert list(memory.iterdir()) == []


def test_an_agent_that_was_killed_is_started_again(tmp_path: Path, memory: Path) -> None:
    root = tmp_path / "run"
    with trainer(root, memory, "go on") as run:
        run.lines(until="ack 3")
        [agent] = children_of(run.process.pid)
        os.kill(agent, signal.SIGKILL)
        number = 4
        with contextlib.suppress(StopIteration):
            while number < 200:
                run.lines(until=f"ack {number}")
                number += 1
                # One that has died is a child until its trainer has looked.
                if set(children_of(run.process.pid)) - {agent}:
                    raise StopIteration
        run.kill()
        out, err = run.end()
    last = max(int(line.split()[1]) for line in [f"ack {number - 1}", *out] if line[:3] == "ack")
    assert "was killed; it is started again" in err
    [step] = steps_of(root)
    assert step >= last


def test_a_process_that_is_started_again_takes_the_memory_over(
    tmp_path: Path, memory: Path
) -> None:
    """The agent of the first one leaves it to the second."""
    root = tmp_path / "run"
    for start in (0, 3, 6):
        with trainer(root, memory, "die", -1, 3) as run:
            out, _ = run.end()
        assert f"start {start}" in out
    assert steps_of(root) == [2, 5, 8]
    with trainer(root, memory, "wait", -1, 1) as run:
        run.lines(until="ack 9")
        run.end()
    assert list(memory.iterdir()) == []


def test_a_fork_that_lives_on_does_not_keep_the_memory(tmp_path: Path, memory: Path) -> None:
    """Workers of data loaders often outlive a trainer that is killed."""
    script = f"""
import os, signal, time
import ckpt, ckpt.sync
tier = ckpt.tiers.SharedMemory(directory={str(memory)!r}, flush=False)
mgr = ckpt.sync.CheckpointManager({str(tmp_path / "run")!r}, tiers=[tier])
mgr.snapshot(1, {{"w": 1}}).result()
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
os.write(1, str(child).encode())
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, timeout=PATIENCE_S
    )
    child = int(done.stdout)
    try:
        tier = SharedMemory(directory=str(memory), flush=False)
        with ckpt.sync.CheckpointManager(tmp_path / "run", tiers=[tier]) as mgr:
            assert mgr.restore() == {"w": 1}
            assert mgr.snapshot(2, {"w": 2})
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_step_of_another_run_in_its_place_is_never_replaced(tmp_path: Path, memory: Path) -> None:
    root = tmp_path / "run"
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(5, {"other": 1}).result()
    with ckpt.sync.CheckpointManager(memory / "steps") as mgr:
        mgr.save(5, {"mine": 1}).result()
    done = anyio.run(flush, memory, LocalStorage(root, Timeouts()), -1)
    assert done is not None
    assert "exists" in done.problem
    with contextlib.suppress(CheckpointError), ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.restore(5) == {"other": 1}


def test_a_copy_at_the_root_that_lacks_files_is_written_again(tmp_path: Path, memory: Path) -> None:
    root, state = tmp_path / "run", {"w": np.arange(100_000)}
    with ckpt.sync.CheckpointManager(memory / "steps") as mgr:
        mgr.save(5, state).result()
    for _ in range(2):
        done = anyio.run(flush, memory, LocalStorage(root, Timeouts()), -1)
        assert done is not None
        assert (done.step, done.problem, done.nbytes > 0) == (5, "", True)
        with ckpt.sync.CheckpointManager(root) as mgr:
            np.testing.assert_array_equal(mgr.restore(5)["w"], state["w"])
        max((root / "5").rglob("*"), key=lambda path: path.stat().st_size).unlink()
