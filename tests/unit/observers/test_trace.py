"""A trace: what it keeps, from any thread, and the file that it writes."""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import ckpt
import ckpt.sync
from ckpt.errors import InvalidArgumentError, StorageError
from ckpt.observers import Timeline, Trace
from ckpt.observers._tracing.trace import chrome_events
from tests.unit.observers.examples import TIMELINES, US, a_save, a_whole_save, event

MIB = 1 << 20
PATIENCE_S = 120


def state() -> dict[str, Any]:
    """Large enough for several batches, so for several lanes."""
    return {f"w{i}": jnp.full((3 * MIB,), i, jnp.float32) for i in range(3)} | {"step": 7}


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """A trace of a real run: a train step, a save, a train step beside it, and a restore."""
    trace = Trace()
    training = threading.Event()

    def hold(event: ckpt.types.Event) -> None:
        """Let the save be published only while the train step is running."""
        if event.phase in ("record", "merge"):
            training.wait(PATIENCE_S)

    with ckpt.sync.CheckpointManager(tmp_path / "run", observers=[trace, hold]) as mgr:
        with trace.span("train step", step=6):
            tree = state()
        with trace.span("blocked", step=7):
            commit = mgr.save(7, tree)
        with trace.span("train step", step=7):
            training.set()
            commit.result()
        mgr.restore(7)
    return trace


def test_a_real_save_is_told_with_its_spans(trace: Trace) -> None:
    save = trace.timeline(7, "save")
    assert {"plan", "stage", "write", "publish"} <= {e.phase for e in save.events}
    assert {e.phase for e in trace.timeline(7, "restore").events} >= {"read", "place"}
    assert {e.step for e in trace.timeline().events} == {7}
    blocked, step = sorted(save.spans, key=lambda s: s.began_ns)[-2:]
    (times,) = save.saves()
    assert (times.began_ns, times.returned_ns) == (blocked.began_ns, blocked.ended_ns)
    assert times.published_ns is not None
    assert times.published_ns <= step.ended_ns
    # The second train step lasts until the commit is durable; all but its beginning is beside it.
    assert save.overlapped() == [(step.began_ns, times.published_ns)]
    assert save.overlap_ratio is not None
    assert 0 < save.overlap_ratio <= 1


