"""Events: the timed phases of operations, and how observers receive them.

An observer is any callable that takes an `Event`. It is called on the library's own thread and must
return quickly: the end of an operation is reported before its caller hears of it. An exception that
it raises is logged and otherwise ignored, so that observing a save can never make it fail.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar, TypeVarTuple

from msgspec import Struct
from msgspec.structs import replace

Ts = TypeVarTuple("Ts")

T = TypeVar("T")

logger = logging.getLogger("ckpt")

Outcome = Literal["ok", "failed", "skipped", "cancelled"]


@dataclass(frozen=True, slots=True)
class Event:
    """One timed phase of an operation, or the whole of one.

    Attributes:
        operation: `"save"`, `"restore"`, `"verify"`, `"delete"` or `"drain"`, the copy of a step
            from a tier to the next place.
        phase: For a save `wait` (for earlier saves), `plan`, `snapshot`, `stage`, `encode`,
            `digest`, `write`, `record`, `publish` and `preserve`, and `blocked` for as long as the
            caller of `save()` waits; for a restore `read` and `place`, and `fetch` and `exchange`
            if processes share their reads. `end` is the whole of an operation, reported once when
            it has succeeded, failed or been cancelled. It is the only phase with an `outcome`.
            `preempted` is reported when the final save of a preempted run is committed: it is the
            time since the step before it was saved, which would have been lost.
        step: The step, or None for a one-shot checkpoint.
        began_ns: Monotonic clock (`time.perf_counter_ns`) at the start.
        ended_ns: The same clock at the end.
        nbytes: Bytes of array data that the phase moved, or 0. For `plan`, the bytes still to be
            moved.
        lane: The write lane for `digest` and `write`, else None.
        batch: Number of the batch within its item, if the phase is about one.
        outcome: Outcome of the operation, for the phase `end`: `ok`, `failed`, `skipped` or
            `cancelled`.
        reason: Why the operation failed or was skipped.
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


def unix_offset_ns() -> int:
    """Return the offset from the times of events to nanoseconds since 1970.

    It changes when the system's clock is set, so ask again for every operation.
    """
    return time.time_ns() - time.perf_counter_ns()


def emit(observers: Sequence[Observer], event: Event) -> None:
    """Call every observer with `event`; those of users are guarded, and none raises."""
    for observer in observers:
        observer(event)


class GuardedObserver:
    """An observer whose errors are logged: the first one whole, later ones by their number."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._failures = 0
        self._said = 0

    def __call__(self, event: Event) -> None:
        """Call the observer; never raises."""
        try:
            self._observer(event)
        except Exception:
            self._failures += 1
            if self._failures == 1:
                self._said = 1
                logger.exception(
                    "the observer %r failed on %s; the operation goes on, and further errors of "
                    "this observer are only counted",
                    self._observer,
                    event.phase,
                )
        if event.phase == "end" and self._failures > self._said:
            more, self._said = self._failures - self._said, self._failures
            logger.warning("the observer %r failed on %d more events", self._observer, more)


def timed(function: Callable[[*Ts], T], *args: *Ts) -> tuple[T, int, int]:
    """Call `function`; return its value, and the times at which it began and ended.

    In a worker thread, the times leave out the waits for the thread to begin, and for the loop to
    go on.
    """
    began = time.perf_counter_ns()
    value = function(*args)
    return value, began, time.perf_counter_ns()


class EventRecorder(Struct, frozen=True):
    """Emits the events of one operation. Without observers it costs nothing measurable."""

    operation: str
    step: int | None
    observers: tuple[Observer, ...]

    def end(
        self, began_ns: int, outcome: Outcome, *, nbytes: int = 0, reason: str | None = None
    ) -> None:
        """Report the whole operation, which began at `began_ns` and ends now."""
        ended_ns = time.perf_counter_ns()
        self.report("end", began_ns, ended_ns, nbytes, outcome=outcome, reason=reason)

    def end_badly(self, began_ns: int, error: BaseException) -> None:
        """Report the whole operation, which began at `began_ns` and which `error` ends now."""
        if isinstance(error, Exception):
            self.end(began_ns, "failed", reason=str(error))
        else:
            self.end(began_ns, "cancelled")

    def preempted(self, seconds: float) -> None:
        """Report the final save of a preempted run, `seconds` after the save before it."""
        now = time.perf_counter_ns()
        self.report("preempted", now - int(seconds * 1e9), now)

    @contextmanager
    def ending(
        self, began_ns: int, *, skips: type[Exception] | tuple[()] = ()
    ) -> Iterator[list[int]]:
        """Report the whole operation when the body ends, also if it raises; see `failing`.

        Yields a list to which the body adds the numbers of bytes that it moved.
        """
        moved: list[int] = []
        with self.failing(began_ns, skips=skips):
            yield moved
        self.end(began_ns, "ok", nbytes=sum(moved))

    @contextmanager
    def failing(self, began_ns: int, *, skips: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """Report the whole operation only if the body raises: as skipped if it raises `skips`.

        If the operation was called without a step, the step that the error names is reported.
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

    @contextmanager
    def phase(
        self, name: str, nbytes: int = 0, lane: int | None = None, batch: int | None = None
    ) -> Iterator[None]:
        """Time the body as one phase, which is reported unless the body raises."""
        began = time.perf_counter_ns()
        yield
        self.report(name, began, time.perf_counter_ns(), nbytes, lane, batch)

    def report(
        self,
        name: str,
        began_ns: int,
        ended_ns: int,
        nbytes: int = 0,
        lane: int | None = None,
        batch: int | None = None,
        outcome: Outcome | None = None,
        reason: str | None = None,
    ) -> None:
        """Report a phase that has been timed already, such as one in a worker thread."""
        if self.observers:
            when = began_ns, ended_ns, nbytes
            event = Event(self.operation, name, self.step, *when, lane, batch, outcome, reason)
            emit(self.observers, event)
