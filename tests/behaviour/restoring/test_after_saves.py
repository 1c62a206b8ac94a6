"""A restore sees what its own manager is saving."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import CommitTimeoutError, InvalidArgumentError, StepNotFoundError
from tests.behaviour.saving.odd_managers import PATIENCE_S, fire, manager, plain_manager
from tests.support.conditions import until
from tests.support.odd_items import Odd
from tests.support.snapshots import shared_memory


def tree(step: int) -> dict[str, Any]:
    return {"w": np.full(4, step)}


def value(found: Any) -> int:
    return int(found["w"][0])


def waits(mgr: Any, thread: ThreadPoolExecutor, *call: Any, **options: Any) -> Future[Any]:
    """Make a call of the manager in a thread; return once it waits for the saves under way."""
    commits = mgr._service.saves.commits.under_way()
    before = [len(commit._future._done_callbacks) for commit in commits]
    found = thread.submit(*call, **options)
    until(lambda: [len(commit._future._done_callbacks) for commit in commits] > before)
    return found


@pytest.mark.parametrize("call", ["restore(1)", "restore()", "resume()"])
def test_it_waits_for_saves_under_way(call: str, tmp_path: Path) -> None:
    gate = threading.Event()
    with plain_manager(tmp_path) as mgr, ThreadPoolExecutor(1) as thread:
        mgr.save(0, tree(0), durable=True)
        mgr.save(1, Odd(tree(1), gate=gate))
        assert mgr.steps_in_progress() == [1]
        assert mgr.all_steps() == [0]
        if call == "resume()":
            found = waits(mgr, thread, mgr.resume, tree(9))
        else:
            found = waits(mgr, thread, mgr.restore, *((1,) if "1" in call else ()))
        assert not found.done()
        gate.set()
        result = found.result(PATIENCE_S)
        assert value(result[1] if call == "resume()" else result) == 1
        assert call != "resume()" or result[0] == 2
        assert mgr.steps_in_progress() == []


def test_so_does_a_coroutine(tmp_path: Path) -> None:
    async def main() -> None:
        gate = threading.Event()
        async with manager(tmp_path) as mgr:
            await mgr.save(1, Odd(tree(1), gate=gate))
            found = asyncio.ensure_future(mgr.restore(1))
            commit: Any = mgr._service.saves.commits.under_way()[0]
            await asyncio.to_thread(until, lambda: len(commit._future._done_callbacks))
            gate.set()
            assert value(await found) == 1

    asyncio.run(main())


def test_a_run_that_has_not_committed_a_step_yet_is_not_new(tmp_path: Path) -> None:
    gate = threading.Event()
    with plain_manager(tmp_path) as mgr, ThreadPoolExecutor(1) as thread:
        mgr.save(0, Odd(tree(5), gate=gate))
        found = waits(mgr, thread, mgr.resume, tree(9))
        gate.set()
        start, state = found.result(PATIENCE_S)
        assert (start, value(state)) == (1, 5)


def test_it_does_not_wait_for_other_steps(tmp_path: Path) -> None:
    gate = threading.Event()
    with plain_manager(tmp_path) as mgr:
        mgr.save(0, tree(0), durable=True)
        mgr.save(1, Odd(tree(1), gate=gate))
        assert value(mgr.restore(0)) == 0
        with pytest.raises(StepNotFoundError):
            mgr.restore(7)
        gate.set()


def test_a_step_that_is_being_replaced_is_there_as_it_was(tmp_path: Path) -> None:
    gate = threading.Event()
    with plain_manager(tmp_path) as mgr:
        mgr.save(0, tree(0), durable=True)
        mgr.save(0, Odd(tree(5), gate=gate), if_exists="replace")
        assert mgr.steps_in_progress() == [0]
        assert value(mgr.restore(0)) == 0
        gate.set()
        mgr.wait_until_finished()
        assert value(mgr.restore(0)) == 5


@pytest.mark.parametrize("step", [1, None])
def test_if_the_save_fails_the_error_says_why(step: int | None, tmp_path: Path) -> None:
    gate = threading.Event()
    with plain_manager(tmp_path, on_failure="log") as mgr, ThreadPoolExecutor(1) as thread:
        mgr.save(1, Odd(tree(1), gate=gate, error=fire()))
        found = waits(mgr, thread, mgr.restore, step)
        gate.set()
        error = found.exception(PATIENCE_S)
        assert isinstance(error, StepNotFoundError)
        assert "fire 0" in str(error)
        assert "fire 0" in str(error.__cause__)


def test_with_an_older_step_a_failed_save_is_no_error_of_the_restore(tmp_path: Path) -> None:
    gate = threading.Event()
    with plain_manager(tmp_path, on_failure="log") as mgr, ThreadPoolExecutor(1) as thread:
        mgr.save(0, tree(0), durable=True)
        mgr.save(1, Odd(tree(1), gate=gate, error=fire()))
        found = waits(mgr, thread, mgr.restore)
        gate.set()
        assert value(found.result(PATIENCE_S)) == 0


@pytest.mark.parametrize("step", [1, None])
def test_the_wait_has_a_limit(step: int | None, tmp_path: Path) -> None:
    gate = threading.Event()
    with plain_manager(tmp_path, timeouts=ckpt.Timeouts(restore=0.05)) as mgr:
        mgr.save(0, tree(0), durable=True)
        mgr.save(1, Odd(tree(1), gate=gate))
        with pytest.raises(CommitTimeoutError, match=r"^step 1: .*0\.05 s .*writing") as caught:
            mgr.restore(step)
        assert "Timeouts(restore=" in str(caught.value)
        gate.set()
        mgr.wait_until_finished()
        assert value(mgr.restore(step)) == 1


def test_a_step_in_parts_is_refused_until_its_block_ends(tmp_path: Path) -> None:
    with plain_manager(tmp_path) as mgr:
        mgr.save(0, tree(0), durable=True)
        with mgr.partial(1) as part:
            part.save(tree(1))
            assert mgr.steps_in_progress() == [1]
            with pytest.raises(InvalidArgumentError, match=r"^step 1: .*partial"):
                mgr.restore(1)
            # It cannot end while this waits.
            assert value(mgr.restore()) == 0
        assert value(mgr.restore(1)) == 1


def test_a_snapshot_under_way_is_waited_for(tmp_path: Path) -> None:
    gate = threading.Event()
    with (
        shared_memory() as memory,
        plain_manager(tmp_path, tiers=[ckpt.tiers.SharedMemory(directory=str(memory))]) as mgr,
        ThreadPoolExecutor(1) as thread,
    ):
        mgr.save(0, tree(0), durable=True)
        mgr.snapshot(1, Odd(tree(1), gate=gate))
        assert mgr.steps_in_progress() == [1]
        found = waits(mgr, thread, mgr.restore)
        gate.set()
        assert value(found.result(PATIENCE_S)) == 1
