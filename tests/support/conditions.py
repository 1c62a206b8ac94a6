"""Waiting for a condition that no event announces."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]


def until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    """Return once the condition holds; fail if that takes longer than a test may."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{holds} did not hold within {seconds:.0f} s"
        time.sleep(0.002)
