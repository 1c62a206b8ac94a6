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
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Event", "EventRecorder", "Observer", "Outcome", "emit"]

logger = logging.getLogger("ckpt")

Outcome = Literal["ok", "failed", "skipped", "cancelled"]


@dataclass(frozen=True, slots=True)
class Event:
    """One timed phase of an operation, or the whole of one.

    Attributes:
        operation: `"save"`, `"restore"`, `"verify"` or `"delete"`.
        phase: Of a save `wait` (for earlier saves), `plan`, `snapshot`, `stage`, `encode`,
            `digest`, `write`, `record`, `publish` and `preserve`, and `blocked` for as long as the
            caller of `save()` waits; of a restore `read` and `place`, and where processes share
            what they read `fetch` and `exchange`. `end` is the whole of an
            operation, reported once when it has ended, however it has: the one phase with an
            `outcome`. `preempted` is reported once when the final save of a preempted run is
            committed: the time since the step before it was saved, which would have been lost.
        step: The step, or None for a one-shot checkpoint.
        began_ns: Monotonic clock (`time.perf_counter_ns`) at the start.
        ended_ns: The same clock at the end.
        nbytes: Bytes of array data the phase moved; 0 where it moved none. Those of `plan` are
            still to be moved.
        lane: The write lane for `digest` and `write`, else None.
        batch: Number of the batch within its item, where the phase is about one.
        outcome: Of the phase `end` how it ended: `ok`, `failed`, `skipped` or `cancelled`.
        reason: Why it failed or was skipped.
    """

    operation: str
    phase: str
    step: int | None
    began_ns: int
    ended_ns: int
    nbytes: int = 0
    lane: int | None = None
    batch: int | None = None
    outcome: Outcome | None = None
    reason: str | None = None


Observer = Callable[[Event], None]


def emit(observers: Sequence[Observer], event: Event) -> None:
    """Hand `event` to every observer; one that raises is logged and skipped."""
    for observer in observers:
        try:
            observer(event)
        except Exception:
            logger.exception("an observer failed on %s; the operation goes on", event.phase)


@dataclass(frozen=True, slots=True)
class EventRecorder:
    """Emits the events of one operation; costs nothing measurable when nobody observes."""

    operation: str
    step: int | None
    observers: tuple[Observer, ...]

    def end(
        self, began_ns: int, outcome: Outcome, *, nbytes: int = 0, reason: str | None = None
    ) -> None:
        """Report the whole operation, which began at `began_ns` and ends now."""
        if self.observers:
            ended = time.perf_counter_ns()
            event = Event(
                self.operation,
                "end",
                self.step,
                began_ns,
                ended,
                nbytes,
                outcome=outcome,
                reason=reason,
            )
            emit(self.observers, event)

    def preempted(self, seconds: float) -> None:
        """Report the final save of a preempted run, so many seconds after the one before it."""
        now = time.perf_counter_ns()
        began = now - int(seconds * 1e9)
        emit(self.observers, Event(self.operation, "preempted", self.step, began, now))

    @contextmanager
    def ending(
        self, began_ns: int, *, skips: type[Exception] | tuple[type[Exception], ...] = ()
    ) -> Iterator[list[int]]:
        """Report the whole operation when the body ends, however it does; see `failing`.

        Gives a list; the body adds to it how many bytes it moved.
        """
        moved: list[int] = []
        with self.failing(began_ns, skips=skips):
            yield moved
        self.end(began_ns, "ok", nbytes=sum(moved))

    @contextmanager
    def failing(
        self, began_ns: int, *, skips: type[Exception] | tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Report the whole operation only if the body raises: as skipped where it raises `skips`.

        Where the operation was not asked for a step, the error may tell which one it was about.
        """
        try:
            yield
        except Exception as error:
            step = getattr(error, "step", None) if self.step is None else self.step
            outcome: Outcome = "skipped" if isinstance(error, skips) else "failed"
            replace(self, step=step).end(began_ns, outcome, reason=str(error))
            raise
        except BaseException:
            self.end(began_ns, "cancelled")
            raise

    def planned(self, began_ns: int, nbytes: int) -> None:
        """Report the phase `plan`, which ends now, with the bytes that are to be moved."""
        if self.observers:
            event = Event(
                self.operation, "plan", self.step, began_ns, time.perf_counter_ns(), nbytes
            )
            emit(self.observers, event)

    @contextmanager
    def phase(
        self, name: str, nbytes: int = 0, lane: int | None = None, batch: int | None = None
    ) -> Iterator[None]:
        """Time the body as one phase; a phase that raises is not reported."""
        if not self.observers:
            yield
            return
        began = time.perf_counter_ns()
        yield
        ended = time.perf_counter_ns()
        event = Event(self.operation, name, self.step, began, ended, nbytes, lane, batch)
        emit(self.observers, event)
