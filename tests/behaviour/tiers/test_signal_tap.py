"""Who hears of signals while managers, loops and forks come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from ckpt._tiers.signal_tap import SignalTap
from tests.support.snapshots import PATIENCE_S


@pytest.fixture
def no_wakeup() -> Iterator[None]:
    before = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(before)


@pytest.mark.filterwarnings("ignore:os.fork")
def test_the_signals_of_a_fork_are_its_own(no_wakeup: None) -> None:
    """A pool ends its workers by SIGTERM; that is not the end of the trainer."""
    tap = SignalTap()
    tap.install()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        os.waitpid(child, 0)
        tap.heard.setblocking(False)
        with pytest.raises(BlockingIOError):
            tap.heard.recv(9)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert tap.heard.recv(9) == bytes([signal.SIGUSR1])
    finally:
        signal.signal(signal.SIGUSR1, before)
        tap.remove()


@pytest.mark.parametrize("first", [0, 1])
def test_a_loop_hears_after_two_managers_have_ended(first: int, no_wakeup: None) -> None:
    async def main() -> None:
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, heard.set)
        taps = [SignalTap(), SignalTap()]
        for tap in taps:
            tap.install()
        taps.pop(first).remove()
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(heard.wait(), PATIENCE_S)
        heard.clear()
        taps.pop().remove()
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(heard.wait(), PATIENCE_S)

    asyncio.run(main())


def test_one_that_puts_us_back(no_wakeup: None) -> None:
    """As trio does at its end: nothing is left behind that writes to a descriptor of another."""
    loop, told = socket.socketpair()
    told.setblocking(False)
    tap = SignalTap()
    with loop, told:
        tap.install()
        ours = signal.set_wakeup_fd(told.fileno())
        tap.install()
        signal.set_wakeup_fd(ours)
        tap.install()
        tap.remove()
        assert signal.set_wakeup_fd(-1) == -1


def test_two_managers_leave_nothing_behind(no_wakeup: None) -> None:
    taps = [SignalTap(), SignalTap()]
    for tap in taps:
        tap.install()
    for tap in taps:
        tap.remove()
    assert signal.set_wakeup_fd(-1) == -1
