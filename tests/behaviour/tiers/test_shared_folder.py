"""Who owns the memory of a run while processes come and go."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt._tiers.agent.__main__ import _is_owned_again
from ckpt._tiers.shared_folder import SharedFolder, take_abandoned, take_abandoned_of
from tests.support.command import environment
from tests.support.paths import ROOT
from tests.support.snapshots import PATIENCE_S, shared_memory


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def test_a_look_of_the_agent_does_not_refuse_a_new_trainer(memory: Path) -> None:
    """It has the lock for a moment, several times a second."""
    folder = SharedFolder(memory / "ours" / "key")
    folder.claim("run", "root")
    folder.leave()
    looking = take_abandoned(folder.path)
    assert looking is not None
    timer = threading.Timer(0.1, looking.leave)
    timer.start()
    try:
        assert SharedFolder(folder.path).claim("run", "root") == "nothing"
    finally:
        timer.join()


def test_what_a_new_owner_has_begun_is_not_removed(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come in while the memory of the one before is given back."""
    path = memory / "ours" / "key"
    old = SharedFolder(path)
    old.claim("run", "root")
    old.steps.mkdir()
    (old.steps / "1").mkdir()
    unlink, claimed = Path.unlink, []

    def then_claimed(self: Path, *args: Any) -> None:
        unlink(self, *args)
        new = SharedFolder(path)
        new.claim("run", "root")
        (new.steps / "2").mkdir(parents=True)
        claimed.append(new)

    monkeypatch.setattr(Path, "unlink", then_claimed)
    old.remove()
    assert len(claimed) == 1
    assert [each.name for each in (path / "steps").iterdir()] == ["2"]


def test_a_lock_on_a_file_that_is_gone_owns_nothing(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening it and locking it another process may give the folder back."""
    path = memory / "ours" / "key"
    first = SharedFolder(path)
    first.claim("run", "root")
    flock, new = fcntl.flock, SharedFolder(path)

    def first_others(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.remove()
        new.claim("run", "root")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", first_others)
    assert take_abandoned(path) is None
    assert (path / "owner").exists()


# Claims a folder in children that are killed, each one line of the code later than the one before.
# Tells what the note was after each of them, and what the next trainer has found.
CLAIMS = """
import os, signal, sys
from pathlib import Path
from ckpt._tiers import shared_folder

def claim(path, left):
    def trace(frame, event, arg):
        nonlocal left
        if frame.f_code.co_filename != shared_folder.__file__:
            return None
        left -= event == "line"
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    shared_folder.SharedFolder(path).claim("run", "root")
    sys.settrace(None)
    os._exit(0)

top, is_new, moment, code = Path(sys.argv[1]), sys.argv[2] == "new", 0, -signal.SIGKILL
while code == -signal.SIGKILL:
    path = top / (f"{moment}" if is_new else "key")
    if not (child := os.fork()):
        claim(path, moment)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    note = path / "owner"
    said = note.read_text() if note.exists() else ""
    following = shared_folder.SharedFolder(path)
    print(following.claim("run", "root"), said, sep="|", flush=True)
    if is_new:
        following.remove()
        assert not path.exists()
    following.leave()
    moment += 1
sys.exit(code)
"""


def _killed_claims(top: Path, which: str) -> list[list[str]]:
    """Return what claims that were killed at every moment have left."""
    program = [sys.executable, "-c", CLAIMS, str(top), which]
    done = subprocess.run(
        program,
        env=environment({"PYTHONPATH": str(ROOT)}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    found = [line.split("|") for line in done.stdout.splitlines()]
    assert len(found) > 10
    return found


def test_a_kill_at_any_moment_of_a_claim_costs_no_snapshot(memory: Path) -> None:
    """The note is whole at every moment, so that the next trainer finds what is its own."""
    first = SharedFolder(memory / "ours" / "key")
    first.claim("run", "root")
    (first.steps / "1").mkdir(parents=True)
    first.leave()
    left = _killed_claims(memory / "ours", "same")
    assert {found for found, _ in left} == {"same run"}
    assert {json.loads(note)["run"] for _, note in left} == {"run"}
    assert (first.steps / "1").is_dir()
    # Also an agent that gives the memory back leaves nothing.
    last = take_abandoned(first.path)
    assert last is not None
    (first.path / "owner.new").touch()
    last.remove()
    assert list(memory.iterdir()) == []


def test_a_kill_at_any_moment_of_a_first_claim_is_made_good(memory: Path) -> None:
    left = _killed_claims(memory / "ours", "new")
    assert {found for found, _ in left} == {"nothing"}
    assert {note and json.loads(note)["run"] for _, note in left} == {"", "run"}


def test_a_folder_is_owned_while_its_note_is_replaced(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one process, at every moment."""
    path = memory / "ours" / "key"
    first = SharedFolder(path)
    first.claim("run", "root")
    first.leave()
    replace, seen = os.replace, []

    def looked_at(*args: Any) -> None:
        seen.append(take_abandoned(path))
        replace(*args)
        seen.append(take_abandoned(path))

    monkeypatch.setattr(os, "replace", looked_at)
    new = SharedFolder(path)
    new.claim("run", "root")
    assert seen == [None, None]
    assert take_abandoned(path) is None
    new.leave()
    left = take_abandoned(path)
    assert left is not None
    left.leave()


def test_a_root_with_a_long_name_is_known_again(memory: Path) -> None:
    """Not cut in the middle of the note, where every restart would find another run."""
    where = "s3://bucket/" + "ü" * 3000
    for found in ("nothing", "same run"):
        folder = SharedFolder(memory / "ours" / "key")
        assert folder.claim("run", where) == found
        json.loads((folder.path / "owner").read_bytes())
        (folder.steps / "1").mkdir(parents=True, exist_ok=True)
        folder.leave()


def test_a_look_for_parts_is_no_new_owner(memory: Path) -> None:
    """An agent waits on: the job may leave the folder as it is, and then it is the agent's."""
    folder = SharedFolder(memory / "ours" / "key")
    folder.claim("run", "root", 0, 2)
    claim = folder.claim_id
    folder.leave()
    [(process, looking)] = take_abandoned_of(memory / "ours" / "other", "run", "root", 2)
    assert process == 0
    assert not _is_owned_again(folder.path, claim)
    looking.leave()
    assert not _is_owned_again(folder.path, claim)
    # The same process, even, after `os.execv`.
    new = SharedFolder(folder.path)
    new.claim("run", "root", 0, 2)
    assert _is_owned_again(folder.path, claim)
    new.remove()
    assert _is_owned_again(folder.path, claim)


@pytest.mark.parametrize("other", ["run", "root", "count", "owned"])
def test_folders_of_others_are_left_alone(other: str, memory: Path) -> None:
    """Of another run, another root, a job of another size, or of a process that lives."""
    theirs = SharedFolder(memory / "ours" / "key")
    run, root = ("x" if other == each else each for each in ("run", "root"))
    theirs.claim(run, root, 1, 3 if other == "count" else 2)
    if other != "owned":
        theirs.leave()
    assert take_abandoned_of(memory / "ours" / "own", "run", "root", 2) == []
    if other != "owned":
        again = take_abandoned(theirs.path)
        assert again is not None
        again.leave()
