"""Threads: the caller's and those that work, and what happens when a process ends.

Interpreter exit: finishes saves that were not waited for, and sets the exit status. `atexit` is too
late: by then Python has shut down its executors, and background I/O fails. The hook used here runs
before that, while everything still works. It is the one `concurrent.futures` itself uses; Python
has no public name for it.

Settings of jax in the calling thread, for the threads that do the work. A mesh, a default device
and the switch for 64 bits hold for one thread alone if they are set by a `with` block, or by
`jax.set_mesh`. Settings of the whole program, such as a guard against implicit transfers, are meant
for the program's own code, and do not hold for a save.

Threads: all of the library's threads start here, and refusals of the system are handled.
`DaemonThreads` is an executor whose threads interpreter exit does not wait for. The threads of
`concurrent.futures.ThreadPoolExecutor` are joined at exit, so one call that hangs in a network file
system would keep the program from ending. Every event loop has threads of its own: see
`threads_of_loop`.

The interpreter lock while bytes move: threads that compute in Python pass it on sooner. A thread
that waits for the lock gets it when the owner of the lock waits for something, or after the switch
interval of the interpreter, 5 ms by default. A save of 512 MiB takes the lock about 400 times, for
microseconds each. Beside a thread that computes in Python without a break, it took 3 to 4 times as
long as alone; with a shorter interval 1.1 to 1.2 times as long, and that thread kept its speed.

The whole process has one interval: it is short while anything is under way, and set back
afterwards.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar
from msgspec import Struct

from ckpt._runtime.futures import settled
from ckpt.errors import CheckpointError, ClosedError, StorageError

if TYPE_CHECKING:
    import jax

P = ParamSpec("P")
Ts = TypeVarTuple("Ts")
T = TypeVar("T")
# Methods to call, oldest first. One hook serves all objects, because a hook cannot be unregistered
# and would outlive its object.
_CALLS: weakref.WeakKeyDictionary[object, Callable[[Any], None]] = weakref.WeakKeyDictionary()
# Set when the main thread has ended; never unset.
_ENDED = threading.Event()


def run_at_exit(method: Callable[[], None]) -> None:
    """Call the bound `method` when the main thread has ended, unless its object is gone by then.

    The object that was registered last is called first, and each object once. Objects must be
    hashable.

    Raises:
        ClosedError: The main thread has ended; it is too late.
    """
    if is_ending():
        raise ending_error()
    try:
        _register()
    except RuntimeError as error:
        raise ending_error() from error
    bound: Any = method
    _CALLS[bound.__self__] = bound.__func__


def is_ending() -> bool:
    """Return True if the main thread has ended, though other threads may go on."""
    return _ENDED.is_set() or not threading.main_thread().is_alive()


def ending_error() -> ClosedError:
    """Return the error of a call that comes too late."""
    return ClosedError(
        "the main thread of the program has ended, and managers with it. Keep it until the other "
        "threads have saved, such as by thread.join() at its end; save() and load() without a "
        "manager may still work"
    )


@functools.cache
def _register() -> None:
    # Registered at first use, so that modules imported before, such as a pool of processes, end
    # after us.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_call_all)


def _call_all() -> None:
    _ENDED.set()
    for reference in reversed(_CALLS.keyrefs()):
        owner = reference()
        if owner is not None and (call := _CALLS.pop(owner, None)) is not None:
            call(owner)


class _Unflushable:
    """A stream whose flush fails; everything else goes to the stream behind it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def flush(self) -> None:
        self._stream.flush()
        raise OSError("a save failed, and was never awaited")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# Set when the process has to end with an error; never unset.
_FAILED = threading.Event()


def fail_exit() -> None:
    """Let this process end with exit status 120, whenever it ends by itself.

    Hooks of the interpreter's exit cannot change its status, and ending the process at once would
    skip the hooks of others. But Python flushes the standard streams last of all, and ends with
    status 120 if that fails (documented at `sys.exit`); an error of standard error is not printed.
    This replaces a status that was given to `sys.exit`, but not that of an uncaught error.
    """
    _FAILED.set()


