"""`EngineLoop`: a thread with its own event loop and one task group, in which all work is done.

Byte work never runs on a caller's loop: a train step that blocks its loop for seconds does not
stall a commit, and the plain, the threaded and the asyncio API are the same calls from here on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import os
import selectors
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from msgspec import Struct

from ckpt._runtime import threads as callers
from ckpt._runtime.futures import CallingThread, outcome
from ckpt._runtime.threads import ending_error, is_ending, run_beside, start_thread, threads_of_loop
from ckpt.errors import (
    ClosedError,
    CommitCancelledError,
    ForkedProcessError,
    InvalidArgumentError,
    StorageError,
)

T = TypeVar("T")
# Turns of a busy loop between looks at files: handlers of users may have files on this loop.
_LOOKS_EVERY = 16


class _Running(Struct, frozen=True):
    """The loop while it runs.

    Attributes:
        schedule: Runs a function on the loop soon; from any thread, without waiting. (anyio's
            BlockingPortal waits for the loop at every call, and would stall the caller's loop
            whenever this one is busy.)
        tasks: The engine's task group.
        stop: Set when no more jobs will come.
    """

    schedule: Callable[..., object]
    tasks: TaskGroup
    stop: anyio.Event


class Job(Generic[T]):
    """A coroutine running on the engine's loop; `future` is done when it has wholly ended."""

    def __init__(self, running: _Running) -> None:
        """Made by `EngineLoop.submit`."""
        self.future: Future[T] = Future()
        self._running = running
        self._caller = callers.look()
        self._scope: anyio.CancelScope | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Ask the coroutine to stop; it cleans up in its own time, then `future` is done."""
        # A loop that has ended has no jobs left to cancel.
        with contextlib.suppress(RuntimeError):
            self._running.schedule(self._cancel)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    async def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> None:
        """Run to the end and keep the outcome; never raises into the engine's task group."""
        callers.serve(self._caller)
        with anyio.CancelScope() as scope:
            self._scope = scope
            if self._cancelled:
                scope.cancel()
            try:
                result = await function(*args)
            except anyio.get_cancelled_exc_class():
                if not scope.cancel_called:
                    self.future.set_exception(ClosedError("the engine was stopped"))
                raise
            except BaseException as error:
                self.future.set_exception(error)
                return
            self.future.set_result(result)
            return
        self.future.set_exception(CommitCancelledError("cancelled before it was done"))


