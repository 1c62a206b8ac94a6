"""`ckpt trace`: what the lines say that an observer has written."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

import ckpt
from ckpt._inspection.followed_run import parse_trace
from ckpt.observers import JsonLines, Trace
from tests.support.command import check_golden, ckpt_command
from tests.unit.observers.examples import a_save


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    """Return what a run recorded, once as lines, once in memory."""
    folder = tmp_path_factory.mktemp("trace")
    trace = Trace()
    file = folder / "saves.jsonl"
    with (
        JsonLines(file, phases=True) as lines,
        ckpt.sync.CheckpointManager(folder / "runs", observers=[lines, trace]) as mgr,
    ):
        for step in (1, 2, 3):
            with trace.span("train step", step=step), lines.span("train step", step=step):
                commit = mgr.save(step, {"w": jnp.full((256, 256), step)})
                commit.result()
        mgr.restore(3)
    return file, trace


def test_the_lines_hold_the_timeline_of_a_trace(recorded: tuple[Path, Trace]) -> None:
    file, trace = recorded
    ours = parse_trace(file.read_text().splitlines()).timeline
    theirs = trace.timeline()
    shift = ours.events[0].ended_ns - theirs.events[0].ended_ns
    assert len(ours.events) == len(theirs.events)
    for mine, other in zip(ours.events, theirs.events, strict=True):
        assert mine.ended_ns == other.ended_ns + shift
        assert abs(mine.began_ns - other.began_ns - shift) <= 1
        assert (mine.operation, mine.phase, mine.step) == (
            other.operation,
            other.phase,
            other.step,
        )
        assert (mine.nbytes, mine.lane, mine.batch) == (other.nbytes, other.lane, other.batch)
    assert [each.name for each in ours.spans] == ["train step"] * 3
    assert ours.overlap_ratio == pytest.approx(theirs.overlap_ratio, abs=1e-3)
    assert len(ours.saves()) == 3


def test_a_file_for_perfetto(recorded: tuple[Path, Trace], tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    ran = ckpt_command("trace", recorded[0], "--to", target, "--json")
    assert (ran.status, ran.err) == (0, "")
    assert ran.json["files"] == [str(target)]
    assert ran.json["overlap_ratio"] == pytest.approx(1.0, abs=0.01)
    names = {each["name"] for each in json.loads(target.read_bytes())["traceEvents"]}
    assert {"train step", "write", "publish"} <= names


def made_up_lines() -> list[dict]:
    """Lines of two saves, of which a train step overlaps with a part."""
    lines: list[dict] = [
        {
            "time": 1_700_000_000 + event.ended_ns / 1e6,
            "operation": event.operation,
            "phase": event.phase,
            "step": event.step,
            "seconds": (event.ended_ns - event.began_ns) / 1e6,
            "nbytes": event.nbytes,
            **({} if event.lane is None else {"lane": event.lane}),
        }
        for event in (*a_save(1), *a_save(2, at=1000))
    ]
    lines.append({"time": 1_700_000_000.2, "span": "train step", "seconds": 0.1, "thread": "main"})
    return lines


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "saves.jsonl"
    lines = [json.dumps(each) for each in made_up_lines()]
    # The last line of a killed program is cut.
    path.write_text("\n".join([*lines, lines[0][:20]]))
    return path


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_output(as_json: bool, file: Path) -> None:
    ran = ckpt_command("trace", file, *(["--json"] if as_json else []))
    assert (ran.status, ran.err) == (0, "")
    check_golden("trace_json" if as_json else "trace", ran.out)


def test_the_overlap_is_not_known_without_spans(file: Path) -> None:
    file.write_text("".join(f"{json.dumps(each)}\n" for each in made_up_lines()[:-1]))
    assert "not known" in ckpt_command("trace", file).out
    assert ckpt_command("trace", file, "--json").json["overlap_ratio"] is None


def test_only_one_step(file: Path) -> None:
    found = ckpt_command("trace", file, "--step", 2, "--operation", "save", "--json").json
    assert (found["steps"], found["saves"]) == ([2], 1)
    ran = ckpt_command("trace", file, "--step", 7)
    assert (ran.status, ran.out) == (2, "")
    assert "its last steps are 1, 2" in ran.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("", "holds no events"),
        ("not json\n[1]\n{}\n" + '{"time": 1e400, "seconds": 1}\n' + "[" * 100_000, "no events"),
        (
            '{"time": 1, "operation": "save", "phase": "end", "seconds": 1}',
            "without phases",
        ),
    ],
    ids=["missing", "empty", "garbage", "no phases"],
)
def test_files_that_are_no_trace(content: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    if content is not None:
        path.write_text(content)
    ran = ckpt_command("trace", path, "--to", tmp_path / "trace.json")
    assert (ran.status, ran.out) == (2, "")
    assert words in ran.err
    assert not (tmp_path / "trace.json").exists()


def test_files_of_another_kind_are_refused(file: Path, tmp_path: Path) -> None:
    ran = ckpt_command("trace", file, "--to", tmp_path / "trace.svg")
    assert ran.status == 2
    assert "expected a name that ends in .json" in ran.err


def test_a_file_that_cannot_be_written(file: Path, tmp_path: Path) -> None:
    ran = ckpt_command("trace", file, "--to", tmp_path / "no" / "trace.json")
    assert ran.status == 2
    assert "cannot write" in ran.err
