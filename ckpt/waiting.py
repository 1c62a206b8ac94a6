"""Waiting for what happens in another thread, from any event loop, without polling.

`concurrent.futures.Future` is the one currency between threads here: it can be waited for from a
plain thread, and through `settled` from any asyncio or trio task.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import anyio
import anyio.lowlevel

__all__ = ["settled", "settled_here", "waker"]

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
