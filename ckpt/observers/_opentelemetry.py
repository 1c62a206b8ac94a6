"""`OpenTelemetry`: an observer that makes spans and metrics, under the names of `OPENTELEMETRY`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt._arguments import invalid
from ckpt._events import Event, unix_offset_ns
from ckpt.observers._names import (
    BUCKETS,
    OPENTELEMETRY,
    ObservedOperation,
    Operations,
    Phase,
    missing,
)
from ckpt.observers._tracing.timeline import PREEMPTED

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider


class OpenTelemetry:
    """Makes a span of every operation, with one below it for each kind of phase, and metrics.

    The spans are named `ckpt.save`, `ckpt.restore`, `ckpt.verify` and `ckpt.delete`, their children
    `ckpt.save.write` and so on. They are made when the operation has ended, with the times at which
    it ran, and each operation is a trace of its own. A failed operation has the status ERROR with
    the reason. Needs the package opentelemetry-api: `pip install 'ckpt-jax[opentelemetry]'`.

    Any number of managers may share one. It is called on the library's own thread, so use a span
    processor that exports in the background, such as `BatchSpanProcessor`.

    Args:
        tracer_provider: Provider that gets the spans; None for the global one.
        meter_provider: Provider that gets the metrics; None for the global one.

    Raises:
        CheckpointError: OpenTelemetry is not installed.
        InvalidArgumentError: A provider is not valid.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, observers=[ckpt.observers.OpenTelemetry()])
        ```
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        try:
            from opentelemetry import metrics, trace
            from opentelemetry.context import Context
        except ImportError as error:
            raise missing("OpenTelemetry()", "opentelemetry-api", "opentelemetry") from error
        for name, provider, method in (
            ("tracer_provider", tracer_provider, "get_tracer"),
            ("meter_provider", meter_provider, "get_meter"),
        ):
            if provider is not None and not callable(getattr(provider, method, None)):
                what = f"an object with the method {method}, or None for the global one"
                raise invalid(name, provider, what, of="OpenTelemetry")
        self._trace = trace
        # An empty context: the library's thread has inherited that of the call that started it.
        self._nowhere = Context()
        self._tracer = trace.get_tracer("ckpt", tracer_provider=tracer_provider)
        meter = metrics.get_meter("ckpt", meter_provider=meter_provider)
        self._counters = {
            name: meter.create_counter(name, known.unit, known.meaning)
            for name, known in OPENTELEMETRY.items()
            if known.kind == "counter"
        }
        self._histograms = {
            name: meter.create_histogram(
                name, known.unit, known.meaning, explicit_bucket_boundaries_advisory=BUCKETS
            )
            for name, known in OPENTELEMETRY.items()
            if known.kind == "histogram"
        }
        self._operations = Operations()

    def __call__(self, event: Event) -> None:
        """Take one event; called by the library."""
        found = self._operations.take(event)
        if found is not None:
            self._trace_it(found)
            self._measure(found)

    def _trace_it(self, found: ObservedOperation) -> None:
        """Make the spans of an operation that has ended."""
        offset = unix_offset_ns()
        attributes: dict[str, str | int | float] = (
            {} if found.step is None else {"ckpt.step": found.step}
        )
        end, parent = found.end, None
        if end is not None:
            parent = self._tracer.start_span(
                f"ckpt.{found.name}",
                self._nowhere,
                attributes=attributes | _of_end(end),
                start_time=end.began_ns + offset,
            )
            if end.outcome == "failed":
                parent.set_status(self._trace.StatusCode.ERROR, end.reason)
        above = (
            self._nowhere
            if parent is None
            else self._trace.set_span_in_context(parent, self._nowhere)
        )
        for phase in found.phases:
            # This phase is no work, and it lasts from the step before.
            if phase.name != PREEMPTED:
                span = self._tracer.start_span(
                    f"ckpt.{found.name}.{phase.name}",
                    above,
                    attributes=attributes | _of_phase(phase),
                    start_time=phase.began_ns + offset,
                )
                span.end(phase.ended_ns + offset)
        if parent is not None and end is not None:
            parent.end(end.ended_ns + offset)

    def _measure(self, found: ObservedOperation) -> None:
        operation = {"ckpt.operation": found.name}
        if found.end is not None:
            outcome = {"ckpt.outcome": f"{found.end.outcome}"}
            self._counters["ckpt.operations"].add(1, operation | outcome)
        if not found.is_ok:
            return
        if found.end is not None:
            seconds = (found.end.ended_ns - found.end.began_ns) / 1e9
            self._histograms["ckpt.operation.duration"].record(seconds, operation)
        for phase in found.phases:
            labels = operation | {"ckpt.phase": phase.name}
            self._histograms["ckpt.phase.duration"].record(phase.seconds, labels)
            if phase.moved:
                self._counters["ckpt.phase.io"].add(phase.moved, labels)


def _of_end(end: Event) -> dict[str, str | int | float]:
    known = {"ckpt.nbytes": end.nbytes, "ckpt.outcome": end.outcome, "ckpt.reason": end.reason}
    return {name: value for name, value in known.items() if value is not None}


def _of_phase(phase: Phase) -> dict[str, str | int | float]:
    return {
        "ckpt.nbytes": phase.nbytes,
        "ckpt.count": phase.count,
        "ckpt.busy_seconds": phase.seconds,
    }
