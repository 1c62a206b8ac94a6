"""Functions that the thread which waits runs meanwhile."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import anyio
import pytest

from ckpt._runtime.futures import CallingThread
from ckpt._runtime.loop import EngineLoop
from ckpt.errors import CommitCancelledError


@pytest.fixture
def loop() -> Any:
    loop = EngineLoop()
    yield loop
    loop.close()


async def call_back(caller: CallingThread) -> list[str]:
    """Call back from several tasks at once; return on which threads it was run."""
    names: list[str] = [threading.current_thread().name]

    async def one() -> None:
        names.append(await caller.run(lambda: threading.current_thread().name))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(one)
    names.append(await caller.run(lambda: threading.current_thread().name))
    return names


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_functions_run_on_the_thread_that_awaits(loop: EngineLoop, backend: str) -> None:
    me = threading.current_thread().name
    found = anyio.run(loop.run_served, call_back, backend=backend)
    assert found == ["ckpt-engine", me, me, me, me]


def test_functions_run_on_the_thread_that_waits(loop: EngineLoop) -> None:
    me = threading.current_thread().name
    assert loop.call_served(call_back) == ["ckpt-engine", me, me, me, me]
    told: list[list[str]] = []
    other = threading.Thread(target=lambda: told.append(loop.call_served(call_back)), name="other")
    other.start()
    other.join()
    assert told == [["ckpt-engine", "other", "other", "other", "other"]]


def test_what_a_function_raises_is_raised_where_it_was_asked_for(loop: EngineLoop) -> None:
    async def ask(caller: CallingThread) -> str:
        with pytest.raises(ZeroDivisionError):
            await caller.run(lambda: 1 // 0)
        return await caller.run(lambda: "still there")

    assert loop.call_served(ask) == "still there"


def test_an_interrupt_within_a_function_ends_the_call_and_its_work(loop: EngineLoop) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    ended: list[str] = []

    async def ask(caller: CallingThread) -> None:
        try:
            await caller.run(interrupt)
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    with pytest.raises(KeyboardInterrupt):
        loop.call_served(ask)
    assert len(ended) == 1


def test_an_interrupt_loses_no_function_and_runs_none_twice(loop: EngineLoop) -> None:
    ran: list[str] = []

    def interrupt() -> None:
        ran.append("interrupted")
        raise KeyboardInterrupt

    async def ask(caller: CallingThread) -> None:
        async def one(function: Callable[[], None]) -> None:
            with anyio.CancelScope(shield=True), contextlib.suppress(KeyboardInterrupt):
                await caller.run(function)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, interrupt)
            tasks.start_soon(one, lambda: ran.append("other"))

    with pytest.raises(KeyboardInterrupt):
        loop.call_served(ask)
    assert ran == ["interrupted", "other"]


def test_what_was_interrupted_before_it_began_is_run_by_who_serves_next() -> None:
    """An interrupt may come between any two lines."""
    ended: Future[None] = Future()
    caller = CallingThread(ended)
    ran: list[str] = []

    def work() -> None:
        anyio.run(caller.run, partial(ran.append, "once"))
        ended.set_result(None)

    def trace(frame: Any, event: str, _: Any) -> Any:
        if event == "call" and frame.f_code.co_name == "call":
            sys.settrace(None)
            raise KeyboardInterrupt
        return None

    other = threading.Thread(target=work)
    other.start()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            caller.serve_here()
    finally:
        sys.settrace(before)
    assert not ran
    caller.serve_here()
    other.join()
    assert ran == ["once"]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_one_that_is_cancelled_still_runs_what_its_work_asks_for(
    loop: EngineLoop, backend: str
) -> None:
    ran: list[str] = []

    async def main() -> None:
        begun = anyio.Event()

        async def ask(caller: CallingThread) -> None:
            try:
                await caller.run(begun.set)
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await caller.run(lambda: ran.append(threading.current_thread().name))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run_served, ask)
            await begun.wait()
            tasks.cancel_scope.cancel()

    anyio.run(main, backend=backend)
    assert ran == [threading.current_thread().name]


def test_work_that_was_cancelled_says_so(loop: EngineLoop) -> None:
    async def forever() -> None:
        await anyio.sleep_forever()

    job = loop.submit(forever)
    job.cancel()
    CallingThread(job.future).serve_here()
    with pytest.raises(CommitCancelledError):
        job.future.result()


def test_an_interrupt_at_any_moment_of_the_wait_leaves_no_lock_behind() -> None:
    """Whoever ends what is waited for would wait for it in turn."""
    moment, is_interrupted = 0, True
    while is_interrupted:
        moment += 1
        future: Future[None] = Future()
        caller = CallingThread(future)
        count = 0

        def trace(frame: Any, event: str, _: Any, moment: int = moment) -> Any:
            nonlocal count
            count += 1
            if count == moment:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        ender = threading.Timer(0.02, future.set_result, [None])
        ender.start()
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            caller.serve_here()
            is_interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        ender.join(5)
        assert not ender.is_alive(), f"interrupted at moment {moment}"
    assert moment > 5
