"""The time of managers in tests, of which policies by time and the trash know."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ckpt._steps import service

__all__ = ["set_clock"]


@contextlib.contextmanager
def set_clock(now: Callable[[], float]) -> Iterator[None]:
    """Let managers that are made in the block have another clock, for as long as they live.

    Args:
        now: Returns the time in Unix seconds.

    Example:
        ```python
        from ckpt.testing.clock import set_clock

        now = 1000.0
        with set_clock(lambda: now):
            mgr = ckpt.sync.CheckpointManager(root, save_when=ckpt.save_when.EverySeconds(60))
        mgr.save(1, state).result()
        now += 30
        assert not mgr.save(2, state)
        mgr.close()
        ```
    """
    own = service.wall_clock_ns
    service.wall_clock_ns = lambda: int(now() * 1e9)
    try:
        yield
    finally:
        service.wall_clock_ns = own
