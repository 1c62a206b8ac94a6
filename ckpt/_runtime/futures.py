"""Futures and tasks: waits from other loops and threads, how they end, many operations at once.

Futures between threads: waiting for another thread from any event loop, without polling. Threads
hand each other `concurrent.futures.Future` only: a plain thread can wait for it, and so can any
asyncio or trio task, through `settled`.

Tracebacks as users see them: the call that failed and the message, not the engine in between. The
engine raises its errors many frames deep, through threads and task groups. Python would print all
of that above the message, each group with the whole traceback again. The call, the message and the
cause are kept; the cause is an error of the system, of jax or of the user's own code. The log has
the rest at level DEBUG.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from ckpt.errors import CheckpointError, located

logger = logging.getLogger("ckpt")
T = TypeVar("T")

_LOOK_SECONDS = 1.0


def waker(event: anyio.Event) -> Callable[[], None]:
    """Return a function that sets `event` from any thread.

    Call it in the event loop that waits for the event. Setting the event after that loop has ended
    does nothing.
    """
    loop: Any = anyio.lowlevel.current_token().native_token
    schedule = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon

    def wake() -> None:
        with contextlib.suppress(RuntimeError):
            schedule(event.set)

    return wake


def settled_here(future: Future[Any], timeout: float | None = None) -> bool:
    """Wait in this thread until `future` is done; return True if it is.

    An interrupt (Ctrl-C) is seen within a second. A signal that arrives after Python's last check
    for one and before the system call that waits does not end that call, so no call waits long.

    Args:
        future: The future to wait for.
        timeout: Seconds to wait at most; None waits for as long as it takes.
    """
    wake_up = _WakeUp()
    future.add_done_callback(wake_up.wake)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        if wake_up.wait(max(0.0, min(left, _LOOK_SECONDS))):
            return True
        if left <= 0:
            return False


class _WakeUp:
    """Wakes one thread from another; it can be interrupted at any moment.

    The waiting thread takes a single lock in a single step. The waits of `threading` and of
    `concurrent.futures` take and release several locks, in Python: an interrupt in between can
    leave one taken that the other thread needs, and both wait forever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self, _: object = None) -> None:
        # The lock is free if it was woken already, without a wait since.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait until it is woken, at most `seconds`; return True if it was."""
        return self._lock.acquire(timeout=seconds)


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


class CallingThread:
    """Lets the thread that waits for a future run functions meanwhile, one after the other."""

    def __init__(self, future: Future[Any]) -> None:
        """Wait for `future`, which may be running already; there is nothing to call yet."""
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_up = _WakeUp()
        self._wake: Callable[[], None] | None = None
        self._is_over = False
        future.add_done_callback(self._end)

    def _end(self, _: Future[Any]) -> None:
        self._is_over = True
        self._wake_both()

    def _wake_both(self) -> None:
        self._wake_up.wake()
        if self._wake is not None:
            self._wake()

    def _is_idle(self) -> bool:
        return not (self._is_over or self._calls)

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread that serves, and return its result; called on another loop.

        Cancelling the wait leaves the function to be run.
        """
        result: Future[T] = Future()
        has_run = False

        def call() -> None:
            nonlocal has_run
            if has_run:
                # The function was interrupted.
                return
            try:
                found = function()
            except BaseException as error:
                has_run = True
                result.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            else:
                has_run = True
                result.set_result(found)

        self._calls.append(call)
        self._wake_both()
        await settled(result)
        return result.result()

    async def serve(self) -> None:
        """Wait until the future is done; meanwhile run the functions of `run` on this thread.

        Cancelling the wait leaves the future as it is. Functions are not interrupted.
        """
        if self._is_over:
            await anyio.lowlevel.checkpoint()
        while not self._is_over:
            event = anyio.Event()
            self._wake = waker(event)
            # A function that was given before `_wake` was set did not set the event.
            if self._is_idle():
                await event.wait()
            self._run_all()

    def serve_here(self) -> None:
        """Do the same in a plain thread; see `settled_here`."""
        while not self._is_over:
            self._wake_up.wait(_LOOK_SECONDS)
            self._run_all()

    def _run_all(self) -> None:
        while self._calls:
            # Removed only after it has run: an interrupt may come before, and serving may go on
            # after it.
            self._calls[0]()
            self._calls.popleft()


# One task for each object of a large step would take a gigabyte for every 200,000 objects.
_MOST_TASKS = 1024


async def for_each(
    act: Callable[[T], Coroutine[Any, Any, object]], things: Iterable[T], most: int = _MOST_TASKS
) -> None:
    """Run `act` on each thing, up to `most` at once.

    Raises:
        Exception: The first error that a call raised; see `located`.
    """
    left = iter(things)

    async def work(thing: T) -> None:
        await act(thing)
        for another in left:
            await act(another)

    with located():
        async with anyio.create_task_group() as tasks:
            for thing in itertools.islice(left, most):
                tasks.start_soon(work, thing)


_PACKAGE = str(Path(__file__).parent.parent)


def outcome(future: Future[T]) -> T:
    """Return the result of a future that is done, or raise its error with a short traceback."""
    error = future.exception()
    if error is not None:
        raise shortened(error)
    return future.result()


def shortened(error: BaseException) -> BaseException:
    """Return an error of this library without the frames and groups of the engine.

    Its cause keeps the frames from the last one of this library on. Other errors stay as they are.
    """
    if isinstance(error, CheckpointError):
        if error.__traceback__ is not None and logger.isEnabledFor(logging.DEBUG):
            logger.debug("raised by the engine: %s", error, exc_info=error)
        _shorten(error, [])
    return error


def _shorten(error: BaseException, seen: list[BaseException]) -> None:
    if any(each is error for each in seen):
        return
    seen.append(error)
    own = isinstance(error, CheckpointError)
    error.__traceback__ = None if own else _from_last_own(error.__traceback__)
    hidden = error.__suppress_context__
    cause = error.__cause__ or (None if hidden else error.__context__)
    # A group as the cause holds only the error itself and its `others`.
    error.__cause__ = None if isinstance(cause, BaseExceptionGroup) else cause
    if error.__cause__ is not None:
        _shorten(error.__cause__, seen)


def _from_last_own(traceback: TracebackType | None) -> TracebackType | None:
    found = frame = traceback
    while frame is not None:
        if frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            found = frame
        frame = frame.tb_next
    return found
