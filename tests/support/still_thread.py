"""Waiting until the main thread stands in a system call that waits."""

from __future__ import annotations

import sys
import threading
import time

__all__ = ["wait_until_main_is_still"]


def wait_until_main_is_still() -> None:
    """Return once the main thread has stood in one place, which waits, for a while.

    A signal that comes between Python's last look for one and the system call that waits is not
    seen before that call returns; nothing tells when it has begun.
    """
    places: list[object] = []
    while len(set(places[-4:])) != 1 or len(places) < 4:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        waits = frame.f_code.co_name == "wait"
        places.append(frame.f_lasti if waits else len(places) + 1e6)
        time.sleep(0.03)
