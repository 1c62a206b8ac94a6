"""Observers of saves, restores, verifications and deletions.

An observer is any callable that takes a `ckpt.types.Event`. Managers take `observers=[...]`.
`JaxMonitoring`, `OpenTelemetry` and `Prometheus` measure, `JsonLines` writes a line for every
operation, and `ProgressBar` shows the progress.

A `Trace` keeps the events, together with spans of your own such as train steps. It writes them for
Perfetto. Its `Timeline` shows how much of a save overlapped with training.
"""

from __future__ import annotations

from ckpt.observers._jax_monitoring import JaxMonitoring
from ckpt.observers._json_lines import JsonLines
from ckpt.observers._opentelemetry import OpenTelemetry
from ckpt.observers._progress import ProgressBar
from ckpt.observers._prometheus import Prometheus
from ckpt.observers._tracing.timeline import SaveTimes, Span, Timeline
from ckpt.observers._tracing.trace import Trace

__all__ = [
    "JaxMonitoring",
    "JsonLines",
    "OpenTelemetry",
    "ProgressBar",
    "Prometheus",
    "SaveTimes",
    "Span",
    "Timeline",
    "Trace",
]


def __dir__() -> list[str]:
    return __all__
