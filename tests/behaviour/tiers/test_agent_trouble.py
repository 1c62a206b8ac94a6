"""What becomes of the last snapshot when the agent, the root or the program misbehaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import ckpt
import ckpt.sync
from ckpt._settings import Timeouts
from ckpt._tiers.agent import client
from ckpt._tiers.agent.flush import flush
from ckpt._tiers.agent.messages import (
    AgentMessage,
    AgentSetup,
    CallResult,
    PartRemovalRequest,
    StepAtTier,
    StepInRoot,
    ToAgent,
    TransferLeg,
    place_to_json,
)
from ckpt.errors import StorageError
from ckpt.storage._local.storage import LocalStorage
from ckpt.tiers import SharedMemory
from tests.support.command import environment
from tests.support.numbered_states import state_of
from tests.support.snapshots import (
    PATIENCE_S,
    children_of,
    shared_memory,
    steps_of,
    trainer,
    wait_for,
)


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def manager(root: Path, memory: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, tiers=[SharedMemory(directory=str(memory), **options)])


def agent_of(mgr: ckpt.sync.CheckpointManager) -> client.AgentClient:
    found: client.AgentClient = mgr._service._agent  # type: ignore[attr-defined]
    return found


def process_of(mgr: ckpt.sync.CheckpointManager) -> Any:
    process = agent_of(mgr)._process
    assert process is not None
    return process


def _priority(process: int) -> tuple[int, str | None]:
    """Return the niceness of a process, and what the system says of its session."""
    group = Path(f"/proc/{process}/autogroup")
    said = group.read_text().split("nice")[-1].strip() if group.exists() else None
    return os.getpriority(os.PRIO_PROCESS, process), said


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_an_agent_gives_way_to_its_trainer_until_the_end_is_near(
    tmp_path: Path, memory: Path, end: signal.Signals
) -> None:
    with trainer(tmp_path, memory, "hold", -1, 2, "handled") as run:
        run.lines(until="held")
        (agent,) = children_of(run.process.pid)
        ours, (found, group) = os.getpriority(os.PRIO_PROCESS, 0), _priority(agent)
        assert found == ours + client.NICENESS
        assert group in (None, str(client.NICENESS))
        run.process.send_signal(end)
        wait_for(tmp_path, 1)
        assert _priority(agent)[1] in (None, "0")


def test_a_run_fails_whose_agent_was_killed(tmp_path: Path, memory: Path) -> None:
    mgr = manager(tmp_path / "run", memory)
    with mgr:
        mgr.snapshot(3, state_of(3)).result()
        process_of(mgr).kill()
        process_of(mgr).wait()
        mgr.__exit__(ValueError, ValueError("the training has failed"), None)
    assert steps_of(tmp_path / "run") == [3]
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize(("fails", "saves"), [(False, False), (False, True), (True, False)])
def test_an_agent_that_is_stopped(
    fails: bool,
    saves: bool,
    tmp_path: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither saves nor the end wait for it; what it was to write stays."""
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.2)
    root = tmp_path / "run"
    mgr = manager(root, memory)
    with mgr:
        mgr.snapshot(3, state_of(3)).result()
        if saves:
            mgr.save(4, state_of(4)).result()
        process_of(mgr).send_signal(signal.SIGSTOP)
        error = ValueError() if fails else None
        mgr.__exit__(type(error) if error else None, error, None)
    assert process_of(mgr).returncode == -signal.SIGKILL
    assert steps_of(root) == ([4] if saves else [])
    assert any("stays in memory" in each for each in caplog.messages) is not saves
    if saves:
        assert list(memory.iterdir()) == []
        return
    with manager(root, memory) as mgr:
        assert mgr.latest_step() == 3


def test_an_agent_that_does_not_listen_is_replaced(tmp_path: Path, memory: Path) -> None:
    with manager(tmp_path / "run", memory) as mgr:
        mgr.snapshot(1, state_of(1)).result()
        first = process_of(mgr)
        first.send_signal(signal.SIGSTOP)
        for step in range(2000):
            agent_of(mgr).tell(StepInRoot(step))
        assert first.wait(PATIENCE_S) == -signal.SIGKILL
        mgr.snapshot(2000, state_of(2000)).result()
        assert process_of(mgr).poll() is None


class _Refusing(LocalStorage):
    """A root that refuses some of its attempts."""

    def __init__(self, root: Path, *refused: int) -> None:
        super().__init__(root, Timeouts())
        self.refused, self.count = refused, 0

    async def begin(self, step_dir: str):  # type: ignore[no-untyped-def]
        self.count += 1
        if self.count in self.refused:
            raise StorageError("busy")
        return await super().begin(step_dir)


