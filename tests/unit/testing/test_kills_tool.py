"""The tool that watches system calls: it sees each, and kills, stops or fails exactly one."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kills import Call, at_call, can_watch, run_watched, watching

pytestmark = pytest.mark.skipif(not can_watch(), reason="system calls cannot be watched here")

PROGRAM = """
import fcntl, json, os, sys, threading
os.chdir(sys.argv[1])

def main():
    os.mkdir("made")
    with open("made/file", "wb", buffering=0) as file:
        file.write(b"1")
        os.fsync(file.fileno())
        fcntl.flock(file, fcntl.LOCK_EX)
    os.rename("made/file", "other")
    here = os.open(".", os.O_RDONLY)
    os.mkdir("more", dir_fd=here)
    os.unlink("other")
    os.rmdir(os.path.join(sys.argv[1], "more", "..", "more"))

# Each call of its own thread would have number one there.
done = []
for line in [main]:
    thread = threading.Thread(target=line)
    thread.start()
    thread.join()
print("end", flush=True)
"""
CALLS = [
    ("mkdir", "made"),
    ("create", "made/file"),
    ("write", "made/file"),
    ("sync", "made/file"),
    ("lock", "made/file"),
    ("rename", "made/file other"),
    ("mkdir", "more"),
    ("remove", "other"),
    ("remove", "more"),
]
THREADS = """
import os, sys, threading
for number in range(6):
    thread = threading.Thread(target=os.mkdir, args=(f"{sys.argv[1]}/{number}",))
    thread.start()
    thread.join()
"""


def command(program: str, root: Path) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program, str(root)]


def seen(calls: list[Call], root: Path) -> list[tuple[str, str]]:
    return [
        (call.kind, " ".join(os.path.relpath(path, root) for path in call.paths)) for call in calls
    ]


def test_a_clean_run_shows_every_call_in_order(tmp_path: Path) -> None:
    run = run_watched(command(PROGRAM, tmp_path), below=tmp_path)
    assert (run.returncode, run.output, run.met) == (0, "end\n", [])
    assert seen(run.calls, tmp_path) == CALLS
    assert run.counts == {
        "mkdir": 2, "remove": 2, "create": 1, "write": 1, "sync": 1, "lock": 1, "rename": 1,
    }  # fmt: skip


def test_calls_elsewhere_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "ab").mkdir()
    run = run_watched(command(PROGRAM, tmp_path / "ab"), below=tmp_path / "a")
    assert (run.returncode, run.calls) == (0, [])
    some = run_watched(command(THREADS, tmp_path / "ab"), below=tmp_path, kinds=["remove"])
    assert (some.returncode, some.calls) == (0, [])


@pytest.mark.parametrize("number", range(1, len(CALLS) + 1))
def test_a_program_is_killed_before_the_call(tmp_path: Path, number: int) -> None:
    run = run_watched(command(PROGRAM, tmp_path), at_call(number, signal.SIGKILL), below=tmp_path)
    assert (run.returncode, run.output) == (-signal.SIGKILL, "")
    assert seen(run.calls, tmp_path) == CALLS[:number]
    assert seen(run.met, tmp_path) == [CALLS[number - 1]]
    done = {"made": number > 1, "made/file": 2 < number <= 6, "other": 6 < number <= 8}
    assert {path: (tmp_path / path).exists() for path in done} == done
    if done["made/file"]:
        assert (tmp_path / "made/file").read_bytes() == (b"1" if number > 3 else b"")


def test_a_forked_script_is_watched_alike(tmp_path: Path) -> None:
    script, root = tmp_path / "program.py", tmp_path / "root"
    script.write_text(PROGRAM)
    root.mkdir()
    number = 4
    decide = at_call(number, signal.SIGKILL)
    run = run_watched([str(script), str(root)], decide, below=root, forked=True)
    assert (run.returncode, run.output) == (-signal.SIGKILL, "")
    assert seen(run.calls, root) == CALLS[:number]
    assert seen(run.met, root) == [CALLS[number - 1]]
    assert (root / "made/file").read_bytes() == b"1"

    (root / "made/file").unlink()
    (root / "made").rmdir()
    run = run_watched([str(script), str(root)], below=root, forked=True)
    assert (run.returncode, run.output, run.met) == (0, "end\n", [])
    assert seen(run.calls, root) == CALLS


def test_calls_are_counted_over_all_threads(tmp_path: Path) -> None:
    run = run_watched(command(THREADS, tmp_path), at_call(4, signal.SIGKILL), below=tmp_path)
    assert run.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


def test_one_call_or_all_from_it_on_fail(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other"
    once = run_watched(
        command(THREADS, tmp_path), at_call(4, errno.EDQUOT, kind="mkdir"), below=tmp_path
    )
    assert once.returncode == 0  # errors of threads are printed only
    assert {str(n) for n in range(6)} - set(os.listdir(tmp_path)) == {"3"}
    lasting = at_call(2, errno.EIO, kind="mkdir", lasting=True)
    run_watched(command(THREADS, other), lasting, below=tmp_path)
    assert os.listdir(other) == ["0"]


def test_a_call_can_be_chosen_by_its_path_or_name(tmp_path: Path) -> None:
    decide = at_call(1, signal.SIGKILL, path=tmp_path / "other")
    assert seen(run_watched(command(PROGRAM, tmp_path), decide, below=tmp_path).met, tmp_path) == [
        CALLS[5]
    ]
    (tmp_path / "other").mkdir()
    decide = at_call(2, signal.SIGKILL, kind="mkdir", path=tmp_path / "other" / "more")
    assert run_watched(command(PROGRAM, tmp_path / "other"), decide, below=tmp_path).met == []


def test_a_program_can_be_stopped_at_a_call(tmp_path: Path) -> None:
    decide = at_call(1, signal.SIGSTOP, path=tmp_path / "more")
    with watching(command(PROGRAM, tmp_path), decide, below=tmp_path) as (child, watched):
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert (tmp_path / "other").exists()
        assert seen(watched.met, tmp_path) == [CALLS[6]]
        child.send_signal(signal.SIGCONT)
        output, _ = child.communicate(timeout=60)
    assert (output, watched.returncode) == ("end\n", 0)
    assert not (tmp_path / "other").exists()


def test_what_a_decision_raises_is_raised_and_ends_the_program(tmp_path: Path) -> None:
    def decide(_: Call) -> int | None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_watched(command(PROGRAM, tmp_path), decide, below=tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_program_that_does_not_end_is_killed(tmp_path: Path) -> None:
    waiting = "import threading; threading.Event().wait()"
    with pytest.raises(subprocess.TimeoutExpired):
        run_watched(command(waiting, tmp_path), below=tmp_path, timeout_s=1)
    with watching(command(waiting, tmp_path), below=tmp_path) as (child, watched):
        pass
    assert watched.returncode == child.returncode == -signal.SIGKILL


def test_a_command_that_is_not_there_ends_by_itself(tmp_path: Path) -> None:
    run = run_watched([str(tmp_path / "nothing")], below=tmp_path)
    assert run.returncode == 1


def test_the_environment_and_the_input_reach_the_program(tmp_path: Path) -> None:
    program = "import json, os, sys; print(json.dumps([os.environ['A'], sys.stdin.readline()]))"
    with watching(command(program, tmp_path), below=tmp_path, environment={"A": "1"}) as (
        child,
        watched,
    ):
        output, _ = child.communicate("hello\n", timeout=60)
    assert json.loads(output) == ["1", "hello\n"]
    assert watched.returncode == 0
