"""Spans and metrics, as the SDK of OpenTelemetry takes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import ckpt.sync
from ckpt.errors import InvalidArgumentError
from ckpt.observers import OpenTelemetry
from ckpt.observers._names import OPENTELEMETRY
from tests.unit.observers.examples import US, a_whole_save, end, event


class Told:
    """An observer, and what it exports."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.observer = OpenTelemetry(self.tracers, self.meters)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """Every span by its name; each is there once."""
        spans = self._exporter.get_finished_spans()
        named = {span.name: span for span in spans}
        assert len(named) == len(spans)
        return named

    @property
    def points(self) -> dict[tuple[str, ...], Any]:
        """Every data point by the name of the instrument and the values of its attributes."""
        data = self._reader.get_metrics_data()
        assert data is not None
        found: dict[tuple[Any, ...], Any] = {}
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                assert point.attributes is not None
                assert set(point.attributes) == set(OPENTELEMETRY[metric.name].labels)
                values = (point.attributes[name] for name in OPENTELEMETRY[metric.name].labels)
                found[metric.name, *values] = point
        return found


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.tracers.shutdown()
    told.meters.shutdown()


def test_an_operation_is_a_span_with_one_below_it_for_each_kind_of_phase(told: Told) -> None:
    for each in a_whole_save(7):
        told.observer(each)
    spans = told.spans
    below = {"wait", "blocked", "plan", "stage", "write", "publish"}
    assert set(spans) == {"ckpt.save", "ckpt.save.preserve", *(f"ckpt.save.{p}" for p in below)}
    save = spans["ckpt.save"]
    assert save.parent is None
    assert save.attributes == {
        "ckpt.step": 7,
        "ckpt.nbytes": 7 << 20,
        "ckpt.outcome": "ok",
    }
    for phase in below:
        span = spans[f"ckpt.save.{phase}"]
        assert span.parent is not None
        assert span.parent.span_id == save.context.span_id
        assert span.context.trace_id == save.context.trace_id
    # It comes after its save has ended.
    assert spans["ckpt.save.preserve"].parent is None
    assert spans["ckpt.save.write"].attributes == {
        "ckpt.step": 7,
        "ckpt.nbytes": 8 << 20,
        "ckpt.count": 2,
        "ckpt.busy_seconds": pytest.approx(190e-6),
    }


def test_spans_lie_where_the_phases_were_in_the_time_of_day(told: Told) -> None:
    # The clock of events counts from anywhere.
    offset = time.time_ns() - time.perf_counter_ns()
    for each in a_whole_save():
        told.observer(each)
    spans = told.spans
    start = spans["ckpt.save"].start_time
    assert start is not None
    assert abs(start - (offset - 20 * US)) < 60 * 10**9
    assert spans["ckpt.save"].end_time == start + 325 * US
    # Relative to each other they are exact.
    write = spans["ckpt.save.write"]
    assert (write.start_time, write.end_time) == (start + 80 * US, start + 270 * US)


def test_only_a_failure_has_the_status_of_one_and_says_why(told: Told) -> None:
    told.observer(end(0, 9, "failed", step=1, reason="no space left"))
    told.observer(end(0, 9, "skipped", step=None, operation="restore", reason="not now"))
    told.observer(end(0, 9, "cancelled", step=3, operation="verify"))
    spans = told.spans
    failed, skipped, cancelled = (spans[f"ckpt.{n}"] for n in ("save", "restore", "verify"))
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert failed.status.description == "no space left"
    assert skipped.status.is_unset
    assert cancelled.status.is_unset
    assert failed.attributes is not None
    assert failed.attributes["ckpt.reason"] == "no space left"
    assert skipped.attributes == {
        "ckpt.nbytes": 0,
        "ckpt.outcome": "skipped",
        "ckpt.reason": "not now",
    }


def test_the_metrics_count_and_measure(told: Told) -> None:
    for each in a_whole_save(7):
        told.observer(each)
    told.observer(event("write", 1000, 9000, nbytes=99))
    told.observer(end(1000, 9000, "failed"))
    points = told.points
    assert points["ckpt.operations", "save", "ok"].value == 1
    assert points["ckpt.operations", "save", "failed"].value == 1
    whole = points["ckpt.operation.duration", "save"]
    assert (whole.count, whole.sum) == (1, pytest.approx(325e-6))
    write = points["ckpt.phase.duration", "save", "write"]
    assert (write.count, write.sum) == (1, pytest.approx(190e-6))
    # In seconds: the boundaries that there are by default are for milliseconds.
    assert write.explicit_bounds[0] == 0.001
    assert points["ckpt.phase.io", "save", "write"].value == 8 << 20
    assert ("ckpt.phase.io", "save", "plan") not in points
    assert ("ckpt.phase.duration", "save", "preserve") in points


def test_what_was_nearly_lost_is_measured_and_no_span(told: Told) -> None:
    told.observer(event("preempted", 0, 60_000_000))
    assert told.spans == {}
    assert told.points["ckpt.phase.duration", "save", "preempted"].sum == 60


def test_a_span_of_the_caller_is_not_taken_for_the_parent(told: Told) -> None:
    with told.tracers.get_tracer("caller").start_as_current_span("train step"):
        for each in a_whole_save():
            told.observer(each)
    assert told.spans["ckpt.save"].parent is None


def test_a_real_run_is_told(told: Told, tmp_path: Path) -> None:
    before = time.time_ns()
    with ckpt.sync.CheckpointManager(tmp_path, observers=[told.observer]) as mgr:
        mgr.save(4, {"w": jnp.ones((256, 1024))})
    after = time.time_ns()
    save, write = told.spans["ckpt.save"], told.spans["ckpt.save.write"]
    times: list[Any] = [save.start_time, write.start_time, write.end_time, save.end_time]
    assert sorted(times) == times
    assert before <= times[0]
    assert times[-1] <= after
    assert save.attributes is not None
    assert save.attributes["ckpt.nbytes"] == 1 << 20


def test_the_global_providers_are_taken_unless_there_are_others() -> None:
    observer = OpenTelemetry()
    for each in a_whole_save():
        observer(each)


@pytest.mark.parametrize("name", ["tracer_provider", "meter_provider"])
def test_a_provider_is_one(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"OpenTelemetry\\({name}='jaeger'\\)"):
        OpenTelemetry(**{name: "jaeger"})  # type: ignore[arg-type]
