"""At the end of a run each place holds what its policy keeps, and what did not get to the root."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

import ckpt
import ckpt.sync
from ckpt._steps.saves import queue as queue_of_saves
from ckpt.errors import NotInRootError
from ckpt.tiers import SharedMemory, Tier
from tests.support.command import environment
from tests.support.forked_programs import run
from tests.support.numbered_states import state_of
from tests.support.snapshots import PATIENCE_S, shared_memory, steps_of


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def manager(base: Path, tier: dict[str, Any], **options: Any) -> ckpt.sync.CheckpointManager:
    near = Tier(base / "disk", keep=ckpt.keep.Latest(2), **tier)
    given = {"tiers": [near], "keep": ckpt.keep.Latest(3), **options}
    return ckpt.sync.CheckpointManager(base / "root", **given)


@contextlib.contextmanager
def agent_stopped(mgr: ckpt.sync.CheckpointManager) -> Iterator[None]:
    """Stop the agent while the body runs: nothing is copied meanwhile."""
    agent = mgr._service._agent._process.pid  # type: ignore[attr-defined]
    os.kill(agent, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(agent, signal.SIGCONT)


def saved_behind_the_agent(mgr: ckpt.sync.CheckpointManager) -> list[ckpt.Commit]:
    """Save eight steps, all of which have to be copied then."""
    with agent_stopped(mgr):
        commits = [mgr.save(step, state_of(step)) for step in range(8)]
        mgr.wait_until_finished()
    return commits


def there(base: Path, *, at: str = "disk") -> list[int]:
    return steps_of(base / at)


@pytest.mark.parametrize("waits", [True, False])
def test_each_place_holds_what_its_policy_keeps(waits: bool, tmp_path: Path) -> None:
    with manager(tmp_path, {}) as mgr:
        for step in range(8):
            commit = mgr.save(step, state_of(step))
            if waits:
                commit.in_root.result(PATIENCE_S)
    assert there(tmp_path) == [6, 7]
    assert there(tmp_path, at="root") == [5, 6, 7]


@pytest.mark.anyio
async def test_each_place_holds_what_its_policy_keeps_with_asyncio(tmp_path: Path) -> None:
    near = Tier(tmp_path / "disk", keep=ckpt.keep.Latest(2))
    async with ckpt.CheckpointManager(
        tmp_path / "root", tiers=[near], keep=ckpt.keep.Latest(3)
    ) as mgr:
        for step in range(5):
            await mgr.save(step, state_of(step))
    assert there(tmp_path) == [3, 4]
    assert there(tmp_path, at="root") == [2, 3, 4]


def test_a_tier_is_tidied_once_its_steps_are_in_the_root(tmp_path: Path) -> None:
    """While the run goes on, without another save."""
    events: queue.Queue[ckpt.types.Event] = queue.Queue()
    with manager(tmp_path, {}, keep=None, observers=[events.put]) as mgr:
        with agent_stopped(mgr):
            for step in range(4):
                mgr.save(step, state_of(step))
            mgr.wait_until_finished()
            assert there(tmp_path) == [0, 1, 2, 3]
        gone: set[int | None] = set()
        while gone < {0, 1}:
            event = events.get(timeout=PATIENCE_S)
            gone |= {event.step} if event.operation == "delete" else set()
        assert there(tmp_path) == [2, 3]


def test_what_is_copied_after_the_block_is_tidied_too(tmp_path: Path) -> None:
    """All steps wait for the root when the loop ends."""
    with manager(tmp_path, {"bytes_per_second": 4e7}) as mgr:
        commits = saved_behind_the_agent(mgr)
    assert all(commit.in_root.done() for commit in commits)
    assert there(tmp_path) == [6, 7]
    assert there(tmp_path, at="root") == [5, 6, 7]


def test_what_the_root_does_not_want_goes_all_the_same(tmp_path: Path) -> None:
    with manager(tmp_path, {"drain": ckpt.save_when.EverySteps(5)}) as mgr:
        for step in range(8):
            mgr.save(step, state_of(step))
    assert there(tmp_path) == [6, 7]
    # The last one is copied in the end.
    assert there(tmp_path, at="root") == [0, 5, 7]


def test_three_places_hold_what_their_policies_keep(tmp_path: Path) -> None:
    tiers = [Tier(tmp_path / each, keep=ckpt.keep.Latest(2)) for each in ("disk", "between")]
    with ckpt.sync.CheckpointManager(
        tmp_path / "root", tiers=tiers, keep=ckpt.keep.Latest(3)
    ) as mgr:
        for step in range(8):
            mgr.save(step, state_of(step))
    assert there(tmp_path) == there(tmp_path, at="between") == [6, 7]
    assert there(tmp_path, at="root") == [5, 6, 7]


def test_a_snapshot_that_is_written_in_the_end_makes_way(tmp_path: Path, memory: Path) -> None:
    near = SharedMemory(directory=str(memory))
    with ckpt.sync.CheckpointManager(
        tmp_path / "root", tiers=[near], keep=ckpt.keep.Latest(2)
    ) as mgr:
        for step in (1, 2):
            mgr.save(step, state_of(step)).result()
        mgr.snapshot(3, state_of(3)).result()
    assert there(tmp_path, at="root") == [2, 3]


def test_no_step_that_did_not_get_to_the_root_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody holds them once the agent has ended; the next run brings them there."""
    timeouts = ckpt.Timeouts(exit=1.0)
    with manager(tmp_path, {}, timeouts=timeouts) as mgr:
        mgr.save(0, state_of(0)).in_root.result(PATIENCE_S)
        (tmp_path / "root").rename(tmp_path / "away")
        (tmp_path / "root").write_text("in the way")
        for step in range(1, 8):
            mgr.save(step, state_of(step)).result()
    assert [each for each in caplog.messages if "steps 1, 2, 3, 4, 5, 6, 7 were not" in each]
    assert there(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    (tmp_path / "root").unlink()
    (tmp_path / "away").rename(tmp_path / "root")
    with manager(tmp_path, {}):
        pass
    assert there(tmp_path) == [6, 7]
    assert there(tmp_path, at="root") == [5, 6, 7]


def test_steps_of_an_agent_that_was_killed_stay(tmp_path: Path) -> None:
    """It has told nothing of what it leaves."""
    with manager(tmp_path, {}) as mgr, agent_stopped(mgr):
        for step in range(8):
            mgr.save(step, state_of(step)).result()
        mgr.wait_until_finished()
        os.kill(mgr._service._agent._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert there(tmp_path) == list(range(8))
    with manager(tmp_path, {}):
        pass
    assert there(tmp_path) == [6, 7]
    assert there(tmp_path, at="root") == [5, 6, 7]


def test_the_newest_step_of_a_killed_agent_gets_to_the_root(tmp_path: Path) -> None:
    """The root keeps its newest step in any case, also one that its policy does not want."""
    options = {"keep": ckpt.keep.EverySteps(10)}
    with manager(tmp_path, {}, **options) as mgr, agent_stopped(mgr):
        for step in (5, 7):
            mgr.save(step, state_of(step)).result()
        mgr.wait_until_finished()
        os.kill(mgr._service._agent._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert there(tmp_path, at="root") == []
    with manager(tmp_path, {}, **options):
        pass
    assert there(tmp_path, at="root") == [7]


def test_a_step_that_was_given_up_in_the_end_stays(tmp_path: Path) -> None:
    """Another run has it in the root: what this one has saved is nowhere else."""
    with manager(tmp_path, {}) as mgr:
        with ckpt.sync.CheckpointManager(tmp_path / "root") as other:
            other.save(4, state_of(4)).result()
        commits = saved_behind_the_agent(mgr)
    with pytest.raises(NotInRootError, match="step 4"):
        commits[4].in_root.result(0)
    assert there(tmp_path) == [4, 6, 7]
    assert there(tmp_path, at="root") == [5, 6, 7]


@pytest.mark.parametrize("near", ["disk", "memory"])
def test_a_step_that_its_save_has_just_published_stays(
    near: str, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that went back saves steps that no policy would keep but for being the newest."""
    tiers = {"memory": {"tiers": [SharedMemory(directory=str(memory))]}, "disk": {}}
    is_there, goes_on = threading.Event(), threading.Event()

    async def wait(*args: Any) -> None:
        is_there.set()
        await anyio.to_thread.run_sync(goes_on.wait)

    at = "disk" if near == "disk" else "root"
    with manager(tmp_path, {}, **{"keep": ckpt.keep.Latest(2), **tiers[near]}) as mgr:
        for step in (10, 11):
            mgr.save(step, state_of(step)).in_root.result(PATIENCE_S)
        monkeypatch.setattr(queue_of_saves, "remove_others", wait)
        commit = mgr.save(5, state_of(5))
        try:
            assert is_there.wait(PATIENCE_S)
            # As when a drain ends at this moment.
            service: Any = mgr._service
            mgr._loop.call(service._tidy, service.services)
            assert there(tmp_path, at=at) == [5, 10, 11]
        finally:
            goes_on.set()
        assert commit.result().step == 5
    assert there(tmp_path, at=at) == [5, 10, 11]


def test_a_place_that_cannot_be_listed_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager(tmp_path, {}) as mgr:
        assert mgr.all_steps() == []
        (tmp_path / "root").rename(tmp_path / "away")
        (tmp_path / "root").write_text("in the way")
        service: Any = mgr._service
        for _ in range(2):
            mgr._loop.call(service._tidy, service.services)
        (tmp_path / "root").unlink()
        (tmp_path / "away").rename(tmp_path / "root")
    (said,) = [each for each in caplog.records if "what is not kept there" in each.getMessage()]
    assert said.levelname == "WARNING"
    assert said.getMessage().startswith(f"{tmp_path}/root: ")
    assert "Not a directory" in said.getMessage()


SCRIPT = """
import os, signal, sys
import ckpt, ckpt.sync
from tests.support.numbered_states import state_of

tier = ckpt.tiers.Tier(sys.argv[1], keep=ckpt.keep.Latest(2))
mgr = ckpt.sync.CheckpointManager(sys.argv[2], tiers=[tier], keep=ckpt.keep.Latest(3))
mgr.__enter__()
for step in range(8):
    mgr.save(step, state_of(step)).result()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_run_tidies_what_a_killed_one_has_left(tmp_path: Path) -> None:
    """Its agent has copied all, and knows no policy."""
    done = run("-c", SCRIPT, tmp_path / "disk", tmp_path / "root", env=environment({}))
    assert done.returncode == -signal.SIGKILL
    assert there(tmp_path, at="root")[-1] == 7
    with manager(tmp_path, {}) as mgr:
        assert mgr.latest_step() == 7
        assert there(tmp_path) == [6, 7]
        assert there(tmp_path, at="root") == [5, 6, 7]
