"""What is said of saves that wait."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ckpt
import ckpt.sync
from ckpt._steps.saves import queue
from tests.behaviour.saving.odd_managers import PATIENCE_S, SMALL, plain_manager
from tests.support.conditions import until
from tests.support.odd_items import Odd


def waits(events: list[ckpt.types.Event], step: int | None) -> list[ckpt.types.Event]:
    return [each for each in events if each.phase == "wait" and each.step == step]


def test_all_that_a_save_waits_is_reported(tmp_path: Path) -> None:
    events: list[ckpt.types.Event] = []
    gate = threading.Event()
    with plain_manager(tmp_path, observers=[events.append]) as mgr:
        mgr.save(0, Odd(SMALL, gate=gate))
        # Its snapshot is taken, and it waits for its turn to write.
        mgr.save(1, SMALL)
        with ThreadPoolExecutor(1) as thread:
            # With two under way, this one waits for room.
            third = thread.submit(mgr.save, 2, SMALL)
            backlog = mgr._service.saves._backlog
            until(lambda: backlog is not None and len(backlog.steps) == 3)
            now = time.perf_counter_ns()
            gate.set()
            third.result(PATIENCE_S)
        mgr.wait_until_finished()
    for step in (1, 2):
        assert any(each.began_ns <= now <= each.ended_ns for each in waits(events, step)), step
    assert not any(each.began_ns <= now <= each.ended_ns for each in waits(events, 0))


def test_waiting_for_the_end_of_all_saves_is_reported(tmp_path: Path) -> None:
    events: list[ckpt.types.Event] = []
    gate = threading.Event()
    with plain_manager(tmp_path, observers=[events.append]) as mgr:
        commit = mgr.save(0, Odd(SMALL, gate=gate))
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(mgr.wait_until_finished)
            until(lambda: commit._waiting)
            now = time.perf_counter_ns()
            gate.set()
            waiting.result(PATIENCE_S)
    (wait,) = waits(events, None)
    assert wait.operation == "save"
    assert wait.began_ns <= now <= wait.ended_ns


def test_a_save_that_hangs_has_said_that_it_began(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ckpt")
    gate = threading.Event()
    with plain_manager(tmp_path) as mgr:
        item = Odd(SMALL, gate=gate)
        mgr.save(7, item)
        assert item.reached.wait(PATIENCE_S)
        assert f"saving step 7 of {tmp_path}" in caplog.messages
        gate.set()


def test_a_long_wait_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "LONG_WAIT_SECONDS", 0.02)
    caplog.set_level(logging.WARNING, "ckpt")

    def said(who: str) -> list[str]:
        return [line for line in caplog.messages if f": {who} has waited" in line]

    gate = threading.Event()
    mgr = plain_manager(tmp_path)
    mgr.save(0, Odd(SMALL, gate=gate))
    mgr.save(1, SMALL)
    until(lambda: said("step 1"))
    with ThreadPoolExecutor(2) as threads:
        ended = [threads.submit(mgr.wait_until_finished)]
        until(lambda: said("the program"))
        ended.append(threads.submit(mgr.close))
        until(lambda: said("the end of the manager"))
        gate.set()
        for each in ended:
            each.result(PATIENCE_S)
    for who in ("step 1", "the program", "the end of the manager"):
        (line,) = said(who)
        assert "step 0 (writing, " in line, line
        assert str(tmp_path) in line
    assert not said("step 0")
