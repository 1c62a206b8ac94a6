"""`Prometheus`: an observer that keeps metrics, under the names of `PROMETHEUS`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt._arguments import invalid
from ckpt._events import Event, unix_offset_ns
from ckpt.errors import InvalidArgumentError
from ckpt.observers._names import BUCKETS, PROMETHEUS, Operations, missing

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Prometheus:
    """Keeps Prometheus metrics of saves, restores and other operations.

    It counts operations by outcome and the bytes that they moved, keeps histograms of the durations
    of operations and phases, and has gauges for the step that was committed last and its time.
    docs/how-to/observing.md lists the names, which follow the prefix: `ckpt_operations_total`. You
    serve them yourself, for example with `prometheus_client.start_http_server`. It needs the
    package prometheus-client: `pip install 'ckpt-jax[prometheus]'`.

    A registry can hold one observer for each prefix. Any number of managers may share the observer.

    Args:
        registry: Registry for the metrics; None for prometheus-client's global registry.
        prefix: The beginning of their names.

    Raises:
        CheckpointError: prometheus-client is not installed.
        InvalidArgumentError: The registry has metrics of these names already, or the prefix cannot
            begin the name of a metric.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, observers=[ckpt.observers.Prometheus()])
        ```
    """

    def __init__(self, registry: CollectorRegistry | None = None, prefix: str = "ckpt") -> None:
        try:
            import prometheus_client as client
        except ImportError as error:
            raise missing("Prometheus()", "prometheus-client", "prometheus") from error
        if type(prefix) is not str or not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
            what = "letters, digits and underscores, such as 'ckpt'"
            raise invalid("prefix", prefix, what, of="Prometheus")
        if registry is None:
            registry = client.REGISTRY
        elif not isinstance(registry, client.CollectorRegistry):
            raise invalid(
                "registry",
                registry,
                "a CollectorRegistry, or None for the global one",
                of="Prometheus",
            )
        self._counters = {
            name: client.Counter(f"{prefix}_{name}", known.meaning, known.labels, registry=None)
            for name, known in PROMETHEUS.items()
            if known.kind == "counter"
        }
        self._histograms = {
            name: client.Histogram(
                f"{prefix}_{name}", known.meaning, known.labels, registry=None, buckets=BUCKETS
            )
            for name, known in PROMETHEUS.items()
            if known.kind == "histogram"
        }
        self._gauges = {
            name: client.Gauge(f"{prefix}_{name}", known.meaning, registry=None)
            for name, known in PROMETHEUS.items()
            if known.kind == "gauge"
        }
        for gauge in self._gauges.values():
            # Without this the gauge would begin as 0, which is a valid step.
            gauge.set(math.nan)
        self._operations = Operations()
        _register(
            registry,
            [*self._counters.values(), *self._histograms.values(), *self._gauges.values()],
        )

    def __call__(self, event: Event) -> None:
        """Take one event; called by the library."""
        found = self._operations.take(event)
        if found is None:
            return
        if found.end is not None:
            self._take_end(found.name, found.end)
        if found.is_ok:
            for phase in found.phases:
                labels = (found.name, phase.name)
                self._histograms["phase_seconds"].labels(*labels).observe(phase.seconds)
                if phase.moved:
                    self._counters["phase_bytes_total"].labels(*labels).inc(phase.moved)

    def _take_end(self, operation: str, end: Event) -> None:
        self._counters["operations_total"].labels(operation, end.outcome).inc()
        if end.outcome != "ok":
            return
        seconds = (end.ended_ns - end.began_ns) / 1e9
        self._histograms["operation_seconds"].labels(operation).observe(seconds)
        if operation == "save" and end.step is not None:
            self._gauges["last_committed_step"].set(end.step)
            instant = (end.ended_ns + unix_offset_ns()) / 1e9
            self._gauges["last_committed_timestamp_seconds"].set(instant)


def _register(registry: CollectorRegistry, metrics: Sequence[Counter | Histogram | Gauge]) -> None:
    """Register all of `metrics`, or none."""
    registered: list[Counter | Histogram | Gauge] = []
    try:
        for metric in metrics:
            registry.register(metric)
            registered.append(metric)
    except ValueError as error:
        for metric in registered:
            registry.unregister(metric)
        raise InvalidArgumentError(
            f"these metrics are in the registry already: {error}. Make one Prometheus and give it "
            "to every manager, or pass another prefix or registry"
        ) from error
