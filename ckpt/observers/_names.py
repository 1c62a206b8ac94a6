"""Names of all metrics, and the operations in progress that they count.

Names of all metrics. docs/how-to/observing.md has them, too. Durations and bytes are recorded
for operations that ended `ok`; all others are only counted. The duration of a phase is the time in
which at least one phase of its kind was running, once for each operation.

Operations in progress: their phases are collected until they end, in bounded memory. Metrics are
recorded once for each operation, not for each of thousands of batches. So all phases of one kind
become one `Phase`, and are returned when the operation ends.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Literal, get_args

from msgspec import Struct, field

from ckpt._events import Event, Outcome
from ckpt.errors import CheckpointError
from ckpt.observers._tracing.timeline import END, PREEMPTED, Interval, measure, merge

Kind = Literal["event", "duration", "scalar", "counter", "histogram", "gauge"]

OUTCOMES: tuple[str, ...] = get_args(Outcome)

# The phases of every operation, and what happens in them.
PHASES: Mapping[str, Mapping[str, str]] = {
    "save": {
        "blocked": "the caller of `save()` waits",
        "wait": "it waits for earlier saves",
        "plan": "what goes where is worked out",
        "snapshot": "what the caller may change soon is copied on its device",
        "stage": "arrays are copied to host memory",
        "encode": "arrays are compressed",
        "digest": "digests of what is written are taken",
        "write": "data files are written",
        "record": "views and the manifest are written",
        "publish": "the step gets its name, durably",
        "preserve": "steps that are not kept any more are deleted, after the save",
        "preempted": "no work: what a preempted run would have lost without its final save",
    },
    "restore": {
        "plan": "what is to be read is worked out",
        "read": "chunks are read and their digests compared",
        "fetch": "with `broadcast_bytes`: this process's share of what several need is read",
        "exchange": "with `broadcast_bytes`: shares are exchanged over the devices",
        "place": "arrays are placed on their devices",
    },
    "verify": {
        "plan": "what is to be read is worked out",
        "read": "files are read",
        "digest": "their digests are compared",
    },
    "delete": {},
    "drain": {},
}
# The phases whose bytes are reported to `jax.monitoring`, and the names for them.
BYTES: Mapping[tuple[str, str], str] = {
    ("save", "write"): "written_bytes",
    ("restore", "read"): "read_bytes",
    ("restore", "fetch"): "fetched_bytes",
    ("verify", "read"): "read_bytes",
}


class MetricName(Struct, frozen=True):
    """The metric of one name; `unit` is written as in OpenTelemetry."""

    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    unit: str = ""


def _of_jax() -> dict[str, Kind]:
    names: dict[str, Kind] = {}
    for operation, phases in PHASES.items():
        for outcome in OUTCOMES:
            names[f"{operation}/{outcome}"] = "event"
        names[f"{operation}/seconds"] = "duration"
        if phases:
            # A deletion has no phases, and moves nothing.
            names[f"{operation}/bytes"] = "scalar"
        for phase in phases:
            names[f"{operation}/{phase}_seconds"] = "duration"
            if (operation, phase) in BYTES:
                names[f"{operation}/{BYTES[operation, phase]}"] = "scalar"
    return names


# Each name follows the prefix and a slash.
JAX: Mapping[str, Kind] = _of_jax()

# Upper bounds of the histograms, in seconds: a plan takes less than a millisecond, and a save that
# waits for a slow store many minutes.
BUCKETS = (
    *(0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    *(1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)

# Each name follows the prefix and an underscore.
PROMETHEUS: Mapping[str, MetricName] = {
    "operations_total": MetricName(
        "counter", "operations that have ended, however", ("operation", "outcome")
    ),
    "operation_seconds": MetricName("histogram", "seconds of a whole operation", ("operation",)),
    "phase_seconds": MetricName(
        "histogram", "seconds of a phase in one operation", ("operation", "phase")
    ),
    "phase_bytes_total": MetricName("counter", "bytes that a phase moved", ("operation", "phase")),
    "last_committed_step": MetricName(
        "gauge", "the step that was committed last; NaN before the first"
    ),
    "last_committed_timestamp_seconds": MetricName(
        "gauge", "when it was, in seconds since 1970; NaN before the first"
    ),
}

OPENTELEMETRY: Mapping[str, MetricName] = {
    "ckpt.operations": MetricName(
        "counter",
        "operations that have ended, however",
        ("ckpt.operation", "ckpt.outcome"),
        "{operation}",
    ),
    "ckpt.operation.duration": MetricName(
        "histogram", "seconds of a whole operation", ("ckpt.operation",), "s"
    ),
    "ckpt.phase.duration": MetricName(
        "histogram", "seconds of a phase in one operation", ("ckpt.operation", "ckpt.phase"), "s"
    ),
    "ckpt.phase.io": MetricName(
        "counter", "bytes that a phase moved", ("ckpt.operation", "ckpt.phase"), "By"
    ),
}


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


def missing(name: str, library: str, extra: str) -> CheckpointError:
    """Return the error of `name`, which needs a library that is not installed.

    Args:
        name: The class or function that needs the library.
        library: The library as people know it.
        extra: The extra of this package that installs it.
    """
    return CheckpointError(
        f"{name} needs {library}, which is not installed: pip install 'ckpt-jax[{extra}]'"
    )
