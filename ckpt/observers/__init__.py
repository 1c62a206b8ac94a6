"""Observers of saves, restores and the rest, and pictures of what they saw.

An observer is any callable that takes a `ckpt.Event`; managers take them as `observers=[...]`.
`JaxMonitoring`, `OpenTelemetry` and `Prometheus` measure, `JsonLines` writes a line for every
operation, and `ProgressBar` shows how far they are.

A `Trace` is one that keeps the events, beside spans of your own such as train steps. It writes them
for Perfetto, and its `Timeline` tells how much of a save overlapped with training and is drawn by
`draw_html` and `draw_png`.
"""

from __future__ import annotations

from ckpt.observers._jax_monitoring import JaxMonitoring
from ckpt.observers._json_lines import JsonLines
from ckpt.observers._opentelemetry import OpenTelemetry
from ckpt.observers._progress import ProgressBar
from ckpt.observers._prometheus import Prometheus
from ckpt.observers._tracing.picture import draw_html, draw_png
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
    "draw_html",
    "draw_png",
]
