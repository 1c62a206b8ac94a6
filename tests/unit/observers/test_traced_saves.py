"""What traces and lines of JSON tell of saves and of a program's own work."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from ckpt.errors import InvalidArgumentError
from ckpt.observers import JsonLines, SaveTimes, Trace
from tests.unit.observers.examples import US, a_whole_save, end, event


def test_the_times_of_each_save() -> None:
    trace = Trace()
    for each in (*a_whole_save(3), event("read", 400, 500, step=3, operation="restore")):
        trace(each)
    trace(end(390, 510, step=3, operation="restore"))
    (save,) = trace.timeline().saves()
    assert isinstance(save, SaveTimes)
    assert (save.step, save.began_ns, save.returned_ns) == (3, -20 * US, 100 * US)
    assert (save.published_ns, save.blocked) == (300 * US, (-20 * US, 100 * US))


def test_a_part_of_a_timeline() -> None:
    trace = Trace()
    for step in (1, 2):
        for each in a_whole_save(step):
            trace(each)
    trace(end(390, 510, step=2, operation="restore"))
    assert {each.step for each in trace.timeline(step=2).events} == {2}
    assert {each.operation for each in trace.timeline(operation="restore").events} == {"restore"}
    with pytest.raises(InvalidArgumentError):
        trace.timeline(step=9)
    with pytest.raises(InvalidArgumentError):
        trace.timeline(operation="verify")


def test_spans_of_ones_own(tmp_path: Path) -> None:
    trace = Trace()
    with trace.span("train step", step=3, of=Path("x")):
        pass
    (span,) = trace.timeline().spans
    assert (span.name, span.args) == ("train step", {"step": 3, "of": "x"})
    assert span.thread == threading.current_thread().name
    assert span.began_ns <= span.ended_ns
    with (
        JsonLines(tmp_path / "saves.jsonl", phases=True) as lines,
        lines.span("train step", step=3),
    ):
        pass
    (line,) = map(json.loads, (tmp_path / "saves.jsonl").read_text().splitlines())
    assert (line["span"], line["args"]) == ("train step", {"step": 3})