class EngineLoop:
    """Starts its thread at first use and ends it at `close`."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running: _Running | None = None
        self._thread: threading.Thread | None = None
        # Gets the running loop from the thread; kept, since an interrupt may come before it is
        # read.
        self._started: Future[_Running] | None = None
        self._pid = os.getpid()
        self._closed = False

    @property
    def closed(self) -> bool:
        """True once `stop` or `close` was called."""
        return self._closed

    @property
    def is_forked(self) -> bool:
        """True if this process is a fork of the one that made the engine."""
        return os.getpid() != self._pid

    def _refuse_fork(self) -> None:
        if self.is_forked:
            raise ForkedProcessError(
                f"this manager was made in process {self._pid} and used in its fork "
                f"{os.getpid()}; make a new one in the child (start children with 'spawn': jax "
                "and TensorStore do not survive fork)"
            )

    def submit(self, function: Callable[..., Awaitable[T]], *args: Any) -> Job[T]:
        """Start `function(*args)` on the engine's loop, from any thread; does not wait.

        Raises:
            ClosedError: The engine was closed, or the program is ending.
            ForkedProcessError: This process was forked from the one that made the engine.
            StorageError: The system refused a thread.
        """
        return self._begin(lambda _: function(*args))[0]

    def _begin(
        self, function: Callable[[CallingThread], Awaitable[T]]
    ) -> tuple[Job[T], CallingThread]:
        self._refuse_fork()
        with self._guard:
            if self._closed:
                if is_ending():
                    raise ending_error()
                raise ClosedError("the manager is closed; make a new one")
            if self._running is None:
                self._running = self._start()
            job: Job[T] = Job(self._running)
            # Made before the job is scheduled: an interrupt in here could leave the future locked.
            caller = CallingThread(job.future)
            self._running.schedule(self._running.tasks.start_soon, job.run, function, caller)
            return job, caller

    def _start(self) -> _Running:
        started: Future[_Running] = Future()
        # A daemon: a script that never closes its manager must not hang at exit. The hook of
        # `_runtime.threads` finishes the work that is still under way then.
        thread = threading.Thread(
            target=_run_loop, args=(started,), name="ckpt-engine", daemon=True
        )
        self._started = started
        self._thread = thread
        try:
            start_thread(thread)
        except BaseException:
            if not thread.is_alive():
                self._thread = self._started = None
            raise
        return started.result()

    async def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run `function(*args)` on the engine's loop; await it from any asyncio or trio task.

        Cancelling the caller cancels the work, waits until it has wholly ended, then re-raises.
        """
        return await self.run_served(lambda _: function(*args))

    async def run_served(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Do what `run` does; `function` gets a `CallingThread` as its first argument.

        Functions that are given to the `CallingThread` run on this thread while this call is
        awaited, and also while it is cancelled and waits for the work to end.
        """
        job, caller = self._begin(partial(function, *args))
        try:
            await caller.serve()
        except (anyio.get_cancelled_exc_class(), KeyboardInterrupt):
            job.cancel()
            with anyio.CancelScope(shield=True):
                await caller.serve()
            raise
        return outcome(job.future)

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run `function(*args)` on the engine's loop; wait for it in this thread.

        An interrupt (`KeyboardInterrupt`) cancels the work, waits until it has ended, and goes on.
        """
        return self.call_served(lambda _: function(*args))

    def call_served(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Do what `call` does; `function` gets a `CallingThread`, as in `run_served`."""
        self.check_caller()
        job, caller = self._begin(partial(function, *args))
        try:
            caller.serve_here()
        except BaseException:
            job.cancel()
            caller.serve_here()
            raise
        return outcome(job.future)

    def check_caller(self) -> None:
        """Raise where waiting for the engine would never end.

        Raises:
            ForkedProcessError: This process was forked from the one that made the engine.
            InvalidArgumentError: This is the engine's own thread.
        """
        self._refuse_fork()
        if threading.current_thread() is self._thread:
            raise InvalidArgumentError(
                "a blocking call was made on the library's own thread, from a done callback or an "
                "observer; hand the work to another thread"
            )

    def stop(self) -> None:
        """Let the thread end once its jobs have ended; does not wait. Idempotent."""
        self._closed = True
        if self._started is not None and not self.is_forked:
            self._started.add_done_callback(_stop_running)

    def close(self, timeout: float | None = None) -> bool:
        """Stop the thread once its jobs have ended, and wait for that. Idempotent.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes.

        Returns:
            True if the thread has ended.
        """
        if not self.is_forked:
            self.check_caller()
        with self._guard:
            self.stop()
            thread = self._thread
        # Waits without the guard: calls made meanwhile fail at once, since the loop is closed.
        if thread is None or self.is_forked:
            return True
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # Waits in slices, so that an interrupt is seen; see `futures.settled_here`.
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(left, 1.0))
        return not thread.is_alive()


def _stop_running(started: Future[_Running]) -> None:
    if started.cancelled() or started.exception() is not None:
        return
    running = started.result()
    # Raised by a loop that has ended already.
    with contextlib.suppress(RuntimeError):
        running.schedule(running.stop.set)


async def end_loop(loop: EngineLoop) -> None:
    """Close a loop whose jobs have ended; await it from any asyncio or trio task."""
    with anyio.CancelScope(shield=True):
        try:
            await run_beside(loop.close)
        except (StorageError, ClosedError):
            # There is no thread for the wait, and the outcome of the work must not be lost.
            loop.stop()


def end_loop_here(loop: EngineLoop) -> None:
    """Do the same in a plain thread."""
    loop.close()


async def run_once(call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a call that runs on a loop of its own."""
    loop = EngineLoop()
    try:
        return await loop.run(call)
    finally:
        await end_loop(loop)


def call_once(call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a call that runs on a loop of its own; block until it is there."""
    loop = EngineLoop()
    try:
        return loop.call_served(lambda _: call())
    finally:
        end_loop_here(loop)


class _IdleSelector(selectors.DefaultSelector):
    """Looks at files only when the loop has nothing to do, and now and then when it is busy.

    Other threads put their work into the loop's queue before they wake the loop, so a busy loop
    need not look. Each look releases the interpreter lock, which takes milliseconds to come back
    beside a thread that computes in Python.
    """

    _passed = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0 and self._passed < _LOOKS_EVERY:
            self._passed += 1
            return []
        self._passed = 0
        return super().select(timeout)


def _run_loop(started: Future[_Running]) -> None:
    async def main() -> None:
        loop: Any = anyio.lowlevel.current_token().native_token
        context = contextvars.copy_context()

        def schedule(function: Callable[..., object], *args: Any) -> None:
            # In this loop's context: the caller's context names, among other things, the kind of
            # the caller's event loop (such as trio's), which would be wrong here.
            loop.call_soon_threadsafe(function, *args, context=context.copy())

        threads = threads_of_loop()
        try:
            async with anyio.create_task_group() as tasks:
                running = _Running(schedule, tasks, anyio.Event())
                started.set_result(running)
                await running.stop.wait()
        finally:
            threads.end()

    try:
        # asyncio, because TensorStore's callbacks and aiofiles are used from here only.
        options = {"loop_factory": lambda: asyncio.SelectorEventLoop(_IdleSelector())}
        anyio.run(main, backend="asyncio", backend_options=options)
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)
