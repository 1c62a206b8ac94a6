"""Promise 3 and what belongs to it: errors, cancellation, threads, forks, and the ends of programs.

Errors reach their owner once; a listed step is a committed one; nothing is left behind; no script
hangs or loses a save.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from tests.support.numbered_states import state_of
from tests.support.odd_items import Odd, OddHandler
from tests.support.paths import PROGRAMS
from tests.support.trees import abstract, assert_same, sharded

ATTEMPT = ".orbax-checkpoint-tmp-"
SMALL = {"w": np.arange(8, dtype=np.float32)}
# Staged and written in many turns where the budget is a megabyte.
MIB = ckpt.Staging(budget_bytes=1 << 20)
LARGE = state_of(0, large=1 << 19)
PATIENCE_S = 60


def fire(number: int = 0) -> ckpt.CheckpointError:
    return ckpt.CheckpointError(f"fire {number}")


def manager(root: Path, **options: Any) -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(root, handlers=[OddHandler()], **options)


def plain_manager(root: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, handlers=[OddHandler()], **options)


def names(root: Path) -> set[str]:
    return set(os.listdir(root))


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


async def reached(item: Odd) -> None:
    assert await asyncio.to_thread(item.reached.wait, PATIENCE_S)


# --- Errors reach their owner, once ---------------------------------------------------------------


def test_the_awaiter_of_a_failed_commit_gets_its_error_and_the_exit_does_not(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with manager(tmp_path) as mgr:
            commit = await mgr.save(3, Odd(SMALL, error=fire()))
            with pytest.raises(ckpt.CheckpointError, match=r"^step 3, item 'state': fire 0$"):
                await commit
            assert commit.done()
            assert commit.stage == "failed"
            assert await mgr.latest_step() is None
        await mgr.close()

    run(main)
    assert names(tmp_path) == {"metadata"}


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
        with pytest.raises(ckpt.CheckpointError, match=r"^step 0, item 'state': fire 0$"):
            async with mgr:
                await mgr.save(0, Odd(SMALL, error=fire()))
        await mgr.close()
        await mgr.close()

    run(main)
    assert names(tmp_path) == {"metadata"}


@pytest.mark.parametrize("way", ["with", "close", "wait_until_finished"])
def test_several_errors_that_nobody_saw_are_raised_as_a_group(tmp_path: Path, way: str) -> None:
    mgr = plain_manager(tmp_path)
    mgr.__enter__()
    for number in range(3):
        mgr.save(number, Odd(SMALL, error=fire(number)))
    mgr.save(3, SMALL)
    with pytest.raises(ExceptionGroup) as caught:
        mgr.__exit__(None, None, None) if way == "with" else getattr(mgr, way)()
    assert sorted(map(str, caught.value.exceptions)) == [
        f"step {n}, item 'state': fire {n}" for n in range(3)
    ]
    mgr.close()
    assert names(tmp_path) == {"metadata", "3"}


def test_an_error_never_surfaces_in_another_call(tmp_path: Path) -> None:
    async def main() -> None:
        mgr = manager(tmp_path)
        ended = threading.Event()
        failed = await mgr.save(0, Odd(SMALL, error=fire()))
        failed.add_done_callback(lambda _: ended.set())
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)
        commit = await mgr.save(1, SMALL)
        info = await commit
        assert info is not None
        assert info.step == 1
        assert failed.done()
        assert await mgr.all_steps() == [1]
        assert await mgr.latest_step() == 1
        assert_same(await mgr.restore(), SMALL)
        await mgr.delete(1)
        with pytest.raises(ckpt.errors.StepNotFoundError):
            await mgr.restore()
        with pytest.raises(ckpt.CheckpointError, match="fire"):
            await mgr.wait_until_finished()
        await mgr.wait_until_finished()
        await mgr.close()

    run(main)


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
                await mgr.save(0, SMALL)

    run(main)
    assert names(tmp_path) == {"metadata", "0"}


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


# --- The ends of programs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """What a script of `children/scripts.py` must come to."""

    code: int = 0
    steps: tuple[str, ...] = ("0",)
    fires: int = 0
    raises: str | None = None
    gives_up: bool = False
    leaves: bool = False


SCRIPTS = {
    "forgets_to_close": Script(),
    "forgets_to_close_in_a_function": Script(),
    "forgets_to_close_after_asyncio_run": Script(),
    "forgets_to_close_in_a_coroutine": Script(),
    "forgets_to_await_the_commit": Script(),
    "leaves_a_pending_awaiter": Script(),
    "saves_in_a_thread_that_has_ended": Script(),
    "never_uses_the_manager": Script(steps=()),
    "calls_sys_exit": Script(code=3),
    "calls_sys_exit_in_the_block": Script(code=3),
    "raises": Script(code=1, raises="ValueError: of the script"),
    "raises_in_the_block": Script(code=1, raises="ValueError: of the script"),
    "never_ends": Script(code=120, gives_up=True),
    "never_ends_and_cannot_be_stopped": Script(code=120, gives_up=True, leaves=True),
    "fails_unseen": Script(code=120, fires=1),
    "fails_unseen_in_a_function": Script(code=120, fires=1),
    "fails_unseen_in_the_block": Script(
        code=1, raises="ckpt.errors.CheckpointError: step 1, item 'state':"
    ),
    "fails_and_is_looked_at": Script(),
}


@contextlib.contextmanager
def script(scenario: str, root: Path) -> Iterator[subprocess.Popen[str]]:
    """A script while it runs."""
    command = [sys.executable, str(PROGRAMS / "end_scripts.py"), scenario, str(root)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, float, str]]:
    """Root, exit status, seconds from the last line to the end, and standard error of each."""
    base = tmp_path_factory.mktemp("scripts")

    def go(scenario: str) -> tuple[Path, int, float, str]:
        root = base / scenario
        with script(scenario, root) as child:
            assert child.stdout is not None
            line = child.stdout.readline()
            at_end = time.monotonic()
            rest, errors = child.communicate(timeout=PATIENCE_S)
            seconds = time.monotonic() - at_end
        assert (line, rest) == ("end\n", ""), errors
        return root, child.returncode, seconds, errors

    with ThreadPoolExecutor(3) as three:
        return dict(zip(SCRIPTS, three.map(go, SCRIPTS), strict=True))


@pytest.mark.parametrize("scenario", SCRIPTS)
def test_a_script_ends_promptly_and_loses_no_save(
    ended: dict[str, tuple[Path, int, float, str]], scenario: str
) -> None:
    expected = SCRIPTS[scenario]
    root, code, seconds, errors = ended[scenario]
    assert code == expected.code, errors
    assert seconds < 15, "the script hung at its end"
    if expected.steps:
        left = {"metadata", *expected.steps}
        assert names(root) > left if expected.leaves else names(root) == left
        with ckpt.sync.CheckpointManager(root, read_only=True) as mgr:
            found = mgr.restore(0)["w"]
        assert np.array_equal(found, np.arange(4 << 20, dtype=np.float32))
    else:
        assert not root.exists()
    if expected.gives_up:
        assert "the save of step 1" in errors
        assert "given up" in errors
        assert len(errors.splitlines()) == 1, errors
    elif expected.raises:
        assert errors.splitlines()[-1].startswith(expected.raises)
        assert "never awaited" not in errors
    else:
        # Loud where something failed, and otherwise silent.
        assert len(errors.splitlines()) == expected.fires, errors
        assert errors.count("step 1, item 'state': the disk is on fire") == expected.fires, errors


def test_a_full_disk_fails_that_save_and_nothing_else(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    with script("meets_a_limit_of_the_file_system", tmp_path) as child:
        out, errors = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, errors
    found = json.loads(out.splitlines()[0])
    number, step, *_ = found["error"]
    assert (number, step) == (27, 1)  # EFBIG
    assert found["left"] == ["0", "metadata"]
    assert found["latest"] == 0
    assert found["then"] == [0, 1]


def test_an_interrupt_in_save_stops_that_save_and_leaves_nothing(tmp_path: Path) -> None:
    with script("is_interrupted", tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "reached\n"
        child.send_signal(signal.SIGINT)
        out, errors = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, errors
    assert errors == ""
    found = json.loads(out.splitlines()[0])
    assert found == {"left": ["0", "metadata"], "saving": False, "then": [0, 1]}


def test_a_forked_child_is_told_at_once(tmp_path: Path) -> None:
    with script("forks", tmp_path) as child:
        out, errors = child.communicate(timeout=PATIENCE_S)
    # The parent ends with an error of its own, and says so.
    assert child.returncode == 120, errors
    found, in_child, code, saved, in_parent = out.splitlines()
    assert json.loads(saved) == 2, "the fork harmed the parent"
    assert (in_child, in_parent) == ("end", "end")
    calls = json.loads(found)
    assert calls == dict.fromkeys(calls, "ForkedProcessError")
    assert json.loads(code) == 7, "the child did not end as it wanted to"
    assert errors.count("the disk is on fire") == 1, "the child told of the parent's failure too"


# --- The commit: one handle for everybody ---------------------------------------------------------


def test_a_commit_can_be_awaited_by_everybody_any_number_of_times(tmp_path: Path) -> None:
    async def wait_for(commit: ckpt.Commit) -> ckpt.StepInfo | None:
        return await commit

    async def main() -> None:
        gate = threading.Event()
        async with manager(tmp_path) as mgr:
            commit = await mgr.save(5, Odd(SMALL, gate=gate), metrics={"loss": 1.5})
            assert commit
            assert commit.step == 5
            assert commit.skipped is None
            assert not commit.done()
            tasks = [asyncio.create_task(wait_for(commit)) for _ in range(3)]
            in_loop = asyncio.create_task(asyncio.to_thread(asyncio.run, wait_for(commit)))
            in_thread = asyncio.create_task(asyncio.to_thread(commit.result, PATIENCE_S))
            await asyncio.sleep(0)
            gate.set()
            found = await asyncio.gather(*tasks, in_loop, in_thread)
            again = [await commit, await commit, commit.result(), commit.result(0)]
            assert all(info is found[0] for info in [*found, *again])
            assert found[0] is not None
            assert (found[0].step, found[0].metrics) == (5, {"loss": 1.5})
            assert commit.exception() is None
            assert commit.stage == "done"
            assert commit.progress.fraction == 1.0
        assert await commit is found[0], "after close"

    run(main)


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


def test_trio_programs_can_use_it_all(tmp_path: Path) -> None:
    trio = pytest.importorskip("trio")

    async def main() -> None:
        gate = threading.Event()
        with trio.fail_after(PATIENCE_S):
            async with manager(tmp_path) as mgr:
                commit = await mgr.save(0, Odd(SMALL, gate=gate))
                with trio.move_on_after(0):
                    await commit
                assert not commit.done()
                gate.set()
                assert (await commit).step == 0
                assert_same(await mgr.restore(), SMALL)
                held = Odd(SMALL, hold="stage")
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(mgr.save, 1, held)
                        await trio.to_thread.run_sync(held.reached.wait)
                        scope.cancel()
                assert names(tmp_path) == {"metadata", "0"}
                await ckpt.save(tmp_path / "one", SMALL)
                assert_same(await ckpt.load(tmp_path / "one"), SMALL)

    trio.run(main)


def test_waiting_can_run_out_of_time_and_the_commit_goes_on(tmp_path: Path) -> None:
    gate = threading.Event()
    with plain_manager(tmp_path) as mgr:
        commit = mgr.save(0, Odd(SMALL, gate=gate))
        with pytest.raises(ckpt.errors.CommitTimeoutError, match=r"step 0.*goes on"):
            commit.result(0.001)
        with pytest.raises(ckpt.errors.CommitTimeoutError):
            commit.exception(0)
        assert not commit.done()
        assert mgr.is_saving_in_progress()
        gate.set()
        info = commit.result(PATIENCE_S)
        assert info is not None
        assert info.step == 0
        assert not mgr.is_saving_in_progress()


def test_a_timeout_is_not_seeing_the_error(tmp_path: Path) -> None:
    gate = threading.Event()
    mgr = plain_manager(tmp_path)
    commit = mgr.save(0, Odd(SMALL, gate=gate, error=fire()))
    with pytest.raises(ckpt.errors.CommitTimeoutError):
        commit.result(0)
    gate.set()
    with pytest.raises(ckpt.CheckpointError, match="fire"):
        mgr.close()


def test_done_callbacks_are_called_once_and_their_errors_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    calls: list[tuple[str, ckpt.Commit]] = []

    def broken(commit: ckpt.Commit) -> None:
        calls.append(("broken", commit))
        raise RuntimeError("of the callback")

    with plain_manager(tmp_path) as mgr:
        commit = mgr.save(0, Odd(SMALL, gate=gate))
        commit.add_done_callback(broken)
        commit.add_done_callback(lambda done: calls.append(("whole", done)))
        assert calls == []
        gate.set()
        commit.result(PATIENCE_S)
        mgr.wait_until_finished()
        assert calls == [("broken", commit), ("whole", commit)]
        commit.add_done_callback(lambda done: calls.append(("late", done)))
        assert calls[2:] == [("late", commit)]
        assert mgr.all_steps() == [0]
    assert "of the callback" in caplog.text


@pytest.mark.parametrize("stands_in", ["commit", "line"])
def test_a_cancelled_commit_leaves_nothing_and_the_next_save_works(
    tmp_path: Path, stands_in: str
) -> None:
    async def main() -> None:
        async with manager(tmp_path, staging=MIB) as mgr:
            held = Odd(LARGE, hold="commit")
            commit = await mgr.save(0, held)
            await reached(held)
            if stands_in == "line":
                behind = asyncio.create_task(mgr.save(1, SMALL))
                await asyncio.sleep(0)
            assert commit.cancel() is True
            with pytest.raises(ckpt.errors.CommitCancelledError, match="step 0"):
                await commit
            assert commit.done()
            assert commit.cancel() is False
            assert commit.stage == "failed"
            if stands_in == "line":
                await (await behind)
            else:
                assert names(tmp_path) == {"metadata"}
                await (await mgr.save(1, SMALL))
            assert names(tmp_path) == {"metadata", "1"}
            commit = await mgr.save(0, LARGE)
            await commit
            assert_same(await mgr.restore(0), LARGE)

    run(main)


def test_a_cancelled_commit_that_nobody_awaits_is_no_failure(tmp_path: Path) -> None:
    with plain_manager(tmp_path) as mgr:
        mgr.save(0, Odd(SMALL, hold="commit")).cancel()
    assert names(tmp_path) == {"metadata"}


def test_a_commit_can_be_cancelled_from_the_library_s_own_thread(tmp_path: Path) -> None:
    gate = threading.Event()
    commits: list[ckpt.Commit] = []

    def observe(event: ckpt.Event) -> None:
        if event.phase == "write":
            gate.wait(PATIENCE_S)
            commits[0].cancel()

    with plain_manager(tmp_path, observers=[observe]) as mgr:
        commits.append(mgr.save(0, SMALL))
        gate.set()
        assert isinstance(commits[0].exception(PATIENCE_S), ckpt.errors.CommitCancelledError)
    assert names(tmp_path) == {"metadata"}


def test_cancelling_an_awaiter_leaves_the_commit_going(tmp_path: Path) -> None:
    async def wait_for(commit: ckpt.Commit) -> None:
        await commit

    async def main() -> None:
        gate = threading.Event()
        async with manager(tmp_path) as mgr:
            commit = await mgr.save(0, Odd(SMALL, gate=gate))
            task = asyncio.create_task(wait_for(commit))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wait_for(commit), 0.001)
            assert not commit.done()
            gate.set()
            info = await commit
            assert info is not None
            assert await mgr.all_steps() == [0]

    run(main)


def test_an_awaiter_that_was_cancelled_has_not_seen_the_error(tmp_path: Path) -> None:
    async def main() -> None:
        gate = threading.Event()
        mgr = manager(tmp_path)
        commit = await mgr.save(0, Odd(SMALL, gate=gate, error=fire()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(commit), 0.001)
        gate.set()
        with pytest.raises(ckpt.CheckpointError, match="fire"):
            await mgr.close()

    run(main)


def test_a_block_that_is_cancelled_still_commits_what_it_saved(tmp_path: Path) -> None:
    async def main() -> None:
        gate = threading.Event()
        item = Odd(SMALL, gate=gate)

        async def block() -> None:
            async with manager(tmp_path) as mgr:
                await mgr.save(0, item)
                await asyncio.sleep(PATIENCE_S)

        task = asyncio.create_task(block())
        await reached(item)
        task.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert names(tmp_path) == {"metadata", "0"}

    run(main)


def test_a_save_that_a_policy_turns_down_is_falsy_and_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        policy = ckpt.policies.FixedInterval(2)
        async with manager(tmp_path, save_policy=policy) as mgr:
            commit = await mgr.save(1, SMALL)
            assert not commit
            assert commit.skipped is not None
            assert "multiple of 2" in commit.skipped
            assert commit.done()
            assert commit.stage == "skipped"
            assert await commit is None
            assert commit.result() is None
            assert commit.exception() is None
            assert commit.cancel() is False
            assert await mgr.all_steps() == []
            assert await mgr.save(2, SMALL)
            assert await mgr.save(3, SMALL, force=True)
            await mgr.wait_until_finished()
            assert await mgr.all_steps() == [2, 3]

    run(main)
    assert names(tmp_path) == {"metadata", "2", "3"}


# --- Closing --------------------------------------------------------------------------------------


def test_a_closed_manager_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with manager(tmp_path) as mgr:
            commit = await mgr.save(0, SMALL)
        assert commit.done()
        for call in (mgr.save(1, SMALL), mgr.restore(), mgr.all_steps(), mgr.latest_step()):
            with pytest.raises(ckpt.errors.ClosedError):
                await call

    run(main)
    assert names(tmp_path) == {"metadata", "0"}


def test_calls_while_the_manager_closes_do_not_block_their_loop(tmp_path: Path) -> None:
    async def main() -> None:
        gate = threading.Event()
        mgr = manager(tmp_path)
        item = Odd(SMALL, gate=gate)
        await mgr.save(0, item)
        await reached(item)
        # Were the loop blocked, this would let it go on: late, but the test ends.
        rescue = threading.Timer(20, gate.set)
        rescue.start()
        closing = asyncio.create_task(mgr.close())
        for call in (mgr.latest_step, mgr.all_steps, mgr.restore):
            # Refused now, or answered before the end; never by waiting in this thread.
            await asyncio.sleep(0.01)
            with contextlib.suppress(ckpt.errors.ClosedError, ckpt.errors.StepNotFoundError):
                await call()
            assert not gate.is_set(), "a call blocked the caller's loop until the save had ended"
        rescue.cancel()
        gate.set()
        await closing

    run(main)


def test_a_busy_engine_does_not_block_the_caller_s_loop(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def observe(event: ckpt.Event) -> None:
        if event.phase == "write":
            reached.set()
            go_on.wait(20)

    async def main() -> None:
        async with manager(tmp_path, observers=[observe]) as mgr:
            commit = await mgr.save(0, SMALL)
            assert await asyncio.to_thread(reached.wait, PATIENCE_S)
            calls = [mgr.latest_step(), mgr.all_steps(), mgr.save(1, SMALL)]
            tasks = [asyncio.create_task(call) for call in calls]
            await asyncio.sleep(0)
            tasks[0].cancel()
            tasks[2].cancel()
            await asyncio.sleep(0)
            assert not commit.done()
            assert not any(task.done() for task in tasks), "the engine was not busy"
            go_on.set()
            await asyncio.wait(tasks)
            assert [task.cancelled() for task in tasks] == [True, False, True]

    started = time.monotonic()
    run(main)
    assert time.monotonic() - started < 20, "the caller's loop waited for the engine"
    assert names(tmp_path) == {"metadata", "0"}


def test_what_a_policy_does_not_keep_is_gone_when_all_is_finished(tmp_path: Path) -> None:
    with plain_manager(tmp_path, preservation=ckpt.policies.LatestN(1)) as mgr:
        for step in range(20):
            mgr.save(step, SMALL)
            mgr.wait_until_finished()
            assert mgr.all_steps() == [step]
    assert names(tmp_path) == {"metadata", "19"}


def test_closing_from_many_places_waits_in_each(tmp_path: Path) -> None:
    gate = threading.Event()
    mgr = plain_manager(tmp_path)
    item = Odd(SMALL, gate=gate)
    commit = mgr.save(0, item)
    assert item.reached.wait(PATIENCE_S)
    with ThreadPoolExecutor(3) as others:
        closing = [others.submit(mgr.close) for _ in range(3)]
        gate.set()
        for each in closing:
            each.result(PATIENCE_S)
            assert commit.done()
    assert names(tmp_path) == {"metadata", "0"}


# --- Cancelling calls -----------------------------------------------------------------------------


def loop_turns() -> Iterator[int]:
    """How many turns of the loop to wait before cancelling: every small count, then fewer."""
    turns = 0.0
    while True:
        yield int(turns)
        turns = max(turns + 1, turns * 1.3)


async def cancelled_after(turns: int, call: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Cancel `call` after so many turns of the loop; return whether that came in time."""
    task = asyncio.create_task(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return False, await task
    except asyncio.CancelledError:
        return True, None


def test_a_save_cancelled_at_any_point_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with manager(tmp_path, staging=MIB) as mgr:
            kept = {"metadata"}
            done = 0
            for step, turns in enumerate(loop_turns()):
                cancelled, commit = await cancelled_after(turns, mgr.save(step, LARGE))
                if not cancelled:
                    await commit
                    done += 1
                    kept.add(str(step))
                elif str(step) in names(tmp_path):
                    # Cancelled when nothing could be stopped any more: then it is all there.
                    assert_same(await mgr.restore(step), LARGE)
                    kept.add(str(step))
                assert names(tmp_path) == kept, f"cancelled after {turns} turns"
                assert not mgr.is_saving_in_progress()
                if done == 2:
                    break
            assert step > 15
            assert await mgr.all_steps() == sorted(int(name) for name in kept - {"metadata"})
            await (await mgr.save(step + 1, LARGE))
            assert_same(await mgr.restore(step + 1), LARGE)

    run(main)


@pytest.mark.parametrize("phase", ["plan", "stage", "write", "record", "publish"])
def test_a_save_cancelled_in_any_phase_is_whole_or_not_there(tmp_path: Path, phase: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        armed = False
        task: asyncio.Task[ckpt.Commit]

        def observe(event: ckpt.Event) -> None:
            nonlocal armed
            if armed and event.phase == phase:
                armed = False
                asked = threading.Event()

                def cancel() -> None:
                    task.cancel()
                    # Once the task has passed the request on.
                    loop.call_soon(loop.call_soon, asked.set)

                loop.call_soon_threadsafe(cancel)
                assert asked.wait(PATIENCE_S)

        async def save() -> ckpt.Commit:
            commit = await mgr.save(0, LARGE)
            await commit
            return commit

        async with manager(tmp_path, staging=MIB, observers=[observe]) as mgr:
            armed = True
            task = asyncio.create_task(save())
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not armed
            await mgr.wait_until_finished()
            if await mgr.all_steps() == [0]:
                assert_same(await mgr.restore(0), LARGE)
                assert names(tmp_path) == {"metadata", "0"}
            else:
                assert phase != "publish"
                assert names(tmp_path) == {"metadata"}
            await (await mgr.save(1, LARGE))
            assert_same(await mgr.restore(1), LARGE)

    run(main)


def test_a_one_shot_save_cancelled_at_any_point_is_whole_or_not_there(tmp_path: Path) -> None:
    async def main() -> None:
        done = 0
        kept: set[str] = set()
        for number, turns in enumerate(loop_turns()):
            path = tmp_path / f"{number}"
            cancelled, _ = await cancelled_after(turns, ckpt.save(path, LARGE, staging=MIB))
            done += not cancelled
            if path.exists():
                assert_same(await ckpt.load(path), LARGE)
                kept.add(path.name)
            else:
                assert cancelled
            assert names(tmp_path) == kept, f"cancelled after {turns} turns"
            if done == 2:
                break
        assert number > 15

    run(main)


@pytest.mark.parametrize("way", ["manager", "one-shot"])
def test_a_restore_cancelled_at_any_point_gives_its_memory_back(tmp_path: Path, way: str) -> None:
    # Saved from one device and restored by columns onto eight, every chunk passes through the
    # staging memory.
    saved = {"w": np.arange(3 << 16, dtype=np.float32).reshape(768, 256)}
    wanted = {"w": sharded(saved["w"], None, ("data", "model"))}
    target = abstract(wanted)

    async def main() -> None:
        async with manager(tmp_path, staging=MIB) as mgr:
            await (await mgr.save(0, {"w": jnp.asarray(saved["w"])}))

            def restore() -> Coroutine[Any, Any, Any]:
                if way == "manager":
                    return mgr.restore(0, target)
                return ckpt.load(tmp_path / "0", target)

            tries = done = 0
            for turns in loop_turns():
                cancelled, tree = await cancelled_after(turns, restore())
                tries += 1
                if not cancelled:
                    assert_same(tree, wanted)
                    done += 1
                    if done == 2:
                        break
            assert tries > 10
            # With a megabyte of staging memory, none of which may have been lost:
            assert_same(await mgr.restore(0, target), wanted)
            await (await mgr.save(1, LARGE))
            assert_same(await mgr.restore(1), LARGE)
        assert names(tmp_path) == {"metadata", "0", "1"}

    run(main)


def test_a_delete_cancelled_at_any_point_is_whole_or_not_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with manager(tmp_path) as mgr:
            kept = {"metadata"}
            for step in range(80):
                await (await mgr.save(step, SMALL))
                await cancelled_after(int(1.12**step), mgr.delete(step))
                if step in await mgr.all_steps():
                    assert_same(await mgr.restore(step), SMALL)
                    kept.add(str(step))
                assert names(tmp_path) == kept, f"cancelled after {int(1.12**step)} turns"

    run(main)


def test_a_save_cancelled_while_it_waits_its_turn_never_begins(tmp_path: Path) -> None:
    async def main() -> None:
        gate = threading.Event()
        async with manager(tmp_path) as mgr:
            first = await mgr.save(0, Odd(SMALL, gate=gate))
            waiting = asyncio.create_task(mgr.save(1, SMALL))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not first.done()
            third = asyncio.create_task(mgr.save(2, SMALL))
            await asyncio.sleep(0)
            gate.set()
            await (await third)
            assert await mgr.all_steps() == [0, 2]

    run(main)
    assert names(tmp_path) == {"metadata", "0", "2"}


def test_a_caller_that_blocks_its_loop_does_not_stall_a_commit(tmp_path: Path) -> None:
    async def main() -> None:
        done = threading.Event()
        async with manager(tmp_path) as mgr:
            commit = await mgr.save(0, LARGE)
            commit.add_done_callback(lambda _: done.set())
            assert done.wait(PATIENCE_S)  # blocks this loop until the commit is done
            assert await commit is not None

    run(main)


# --- Several writers on one root ------------------------------------------------------------------


def test_of_two_processes_that_save_the_same_steps_one_wins_each(tmp_path: Path) -> None:
    rounds = 15
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        racers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(PROGRAMS / "race_saves.py"), str(tmp_path), name],
                    stdin=pipe,
                    stdout=pipe,
                    text=True,
                )
            )
            for name in ("one", "two")
        ]
        lines = [(racer.stdin, racer.stdout) for racer in racers]
        assert all(out and out.readline() == "ready\n" for _, out in lines)
        winners = []
        for step in range(rounds):
            for into, _ in lines:
                print(step, file=into, flush=True)
            said = [out.readline().strip() if out else "" for _, out in lines]
            assert sorted(said) == ["taken", "won"], f"step {step}: {said}"
            winners.append(("one", "two")[said.index("won")])
        for into, out in lines:
            assert into is not None
            assert out is not None
            into.close()
            assert json.loads(out.readline()) == list(range(rounds))
    assert [racer.returncode for racer in racers] == [0, 0]
    assert names(tmp_path) == {"metadata", *map(str, range(rounds))}
    with ckpt.sync.CheckpointManager(tmp_path, read_only=True) as mgr:
        for step, winner in enumerate(winners):
            found = mgr.restore(step)
            assert found["name"] == winner
            assert np.array_equal(found["w"], np.full(1 << 16, step))


