"""What people see of a save that takes long, and what is left when it has ended."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import nbclient
import nbformat
import pytest
from rich.console import Console

import ckpt.sync
from ckpt._events import Event, GuardedObserver
from ckpt.errors import InvalidArgumentError, UnsupportedLeafError
from ckpt.observers import ProgressBar
from tests.support.gated_item import PATIENCE_S
from tests.support.paths import ROOT
from tests.unit.observers.examples import end, event
from tests.unit.observers.long_saves import MB, SECOND, a_long_save, batch


class Screen:
    """A small terminal: what is on it after some output, and what was on it in between."""

    CODES = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")

    def __init__(self, output: str) -> None:
        self.lines = [""]
        self.seen: list[str] = []
        self.cursor = True
        self.hidden = 0
        row = column = at = 0
        while at < len(output):
            code = self.CODES.match(output, at)
            if code:
                at = code.end()
                private, number, letter = code.groups()
                if letter == "K":
                    assert number == "2"
                    self.lines[row] = ""
                elif letter == "A":
                    row -= int(number or 1)
                elif letter in "lh":
                    assert (private, number) == ("?", "25")
                    self.cursor = letter == "h"
                    # Seen by people only if something else comes before it is back.
                    self.hidden += not self.cursor and not output[at:].startswith("\x1b[?25h")
                else:
                    assert letter == "m", code.group()
                continue
            letter, at = output[at], at + 1
            if letter == "\r":
                column = 0
                self.seen.append(self.lines[row])
            elif letter == "\n":
                row, column = row + 1, 0
                self.lines += [""] * (row + 1 - len(self.lines))
            else:
                line = self.lines[row]
                self.lines[row] = line[:column].ljust(column) + letter + line[column + 1 :]
                column += 1
        self.row = row

    @property
    def text(self) -> str:
        return "\n".join(self.lines).strip()

    def is_clean(self) -> bool:
        return not self.text and self.cursor and not self.hidden and self.row == 0


class Terminal(io.StringIO):
    """One whose cursor is not even hidden between two writes."""

    def write(self, text: str, /) -> int:
        assert text.rfind("\x1b[?25l") <= text.rfind("\x1b[?25h")
        return super().write(text)


class Board:
    """A progress bar on a terminal that is not there."""

    def __init__(self) -> None:
        self.console = Console(file=Terminal(), force_terminal=True, width=100, color_system=None)
        self.observer = ProgressBar(self.console)

    def written(self) -> str:
        assert isinstance(self.console.file, io.StringIO)
        return self.console.file.getvalue()

    def tell(self, *events: Event) -> Screen:
        for each in events:
            self.observer(each)
        return Screen(self.written())


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a dumb terminal there are no bars."""
    monkeypatch.setenv("TERM", "xterm")


def test_a_long_save_has_a_bar_until_it_ends() -> None:
    board = Board()
    screen = board.tell(*a_long_save())
    assert screen.text.startswith("save step 7 ━")
    # The next batch has been copied.
    assert any("51% of 100.0 MB 0:00:05, 0:00:05 left" in line for line in screen.seen)
    assert screen.cursor
    assert board.tell(end(0, 10 * SECOND, step=7)).is_clean()
    # The next one begins anew.
    later = a_long_save(8, at=20 * SECOND)
    assert board.tell(*later[:7]).text.startswith("save step 8 ━")
    assert board.tell(end(0, 30 * SECOND, step=8)).is_clean()


def shares(screen: Screen) -> list[int]:
    """The percentages that were shown, in order."""
    lines = [line for line in (*screen.seen, screen.text) if line]
    return [int(found[1]) for line in lines if (found := re.search(r"(\d+)% of", line))]


