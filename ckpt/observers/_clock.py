"""The clock of events, which counts from anywhere, mapped to the time of day."""

from __future__ import annotations

import time

__all__ = ["unix_offset_ns"]


def unix_offset_ns() -> int:
    """Return what to add to an instant of `time.perf_counter_ns` to have Unix nanoseconds.

    It changes when the time of day is set, so ask again for every operation.
    """
    return time.time_ns() - time.perf_counter_ns()
