"""A program that is told to end saves one last step, and ends; one that hangs still dies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from tests.reliability.kills import attempts
from tests.support.forked_programs import Forked, program
from tests.support.paths import PROGRAMS

# Programs are started here, which takes its time on a machine that does other things.
pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 120
USR1, TERM = signal.SIGUSR1, signal.SIGTERM
PROGRAM = str(PROGRAMS / "train_preempted.py")


@dataclass(frozen=True, slots=True)
class End:
    root: Path
    code: int
    lines: list[Any]
    errors: str

    def steps(self) -> list[int]:
        """The committed steps; all of them whole, and nothing else left after an orderly end."""
        if self.code == 0:
            assert attempts(self.root) == []
        with ckpt.sync.CheckpointManager(self.root, mode="r") as mgr:
            steps = mgr.all_steps()
            assert all(mgr.verify(step) for step in steps)
        return steps

    def is_right(self) -> bool:
        """Whether the latest step holds the state after as many updates."""
        with ckpt.sync.CheckpointManager(self.root, mode="r") as mgr:
            step, w = mgr.latest_step(), mgr.restore()["w"]
        return step is not None and bool((np.asarray(w) == step + 1).all())


@contextlib.contextmanager
def started(scenario: str, root: Path, *rest: object) -> Iterator[Forked]:
    """A program, that is ended whatever happens."""
    with program(PROGRAM, scenario, root, *rest, errors=None) as child:
        # A program that hangs would never end a line.
        watchdog = threading.Timer(PATIENCE_S, child.kill)
        watchdog.start()
        try:
            yield child
        finally:
            watchdog.cancel()
            child.kill()


def expect(child: Forked, line: str) -> None:
    found = child.stdout.readline()
    if found != f"{line}\n":
        child.kill()
        raise AssertionError((found, child.communicate(timeout=PATIENCE_S)))


def ended(child: Forked, root: Path) -> End:
    out, errors = child.communicate(timeout=PATIENCE_S)
    return End(root, child.returncode, [_parsed(line) for line in out.splitlines()], errors)


def _parsed(line: str) -> Any:
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(line)
    return line


# By the parent, after `ready`.
TOLD = {"plain": [TERM], "in_asyncio": [TERM], "hangs": [TERM, TERM], "signals_itself": []}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    """How each program ended."""
    base = tmp_path_factory.mktemp("preempted")

    def go(scenario: str) -> End:
        with started(scenario, base / scenario) as child:
            for number, line in zip(TOLD[scenario], ["ready", "noticed"], strict=False):
                expect(child, line)
                child.send_signal(number)
            return ended(child, base / scenario)

    with ThreadPoolExecutor(3) as three:
        return dict(zip(TOLD, three.map(go, TOLD), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["plain", "in_asyncio"])
def test_one_final_save_and_an_orderly_end(ends: dict[str, End], scenario: str) -> None:
    end = ends[scenario]
    assert (end.code, end.errors) == (0, "")
    (last,) = end.lines
    assert last >= 3
    assert end.steps() == [0, last], "the policy wanted step 0 only"
    assert end.is_right()


def test_a_second_signal_ends_a_program_that_hangs(ends: dict[str, End]) -> None:
    end = ends["hangs"]
    assert (end.code, end.lines, end.errors) == (-TERM, [], "")
    assert end.steps() == [0]


IN_THE_SAVE = [False, False, True]


@pytest.mark.parametrize(
    ("part", "shown", "steps"),
    [
        # The step that is asked about next.
        ("in_an_await", [False, True], [0, 1]),
        # `save(1)` has asked already, so the loop makes one more step.
        ("in_the_save", IN_THE_SAVE, [0, 1, 2]),
        ("in_the_awaited_save", IN_THE_SAVE, [0, 1, 2]),
        ("forks", [-TERM, False], [0]),
        ("at_exit", None, [0]),
    ],
)
def test_signals_that_come_at_an_odd_moment(
    ends: dict[str, End], part: str, shown: Any, steps: list[int]
) -> None:
    end = ends["signals_itself"]
    assert (end.code, end.errors) == (0, "")
    lines = dict(end.lines)
    assert lines.get(part) == shown
    its = dataclasses.replace(end, root=end.root / part)
    assert its.steps() == steps
    assert its.is_right()


# Several processes.


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("scenario", "number", "told"),
    [("agrees", TERM, [1]), ("agrees", TERM, [0, 1]), ("agrees_on_another_signal", USR1, [1])],
)
def test_processes_save_the_same_final_step_together(
    tmp_path: Path, scenario: str, number: signal.Signals, told: list[int]
) -> None:
    port = free_port()
    with (
        started(scenario, tmp_path, 0, port) as first,
        started(scenario, tmp_path, 1, port) as second,
    ):
        expect(first, "ready")
        expect(second, "ready")
        for index in told:
            (first, second)[index].send_signal(number)
        both = [ended(first, tmp_path), ended(second, tmp_path)]
    assert [end.code for end in both] == [0, 0], both
    last = both[0].lines[0]
    for end in both:
        assert end.lines == [last]
        assert end.steps() == [0, last]
        assert end.is_right()
    assert json.loads((tmp_path / f"{last}" / "ckpt.json").read_text())["process_count"] == 2


def test_the_service_of_jax_takes_over_and_may_be_off(tmp_path: Path) -> None:
    with started("changes_hands", tmp_path, 0, free_port()) as child:
        end = ended(child, tmp_path)
    assert end.code == 0, end.errors
    taken_over, unasked, message = end.lines
    assert taken_over == [False, True]
    assert unasked is False
    assert "leave jax_enable_preemption_service on" in message