def _spoil_standard_error() -> None:
    # Without a stream there is nothing to spoil. After an uncaught error the status is 1 anyway.
    if _FAILED.is_set() and sys.stderr is not None and getattr(sys, "last_value", None) is None:
        sys.stderr = _Unflushable(sys.stderr)


# Registered at import, so that later hooks run before it, with a stream that works.
atexit.register(_spoil_standard_error)


class Caller(Struct, frozen=True):
    """The settings of a calling thread.

    Attributes:
        mesh: The mesh that is set; None without one. An abstract mesh has no devices.
        device: Device for new arrays, or the name of its platform; None leaves it to jax.
        x64: True if jax may have numbers of 64 bits; None leaves it to the thread that asks.
    """

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None
    device: Any = None
    x64: bool | None = None


# Settings that would forbid or change the library's own work, with the values that it needs.
_OURS = (
    *(
        (f"transfer_guard{which}", "allow")
        for which in ("", "_host_to_device", "_device_to_device", "_device_to_host")
    ),
    ("debug_nans", False),
    ("debug_infs", False),
    ("disable_jit", False),
    ("enable_checks", False),
    ("numpy_rank_promotion", "allow"),
    ("numpy_dtype_promotion", "standard"),
)
_CALLER: ContextVar[Caller] = ContextVar("ckpt_caller")


def look() -> Caller:
    """Return the settings of this thread."""
    jax = _jax()
    if jax is None:
        return Caller()
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        # jax refuses this while it traces a function.
        with contextlib.suppress(ValueError):
            concrete = jax.sharding.get_mesh()
            mesh = mesh if concrete.empty else concrete
    config = jax.config
    return Caller(None if mesh.empty else mesh, config.jax_default_device, config.jax_enable_x64)


def serve(caller: Caller) -> None:
    """Work for a caller from now on, in this task and in all that it starts."""
    _CALLER.set(caller)


def caller() -> Caller:
    """Return the settings of the thread that this task works for, or else of this thread."""
    found = _CALLER.get(None)
    # The caller may have called before jax was imported.
    return look() if found is None or found.x64 is None else found


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Run the body in this thread as if the program had set nothing but the switch for 64 bits."""
    jax = _jax()
    with contextlib.ExitStack() as stack:
        if jax is not None:
            wanted = [*_OURS, ("enable_x64", caller().x64)]
            for name, value in wanted:
                if getattr(jax.config, f"jax_{name}") not in (value, None):
                    stack.enter_context(getattr(jax, name)(value))
        yield


def _jax() -> Any:
    """Return jax; None in a program without it, or while another thread imports it."""
    jax = sys.modules.get("jax")
    # A module that is being imported does not have all of its parts.
    return None if getattr(getattr(jax, "__spec__", None), "_initializing", False) else jax


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


# Shorter intervals gain little, and cost threads that all compute in Python more than 5 %.
_SECONDS = 2e-4


class _Interval:
    """The switch interval, and the value to restore once no save needs a short one."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._users = 0
        self._before = 0.0

    def shorten(self) -> None:
        with self._guard:
            self._users += 1
            if self._users == 1:
                self._before = sys.getswitchinterval()
                if self._before > _SECONDS:
                    sys.setswitchinterval(_SECONDS)

    def set_back(self) -> None:
        with self._guard:
            self._users -= 1
            # If another value was set meanwhile, it belongs to somebody else and stays.
            is_ours = abs(sys.getswitchinterval() - _SECONDS) < _SECONDS / 100
            if not self._users and self._before > _SECONDS and is_ours:
                sys.setswitchinterval(self._before)


# The interpreter has one interval, so there is one of these.
_interval = _Interval()


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Keep the switch interval short for the body; bodies may overlap."""
    _interval.shorten()
    try:
        yield
    finally:
        _interval.set_back()
