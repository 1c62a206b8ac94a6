"""Names of all metrics. docs/how-to/observing.md has the same tables.

Durations and bytes are recorded for operations that ended `ok`; all others are only counted. The
duration of a phase is the time in which at least one phase of its kind was running, once for each
operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from msgspec import Struct

from ckpt._events import Outcome

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
_ENDED = {
    "ok": "it did what was asked",
    "failed": "it failed",
    "skipped": "it was turned down, by a policy for example",
    "cancelled": "it was cancelled",
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


def _of_jax() -> dict[str, MetricName]:
    names: dict[str, MetricName] = {}
    for operation, phases in PHASES.items():
        for outcome in OUTCOMES:
            names[f"{operation}/{outcome}"] = MetricName(
                "event", f"one {operation}: {_ENDED[outcome]}"
            )
        names[f"{operation}/seconds"] = MetricName("duration", f"the whole {operation}")
        if phases:
            # A deletion has no phases, and moves nothing.
            names[f"{operation}/bytes"] = MetricName(
                "scalar", f"bytes of the arrays of the {operation}"
            )
        for phase, meaning in phases.items():
            names[f"{operation}/{phase}_seconds"] = MetricName("duration", meaning)
            if (operation, phase) in BYTES:
                name = f"{operation}/{BYTES[operation, phase]}"
                names[name] = MetricName("scalar", f"bytes that the phase `{phase}` moved")
    return names


# Each name follows the prefix and a slash.
JAX: Mapping[str, MetricName] = _of_jax()

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