@pytest.mark.parametrize("phase", ["stage", "write", "record"])
def test_an_attempt_of_a_live_writer_is_not_swept(tmp_path: Path, phase: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def observe(event: ckpt.Event) -> None:
        if event.operation == "save" and event.phase == phase:
            reached.set()
            assert go_on.wait(PATIENCE_S)

    def attempts() -> list[str]:
        return [name for name in names(tmp_path) if ATTEMPT in name]

    with plain_manager(tmp_path, observers=[observe]) as writer, ThreadPoolExecutor(1) as thread:
        saved = thread.submit(lambda: writer.save(0, LARGE).result(PATIENCE_S))
        assert reached.wait(PATIENCE_S)
        try:
            with plain_manager(tmp_path) as other:
                assert len(attempts()) == 1
                assert other.all_steps() == []
                other.save(1, SMALL).result(PATIENCE_S)
            ckpt.sync.save(tmp_path / "2", SMALL)
            assert len(attempts()) == 1
        finally:
            go_on.set()
        info = saved.result(PATIENCE_S)
        assert info is not None
        assert_same(writer.restore(0), LARGE)
        assert writer.all_steps() == [0, 1]
    assert attempts() == []


def test_failures_that_were_fetched_are_not_kept(tmp_path: Path) -> None:
    with plain_manager(tmp_path) as mgr:
        for step in range(5):
            commit = mgr.save(step, Odd(SMALL, error=fire()))
            assert isinstance(commit.exception(PATIENCE_S), ckpt.CheckpointError)
        mgr.save(5, SMALL).result(PATIENCE_S)
        assert not mgr._service.saves._commits