def test_the_first_drawing_says_how_far_it_is() -> None:
    board = Board()
    screen = board.tell(
        event("plan", 0, 1, nbytes=100 * MB),
        batch("write", 0, 0, SECOND // 10, 10 * MB, 1),
        batch("write", 1, 0, SECOND, 10 * MB, 1),
    )
    assert shares(screen) == [20, 20]
    assert "20% of 100.0 MB 0:00:01, 0:00:04 left" in screen.text


def test_it_is_never_done_before_it_has_ended() -> None:
    board = Board()
    told = a_long_save()
    late = [event(phase, 0, 12 * SECOND, step=7) for phase in ("record", "publish", "wait")]
    screen = board.tell(*told, *late)
    assert shares(screen)[-1] == 99
    assert max(shares(screen)) == 99
    more = event("plan", 0, 13 * SECOND, nbytes=100 * MB, step=7)  # a save in parts
    assert shares(board.tell(more))[-1] == 50


@pytest.mark.parametrize("outcome", ["failed", "cancelled", "skipped"])
def test_however_it_ends_the_bar_disappears(outcome: Any) -> None:
    board = Board()
    board.tell(*a_long_save())
    assert board.tell(end(0, 10 * SECOND, outcome, step=7, reason="why")).is_clean()


def test_a_one_shot_checkpoint_has_no_step() -> None:
    assert Board().tell(*a_long_save(None)).text.startswith("save ━")


def test_what_takes_a_moment_is_not_shown() -> None:
    board = Board()
    board.tell(
        event("plan", 0, 10, nbytes=5),
        event("write", 10, 250_000, nbytes=5),
        end(0, 260_000),
        event("preserve", 260_000, 9 * SECOND),
        event("preempted", -9 * SECOND, 9 * SECOND),
        end(0, 9 * SECOND, operation="delete"),
    )
    assert board.written() == ""


def test_it_is_drawn_ten_times_a_second_and_no_more() -> None:
    board = Board()
    writes = [
        batch("write", n, 100 * n, 100 * n + 99, MB, 1) for n in range(50_000)
    ]  # in five seconds
    screen = board.tell(event("plan", 0, 1, nbytes=50_000 * MB), *writes)
    assert 40 <= len(screen.seen) <= 55


def test_it_moves_while_copies_compression_and_writes_go_on() -> None:
    size = 50 * MB
    told = [event("plan", 0, 1, nbytes=2 * size)]
    told += [batch("stage", n, 0, SECOND, size, 1) for n in range(2)]
    told += [batch("encode", n, 0, (2 + n) * SECOND, size // 2, 1) for n in (0, 1, 0, 1)]
    # Few bytes are left of a batch, and the disk takes long.
    told += [batch("write", n, 0, (9 + n) * SECOND, size // 7, 1) for n in range(2)]
    board = Board()
    seen = [shares(board.tell(each))[-1:] for each in sorted(told, key=lambda e: e.ended_ns)]
    assert [share for shown in seen for share in shown] == [5, 5, 30, 30, 70, 70, 95, 99]
    # Views and the manifest are not part of the plan.
    view = event("write", 0, 12 * SECOND, nbytes=5 * MB)
    assert shares(Board().tell(*told[:7], view))[-1] == 90


def test_several_items_are_one_save() -> None:
    board = Board()
    screen = board.tell(
        event("plan", 0, 1, nbytes=30 * MB),
        event("plan", 1, 2, nbytes=10 * MB),
        batch("stage", 0, 0, 3, 30 * MB, 1),
        batch("stage", 0, 0, 3, 10 * MB, 1),
        batch("write", 0, 0, SECOND, 10 * MB, 1),
        batch("write", 0, 0, 2 * SECOND, 30 * MB, 1),
    )
    assert screen.text.startswith("save step 1 ━")
    assert "99% of 40.0 MB" in screen.text


@pytest.mark.parametrize("operation", ["restore", "verify"])
def test_without_a_total_it_says_how_much_was_done(operation: str) -> None:
    board = Board()
    reads = [
        event("read", n * SECOND, (n + 1) * SECOND, operation=operation, nbytes=MB)
        for n in range(3)
    ]
    screen = board.tell(*reads)
    assert screen.text.startswith(f"{operation} step 1 ━")
    assert "3.0 MB 0:00:03" in screen.text
    assert "%" not in screen.text
    assert board.tell(end(0, 4 * SECOND, operation=operation)).is_clean()


def test_those_that_go_on_at_once_have_a_bar_each() -> None:
    board = Board()
    first, second = a_long_save(1), a_long_save(2, at=SECOND // 2)
    screen = board.tell(*sorted(first + second, key=lambda each: each.ended_ns))
    assert [line.split(" ━")[0] for line in screen.lines] == ["save step 1", "save step 2"]
    again = a_long_save(2, at=20 * SECOND)[1:]
    screen = board.tell(end(0, 11 * SECOND, step=1), *again)
    assert screen.text.startswith("save step 2 ━")
    assert board.tell(end(0, 30 * SECOND, step=2)).is_clean()


def test_those_that_never_end_are_forgotten_when_others_come() -> None:
    board = Board()
    for step in range(30):
        for each in a_long_save(step, 3, at=step * SECOND):
            board.observer(each)
    screen = board.tell()
    assert 1 <= len(screen.text.splitlines()) <= 8
    assert "save step 29" in screen.text
    for step in range(30):
        board.observer(end(0, 99 * SECOND, step=step))
    assert board.tell().text == ""


def test_a_terminal_that_has_gone_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError(5, "Input/output error")

    observer = ProgressBar(Console(file=Gone(), force_terminal=True, width=100))
    guarded = GuardedObserver(observer)
    with caplog.at_level(logging.ERROR, "ckpt"):
        for each in (*a_long_save(), end(0, 10 * SECOND, step=7)):
            guarded(each)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("variable", ["TERM", "FORCE_COLOR", "TTY_COMPATIBLE"])
def test_where_nobody_looks_nothing_is_written(
    variable: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "1")
    observer = ProgressBar()
    for each in a_long_save():
        observer(each)
    plain = ProgressBar(Console(file=sys.stdout, force_terminal=False))
    for each in a_long_save():
        plain(each)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("console", ["stderr", 2])
def test_a_console_is_one_of_rich(console: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected a rich\.console\.Console"):
        ProgressBar(console)  # type: ignore[arg-type]


def test_real_operations_are_shown_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.observers._progress._DELAY_NS", 0)
    monkeypatch.setattr("ckpt.observers._progress._PAUSE_NS", 0)
    # Threads end because the manager closed, not because they had nothing to do for a while.
    monkeypatch.setattr("ckpt._runtime.threads._IDLE_SECONDS", 600.0)
    board = Board()
    before = set(threading.enumerate())
    with ckpt.sync.CheckpointManager(tmp_path, observers=[board.observer]) as mgr:
        mgr.save(3, {"w": jnp.ones((1024, 1024)), "b": jnp.ones(7)}).result()
        mgr.restore(3)
        mgr.verify(3)
        with pytest.raises(UnsupportedLeafError):
            mgr.save(4, {"w": object()})
        screen = board.tell()
        for operation in ("save step 3", "restore step 3", "verify step 3", "save step 4"):
            assert any(line.startswith(f"{operation} ━") for line in screen.seen), operation
        assert screen.is_clean()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
    assert set(threading.enumerate()) <= before


# --- In a process of its own ----------------------------------------------------------------------

SCRIPT = """
import sys, threading
from tests.unit.observers.long_saves import a_long_save, the_end
from ckpt.observers import ProgressBar
observer = ProgressBar()
def work():
    for each in a_long_save():
        observer(each)
{ending}
thread = threading.Thread(target=work)
thread.start()
thread.join()
print([each.name for each in threading.enumerate()])
{last}
"""


def in_terminal(script: str, *, prints: bool = False, **env: str) -> tuple[Screen, str, int]:
    """Run a script with a terminal as its standard error; return that, its output and status.

    Args:
        script: The program.
        prints: Whether its standard output is the terminal, too.
        **env: Variables of its environment.
    """
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=theirs if prints else subprocess.PIPE,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **env},
    ) as run:
        os.close(theirs)
        output = bytearray()
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # What Linux says once the other side is closed.
                break
            if not data:
                break
            output += data
        os.close(ours)
        printed, _ = run.communicate(timeout=60)
    return Screen(output.decode()), (printed or b"").decode(), run.returncode


@pytest.mark.parametrize(
    ("ending", "last", "status"),
    [
        ("    observer(the_end())", "", 0),
        ("    observer(the_end(outcome='failed'))", "sys.exit(3)", 3),
        # The program ends amid the operation.
        ("", "", 0),
    ],
    ids=["ok", "failed", "amid"],
)
def test_a_terminal_is_left_as_it_was(ending: str, last: str, status: int) -> None:
    screen, printed, code = in_terminal(SCRIPT.format(ending=ending, last=last))
    assert code == status
    assert any(line.startswith("save step 7 ━") for line in screen.seen)
    assert screen.is_clean()
    assert printed.strip() == "['MainThread']"


COMPRESSED = """
import numpy as np
import ckpt, ckpt.sync
from ckpt.observers import ProgressBar, _progress
# The bar is as quick as the little that is saved here.
_progress._DELAY_NS, _progress._TICK_SECONDS = 30_000_000, 0.03
formats = {{"w": ckpt.ArrayFormat(compression=ckpt.Zstd(19), chunk_bytes={chunk_bytes})}}
state = {{"w": np.random.default_rng(0).standard_normal(({rows}, 1 << 14))}}
bars = [ProgressBar()]
with ckpt.sync.CheckpointManager({root!r}, formats=formats, observers=bars) as mgr:
    commit = mgr.save(1, state)
    commit.result()
    print("committed", flush=True)
"""


@pytest.mark.parametrize(
    ("rows", "chunk_bytes"), [(96, 1 << 18), (28, 1 << 22)], ids=["chunks", "one-chunk"]
)
def test_a_compressed_save_is_seen_to_go_on_and_leaves_the_line_to_others(
    rows: int, chunk_bytes: int, tmp_path: Path
) -> None:
    script = COMPRESSED.format(rows=rows, chunk_bytes=chunk_bytes, root=str(tmp_path))
    screen, _, code = in_terminal(script, prints=True)
    assert code == 0
    # What is printed once the result is known stands on a line of its own, and nothing else stays.
    assert screen.text == "committed"
    assert screen.lines[0] == "committed"
    shown = [line for line in screen.seen if line.startswith("save step 1 ━")]
    assert len(shown) >= 3, screen.seen
    found = shares(screen)
    assert found == sorted(found)
    assert max(found) < 100
    if rows == 96:
        assert len({share for share in found if 10 < share < 90}) >= 3, found


async def until(happened: Callable[[], bool]) -> None:
    """Wait until something has happened."""
    for _ in range(round(PATIENCE_S / 0.01)):
        if happened():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def test_while_a_chunk_is_compressed_the_time_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event comes meanwhile, and no thread is started."""
    board = Board()

    async def wait() -> None:
        began = time.perf_counter_ns() // 1000
        board.observer(event("plan", began, began, nbytes=MB))
        # Threads of earlier tests may end meanwhile.
        before = set(threading.enumerate())
        await until(lambda: len(Screen(board.written()).seen) >= 3)
        assert set(threading.enumerate()) <= before
        board.observer(end(began, began))
        written = board.written()
        await asyncio.sleep(0.1)
        assert board.written() == written

    monkeypatch.setattr("ckpt.observers._progress._TICK_SECONDS", 0.02)
    asyncio.run(wait())
    assert board.tell().is_clean()


def test_a_terminal_that_goes_between_events_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckpt.observers._progress._TICK_SECONDS", 0.02)
    board = Board()

    async def wait() -> None:
        began = time.perf_counter_ns() // 1000
        board.observer(event("plan", began, began, nbytes=MB))
        board.console.file.close()
        await until(lambda: bool(caplog.records))
        await asyncio.sleep(0.1)

    with caplog.at_level(logging.ERROR, "ckpt"):
        asyncio.run(wait())
    assert len(caplog.records) == 1


def test_what_is_printed_through_its_console_stands_above_the_bar() -> None:
    board = Board()
    told = a_long_save()
    board.tell(*told[:8])
    board.console.print("loss 0.5")
    screen = board.tell(*told[8:10])
    assert screen.lines[0] == "loss 0.5"
    assert screen.lines[1].startswith("save step 7 ━")
    assert board.tell(end(0, 10 * SECOND, step=7)).text == "loss 0.5"


def test_a_terminal_that_can_do_nothing_is_left_alone() -> None:
    screen, _, _ = in_terminal(SCRIPT.format(ending="", last=""), TERM="dumb")
    assert (screen.text, screen.seen) == ("", [])


def test_in_a_notebook_there_is_one_output_for_all_saves_of_a_cell() -> None:
    # Two saves, the second of which ends while another cell runs; from a thread of its own.
    script = """
import threading
from tests.unit.observers.long_saves import a_long_save, the_end
from ckpt.observers import ProgressBar
observer = ProgressBar()
def work():
    for each in [*a_long_save(1), the_end(1), *a_long_save(2, at=20_000_000)]:
        observer(each)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    cells = [nbformat.v4.new_code_cell(source) for source in (script, "observer(the_end(2))")]
    book = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        book, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    with client.setup_kernel():
        client.execute_cell(book.cells[0], 0)
        shown = json.loads(json.dumps(book.cells[0].outputs))
        client.execute_cell(book.cells[1], 1)
    # No word about a missing ipywidgets either.
    (bar,) = shown
    assert bar["output_type"] == "display_data"
    assert bar["data"]["text/plain"].startswith("save step 2 ━")
    assert "\x1b" not in bar["data"]["text/plain"]
    (cleared,) = book.cells[0].outputs
    assert cleared["data"]["text/plain"] == ""
    assert book.cells[1].outputs == []
