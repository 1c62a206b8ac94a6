"""`Preemption` hears signals, gives handlers back, and makes the manager save one last step."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
import ckpt.sync
from ckpt._steps.saves.history import Preemption
from ckpt.errors import InvalidArgumentError
from tests.support.odd_items import Odd, OddHandler

PATIENCE_S = 120
USR1, USR2, TERM = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that reach the handlers which were there before."""
    numbers: list[int] = []

    def hear(number: int, _: object) -> None:
        numbers.append(number)

    before = {number: signal.signal(number, hear) for number in (USR1, USR2, TERM)}
    yield numbers
    now = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert set(now.values()) == {hear}, "handlers were left behind"


@contextlib.contextmanager
def opened(*signals: int) -> Iterator[Preemption]:
    preemption = Preemption(signals or (USR1,))
    preemption.open()
    try:
        yield preemption
    finally:
        preemption.close()


# The object: what is answered.


def test_the_step_after_the_signal_is_the_last_one(heard: list[int]) -> None:
    with opened() as preemption:
        assert [preemption.reached(step) for step in (0, 1, 1)] == [False] * 3
        assert preemption.noticed_at is None
        before = time.monotonic()
        signal.raise_signal(USR1)
        assert preemption.noticed_at is not None
        assert before <= preemption.noticed_at <= time.monotonic()
        # `save(1)` was told no before the signal; the loop must not break without a save.
        assert not preemption.reached(1)
        assert [preemption.reached(step) for step in (2, 2, 3, 100)] == [True] * 4
        assert not preemption.reached(1)
    assert heard == []
    assert preemption.reached(101), "closing forgot it"


@given(st.lists(st.sampled_from(["next", "ask", "signal"]), max_size=40))
def test_a_step_is_preempted_if_the_signal_came_before_it_was_first_asked_about(
    actions: list[str],
) -> None:
    before = signal.signal(USR1, lambda *_: None)
    try:
        with opened() as preemption:
            step, came, answers = 0, False, dict[int, bool]()
            for action in actions:
                if action == "next":
                    step += 1
                elif action == "signal":
                    signal.raise_signal(USR1)
                    came = True
                else:
                    assert preemption.reached(step) == answers.setdefault(step, came)
    finally:
        signal.signal(USR1, before)


def test_a_run_that_goes_back_ends_at_its_next_step(heard: list[int]) -> None:
    with opened() as preemption:
        assert not preemption.reached(1000)
        assert not preemption.reached(500)
        signal.raise_signal(USR1)
        assert preemption.reached(501)


def test_threads_that_ask_about_one_step_are_told_the_same(heard: list[int]) -> None:
    with opened() as preemption, ThreadPoolExecutor(4) as four:
        for step in range(200):
            answers = [four.submit(preemption.reached, step) for _ in range(4)]
            if step == 100:
                signal.raise_signal(USR1)
            told = {answer.result() for answer in answers}
            assert len(told) == 1
        assert told == {True}


# The object: handlers.


def every_handler() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def test_nothing_is_installed_unasked(tmp_path: Path) -> None:
    before = every_handler()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, {"w": 1})
        assert not mgr.reached_preemption(0)
        assert every_handler() == before
    Preemption((TERM,))
    assert every_handler() == before, "before it was opened"


def test_handlers_are_put_back(heard: list[int]) -> None:
    before = every_handler()
    preemption = Preemption((USR1, USR2))
    for _ in range(2):
        preemption.open()
    changed = {number for number, handler in every_handler().items() if before[number] != handler}
    assert changed == {USR1, USR2}
    for _ in range(2):
        preemption.close()
        assert every_handler() == before
    preemption.open()
    assert every_handler() == before, "it is closed"
    signal.raise_signal(USR1)
    assert heard == [USR1]
    assert not preemption.reached(0)
    never_opened = Preemption((USR1,))
    never_opened.close()
    assert not never_opened.reached(0)
    assert every_handler() == before, "the first question opens it, but not after its end"


def test_the_second_signal_of_a_kind_goes_to_who_handled_it_before(heard: list[int]) -> None:
    with opened(USR1, USR2) as preemption:
        signal.raise_signal(USR2)
        first = preemption.noticed_at
        signal.raise_signal(USR1)
        assert heard == []
        signal.raise_signal(USR1)
        signal.raise_signal(USR2)
        signal.raise_signal(USR2)
        assert heard == [USR1, USR2, USR2]
        assert preemption.noticed_at == first


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("when", range(4))
def test_several_notice_and_close_in_any_order(
    heard: list[int], order: tuple[int, ...], when: int
) -> None:
    before = every_handler()
    three = [Preemption((USR1,)) for _ in range(3)]
    for preemption in three:
        preemption.open()
    for number in order[:when]:
        three[number].close()
    signal.raise_signal(USR1)
    for number in order[when:]:
        assert three[number].reached(7)
    assert not any(three[number].reached(7) for number in order[:when])
    assert heard == ([USR1] if when == 3 else [])
    if when < 3:
        signal.raise_signal(USR1)
        assert heard == [USR1], "the second one did not get through, or too often"
    for number in order[when:]:
        three[number].close()
    assert every_handler() == before


