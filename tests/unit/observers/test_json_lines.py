"""Lines of JSON: one for each operation, whole, from any thread."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ckpt.sync
from ckpt._events import Event, GuardedObserver
from ckpt.errors import InvalidArgumentError, StorageError, UnsupportedLeafError
from ckpt.observers import JsonLines
from tests.unit.observers.examples import US, a_whole_save, end, event


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


def test_an_operation_that_has_ended_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    now = time.perf_counter_ns() // US
    with JsonLines(path) as observer:
        observer(event("write", now - 9, now))
        observer(end(now - 2_000_000, now, step=7, nbytes=5))
        observer(end(now - 1, now, "failed", step=None, reason="no space\nleft “here”"))
    ok, failed = lines_of(path)
    assert ok.pop("time") == pytest.approx(time.time(), abs=60)
    assert ok == {
        "operation": "save",
        "phase": "end",
        "step": 7,
        "seconds": 2.0,
        "nbytes": 5,
        "outcome": "ok",
    }
    assert (failed["step"], failed["outcome"]) == (None, "failed")
    assert failed["reason"] == "no space\nleft “here”"


def test_every_phase_is_one_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    with JsonLines(path, phases=True) as observer:
        for each in a_whole_save():
            observer(each)
        observer(event("preempted", -5000, 290))
    told = lines_of(path)
    assert [each["phase"] for each in told] == [
        *(e.phase for e in a_whole_save()),
        "preempted",
    ]
    assert {each.get("lane") for each in told} == {None, 0, 1}


def test_a_line_is_there_as_soon_as_it_is_told_and_after_those_of_before(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    for step in range(2):
        with JsonLines(str(path)) as observer:
            observer(end(0, 1, step=step))
            assert [each["step"] for each in lines_of(path)] == list(range(step + 1))


def test_an_open_file_is_written_and_left_open() -> None:
    file = io.StringIO()
    with JsonLines(file) as observer:
        observer(end(0, 1))
    observer(end(0, 1))
    assert not file.closed
    assert len(file.getvalue().splitlines()) == 1


def test_whatever_comes_after_closing_is_not_written(tmp_path: Path) -> None:
    observer = JsonLines(tmp_path / "saves.jsonl")
    observer.close()
    observer(end(0, 1))
    observer.close()
    assert lines_of(tmp_path / "saves.jsonl") == []


def test_odd_values_are_text_and_never_what_json_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    with JsonLines(path) as observer:
        observer(end(0, 1, reason="\ud800 not unicode"))
        observer(Event("save", "end", 1, 0, 1, 0, None, None, "ok", float("nan")))  # type: ignore[arg-type]
    assert [each["reason"] for each in lines_of(path)] == ["\ud800 not unicode", "nan"]


def test_nobody_comes_in_between_a_line() -> None:
    class Slow(io.StringIO):
        """In the middle of the first line lets another thread come, if it can."""

        def write(self, text: str, /) -> int:
            half = len(text) // 2
            super().write(text[:half])
            if not others:
                others.append(threading.Thread(target=observer, args=(end(0, 1, step=2),)))
                others[0].start()
                others[0].join(0.2)
            return super().write(text[half:])

    others: list[threading.Thread] = []
    file = Slow()
    observer = JsonLines(file)
    observer(end(0, 1, step=1))
    others[0].join()
    assert [json.loads(line)["step"] for line in file.getvalue().splitlines()] == [1, 2]


def test_many_threads_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    threads, each = 8, 200

    def work(number: int) -> None:
        for n in range(each):
            observer(end(0, 1, step=number * each + n, reason="x" * 500))

    with JsonLines(path) as observer:
        workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert sorted(line["step"] for line in lines_of(path)) == list(range(threads * each))


def test_a_real_run_is_a_line_for_each_operation(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    before = time.time()
    with (
        JsonLines(path) as observer,
        ckpt.sync.CheckpointManager(
            tmp_path / "run",
            save_when=ckpt.save_when.Steps([0, 1, 2, 4]),
            observers=[observer],
        ) as mgr,
    ):
        for step in range(3):
            mgr.save(step, {"w": jnp.ones((256, 1024))})
        mgr.wait_until_finished()
        mgr.restore(2)
        mgr.verify(2)
        mgr.delete(0)
        with pytest.raises(UnsupportedLeafError):
            mgr.save(4, {"w": object()})
        assert not mgr.save(7, {"w": jnp.ones(1)})
    told = lines_of(path)
    assert [(each["operation"], each["step"], each["outcome"]) for each in told] == [
        *(("save", step, "ok") for step in range(3)),
        *(("restore", 2, "ok"), ("verify", 2, "ok"), ("delete", 0, "ok")),
        *(("save", 4, "failed"), ("save", 7, "skipped")),
    ]
    assert "object" in told[-2]["reason"]
    assert told[-1]["reason"]
    assert all(each["nbytes"] == 1 << 20 for each in told[:3])
    assert all(before <= each["time"] <= time.time() + 1e-5 for each in told)
    assert all(0 < each["seconds"] < 60 for each in told)


def test_a_file_that_cannot_be_written_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    with caplog.at_level(logging.ERROR, "ckpt"):
        GuardedObserver(JsonLines(Full()))(end(0, 1))
    assert "failed on end; the operation goes on" in caplog.text


def test_a_folder_that_is_not_there_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="a directory that exists") as caught:
        JsonLines(tmp_path / "missing" / "saves.jsonl")
    assert caught.value.errno == 2
    with pytest.raises(StorageError, match="Is a directory"):
        JsonLines(tmp_path)


@pytest.mark.parametrize("file", [None, 7, io.BytesIO()])
def test_a_file_is_a_path_or_takes_text(file: object) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a path, or a file"):
        JsonLines(file)  # type: ignore[arg-type]


def test_spans_are_lines_beside_the_phases(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    with JsonLines(path, phases=True) as observer:
        with pytest.raises(KeyError), observer.span("train step", step=3, odd=object):
            raise KeyError
        observer(end(0, 1))
    told, ended = lines_of(path)
    assert (told["span"], told["args"]["step"], told["thread"]) == ("train step", 3, "MainThread")
    assert told["seconds"] >= 0
    assert {"clock_ns", "time"} <= set(told) & set(ended)


def test_spans_are_left_out_without_phases_and_never_stop_the_program(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    with JsonLines(path) as observer, observer.span("train step"):
        pass
    assert lines_of(path) == []
    file = io.StringIO()
    broken = JsonLines(file, phases=True)
    file.close()
    with broken.span("train step"):
        pass
