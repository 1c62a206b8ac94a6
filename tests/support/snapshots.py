"""Programs that take snapshots in memory, and what is there when they have ended."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ckpt
import ckpt.sync
from ckpt.testing.compare import differences
from tests.support.command import environment
from tests.support.forked_programs import program
from tests.support.numbered_states import state_of
from tests.support.paths import ROOT

PROGRAM = ROOT / "tests/support/programs/take_snapshots.py"
PATIENCE_S = 120


class Trainer:
    """A program that takes snapshots of the run at `root` in a folder of memory."""

    def __init__(self, root: Path, memory: Path, *arguments: object) -> None:
        self.root = root
        self.process = program(PROGRAM, root, memory, *arguments, env=environment({}), errors=None)

    def lines(self, *, until: str) -> list[str]:
        """Return what it prints, up to a line."""
        found = []
        for line in self.process.stdout:
            found.append(line.strip())
            if found[-1] == until:
                return found
        raise AssertionError(f"it has ended: {found}, {self.process.communicate()[1]}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def end(self) -> tuple[list[str], str]:
        """Wait until it, and what its agent has to write, is done; return what both printed."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return out.split("\n"), err


@contextlib.contextmanager
def trainer(root: Path, memory: Path, *arguments: object) -> Iterator[Trainer]:
    """Run a trainer; kill it with the body."""
    found = Trainer(root, memory, *arguments)
    try:
        yield found
    finally:
        found.kill()
        with contextlib.suppress(ValueError):
            found.process.communicate(timeout=PATIENCE_S)


@contextlib.contextmanager
def shared_memory() -> Iterator[Path]:
    """Make a folder in memory."""
    folder = tempfile.mkdtemp(dir="/dev/shm", prefix="ckpt-test-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def children_of(process: int) -> list[int]:
    """Return the processes that a process has started and that still run: agents, as a rule."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in task.read_text().split()]
    return found


def steps_of(root: Path) -> list[int]:
    """Return the steps of a root, all of which must be whole, and hold what their number says."""
    if not root.exists():
        return []
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        steps = mgr.all_steps()
        for step in steps:
            assert mgr.verify(step).ok
            assert differences(state_of(step), mgr.restore(step)) == []
    return steps


def wait_for(root: Path, step: int) -> None:
    """Wait until another process has written a step."""
    root.mkdir(exist_ok=True)
    seen = list(ckpt.sync.watch(root, timeout=PATIENCE_S, until=step, poll_interval=0.05))
    assert [info.step for info in seen[-1:]] == [step]