def test_one_that_was_opened_later_hears_its_own_first_signal(heard: list[int]) -> None:
    with opened() as first:
        signal.raise_signal(USR1)
        with opened() as second:
            assert not second.reached(0)
            signal.raise_signal(USR1)
            assert second.reached(1)
            assert heard == [USR1], "it was the second one of the other"
        assert first.reached(2)


def test_a_handler_that_others_installed_later_stays(heard: list[int]) -> None:
    hear, told = signal.getsignal(USR1), []
    preemption = Preemption((USR1,))
    preemption.open()
    ours = signal.getsignal(USR1)
    assert callable(ours)

    def theirs(number: int, frame: Any) -> None:
        told.append(number)
        ours(number, frame)

    signal.signal(USR1, theirs)
    try:
        signal.raise_signal(USR1)
        assert preemption.reached(0)
        preemption.close()
        assert signal.getsignal(USR1) is theirs
        signal.raise_signal(USR1)
        assert (told, heard) == ([USR1, USR1], [USR1]), "ours was to pass it on"
    finally:
        signal.signal(USR1, hear)


def test_one_that_is_dropped_swallows_nothing(heard: list[int]) -> None:
    hear = signal.getsignal(USR1)
    preemption = Preemption((USR1,))
    preemption.open()
    del preemption
    gc.collect()
    signal.raise_signal(USR1)
    assert heard == [USR1]
    with opened():
        pass
    assert signal.getsignal(USR1) is hear


@pytest.mark.parametrize("default", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_default_that_does_nothing_leaves_the_handler_in_place(default: Any) -> None:
    before = signal.signal(signal.SIGURG, default)
    try:
        with opened(signal.SIGURG) as preemption:
            ours = signal.getsignal(signal.SIGURG)
            for _ in range(3):
                signal.raise_signal(signal.SIGURG)
                assert signal.getsignal(signal.SIGURG) is ours
            assert preemption.reached(0)
        assert signal.getsignal(signal.SIGURG) == default
    finally:
        signal.signal(signal.SIGURG, before)


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1, "worker") as one:
        return one.submit(function).result()


def test_other_threads_than_the_main_one(heard: list[int]) -> None:
    before = every_handler()
    preemption = Preemption((USR1,))
    for call in (preemption.open, lambda: preemption.reached(0)):
        with pytest.raises(
            InvalidArgumentError, match=r"SIGUSR1: .*the main thread.*worker.*enter the man"
        ):
            in_thread(call)
    assert every_handler() == before
    # The first question opens it, where nobody has.
    assert not preemption.reached(0)
    assert every_handler() != before
    assert not in_thread(lambda: preemption.reached(1))
    in_thread(preemption.close)
    assert every_handler() != before
    signal.raise_signal(USR1)
    assert heard == [USR1]
    preemption.close()
    assert every_handler() == before


def test_a_handler_that_cannot_be_put_back_is_left_alone(
    heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = every_handler()
    # As after a program in C that embeds Python has handled it before; nothing else leads to it.
    get = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda n: None if n == USR2 else get(n))
    with pytest.raises(InvalidArgumentError, match=r"SIGUSR2 has .*choose another"):
        Preemption((USR1, USR2)).open()
    monkeypatch.undo()
    assert every_handler() == before


BAD: dict[str, Any] = {
    "number": 15,
    "none": None,
    "text": "TERM",
    "bytes": b"\x0f",
    "texts": ["SIGTERM"],
    "bool": [True],
    "kill": [signal.SIGKILL],
    "stop": [TERM, signal.SIGSTOP],
    "fault": [signal.SIGSEGV],
    "zero": [0],
    "negative": [-15],
    "beyond": [1000],
    "float": [15.0],
    "unhashable": [[15]],
    "signal itself": TERM,
}


@pytest.mark.parametrize("wrong", BAD.values(), ids=BAD.keys())
def test_what_is_no_signal_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^Preempted\(signals.*signal\.SIGTERM,\)"):
        ckpt.save_when.Preempted(wrong)


def test_a_signal_that_is_given_twice_has_one_handler() -> None:
    assert ckpt.save_when.Preempted([USR1, USR2, USR1]).signals == (USR1, USR2)


@pytest.mark.parametrize("signals", [[], (TERM,), {15, USR1}, iter([TERM]), [signal.SIGRTMIN + 1]])
def test_signals_are_given_in_any_collection(tmp_path: Path, signals: Any) -> None:
    before = every_handler()
    with ckpt.sync.CheckpointManager(
        tmp_path,
        save_when=ckpt.save_when.Any(
            ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted(signals)
        ),
    ):
        pass
    assert every_handler() == before


# The managers.


