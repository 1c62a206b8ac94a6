"""Waiting until the main thread stands in a system call that waits."""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import FrameType

__all__ = ["main_frame", "wait_until_main_is_still"]


def main_frame() -> FrameType:
    """Return what the main thread runs.

    Python 3.11 holds a lock of its threads meanwhile. A run of the garbage collector in it calls
    back into Python, and then waits forever for a thread that is just being started
    (https://github.com/python/cpython/issues/106883).
    """
    gc.disable()
    try:
        return sys._current_frames()[threading.main_thread().ident or 0]
    finally:
        gc.enable()


def wait_until_main_is_still() -> None:
    """Return once the main thread has stood in one place, which waits, for a while.

    A signal that comes between Python's last look for one and the system call that waits is not
    seen before that call returns; nothing tells when it has begun.
    """
    places: list[object] = []
    while len(set(places[-4:])) != 1 or len(places) < 4:
        frame = main_frame()
        waits = frame.f_code.co_name == "wait"
        places.append(frame.f_lasti if waits else len(places) + 1e6)
        time.sleep(0.03)
