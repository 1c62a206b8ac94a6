"""What happens at interpreter exit to saves nobody waited for.

`atexit` is too late: by then Python has shut down its executors, and background I/O fails. The hook
used here runs before that, while everything still works. It is the one `concurrent.futures` itself
uses; Python has no public name for it.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (its own hook must be registered before ours)
import threading
import weakref
from collections.abc import Callable

__all__ = ["run_at_exit"]


def run_at_exit(method: Callable[[], None]) -> None:
    """Call the bound `method` when the main thread has ended, unless its object is gone by then."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    register = getattr(threading, "_register_atexit", atexit.register)
    register(call)
