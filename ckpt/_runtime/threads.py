"""Threads: all of the library's threads start here, and refusals of the system are handled.

`DaemonThreads` is an executor whose threads interpreter exit does not wait for. The threads of
`concurrent.futures.ThreadPoolExecutor` are joined at exit, so one call that hangs in a network file
system would keep the program from ending. Every event loop has threads of its own: see
`threads_of_loop`.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from ckpt._runtime.caller import own_settings
from ckpt._runtime.exit import ending_error
from ckpt._runtime.futures import settled
from ckpt.errors import CheckpointError, StorageError

P = ParamSpec("P")
Ts = TypeVarTuple("Ts")
T = TypeVar("T")
# While operations follow each other, keeping a thread costs less than starting one.
_IDLE_SECONDS = 2.0
# Small file operations at the same time: enough for the files of a step.
_MOST = 8


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        StorageError: The system refused it.
        ClosedError: Python refused it, because the program is ending.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise _refused(error) from error


def _refused(error: RuntimeError) -> CheckpointError:
    # Since Python 3.12: "can't create new thread at interpreter shutdown".
    if "shutdown" in str(error):
        return ending_error()
    return StorageError(
        f"the system refused a thread ({error}): as many threads and processes run as this user or "
        "container may have, or memory is short. Raise the limit (ulimit -u, pids.max), or end "
        "other threads, and try again",
        errno=errno.EAGAIN,
    )


async def run_in_thread(
    function: Callable[[*Ts], T],
    *args: *Ts,
    abandon_on_cancel: bool = False,
    limiter: anyio.CapacityLimiter | None = None,
) -> T:
    """Run a function in a worker thread, as `anyio.to_thread.run_sync` does; see `own_settings`.

    Raises:
        StorageError: The system refused the thread.
        ClosedError: Python refused it, because the program is ending.
    """
    begun = False

    def call() -> T:
        nonlocal begun
        begun = True
        with own_settings():
            return function(*args)

    try:
        return await anyio.to_thread.run_sync(
            call, abandon_on_cancel=abandon_on_cancel, limiter=limiter
        )
    except RuntimeError as error:
        if begun:
            raise
        raise _refused(error) from error


async def run_beside(function: Callable[[], T]) -> T:
    """Run a function in a thread of its own, for a caller's event loop; a cancelled call runs on.

    The threads of anyio end with the first task of their loop. Patched loops, such as those of
    `nest_asyncio`, never report the end of that task, and the interpreter would wait for the
    thread.

    Raises:
        StorageError: The system refused the thread.
        ClosedError: Python refused it, because the program is ending.
    """
    future: Future[T] = Future()
    start_thread(
        threading.Thread(target=_perform, args=(future, function), name="ckpt-wait", daemon=True)
    )
    await settled(future)
    return future.result()


class DaemonThreads(Executor):
    """A limited number of daemon threads; each ends when it was idle for a while.

    If the system refuses a thread, calls wait for an existing one. If there is none, a call runs in
    the thread that asks for it: files must be removed and leases released even then.
    """

    def __init__(self, most: int) -> None:
        """Run up to `most` calls at the same time."""
        self._most = most
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        call, is_left = partial(fn, *args, **kwargs), False
        with self._changed:
            self._calls.append((future, call))
            if self._idle >= len(self._calls):
                self._changed.notify()
            elif self._threads < self._most:
                try:
                    threading.Thread(target=self._run, name="ckpt-files", daemon=True).start()
                    self._threads += 1
                except RuntimeError:
                    if not self._threads:
                        self._calls.pop()
                        is_left = True
        if is_left:
            _perform(future, call)
        return future

    def end(self) -> None:
        """Let the threads end once the calls are done; does not wait for them."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._calls or self._ended, _IDLE_SECONDS)
                self._idle -= 1
                if not self._calls:
                    self._threads -= 1
                    return
                future, call = self._calls.popleft()
            _perform(future, call)
            # An idle thread keeps nothing of the last call alive.
            del future, call


def _perform(future: Future[T], call: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


_THREADS: RunVar[DaemonThreads] = RunVar("ckpt_file_threads")


def threads_of_loop() -> DaemonThreads:
    """Return the threads for small file operations of the running event loop."""
    try:
        return _THREADS.get()
    except LookupError:
        threads = DaemonThreads(_MOST)
        _THREADS.set(threads)
        return threads
