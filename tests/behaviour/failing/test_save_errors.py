"""The error of a save is logged at once, and raised once.

By all that wait for the commit, else by the next save, else at the end of the manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ckpt
import ckpt.sync
from ckpt._calls import background
from ckpt._steps.saves import queue
from tests.behaviour.saving.odd_managers import (
    PATIENCE_S,
    SMALL,
    fire,
    manager,
    names,
    plain_manager,
    run,
)
from tests.support.conditions import until
from tests.support.odd_items import Odd, OddHandler
from tests.support.snapshots import shared_memory
from tests.support.trees import assert_same


def test_the_awaiter_of_a_failed_commit_gets_its_error_and_the_exit_does_not(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with manager(tmp_path) as mgr:
            commit = await mgr.save(3, Odd(SMALL, error=fire()))
            with pytest.raises(ckpt.CheckpointError, match=r"^step 3, item 'default': fire 0$"):
                await commit
            assert commit.done()
            assert commit.stage == "failed"
            assert await mgr.latest_step() is None
        await mgr.close()

    run(main)
    assert names(tmp_path) == set()


def test_an_error_that_somebody_fetched_is_not_raised_at_exit(tmp_path: Path) -> None:
    with plain_manager(tmp_path) as mgr:
        error = fire()
        assert mgr.save(0, Odd(SMALL, error=error)).exception(PATIENCE_S) is error
    with plain_manager(tmp_path) as mgr:
        commit = mgr.save(0, Odd(SMALL, error=error))
        with pytest.raises(ckpt.CheckpointError, match="fire"):
            commit.result(PATIENCE_S)
    with plain_manager(tmp_path) as mgr:
        seen: Future[Any] = Future()
        commit = mgr.save(0, Odd(SMALL, error=error))
        commit.add_done_callback(lambda done: seen.set_result(done.exception()))
        assert seen.result(PATIENCE_S) is error


def test_looking_whether_a_commit_is_done_is_not_seeing_its_error(tmp_path: Path) -> None:
    mgr = plain_manager(tmp_path)
    done = threading.Event()
    commit = mgr.save(0, Odd(SMALL, error=fire()))
    commit.add_done_callback(lambda _: done.set())
    assert done.wait(PATIENCE_S)
    assert commit.done()
    assert "failed" in repr(commit)
    with pytest.raises(ckpt.CheckpointError, match="fire"):
        mgr.close()


def test_an_error_that_nobody_saw_is_raised_at_exit_and_not_again(tmp_path: Path) -> None:
    async def main() -> None:
        mgr = manager(tmp_path)
        with pytest.raises(ckpt.CheckpointError, match=r"^step 0, item 'default': fire 0$"):
            async with mgr:
                await mgr.save(0, Odd(SMALL, error=fire()))
        await mgr.close()
        await mgr.close()

    run(main)
    assert names(tmp_path) == set()


def failed(mgr: ckpt.sync.CheckpointManager, step: int, **options: Any) -> ckpt.Commit:
    """Save a step, and wait until that has failed without looking at its commit."""
    done = threading.Event()
    commit = mgr.save(step, Odd(SMALL, error=fire(step)), **options)
    commit.add_done_callback(lambda _: done.set())
    assert done.wait(PATIENCE_S)
    return commit


class Errors(logging.Handler):
    """The lines at ERROR, and what `ask` gave when each came."""

    def __init__(self, ask: Callable[[], Any] = lambda: None) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []
        self.answers: list[Any] = []
        self._ask = ask

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.answers.append(self._ask())


@contextlib.contextmanager
def errors_logged(ask: Callable[[], Any] = lambda: None) -> Iterator[Errors]:
    handler = Errors(ask)
    logging.getLogger("ckpt").addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger("ckpt").removeHandler(handler)


def test_a_failure_is_a_line_in_the_log_before_the_commit_is_done(tmp_path: Path) -> None:
    gate = threading.Event()
    commits: list[ckpt.Commit] = []
    with plain_manager(tmp_path, on_failure="log") as mgr:
        mgr.save(1, SMALL, durable=True)
        with errors_logged(lambda: commits[0].done()) as logged:
            commits.append(mgr.save(2, Odd(SMALL, gate=gate, error=fire())))
            gate.set()
            assert commits[0].exception(PATIENCE_S) is not None
    assert logged.lines == [
        f"step 2 of {tmp_path} was NOT saved: item 'default': fire 0; the newest durable step is 1"
    ]
    assert logged.answers == [False]


def test_the_line_says_that_there_is_no_step_yet(tmp_path: Path) -> None:
    with plain_manager(tmp_path, on_failure="log") as mgr, errors_logged() as logged:
        failed(mgr, 0)
    assert [line.split("; ")[-1] for line in logged.lines] == ["no step is durable yet"]


def test_a_call_that_raises_its_error_logs_none_nor_does_a_save_that_was_cancelled(
    tmp_path: Path,
) -> None:
    with plain_manager(tmp_path) as mgr, errors_logged() as logged:
        with pytest.raises(ckpt.errors.UnsupportedLeafError):
            mgr.save(0, {"broken": object()})
        commit = mgr.save(1, Odd(SMALL, hold="commit"))
        commit.cancel()
        assert isinstance(commit.exception(PATIENCE_S), ckpt.errors.CommitCancelledError)
    assert logged.lines == []


def test_observers_hear_of_a_failure(tmp_path: Path) -> None:
    events: list[ckpt.types.Event] = []
    with plain_manager(tmp_path, observers=[events.append], on_failure="log") as mgr:
        failed(mgr, 4)
    (end,) = [each for each in events if each.phase == "end"]
    assert (end.operation, end.step, end.outcome) == ("save", 4, "failed")
    assert "fire 4" in (end.reason or "")


def test_the_next_save_raises_what_nobody_has_looked_at_and_then_saves(tmp_path: Path) -> None:
    with plain_manager(tmp_path) as mgr:
        commit = failed(mgr, 0)
        before = names(tmp_path)
        with pytest.raises(ckpt.CheckpointError, match=r"^step 0, .*fire 0; .*step 1 ") as caught:
            mgr.save(1, SMALL)
        assert "the same call again saves it" in str(caught.value)
        assert names(tmp_path) == before
        assert commit.exception() is caught.value
        mgr.save(1, SMALL).result(PATIENCE_S)
        assert mgr.all_steps() == [1]
    with plain_manager(tmp_path) as mgr:
        assert_same(mgr.restore(), SMALL)


def test_what_fails_after_that_is_raised_too(tmp_path: Path) -> None:
    gate = threading.Event()
    with plain_manager(tmp_path) as mgr:
        failed(mgr, 0)
        late = mgr.save(1, Odd(SMALL, gate=gate, error=fire(1)), force=True)
        with pytest.raises(ckpt.CheckpointError, match="fire 0"):
            mgr.save(2, SMALL)
        gate.set()
        until(late.done)
        with pytest.raises(ckpt.CheckpointError, match="fire 1"):
            mgr.save(2, SMALL)
        mgr.save(2, SMALL).result(PATIENCE_S)


def test_other_calls_do_not_raise_it(tmp_path: Path) -> None:
    with plain_manager(tmp_path, save_when=ckpt.save_when.EverySteps(10)) as mgr:
        mgr.save(0, SMALL, durable=True)
        failed(mgr, 10)
        assert mgr.all_steps() == [0]
        assert_same(mgr.restore(), SMALL)
        assert mgr.should_save(20)
        mgr.delete(0)
        with pytest.raises(ckpt.CheckpointError, match="fire 10"):
            # A policy turns this one down.
            mgr.save(11, SMALL)
        assert not mgr.save(11, SMALL)


def test_a_coroutine_raises_it_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with manager(tmp_path) as mgr:
            done = threading.Event()
            commit = await mgr.save(0, Odd(SMALL, error=fire()))
            commit.add_done_callback(lambda _: done.set())
            assert await asyncio.to_thread(done.wait, PATIENCE_S)
            with pytest.raises(ckpt.CheckpointError, match="fire 0"):
                await mgr.save(1, SMALL, durable=True)
            assert await mgr.save(1, SMALL, durable=True)

    run(main)


@pytest.mark.parametrize("looks", ["result", "exception", "await"])
def test_what_somebody_has_looked_at_is_not_raised_by_the_next_save(
    tmp_path: Path, looks: str
) -> None:
    async def awaited(commit: ckpt.Commit) -> None:
        await commit

    with plain_manager(tmp_path) as mgr:
        commit = failed(mgr, 0)
        with contextlib.suppress(ckpt.CheckpointError):
            asyncio.run(awaited(commit)) if looks == "await" else getattr(commit, looks)()
        mgr.save(1, SMALL).result(PATIENCE_S)


def test_a_forced_save_is_made_first_and_the_failure_raised_at_the_end(tmp_path: Path) -> None:
    mgr = plain_manager(tmp_path)
    failed(mgr, 0)
    mgr.save(1, SMALL, force=True).result(PATIENCE_S)
    with pytest.raises(ckpt.CheckpointError, match=r"^step 0, item 'default': fire 0$"):
        mgr.close()
    assert "1" in names(tmp_path)


def test_so_is_the_save_of_a_preempted_run(tmp_path: Path) -> None:
    mgr = plain_manager(
        tmp_path,
        save_when=ckpt.save_when.Any(
            ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted([signal.SIGUSR1])
        ),
    )
    failed(mgr, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert mgr.reached_preemption(1)
    mgr.save(1, SMALL).result(PATIENCE_S)
    with pytest.raises(ckpt.CheckpointError, match="fire 0"):
        mgr.close()
    assert "1" in names(tmp_path)


def test_a_failure_may_be_left_to_the_log(tmp_path: Path) -> None:
    with plain_manager(tmp_path, on_failure="log") as mgr, errors_logged() as logged:
        failed(mgr, 0)
        mgr.save(1, SMALL).result(PATIENCE_S)
        commit = failed(mgr, 2)
        mgr.wait_until_finished()
        with pytest.raises(ckpt.CheckpointError, match="fire 2"):
            commit.result()
    assert len(logged.lines) == 2
    with pytest.raises(ckpt.errors.InvalidArgumentError, match="on_failure"):
        plain_manager(tmp_path, on_failure="ignore")


def test_a_failed_commit_is_false(tmp_path: Path) -> None:
    with plain_manager(tmp_path, on_failure="log") as mgr:
        assert not failed(mgr, 0)
        assert mgr.save(1, SMALL)


@pytest.mark.parametrize("way", ["with", "close", "wait_until_finished"])
def test_several_failures_that_nobody_saw_are_one_error(tmp_path: Path, way: str) -> None:
    mgr = plain_manager(tmp_path)
    mgr.__enter__()
    for number in range(3):
        failed(mgr, number, force=True)
    mgr.save(3, SMALL, force=True)
    with pytest.raises(ckpt.CheckpointError, match=r"^step 0, .*fire 0\n") as caught:
        mgr.__exit__(None, None, None) if way == "with" else getattr(mgr, way)()
    assert caught.value.__notes__ == ["also failed: steps 1, 2; the log says why"]
    mgr.close()
    assert names(tmp_path) == {"3"}


def test_all_that_wait_for_the_end_hear_of_a_failure_and_nobody_after_them(
    tmp_path: Path,
) -> None:
    gate = threading.Event()
    with plain_manager(tmp_path) as mgr:
        commit = mgr.save(0, Odd(SMALL, gate=gate, error=fire()))
        with ThreadPoolExecutor(3) as threads:
            found = [threads.submit(mgr.wait_until_finished) for _ in range(3)]
            until(lambda: commit._waiting == 3)
            gate.set()
            for each in found:
                assert "fire" in str(each.exception(PATIENCE_S))
        mgr.wait_until_finished()
        mgr.save(1, SMALL).result(PATIENCE_S)


def test_a_wait_that_is_cancelled_has_not_heard_of_the_failure(tmp_path: Path) -> None:
    async def main() -> None:
        gate = threading.Event()
        async with manager(tmp_path) as mgr:
            commit = await mgr.save(0, Odd(SMALL, gate=gate, error=fire()))
            waiting = asyncio.ensure_future(mgr.wait_until_finished())
            await asyncio.to_thread(until, lambda: commit._waiting == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            done = threading.Event()
            commit.add_done_callback(lambda _: done.set())
            gate.set()
            assert await asyncio.to_thread(done.wait, PATIENCE_S)
            with pytest.raises(ckpt.CheckpointError, match="fire"):
                await mgr.save(1, SMALL)

    run(main)


def test_a_snapshot_raises_the_failure_of_a_save(tmp_path: Path) -> None:
    with (
        shared_memory() as memory,
        plain_manager(tmp_path, tiers=[ckpt.tiers.SharedMemory(directory=str(memory))]) as mgr,
    ):
        failed(mgr, 0)
        with pytest.raises(ckpt.CheckpointError, match=r"fire 0; .*step 1 "):
            mgr.snapshot(1, SMALL)
        mgr.snapshot(1, SMALL).result(PATIENCE_S)
        assert mgr.latest_step() == 1


def test_a_step_in_parts_that_was_given_up_is_heard_of(tmp_path: Path) -> None:
    with plain_manager(tmp_path) as mgr, errors_logged() as logged:
        part = mgr.partial(0)
        part.save({"odd": 1})
        del part
        gc.collect()
        until(lambda: not mgr.is_saving_in_progress())
        with pytest.raises(ckpt.errors.ClosedError, match=r"step 0: .*dropped"):
            mgr.save(1, SMALL)
        mgr.save(1, SMALL).result(PATIENCE_S)
    assert [line.split(":")[0] for line in logged.lines] == [f"step 0 of {tmp_path} was NOT saved"]


def test_a_step_in_parts_raises_what_failed_before_it(tmp_path: Path) -> None:
    with plain_manager(tmp_path) as mgr:
        failed(mgr, 0)
        with pytest.raises(ckpt.CheckpointError, match=r"fire 0; .*step 1 "), mgr.partial(1):
            pass
        with mgr.partial(1) as part:
            part.save(SMALL)
        assert mgr.all_steps() == [1]


def test_a_one_shot_save_in_the_background_is_heard_of_and_raises_at_its_commit(
    tmp_path: Path,
) -> None:
    events: list[ckpt.types.Event] = []
    options: dict[str, Any] = {"handlers": [OddHandler()], "observers": [events.append]}
    with errors_logged() as logged:
        first = ckpt.sync.save(tmp_path / "a", Odd(SMALL, error=fire()), **options, durable=False)
        second = ckpt.sync.save(tmp_path / "b", SMALL, observers=[events.append], durable=False)
        assert second.result(PATIENCE_S)
        with pytest.raises(ckpt.CheckpointError, match="fire"):
            first.result(PATIENCE_S)
    assert not first
    assert logged.lines == [f"{tmp_path}/a was NOT saved: item 'default': fire 0"]
    assert [each.outcome for each in events if each.phase == "end"] == ["failed", "ok"]
    assert {"snapshot", "write", "publish", "wait"} <= {each.phase for each in events}


def test_a_one_shot_save_can_be_observed(tmp_path: Path) -> None:
    events: list[ckpt.types.Event] = []
    ckpt.sync.save(tmp_path / "a", SMALL, observers=[events.append])
    asyncio.run(ckpt.save(tmp_path / "b", SMALL, observers=[events.append]))
    with pytest.raises(ckpt.errors.StepExistsError):
        ckpt.sync.save(tmp_path / "a", SMALL, observers=[events.append])
    assert [each.outcome for each in events if each.phase == "end"] == ["ok", "ok", "failed"]
    with pytest.raises(ckpt.errors.InvalidArgumentError, match="observers"):
        ckpt.sync.save(tmp_path / "c", SMALL, observers=[3])  # type: ignore[list-item]


def test_an_error_of_the_block_goes_on_and_tells_of_the_failed_save(tmp_path: Path) -> None:
    async def main() -> None:
        async with manager(tmp_path) as mgr:
            await mgr.save(0, Odd(SMALL, error=fire()))
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block") as caught:
        run(main)
    assert any("fire 0" in note for note in caught.value.__notes__)


def test_an_error_before_the_snapshot_is_raised_by_the_call_and_not_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with manager(tmp_path) as mgr:
            with pytest.raises(ckpt.errors.UnsupportedLeafError, match=r"step 0.*broken"):
                await mgr.save(0, {"broken": object()})
            with pytest.raises(ckpt.errors.InvalidArgumentError):
                await mgr.save(-1, SMALL)
            commit = await mgr.save(0, SMALL)
            await commit
            with pytest.raises(ckpt.errors.StepExistsError, match="step 0"):
                await mgr.save(0, SMALL, if_exists="error")

    run(main)
    assert names(tmp_path) == {"0"}


@pytest.mark.parametrize("waits_in", ["a busy loop", "a thread"])
def test_an_error_is_the_awaiter_s_also_when_the_manager_is_closed_meanwhile(
    tmp_path: Path, waits_in: str
) -> None:
    gate, waiting, go_on = (threading.Event() for _ in range(3))

    async def wait_for(commit: ckpt.Commit) -> None:
        task = asyncio.ensure_future(commit)
        for _ in range(10):
            await asyncio.sleep(0)
        waiting.set()
        go_on.wait(PATIENCE_S)  # a long train step
        await task

    def awaiter(commit: ckpt.Commit) -> None:
        if waits_in == "a thread":
            waiting.set()
            commit.result(PATIENCE_S)
        else:
            asyncio.run(wait_for(commit))

    rounds = 1 if waits_in == "a busy loop" else 40
    for number in range(rounds):
        for event in (gate, waiting, go_on):
            event.clear()
        mgr = plain_manager(tmp_path)
        commit = mgr.save(number, Odd(SMALL, gate=gate, error=fire()))
        with ThreadPoolExecutor(1) as other:
            found = other.submit(awaiter, commit)
            assert waiting.wait(PATIENCE_S)
            gate.set()
            try:
                mgr.close()  # somebody awaits the commit: the error is theirs
            finally:
                go_on.set()
            assert isinstance(found.exception(PATIENCE_S), ckpt.CheckpointError)


def test_an_error_whose_awaiter_is_cancelled_at_the_last_moment_is_not_lost(
    tmp_path: Path,
) -> None:
    gate, waiting, go_on = (threading.Event() for _ in range(3))

    async def wait_in_vain(commit: ckpt.Commit) -> None:
        task = asyncio.ensure_future(commit)
        for _ in range(10):
            await asyncio.sleep(0)
        waiting.set()
        go_on.wait(PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    mgr = plain_manager(tmp_path)
    commit = mgr.save(0, Odd(SMALL, gate=gate, error=fire()))
    with ThreadPoolExecutor(1) as other:
        waiter = other.submit(asyncio.run, wait_in_vain(commit))
        assert waiting.wait(PATIENCE_S)
        gate.set()
        # Its awaiter may still see it, so this is not the time to raise it; or it is, then once.
        raised = 0
        try:
            mgr.close()
        except ckpt.CheckpointError:
            raised += 1
        go_on.set()
        waiter.result(PATIENCE_S)
    try:
        mgr.close()
    except ckpt.CheckpointError:
        raised += 1
    assert raised == 1


def test_a_failed_commit_raises_for_everybody_any_number_of_times(tmp_path: Path) -> None:
    async def wait_for(commit: ckpt.Commit) -> None:
        await commit

    async def main() -> None:
        error = fire()
        async with manager(tmp_path) as mgr:
            commit = await mgr.save(0, Odd(SMALL, error=error))
            tasks = [asyncio.create_task(wait_for(commit)) for _ in range(3)]
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(outcome is error for outcome in outcomes)
            with pytest.raises(ckpt.CheckpointError, match="fire"):
                await commit
            assert commit.exception() is error

    run(main)


def test_a_timeout_is_not_seeing_the_error(tmp_path: Path) -> None:
    gate = threading.Event()
    mgr = plain_manager(tmp_path)
    commit = mgr.save(0, Odd(SMALL, gate=gate, error=fire()))
    with pytest.raises(ckpt.errors.CommitTimeoutError):
        commit.result(0)
    gate.set()
    with pytest.raises(ckpt.CheckpointError, match="fire"):
        mgr.close()


def test_failures_that_were_fetched_are_not_kept(tmp_path: Path) -> None:
    with plain_manager(tmp_path) as mgr:
        for step in range(5):
            commit = mgr.save(step, Odd(SMALL, error=fire()))
            assert isinstance(commit.exception(PATIENCE_S), ckpt.CheckpointError)
        mgr.save(5, SMALL).result(PATIENCE_S)
        assert len(mgr._service.saves.commits) == 0


def test_a_one_shot_save_that_breaks_off_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("after it was published")

    monkeypatch.setattr(background, "finished", broken)
    commit = ckpt.sync.save(tmp_path / "x", {"w": 1}, durable=False)
    assert isinstance(commit.exception(PATIENCE_S), ZeroDivisionError)
    assert ckpt.sync.load(tmp_path / "x") == {"w": 1}


@pytest.mark.parametrize("how", ["save", "partial"])
def test_a_save_whose_work_breaks_off_is_not_waited_for_for_ever(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("after the step was published")

    monkeypatch.setattr(queue, "step_info", broken)
    mgr = ckpt.sync.CheckpointManager(tmp_path)
    if how == "save":
        commit = mgr.save(1, {"w": 1})
    else:
        part = mgr.partial(1)
        part.save({"w": 1})
        commit = part._save.commit
        with pytest.raises(ZeroDivisionError):
            part.finalize()
    until(commit.done)
    with pytest.raises(ZeroDivisionError) if how == "save" else contextlib.nullcontext():
        mgr.close()
    assert commit.stage == "failed"
    assert "the save of step 1" in caplog.text
    assert "failed: ZeroDivisionError" in caplog.text
    assert "; a step 1 is there, and is durable" in caplog.text
    assert "NOT saved" not in caplog.text
    error = commit.exception()
    assert error is not None
    assert error.__notes__ == ["the step was published before this, and is durable"]
