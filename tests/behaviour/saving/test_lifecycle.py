"""Commits, managers, threads, forks and whole programs: no script hangs or loses a save."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ckpt
import ckpt.sync
from tests.behaviour.saving.odd_managers import (
    LARGE,
    PATIENCE_S,
    SMALL,
    manager,
    names,
    plain_manager,
    reached,
    run,
)
from tests.support.forked_programs import Forked, program
from tests.support.odd_items import Odd
from tests.support.paths import PROGRAMS
from tests.support.trees import assert_same

ATTEMPT = ".orbax-checkpoint-tmp-"


# --- The ends of programs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """What a script of `children/scripts.py` must come to."""

    code: int = 0
    steps: tuple[str, ...] = ("0",)
    fires: int = 0
    raised_at_exit: int = 0
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
    "fails_unseen": Script(code=120, fires=1, raised_at_exit=1),
    "fails_unseen_in_a_function": Script(code=120, fires=1, raised_at_exit=1),
    "fails_unseen_in_the_block": Script(
        code=1, raises="ckpt.errors.CheckpointError: step 1, item 'default':"
    ),
    "fails_and_is_looked_at": Script(fires=1),
}


@contextlib.contextmanager
def script(scenario: str, root: Path) -> Iterator[Forked]:
    """A script while it runs."""
    with program(PROGRAMS / "end_scripts.py", scenario, root, errors=None) as child:
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
    assert seconds < 60, "the script hung at its end"
    if expected.steps:
        left = set(expected.steps)
        assert names(root) > left if expected.leaves else names(root) == left
        with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
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
        # Loud where something failed, also without logging, and otherwise silent.
        lines = errors.splitlines()
        said = [line for line in lines if line.startswith(f"step 1 of {root} was NOT saved: ")]
        raised = [line for line in lines if "never awaited: step 1, item 'default':" in line]
        assert (len(said), len(raised)) == (expected.fires, expected.raised_at_exit), errors
        assert len(lines) == len(said) + len(raised), errors


def test_a_full_disk_fails_that_save_and_nothing_else(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    with script("meets_a_limit_of_the_file_system", tmp_path) as child:
        out, errors = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, errors
    found = json.loads(out.splitlines()[0])
    number, step, *_ = found["error"]
    assert (number, step) == (27, 1)  # EFBIG
    assert found["left"] == ["0"]
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
    assert found == {"left": ["0"], "saving": False, "then": [0, 1]}


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
    assert errors.count("never awaited") == 1, "the child told of the parent's failure too"


def test_a_manager_is_of_no_use_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": 1}).result()
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: 1)
            with pytest.raises(ckpt.errors.ForkedProcessError, match="make a new one in the child"):
                mgr.restore(1)
        assert mgr.restore(1) == {"w": 1}


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
                info = await commit
                assert info is not None
                assert info.step == 0
                assert_same(await mgr.restore(), SMALL)
                held = Odd(SMALL, hold="stage")
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(mgr.save, 1, held)
                        await trio.to_thread.run_sync(held.reached.wait)
                        scope.cancel()
                assert names(tmp_path) == {"0"}
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


def test_a_save_that_a_policy_turns_down_is_falsy_and_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        policy = ckpt.save_when.EverySteps(2)
        async with manager(tmp_path, save_when=policy) as mgr:
            commit = await mgr.save(1, SMALL)
            assert not commit
            assert commit.skipped is not None
            assert "multiple of 2" in commit.skipped
            assert commit.done()
            assert commit.stage == "skipped"
            with pytest.raises(ckpt.errors.SaveSkippedError, match="multiple of 2"):
                await commit
            with pytest.raises(ckpt.errors.SaveSkippedError, match="if commit:"):
                commit.result()
            assert isinstance(commit.exception(), ckpt.errors.SaveSkippedError)
            assert commit.cancel() is False
            assert await mgr.all_steps() == []
            assert await mgr.save(2, SMALL)
            assert await mgr.save(3, SMALL, force=True)
            await mgr.wait_until_finished()
            assert await mgr.all_steps() == [2, 3]

    run(main)
    assert names(tmp_path) == {"2", "3"}


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
    assert names(tmp_path) == {"0"}


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

    def observe(event: ckpt.types.Event) -> None:
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
    assert names(tmp_path) == {"0"}


def test_what_a_policy_does_not_keep_is_gone_when_all_is_finished(tmp_path: Path) -> None:
    with plain_manager(tmp_path, keep=ckpt.keep.Latest(1)) as mgr:
        for step in range(20):
            mgr.save(step, SMALL)
            mgr.wait_until_finished()
            assert mgr.all_steps() == [step]
    # What a run keeps is noted beside its steps.
    assert names(tmp_path) == {".ckpt-run", "19"}


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
    assert names(tmp_path) == {"0"}


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
    with contextlib.ExitStack() as stack:
        racers = [
            stack.enter_context(program(PROGRAMS / "race_saves.py", tmp_path, name))
            for name in ("one", "two")
        ]
        lines = [(racer.stdin, racer.stdout) for racer in racers]
        assert all(out.readline() == "ready\n" for _, out in lines)
        winners = []
        for step in range(rounds):
            for into, _ in lines:
                print(step, file=into, flush=True)
            said = [out.readline().strip() for _, out in lines]
            assert sorted(said) == ["taken", "won"], f"step {step}: {said}"
            winners.append(("one", "two")[said.index("won")])
        for into, out in lines:
            into.close()
            assert json.loads(out.readline()) == list(range(rounds))
    assert [racer.returncode for racer in racers] == [0, 0]
    assert names(tmp_path) == {*map(str, range(rounds))}
    with ckpt.sync.CheckpointManager(tmp_path, mode="r") as mgr:
        for step, winner in enumerate(winners):
            found = mgr.restore(step)
            assert found["name"] == winner
            assert np.array_equal(found["w"], np.full(1 << 16, step))


@pytest.mark.parametrize("phase", ["stage", "write", "record"])
def test_an_attempt_of_a_live_writer_is_not_swept(tmp_path: Path, phase: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def observe(event: ckpt.types.Event) -> None:
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
        assert writer.all_steps() == [0, 1, 2]
    assert attempts() == []