def check_chrome(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Check what viewers rely on; return the events of each track by its names."""
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for each in events:
        assert {"ph", "name", "ts", "dur", "pid", "tid"} <= set(each)
        assert each["ts"] >= 0
        assert each["dur"] >= 0
        place = (each["pid"], each["tid"])
        if each["ph"] == "X":
            rows[place].append(each)
            continue
        assert each["ph"] == "M"
        if each["name"] == "process_name":
            assert processes.setdefault(each["pid"], each["args"]["name"]) == each["args"]["name"]
        if each["name"] == "thread_name":
            assert place not in threads
            threads[place] = each["args"]["name"]
    assert set(rows) == set(threads)
    assert {pid for pid, _ in threads} == set(processes)
    for row in rows.values():
        for left, right in pairwise(row):
            assert round(1000 * (left["ts"] + left["dur"])) <= round(1000 * right["ts"])
    named = {(processes[pid], threads[pid, tid]): row for (pid, tid), row in rows.items()}
    assert len(named) == len(rows)
    return named


def test_the_chrome_file_of_a_real_run_is_well_formed(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.save_chrome(path)
    written = json.loads(path.read_text())
    tracks = check_chrome(written["traceEvents"])
    assert {process for process, _ in tracks} == {"your spans", "ckpt save", "ckpt restore"}
    assert {("your spans", "train step"), ("ckpt save", "lane 0"), ("ckpt save", "lane 1")} <= set(
        tracks
    )
    count = sum(map(len, tracks.values()))
    assert count == len(trace.timeline().events) + len(trace.timeline().spans)
    first, blocked, last = tracks["your spans", "train step"]
    assert (first["name"], blocked["name"], last["name"]) == ("train step", "blocked", "train step")
    assert last["args"] == {"step": 7}
    lanes = [row for (_, track), row in tracks.items() if track.startswith("lane")]
    writes = [each for row in lanes for each in row if each["name"] == "write"]
    # The arrays, and beside them a scalar.
    assert 0 <= sum(each["args"]["nbytes"] for each in writes) - 36 * MIB < 4096
    assert all(each["args"]["GB/s"] > 0 for each in writes)
    assert written["otherData"] == {"dropped": 0}


@given(TIMELINES)
def test_chrome_events_are_well_formed_whatever_happened(timeline: Timeline) -> None:
    events = json.loads(json.dumps(chrome_events(timeline), allow_nan=False))
    tracks = check_chrome(events)
    assert sum(map(len, tracks.values())) == len(timeline.events) + len(timeline.spans)
    timed: list[Any] = [*timeline.events, *timeline.spans]
    zero = min(each.began_ns for each in timed)
    writes = sorted((e.began_ns - zero) / 1000 for e in timeline.events if e.phase == "write")
    assert writes == sorted(e["ts"] for e in events if e["name"] == "write")


def test_the_chrome_file_shows_the_whole_and_nothing_that_was_nearly_lost(tmp_path: Path) -> None:
    trace = Trace()
    for each in (*a_whole_save(), event("preempted", -(10**9), 299)):
        trace(each)
    trace.save_chrome(tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = check_chrome(written)
    (whole,) = tracks["ckpt save", "whole"]
    assert (whole["ts"], whole["dur"], whole["args"]["outcome"]) == (0, 325, "ok")
    assert min(e["ts"] for e in written) == 0
    assert not any(e["name"] == "preempted" for e in written)


def test_an_empty_trace_is_a_file_too(tmp_path: Path) -> None:
    Trace().save_chrome(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


# --- What is kept ---------------------------------------------------------------------------------


def test_beyond_its_limit_the_oldest_go_and_it_says_so_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    trace = Trace(limit=10)
    with caplog.at_level(logging.WARNING, "ckpt"):
        for step in range(10):
            trace(event("publish", step, step + 1, step=step))
        assert (trace.dropped, caplog.records) == (0, [])
        for step in range(10, 25):
            trace(event("publish", step, step + 1, step=step))
            with trace.span("train step", step=step):
                pass
    assert trace.timeline().steps == tuple(range(15, 25))
    assert [span.args["step"] for span in trace.timeline().spans] == list(range(15, 25))
    assert (len(trace.timeline().events), trace.dropped) == (10, 15 + 5)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "limit of 10" in caplog.text
    trace.save_chrome(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {"dropped": 20}


def test_clearing_forgets_everything() -> None:
    trace = Trace(limit=1)
    for each in a_save():
        trace(each)
    with trace.span("train step"):
        pass
    assert trace.dropped
    trace.clear()
    assert trace.timeline() == Timeline()
    assert trace.dropped == 0


def test_many_threads_lose_nothing() -> None:
    threads, each = 8, 400
    trace = Trace(limit=threads * each // 2)
    ready = threading.Barrier(threads + 1)

    def work(number: int) -> None:
        ready.wait()
        for i in range(each):
            trace(event("write", i, i + 1, lane=number))
            with trace.span("train step", i=i):
                pass

    workers = [threading.Thread(target=work, args=(n,), name=f"worker {n}") for n in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    while any(worker.is_alive() for worker in workers):
        # What is read meanwhile is whole.
        timeline = trace.timeline()
        assert len(timeline.events) <= threads * each // 2
    for worker in workers:
        worker.join()
    timeline = trace.timeline()
    assert len(timeline.events) == len(timeline.spans) == threads * each // 2
    assert trace.dropped == threads * each
    assert {span.thread for span in timeline.spans} <= {worker.name for worker in workers}


class _Interrupted(deque[Any]):
    """In the thread that asks for it, lets another come in between, if it can."""

    asking: ClassVar[int | None] = None
    come: ClassVar[Callable[[], None]]

    def _pause(self) -> None:
        if self.asking == threading.get_ident():
            type(self).asking = None
            type(self).come()

    def __len__(self) -> int:
        length = super().__len__()
        self._pause()
        return length

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self._pause()
            yield each


@pytest.mark.parametrize("reading", [False, True])
def test_nobody_comes_in_between(reading: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.observers._tracing.trace.deque", _Interrupted)
    trace = Trace(limit=3)
    for step in range(2):
        trace(event("publish", step, step + 1, step=step))
    other = threading.Thread(target=trace, args=(event("publish", 8, 9, step=8),))

    def come() -> None:
        other.start()
        # Where the other has to wait for us, it is we who go on in the end.
        other.join(timeout=0.2)

    monkeypatch.setattr(_Interrupted, "come", staticmethod(come), raising=False)
    monkeypatch.setattr(_Interrupted, "asking", threading.get_ident())
    if reading:
        assert trace.timeline().steps == (0, 1)
    else:
        trace(event("publish", 7, 8, step=7))
    other.join()
    assert trace.timeline().steps == ((0, 1, 8) if reading else (1, 7, 8))
    assert trace.dropped == (0 if reading else 1)


def test_a_span_is_kept_if_its_body_raises() -> None:
    trace = Trace()
    with pytest.raises(KeyError), trace.span("train step"):
        raise KeyError("batch")
    (span,) = trace.timeline().spans
    assert (span.name, span.thread) == ("train step", threading.current_thread().name)
    assert span.began_ns <= span.ended_ns


def test_arguments_of_a_span_are_plain_values(tmp_path: Path) -> None:
    trace = Trace()
    array = np.float32(0.5)
    with trace.span("train step", name="a", step=3, loss=float("nan"), scale=array, late=None):
        pass
    (span,) = trace.timeline().spans
    told = {"name": "a", "step": 3, "loss": "nan", "scale": "0.5", "late": None}
    assert span.args == told
    assert type(span.args["scale"]) is str
    trace.save_chrome(tmp_path / "trace.json")
    *_, written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert written["args"] == told


# --- Errors ---------------------------------------------------------------------------------------


def test_a_step_without_events_is_an_error_that_says_which_there_are() -> None:
    trace = Trace()
    with pytest.raises(InvalidArgumentError, match=r"no event of step 3.*observers=\[trace\]"):
        trace.timeline(3)
    for step in range(1, 13):
        trace(event("publish", 0, 1 * US, step=step))
    with pytest.raises(InvalidArgumentError, match=r"of step 99.* of steps \.\.\. 3, .*, 12$"):
        trace.timeline(99)
    with pytest.raises(InvalidArgumentError, match="no event of restore step 3"):
        trace.timeline(3, "restore")


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_a_limit_is_a_positive_number(limit: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="limit="):
        Trace(limit=limit)


def test_a_path_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="directory that exists") as caught:
        Trace().save_chrome(tmp_path / "missing" / "trace.json")
    assert caught.value.errno
    assert isinstance(caught.value.__cause__, FileNotFoundError)
