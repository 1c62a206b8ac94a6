"""Frozen records of what the engine did and when, and the one seam that hands them out.

An observer is any callable that takes an `Event`. It is called on the engine's own thread and must
return quickly; an exception it raises is logged and otherwise ignored, so that watching a save can
never fail it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Event", "Observer", "Recorder", "emit"]

logger = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class Event:
    """One timed phase of a save or a restore.

    Attributes:
        operation: `"save"`, `"restore"` or `"verify"`.
        phase: Of a save `plan`, `snapshot`, `stage`, `encode`, `digest`, `write`, `record`,
            `publish` and `preserve`, and `blocked` for as long as the caller of `save()` waits; of
            a restore `read` and `place`.
        step: The step, or None for a one-shot checkpoint.
        began_ns: Monotonic clock (`time.perf_counter_ns`) at the start.
        ended_ns: The same clock at the end.
        nbytes: Bytes of array data the phase moved; 0 where it moved none.
        lane: The write lane for `digest` and `write`, else None.
        granule: Number of the granule within its item, where the phase is about one.
    """

    operation: str
    phase: str
    step: int | None
    began_ns: int
    ended_ns: int
    nbytes: int = 0
    lane: int | None = None
    granule: int | None = None


Observer = Callable[[Event], None]


def emit(observers: Sequence[Observer], event: Event) -> None:
    """Hand `event` to every observer; one that raises is logged and skipped."""
    for observer in observers:
        try:
            observer(event)
        except Exception:
            logger.exception("an observer failed on %s; the operation goes on", event.phase)


@dataclass(frozen=True, slots=True)
class Recorder:
    """Emits the events of one operation; costs nothing measurable when nobody observes."""

    operation: str
    step: int | None
    observers: tuple[Observer, ...]

    @contextmanager
    def phase(
        self, name: str, nbytes: int = 0, lane: int | None = None, granule: int | None = None
    ) -> Iterator[None]:
        """Time the body as one phase; a phase that raises is not reported."""
        if not self.observers:
            yield
            return
        began = time.perf_counter_ns()
        yield
        ended = time.perf_counter_ns()
        event = Event(self.operation, name, self.step, began, ended, nbytes, lane, granule)
        emit(self.observers, event)
