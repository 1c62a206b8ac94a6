"""`ckpt watch`: a real trainer beside it, step by step."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import (
    Ran,
    check_golden,
    ckpt_command,
    on_terminal,
    settled,
    without_styles,
)
from tests.support.paths import GOLDEN
from tests.support.running_command import Running, as_ordinary_user, let_everybody_enter, running

# A trainer that does what it is told. It answers when that is done.
_TRAINER = """
import sys
import jax.numpy as jnp
import ckpt
from tests.support.gated_item import Gate, GateHandler

mgr = None
gates = {}
print("ready", flush=True)
for line in sys.stdin:
    what, about = line.split()
    if what == "open":
        mgr = ckpt.sync.CheckpointManager(about, handlers=[GateHandler()])
    elif what == "close":
        for gate, commit in gates.values():
            gate.open()
        gates.clear()
        mgr.close()
    else:
        step = int(about)
        state = {"w": jnp.full((64, 64), step)}
    if what == "save":
        mgr.save(step, state, metrics={"loss": 1 / step}, if_exists="replace").result()
    elif what == "begin":
        gate = Gate()
        items = {"state": state, "gate": gate}
        gates[step] = gate, mgr.save(step, items=items)
        assert gate.reached.wait(60)
    elif what == "end":
        gate, commit = gates.pop(step)
        gate.open()
        commit.result()
    elif what == "cancel":
        gate, commit = gates.pop(step)
        commit.cancel()
        gate.open()
        commit.exception()
    print(what, about, flush=True)