def test_the_step_is_saved_whatever_the_policy_says(tmp_path: Path, heard: list[int]) -> None:
    with ckpt.sync.CheckpointManager(
        tmp_path,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1000), ckpt.save_when.Preempted()),
    ) as mgr:
        for step in range(100):
            if step == 7:
                signal.raise_signal(TERM)
            mgr.save(step, {"w": np.full(8, step)})
            if mgr.reached_preemption(step):
                break
        assert mgr.reached_preemption(8)
    assert step == 7
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.all_steps() == [0, 7]
        assert np.array_equal(mgr.restore()["w"], np.full(8, 7))
    assert heard == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("backlog", ["skip", "supersede", "wait"])
def test_the_step_is_saved_whatever_the_backlog_says(
    tmp_path: Path, heard: list[int], backlog: Any, backend: str
) -> None:
    pytest.importorskip(backend)
    gate = threading.Event()

    async def main() -> None:
        async with ckpt.CheckpointManager(
            tmp_path,
            staging=ckpt.Staging(backlog=backlog),
            handlers=[OddHandler()],
            save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted()),
        ) as mgr:
            await mgr.save(0, Odd({"w": 0}, gate=gate))
            if backlog == "skip":
                assert not await mgr.save(1, {"w": 1})
            assert not mgr.reached_preemption(1)
            signal.raise_signal(TERM)
            assert await mgr.save(2, {"w": 2})
            assert mgr.reached_preemption(2)
            gate.set()

    anyio.run(main, backend=backend)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.all_steps() == [0, 2]
        assert mgr.restore() == {"w": 2}


def test_a_save_that_asks_first_knows_of_the_preemption(tmp_path: Path, heard: list[int]) -> None:
    with ckpt.sync.CheckpointManager(
        tmp_path,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1000), ckpt.save_when.Preempted()),
    ) as mgr:
        assert not mgr.should_save(1)
        signal.raise_signal(TERM)
        assert not mgr.should_save(1)
        assert not mgr.save(1, {"w": 1})
        assert mgr.should_save(2)
        assert mgr.save(2, {"w": 1}).result()


def test_there_is_one_final_save_unless_it_fails(tmp_path: Path, heard: list[int]) -> None:
    with ckpt.sync.CheckpointManager(
        tmp_path,
        handlers=[OddHandler()],
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1000), ckpt.save_when.Preempted()),
    ) as mgr:
        signal.raise_signal(TERM)
        fire = ckpt.CheckpointError("the disk is on fire")
        assert mgr.save(1, Odd({"w": 1}, error=fire)).exception() is fire
        assert mgr.should_save(2)
        assert mgr.save(2, {"w": 2}).result()
        # Whoever goes on all the same is not made to save every step.
        assert mgr.reached_preemption(3)
        assert not mgr.should_save(3)
        assert not mgr.save(3, {"w": 3})
        assert mgr.all_steps() == [2]


def test_the_second_interrupt_cancels_as_asyncio_does(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    seen: list[bool | str] = []

    async def main() -> None:
        async with ckpt.CheckpointManager(
            tmp_path,
            save_when=ckpt.save_when.Any(
                ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted((signal.SIGINT,))
            ),
        ) as mgr:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
            seen.append(mgr.reached_preemption(0))
            await mgr.save(0, {"w": 1})
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(PATIENCE_S)
            seen.append("slept")

    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [True]
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.all_steps() == [0]


def test_every_way_out_puts_the_handlers_back(tmp_path: Path, heard: list[int]) -> None:
    before = every_handler()
    taken = tmp_path / "file"
    taken.touch()

    async def enters(root: Path) -> None:
        async with ckpt.CheckpointManager(
            root,
            save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted()),
        ):
            assert every_handler() != before
            raise KeyError

    def enters_plainly(root: Path) -> None:
        with ckpt.sync.CheckpointManager(
            root,
            save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted()),
        ):
            assert every_handler() != before
            raise KeyError

    def run(root: Path) -> None:
        asyncio.run(enters(root))

    for go in (run, enters_plainly):
        with pytest.raises(KeyError):
            go(tmp_path / "root")
        assert every_handler() == before
        with pytest.raises(ckpt.CheckpointError):
            go(taken)
        assert every_handler() == before
    mgr = ckpt.sync.CheckpointManager(
        tmp_path / "root",
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted()),
    )
    mgr.save(0, {"w": 1})
    assert every_handler() != before, "the first save opens what nobody has entered"
    mgr.close()
    assert every_handler() == before


def test_a_manager_in_another_thread_says_what_to_do(tmp_path: Path) -> None:
    def enters() -> None:
        with ckpt.sync.CheckpointManager(
            tmp_path,
            save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted()),
        ):
            raise AssertionError

    before = set(threading.enumerate())
    with pytest.raises(InvalidArgumentError, match="enter the manager in the main thread"):
        in_thread(enters)
    started = set(threading.enumerate()) - before
    assert not [thread for thread in started if "ckpt" in thread.name]
