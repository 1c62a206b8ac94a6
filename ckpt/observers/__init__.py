"""Observers of saves and restores, and pictures of what they saw.

An observer is any callable that takes a `ckpt.Event`; managers take them as `observers=[...]`. A
`Trace` is one that keeps the events, beside spans of your own such as train steps. It writes them
for Perfetto, and its `Timeline` tells how much of a save overlapped with training and is drawn by
`draw_html` and `draw_png`.
"""

from __future__ import annotations

from ckpt.observers.picture import draw_html, draw_png
from ckpt.observers.timeline import SaveTimes, Span, Timeline
from ckpt.observers.trace import Trace

__all__ = ["SaveTimes", "Span", "Timeline", "Trace", "draw_html", "draw_png"]
