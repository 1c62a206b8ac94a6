"""Operations in progress: their phases are collected until they end, in bounded memory.

Metrics are recorded once for each operation, not for each of thousands of batches. So all phases of
one kind become one `Phase`, and are returned when the operation ends.
"""

from __future__ import annotations

import threading

from msgspec import Struct, field

from ckpt._events import Event
from ckpt.observers._tracing.intervals import Interval, measure, merge
from ckpt.observers._tracing.timeline import END, PREEMPTED

# Most operations in progress. One without an end is forgotten when so many others have begun.
_MOST_UNDER_WAY = 256
# Phases outside of their save: old steps are deleted after it has ended, and the time that would
# have been lost is before it.
_ALONE = ("preserve", PREEMPTED)
# Intervals of one phase that are kept before neighbours are merged.
_MOST_STRETCHES = 4096


class Phase(Struct):
    """All phases of one kind of one operation.

    Attributes:
        began_ns: Beginning of the first of them.
        ended_ns: End of the last of them.
    """

    name: str
    began_ns: int
    ended_ns: int
    nbytes: int = 0
    count: int = 0
    _stretches: list[Interval] = field(default_factory=list)

    def add(self, event: Event) -> None:
        self.began_ns = min(self.began_ns, event.began_ns)
        self.ended_ns = max(self.ended_ns, event.ended_ns)
        self.nbytes += event.nbytes
        self.count += 1
        self._stretches.append((event.began_ns, event.ended_ns))
        if len(self._stretches) > _MOST_STRETCHES:
            merged = merge(self._stretches)
            # The merged intervals have gaps. The gaps in the older half are given up.
            half = merged[: -_MOST_STRETCHES // 2]
            older = [(half[0][0], half[-1][1])] if half else []
            self._stretches = older + merged[-_MOST_STRETCHES // 2 :]

    @property
    def moved(self) -> int:
        """Bytes that they moved; 0 for a plan."""
        return 0 if self.name == "plan" else self.nbytes

    @property
    def seconds(self) -> float:
        """Time in which at least one of them was running."""
        return measure(self._stretches) / 1e9


class ObservedOperation(Struct, frozen=True):
    """An operation that has ended, or a phase on its own.

    Attributes:
        name: `"save"`, `"restore"`, `"verify"`, `"delete"` or `"drain"`.
        step: The step, or None for a one-shot checkpoint.
        end: Event of the end of the operation; None for a phase on its own.
        phases: Its phases, in the order in which the first of each kind ended.
    """

    name: str
    step: int | None
    end: Event | None
    phases: tuple[Phase, ...]

    @property
    def is_ok(self) -> bool:
        """True if it succeeded, or is a phase on its own."""
        return self.end is None or self.end.outcome == "ok"


class Operations:
    """Operations in progress. It may be used from any thread.

    Events name a step, but not a manager. If two managers save a step of the same number at the
    same time, their phases are mixed until the first save has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Ordered by their last event, oldest first.
        self._under_way: dict[tuple[str, int | None], dict[str, Phase]] = {}

    def take(self, event: Event) -> ObservedOperation | None:
        """Add one event; return the operation that it completes, or None."""
        if event.phase in _ALONE:
            return ObservedOperation(event.operation, event.step, None, (_single_phase(event),))
        key = (event.operation, event.step)
        with self._lock:
            phases = self._under_way.pop(key, {})
            if event.phase != END:
                self._under_way[key] = phases
                known = phases.setdefault(
                    event.phase, Phase(event.phase, event.began_ns, event.ended_ns)
                )
                known.add(event)
                if len(self._under_way) > _MOST_UNDER_WAY:
                    del self._under_way[next(iter(self._under_way))]
                return None
        # Phases that ended before this operation began belong to another one that never ended.
        own = tuple(phase for phase in phases.values() if phase.ended_ns > event.began_ns)
        return ObservedOperation(event.operation, event.step, event, own)


def _single_phase(event: Event) -> Phase:
    phase = Phase(event.phase, event.began_ns, event.ended_ns)
    phase.add(event)
    return phase
