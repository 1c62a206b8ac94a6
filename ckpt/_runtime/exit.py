"""Interpreter exit: finishes saves that were not waited for, and sets the exit status.

`atexit` is too late: by then Python has shut down its executors, and background I/O fails. The hook
used here runs before that, while everything still works. It is the one `concurrent.futures` itself
uses; Python has no public name for it.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (its own hook must be registered before ours)
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ckpt.errors import ClosedError

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
