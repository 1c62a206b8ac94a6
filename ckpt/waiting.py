"""Waiting for what happens in another thread, from any event loop, without polling.

`concurrent.futures.Future` is the one currency between threads here: it can be waited for from a
plain thread, and through `settled` from any asyncio or trio task.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

__all__ = ["CallingThread", "settled", "settled_here", "waker"]

T = TypeVar("T")

_LOOK_SECONDS = 1.0


def waker(event: anyio.Event) -> Callable[[], None]:
    """Return a function that sets `event` from any thread.

    To be called in the event loop that waits for the event. Setting it after that loop has ended
    does nothing.
    """
    loop: Any = anyio.lowlevel.current_token().native_token
    schedule = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon

    def wake() -> None:
        with contextlib.suppress(RuntimeError):
            schedule(event.set)

    return wake


def settled_here(future: Future[Any], timeout: float | None = None) -> bool:
    """Wait in this thread until `future` is done; return whether it is.

    An interrupt (Ctrl-C) is seen within a second. A signal that arrives between Python's last look
    for one and the system call that waits does not end that call, so no call may wait for ever.

    Args:
        future: What to wait for.
        timeout: Seconds to wait at most; None waits for as long as it takes.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while not future.done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        concurrent.futures.wait([future], min(left, _LOOK_SECONDS))
    return True


async def settled(future: Future[Any]) -> None:
    """Wait until `future` is done, however it ended.

    Cancelling the wait leaves the future as it is.
    """
    if future.done():
        await anyio.lowlevel.checkpoint()
        return
    event = anyio.Event()
    wake = waker(event)
    future.add_done_callback(lambda _: wake())
    await event.wait()


def _woken(wake: Callable[[], None], _: Future[Any]) -> None:
    wake()


class CallingThread:
    """Lets the thread that waits for a future run functions meanwhile, one after the other."""

    def __init__(self) -> None:
        """Nothing is to be run yet."""
        self._guard = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        # Done as soon as there is a call; then there is a new one.
        self._news: Future[None] = Future()

    async def run(self, function: Callable[[], T]) -> T:
        """Return what `function` gives on the thread that serves; for any other thread's loop.

        Cancelling the wait leaves the function to be run.
        """
        result: Future[T] = Future()

        def call() -> None:
            if result.done():
                # It was interrupted.
                return
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        with self._guard:
            self._calls.append(call)
            if not self._news.done():
                self._news.set_result(None)
        await settled(result)
        return result.result()

    async def serve(self, future: Future[Any]) -> None:
        """Wait until `future` is done; run on this thread what `run` is given until then.

        Cancelling the wait leaves the future as it is. Functions are not interrupted.
        """
        if future.done():
            await anyio.lowlevel.checkpoint()
        while not future.done():
            event = anyio.Event()
            wake = waker(event)
            for each in (future, self._news):
                each.add_done_callback(partial(_woken, wake))
            await event.wait()
            self._run_all()

    def serve_here(self, future: Future[Any]) -> None:
        """Do the same in a plain thread; see `settled_here`."""
        while not future.done():
            waited = [future, self._news]
            concurrent.futures.wait(waited, _LOOK_SECONDS, concurrent.futures.FIRST_COMPLETED)
            self._run_all()

    def _run_all(self) -> None:
        while True:
            with self._guard:
                if not self._calls:
                    if self._news.done():
                        self._news = Future()
                    return
                call = self._calls[0]
            # Forgotten when it has been run: an interrupt may come before it, and be survived.
            call()
            with self._guard:
                self._calls.pop(0)
