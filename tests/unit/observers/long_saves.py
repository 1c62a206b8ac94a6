"""Saves that take seconds, as they are told; in a module that children import quickly."""

from __future__ import annotations

from ckpt._events import Event

MB = 1_000_000
SECOND = 1_000_000


def batch(phase: str, n: int, began: int, ended: int, nbytes: int, step: int | None) -> Event:
    """Times are in microseconds."""
    return Event("save", phase, step, began * 1000, ended * 1000, nbytes, batch=n)


def a_long_save(step: int | None = 7, count: int = 10, at: int = 0) -> list[Event]:
    """A save of 100 MB that takes a second for each batch, without its end."""
    size = 100 * MB // count
    plan = Event("save", "plan", step, at * 1000, at * 1000, size * count)
    told = [plan]
    for n in range(count):
        began, ended = at + n * SECOND, at + (n + 1) * SECOND
        told.append(batch("stage", n, began, ended - 9, size, step))
        told.append(batch("write", n, began, ended, size, step))
    return told


def the_end(step: int | None = 7, at: int = 20 * SECOND, outcome: str = "ok") -> Event:
    return Event("save", "end", step, 0, at * 1000, outcome=outcome)  # type: ignore[arg-type]
