"""A signal in a save: the step is committed or the one before it kept, and the program ends."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ckpt.sync
from tests.reliability.kills import attempts
from tests.support.forked_programs import program
from tests.support.gated_item import Gate, GateHandler
from tests.support.paths import PROGRAMS
from tests.support.still_thread import wait_until_main_is_still

# Programs are started here, which takes its time on a machine that does other things.
pytestmark = pytest.mark.timeout(300)

PROGRAM = str(PROGRAMS / "stop_in_save.py")
PATIENCE_S = 120
# Far above what a loaded machine takes; a hang is what is looked for.
GRACE_S = 20


@dataclass(frozen=True, slots=True)
class Stop:
    """A signal, the exit status it leads to, and the steps that are left; None: see the test."""

    code: int
    steps: list[int] | None
    signal: signal.Signals = signal.SIGTERM


STOPS = {
    "default": Stop(-signal.SIGTERM, [0]),
    "exits_in_the_wait": Stop(3, [0, 1]),
    "exits_in_the_save": Stop(3, [0]),
    "exits_without_a_block": Stop(3, [0, 1]),
    "saves_a_last_step": Stop(0, None),
    "waits_again": Stop(0, [0], signal.SIGINT),
}


@dataclass(frozen=True, slots=True)
class End:
    root: Path
    code: int
    seconds: float
    lines: list[str]
    errors: str


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    """How each program ended after its signal."""
    base = tmp_path_factory.mktemp("signals")

    def go(scenario: str) -> End:
        root = base / scenario
        with program(PROGRAM, scenario, root, errors=None) as child:
            try:
                assert child.stdout.readline() == "reached\n"
                child.send_signal(STOPS[scenario].signal)
                sent = time.monotonic()
                out, errors = child.communicate(timeout=PATIENCE_S)
                seconds = time.monotonic() - sent
            finally:
                child.kill()
        return End(root, child.returncode, seconds, out.splitlines(), errors)

    with ThreadPoolExecutor(3) as three:
        return dict(zip(STOPS, three.map(go, STOPS), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", STOPS)
def test_a_program_that_is_stopped_ends_soon_and_loses_no_step(
    ends: dict[str, End], scenario: str
) -> None:
    stop, end = STOPS[scenario], ends[scenario]
    assert end.code == stop.code, end.errors
    assert end.seconds < GRACE_S
    assert end.errors == ""
    if scenario != "default":
        assert attempts(end.root) == [], "an orderly end left something behind"
    with ckpt.sync.CheckpointManager(end.root) as mgr:
        assert attempts(end.root) == []
        steps = mgr.all_steps()
        assert steps
        if stop.steps is not None:
            assert steps == stop.steps
            assert np.array_equal(mgr.restore()["w"], np.arange(1 << 18))


def test_a_last_step_can_be_saved_after_the_signal(ends: dict[str, End]) -> None:
    end = ends["saves_a_last_step"]
    last = json.loads(end.lines[0])
    with ckpt.sync.CheckpointManager(end.root, mode="r") as mgr:
        assert mgr.all_steps() == list(range(last + 1))
        assert mgr.restore() == {"last": last}
    assert last > 3


def test_an_interrupted_wait_can_be_repeated(ends: dict[str, End]) -> None:
    in_between, after = map(json.loads, ends["waits_again"].lines)
    assert in_between == [False, True], "the interrupt stopped the save"
    assert after == 0


class Stopped(BaseException):
    """What a program's own signal handler raises; no error, and none of Python's interrupts."""


@pytest.mark.parametrize("call", ["save", "finalize"])
def test_whatever_a_signal_handler_raises_stops_the_call_that_waits(
    tmp_path: Path, call: str
) -> None:
    def stop(*_: object) -> None:
        raise Stopped

    def send(gate: Gate) -> None:
        assert gate.reached.wait(PATIENCE_S)
        wait_until_main_is_still()
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, stop)
    gate = Gate()
    sender = threading.Thread(target=send, args=(gate,))
    try:
        with ckpt.sync.CheckpointManager(tmp_path, handlers=[GateHandler()]) as mgr:
            part = mgr.partial(1)
            calls = {
                "save": lambda: mgr.save(1, items={"gate": gate}, durable=True),
                "finalize": part.finalize,
            }
            if call == "finalize":
                part.save(items={"gate": gate})
            sender.start()
            with pytest.raises(Stopped):
                calls[call]()
            assert not mgr.is_saving_in_progress()
            assert mgr.all_steps() == []
            assert attempts(tmp_path) == []
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
