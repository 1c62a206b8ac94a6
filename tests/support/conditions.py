"""Conditions that no event announces: waiting for one, and whether a call lets others run."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable

__all__ = ["lets_others_run", "until"]


def until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    """Return once the condition holds; fail if that takes longer than a test may."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{holds} did not hold within {seconds:.0f} s"
        time.sleep(0.002)


def lets_others_run(call: Callable[[], object], *, times: int) -> bool:
    """Tell whether another thread runs during a call, in one of so many."""
    counted, is_over = itertools.count(), threading.Event()

    def count() -> None:
        while not is_over.is_set():
            next(counted)
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    switch_interval = sys.getswitchinterval()
    # From now on another thread goes on only if this one lets it.
    sys.setswitchinterval(1000)
    try:
        for _ in range(times):
            before = next(counted)
            call()
            if next(counted) > before + 1:
                return True
        return False
    finally:
        sys.setswitchinterval(switch_interval)
        is_over.set()
        thread.join()