def in_memory(memory: Path, *steps: int, **items: Any) -> None:
    with ckpt.sync.CheckpointManager(memory / "steps") as mgr:
        for step in steps:
            mgr.save(step, items=items or {"number": state_of(step)}).result()


def test_an_older_snapshot_never_takes_the_place_of_one_that_is_whole(
    tmp_path: Path, memory: Path
) -> None:
    """A store that is away for a moment says nothing about the snapshot."""
    in_memory(memory, 5, 6)
    root = _Refusing(tmp_path / "run", 1)
    first = anyio.run(flush, memory, root, -1)
    assert first is not None
    assert (first.step, first.problem) == (6, "step 6: busy")
    second = anyio.run(flush, memory, root, -1)
    assert second is not None
    assert (second.step, second.problem) == (6, "")
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        assert mgr.all_steps() == [6]


def test_an_older_one_is_written_where_the_newest_is_damaged(tmp_path: Path, memory: Path) -> None:
    """And that is said."""
    in_memory(memory, 5, 6)
    files = [path for path in (memory / "steps/6").rglob("*") if path.is_file()]
    large = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(large.read_bytes())
    data[len(data) // 2] ^= 1
    large.unlink()
    large.write_bytes(data)
    done = anyio.run(flush, memory, LocalStorage(tmp_path / "run", Timeouts()), -1)
    assert done is not None
    assert (done.step, done.problem) == (5, "")
    assert "was changed after it was saved" in done.passed_over
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        assert mgr.all_steps() == [5]


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_fork_that_leaves_the_block_ends_nothing(tmp_path: Path, memory: Path) -> None:
    """A child that ends with `sys.exit` goes through the block of its parent's manager."""
    mgr = manager(tmp_path / "run", memory)
    with mgr:
        mgr.snapshot(1, state_of(1)).result()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            code = 1
            try:
                mgr.__exit__(SystemExit, SystemExit(0), None)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert process_of(mgr).poll() is None
        mgr.snapshot(2, state_of(2)).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [2]


def test_a_trainer_that_becomes_another_program(tmp_path: Path, memory: Path) -> None:
    """Its number is the same, and its agent is not."""
    script = f"""
import os, signal, sys
import ckpt.sync
from ckpt.tiers import SharedMemory
signal.alarm({PATIENCE_S})
tier = SharedMemory(directory={str(memory)!r}, flush=False)
mgr = ckpt.sync.CheckpointManager({str(tmp_path / "run")!r}, tiers=[tier])
with mgr:
    if len(sys.argv) == 1:
        mgr.snapshot(7, {{"number": 7}}).result()
        agent = mgr._service._agent._process.pid
        os.execv(sys.executable, [sys.executable, __file__, str(agent)])
    assert mgr.restore() == {{"number": 7}}
    os.waitpid(int(sys.argv[1]), 0)
"""
    program = tmp_path / "program.py"
    program.write_text(script)
    subprocess.run([sys.executable, program], env=environment({}), check=True)
    assert list(memory.iterdir()) == []


@contextlib.contextmanager
def bare_agent(
    tmp_path: Path,
    told: Callable[[AgentMessage], None] = print,
    greeting: Callable[[], list[ToAgent]] = list,
) -> Iterator[client.AgentClient]:
    """An agent without a manager, which is running."""
    setup = AgentSetup(os.getpid(), place_to_json(str(tmp_path)), (), 1.0)
    agent = client.AgentClient(setup, told, greeting)
    try:
        agent.start()
        yield agent
    finally:
        agent.close(flush=False, timeout=PATIENCE_S)
        agent.untap_signals()


def _asked_while_it_is_stopped(
    agent: client.AgentClient, *, again: bool, is_killed: bool
) -> CallResult:
    """Return the result of a call that the running agent never answers."""
    process, send = agent._process, agent._send
    assert process is not None

    def send_and_kill(message: ToAgent) -> bool:
        agent._send = send
        is_sent = send(message)
        if is_killed:
            process.kill()
        return is_sent

    process.send_signal(signal.SIGSTOP)
    agent._send = send_and_kill
    return anyio.run(partial(agent.call, PartRemovalRequest("/nowhere"), again=again))


@pytest.mark.parametrize("again", [False, True])
def test_a_call_of_a_killed_agent_ends_or_is_made_again(tmp_path: Path, again: bool) -> None:
    with bare_agent(tmp_path) as agent:
        done = _asked_while_it_is_stopped(agent, again=again, is_killed=True)
        assert done.problem == ("" if again else "its agent was killed")
        assert agent.under_way == []
        # Either way the next call is answered.
        assert anyio.run(agent.call, PartRemovalRequest("/nowhere")).problem == ""


@pytest.mark.parametrize("again", [False, True])
def test_an_agent_that_does_not_answer_a_call_is_replaced(
    tmp_path: Path, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.5)
    with bare_agent(tmp_path) as agent:
        first = agent._process
        assert first is not None

        def is_patient_with_the_next() -> None:
            first.wait(PATIENCE_S)
            monkeypatch.setattr(client, "ANSWER_SECONDS", 20.0)

        ended = threading.Thread(target=is_patient_with_the_next)
        ended.start()
        done = _asked_while_it_is_stopped(agent, again=again, is_killed=False)
        ended.join()
        assert first.returncode == -signal.SIGKILL
        assert done.problem == ("" if again else "its agent does not answer within 0 s")


def test_a_call_ends_one_silent_agent_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are left for the rest of the run."""
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o700)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(sys, "executable", str(silent))
    with bare_agent(tmp_path / "run") as agent:
        request = PartRemovalRequest("/nowhere")
        done = anyio.run(partial(agent.call, request, again=True))
        assert done.problem == "its agent does not answer"
        assert agent._starts == 2
        assert agent.under_way == []


def test_an_agent_that_is_gone_before_the_end_holds_nothing_back(tmp_path: Path) -> None:
    first, second = (place_to_json(str(tmp_path / name)) for name in "ab")
    leg = TransferLeg(first, second, None, 2)
    setup = AgentSetup(os.getpid(), place_to_json(str(tmp_path)), (), 1.0, legs=(leg,))
    agent = client.AgentClient(setup, print, list)
    agent.start()
    process = agent._process
    assert process is not None
    process.kill()
    process.wait()
    agent._listener.join(PATIENCE_S)
    assert agent.close(flush=False, timeout=PATIENCE_S) == (True, ())
    agent.untap_signals()


def test_an_agent_that_cannot_be_started_answers_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with bare_agent(tmp_path) as agent:
        for again in (False, True):
            done = anyio.run(partial(agent.call, PartRemovalRequest("/nowhere"), again=again))
            assert done.problem
    assert "could not be started" in caplog.text


@pytest.mark.parametrize("saves", [False, True])
def test_memory_is_let_go_in_the_end_where_no_agent_can_be_started(
    saves: bool,
    tmp_path: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is only there stays, and the next manager finds it."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with manager(tmp_path / "run", memory) as mgr:
            mgr.snapshot(3, state_of(3)).result()
            if saves:
                mgr.save(4, state_of(4)).result()
    assert ("stays in memory" in caplog.text) is not saves
    assert (list(memory.iterdir()) == []) is saves
    with manager(tmp_path / "run", memory) as mgr:
        assert mgr.latest_step() == (4 if saves else 3)


def test_the_last_messages_of_an_agent_are_heard_before_the_next_one_is_greeted(
    tmp_path: Path,
) -> None:
    """Else what it has done would be asked for once more."""
    heard: list[str] = []
    is_told, may_end = threading.Event(), threading.Event()

    def told(message: AgentMessage) -> None:
        is_told.set()
        may_end.wait(PATIENCE_S)
        heard.append(type(message).__name__)

    def greeting() -> list[ToAgent]:
        heard.append("greeted")
        # It answers that there is no such step.
        return [StepAtTier(0, 7, "7", is_wanted=True)]

    (tmp_path / "disk").mkdir()
    places = [place_to_json(str(tmp_path / each)) for each in ("disk", "root")]
    legs = (TransferLeg(places[0], places[1], None, 16),)
    setup = AgentSetup(os.getpid(), places[1], (), 1.0, legs=legs)
    agent = client.AgentClient(setup, told, greeting)
    agent.start()
    try:
        assert is_told.wait(PATIENCE_S)
        assert agent._process is not None
        agent._process.kill()
        agent._process.wait()
        timer = threading.Timer(0.1, may_end.set)
        timer.start()
        agent.start()
        assert heard[:3] == ["greeted", "TransferResult", "greeted"]
        timer.join()
    finally:
        may_end.set()
        agent.close(flush=False, timeout=PATIENCE_S)
        agent.untap_signals()
