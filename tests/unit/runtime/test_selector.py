"""The engine's loop looks at files seldom while it is busy, and never forgets them."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from ckpt._runtime.loop import _IdleSelector


@pytest.fixture
def runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_IdleSelector()))


def test_a_file_is_served_beside_a_task_that_never_rests(runner: asyncio.Runner) -> None:
    async def main() -> int:
        here, there = socket.socketpair()
        here.setblocking(False)
        loop = asyncio.get_running_loop()
        with here, there:
            arrived = asyncio.ensure_future(loop.sock_recv(here, 10))
            await asyncio.sleep(0)
            there.send(b"data")
            turns = 0
            while not arrived.done():
                turns += 1
                assert turns < 1000
                await asyncio.sleep(0)
            assert arrived.result() == b"data"
        return turns

    with runner:
        assert runner.run(main()) > 1


def test_other_threads_wake_an_idle_loop(runner: asyncio.Runner) -> None:
    async def main() -> list[int]:
        loop, found = asyncio.get_running_loop(), []
        for number in range(500):
            woken = asyncio.Event()
            await loop.run_in_executor(None, loop.call_soon_threadsafe, woken.set)
            await woken.wait()
            found.append(number)
        return found

    with runner:
        assert runner.run(asyncio.wait_for(main(), 30)) == list(range(500))


def test_a_busy_loop_seldom_looks(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    parent: Any = _IdleSelector.__mro__[1]
    real = parent.select

    def counted(self: object, timeout: float | None = None) -> object:
        nonlocal looks
        looks += 1
        return real(self, timeout)

    monkeypatch.setattr(parent, "select", counted)

    async def main() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)

    with runner:
        runner.run(main())
    assert 10 < looks < 200