"""


class Trainer:
    def __init__(self, process: Running) -> None:
        self._process = process
        assert process.line() == "ready\n"

    def do(self, what: str, about: object) -> None:
        assert self._process.process.stdin is not None
        self._process.process.stdin.write(f"{what} {about}\n")
        self._process.process.stdin.flush()
        assert self._process.line() == f"{what} {about}\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def started() -> Iterator[Trainer]:
    """A trainer that trains for one test after the other."""
    with running(script=_TRAINER) as process:
        yield Trainer(process)


@pytest.fixture
def trainer(root: Path, started: Trainer) -> Iterator[Trainer]:
    started.do("open", root)
    yield started
    started.do("close", root)


def event(command: Running) -> dict:
    return json.loads(command.line())


def stable(ran: Ran) -> str:
    """Return an output without its figures."""
    text = re.sub(r"\d\d:\d\d:\d\d", "<time>", settled(ran.out))
    text = re.sub(r"[\d.e+]+ (ms|s|[KMG]iB/s)(?=\W)", "<figure>", text)
    return re.sub(r'"(rate)":[\d.e-]+', r'"\1":"<figure>"', text)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_output(as_json: bool, root: Path, trainer: Trainer) -> None:
    options = ["--json"] if as_json else []
    with running("watch", root, "--after", 0, "--until", 30, *options) as command:
        for step in (10, 20, 30):
            trainer.do("save", step)
        ran = command.end()
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines(keepends=True)
    out = "".join(each for each in lines if '"event":"attempt"' not in each)
    check_golden("watch_json" if as_json else "watch", stable(Ran(0, out, "")))


def test_a_save_under_way_is_seen_before_it_is_committed(root: Path, trainer: Trainer) -> None:
    with running("watch", root, "--after", 0, "--until", 20, "--json") as command:
        trainer.do("save", 10)
        while event(command)["event"] != "step":
            pass
        trainer.do("begin", 20)
        found = event(command)
        while not found["nbytes"]:
            found = event(command)
        assert (found["event"], found["step"]) == ("attempt", 20)
        assert found["expected_bytes"] > 0
        trainer.do("end", 20)
        ran = command.end()
    assert ran.status == 0
    rest = [json.loads(each) for each in ran.out.splitlines()]
    assert [each["step"] for each in rest if each["event"] == "step"] == [20]
    assert not [each for each in rest if each["event"] == "gone"]


def test_a_save_that_is_given_up_is_told(root: Path, trainer: Trainer) -> None:
    with running("watch", root, "--after", 0, "--json") as command:
        trainer.do("begin", 20)
        assert event(command)["event"] == "attempt"
        trainer.do("cancel", 20)
        found = event(command)
        while found["event"] == "attempt":
            found = event(command)
        assert (found["event"], found["step"]) == ("gone", 20)


def test_a_step_that_is_overwritten_is_new(root: Path, trainer: Trainer) -> None:
    trainer.do("save", 10)
    with running("watch", root, "--after", 0, "--json") as command:
        first = event(command)
        trainer.do("save", 10)
        again = event(command)
        while again["event"] != "step":
            again = event(command)
    assert (first["overwritten"], again["overwritten"]) == (False, True)


def test_steps_that_exist_are_counted_and_not_listed(run_root: Path) -> None:
    ran = ckpt_command("watch", run_root, "--timeout", "0")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == "3 steps so far, the latest is 30\n"
    assert ckpt_command("watch", run_root, "--until", 30).status == 0
    ran = ckpt_command("watch", run_root, "--after", 10, "--timeout", "0", "--json")
    steps = [json.loads(line)["step"] for line in ran.out.splitlines()]
    assert steps == [20, 30]


def test_a_step_that_the_run_went_back_behind_is_not_the_latest() -> None:
    root = GOLDEN / "v1-features/branch"
    ran = ckpt_command("watch", root, "--until", 3, "--timeout", "0")
    assert (ran.status, ran.err) == (1, "3 steps so far, the latest is 2\n")
    assert ckpt_command("watch", root, "--until", 2).status == 0


def test_a_root_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    ran = ckpt_command("watch", tmp_path / "runs", "--timeout", "0")
    assert (ran.status, ran.out, ran.err) == (1, "", "")
    assert list(tmp_path.iterdir()) == []


def test_places_where_no_root_can_be(tmp_path: Path, items_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "no" / "runs", tmp_path / "file", items_path):
        ran = ckpt_command("watch", path, "--timeout", "0")
        assert (ran.status, ran.out) == (2, ""), path
        assert ran.err.count("\n") == 1


def test_an_interrupted_watch_leaves_nothing_behind(root: Path, trainer: Trainer) -> None:
    trainer.do("save", 10)
    with running("watch", root, "--after", 0) as command:
        assert "step 10" in command.line()
        command.interrupt(signal.SIGINT)
        ran = command.end()
    assert (ran.status, ran.out, ran.err.strip()) == (130, "", "ckpt: interrupted")
    # No pins and no marks; the trainer has a folder for metadata.
    assert {each.name for each in root.iterdir()} <= {"10"}


def test_a_reader_that_goes_away_ends_it(root: Path, trainer: Trainer) -> None:
    with running("watch", root, "--after", 0) as command:
        trainer.do("save", 10)
        assert "step 10" in command.line()
        command.stop_reading()
        trainer.do("save", 20)
        ran = command.end()
    assert (ran.status, ran.err) == (141, "")


def test_a_root_that_may_only_be_read_is_followed(root: Path, trainer: Trainer) -> None:
    trainer.do("save", 10)
    let_everybody_enter(root)
    root.chmod(0o555)
    try:
        ran = as_ordinary_user("watch", root, "--after", 0, "--until", 10)
    finally:
        root.chmod(0o755)
    assert (ran.status, ran.err) == (0, "")
    assert "step 10" in ran.out


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_line_at_the_bottom_fits_the_terminal(
    columns: int, root: Path, trainer: Trainer
) -> None:
    trainer.do("save", 10)
    trainer.do("begin", 20)
    status, shown = on_terminal("watch", root, "--timeout", "0.2", columns=columns)
    assert status == 1
    drawn = [part for part in re.split(r"[\r\n]", without_styles(shown)) if part]
    assert any(part.startswith("step 20: ") for part in drawn)
    assert max(map(len, drawn)) < max(columns, 40)
    # The line is gone at the end.
    assert shown.endswith("\r\x1b[K")
    trainer.do("end", 20)


def test_a_terminal_that_cannot_clear_lines_gets_none(run_root: Path) -> None:
    _, shown = on_terminal("watch", run_root, "--timeout", "0", TERM="dumb")
    assert "\r" not in shown
    assert "\x1b" not in shown
