"""Campaigns of several processes on one root: who wins, who waits, what is swept."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import ckpt.sync
from tests.reliability.kills import ATTEMPT, attempts
from tests.reliability.tally import Tally
from tests.support.forked_programs import Forked, program
from tests.support.kills import Call, watching
from tests.support.paths import PROGRAMS

__all__ = ["different_steps", "same_steps", "sweeps"]

# Nobody may hang; far above what a loaded machine takes.
PATIENCE_S = 120.0
LONGEST_OFFSET_S = 0.08

Child = Forked | subprocess.Popen[str]


def command(program: str, *arguments: object) -> list[str]:
    return [sys.executable, str(PROGRAMS / program), *map(str, arguments)]


@contextlib.contextmanager
def started(*commands: list[str]) -> Iterator[list[Child]]:
    """Programs beside the body; what still runs at its end is killed."""
    with contextlib.ExitStack() as stack:
        children: list[Child] = []
        for each in commands:
            run = stack.enter_context(program(*each[1:]))
            stack.callback(run.kill)
            children.append(run)
        for child in children:
            answer = told(child)
            assert answer == "ready", f"{answer!r} came instead of a start"
        yield children


def tell(child: Child, line: object) -> None:
    assert child.stdin is not None
    print(line, file=child.stdin, flush=True)


def told(child: Child, patience_s: float = PATIENCE_S) -> str:
    """The next line that a child says; "" when it has ended, "hangs" when it is silent."""
    assert child.stdout is not None
    # A child says one line at a time, so nothing waits in the buffer of the file object.
    if not select.select([child.stdout], [], [], patience_s)[0]:
        return "hangs"
    return child.stdout.readline().strip()


def wrong(root: Path, step: int, name: str | None = None) -> list[str]:
    """What is not as a racer or a keeper saved it, in a line."""
    try:
        with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
            found = mgr.restore(step)
    except Exception as error:
        return [f"step {step} is unreadable: {type(error).__name__}: {error}"]
    good = np.array_equal(found["w"], np.full(1 << 16, step)) and found.get("name") == name
    return [] if good else [f"step {step} holds something else"]


def same_steps(directory: Path, count: int, seed: int = 0) -> Tally:
    """Let two processes save the same step, `count` times, half of them at random offsets.

    A fault is a round in which the later one began before the earlier one had ended.
    """
    choice = random.Random(seed)
    tally = Tally()
    racers = {name: command("race_saves.py", directory, name) for name in ("one", "two")}
    with started(*racers.values()) as children:
        for step in range(count):
            order = choice.sample(range(2), 2)
            tell(children[order[0]], step)
            # An answer that comes before the offset is over ends the wait, and the race.
            first = children[order[0]].stdout
            offset_s = choice.choice([0.0, choice.uniform(0, LONGEST_OFFSET_S)])
            assert first is not None
            early = select.select([first], [], [], offset_s)[0]
            tell(children[order[1]], step)
            said = [told(child) for child in children]
            tally += Tally(1, not early)
            if sorted(said) != ["taken", "won"]:
                tally.losses.append(f"step {step}: {said}")
                break
            tally.losses += wrong(directory, step, list(racers)[said.index("won")])
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
            listed = told(child)
            if listed != str(list(range(tally.runs))):
                tally.losses.append(f"a racer ends with the steps {listed}")
            child.wait(PATIENCE_S)
    tally.losses += _rubbish(directory, {*map(str, range(tally.runs))})
    return tally


def different_steps(directory: Path, count: int, seed: int = 0) -> Tally:
    """Let two processes save even and odd steps, `count` each, while each keeps two of all.

    A fault is a change of turns: a step whose forerunner in time was the other's.
    """
    with started(
        *(command("keep_two_steps.py", directory, first, 2, count) for first in (0, 1))
    ) as both:
        order: list[int] = []

        def listen(child: Child) -> list[str]:
            lines = []
            while (line := told(child)).startswith("ack "):
                order.append(int(line.removeprefix("ack ")))
                lines.append(line)
            return [] if line == "end" else [f"a keeper said {line!r} after {lines[-1:]}"]

        for child in both:
            tell(child, "go")
        with ThreadPoolExecutor(2) as two:
            losses = [line for lines in two.map(listen, both) for line in lines]
        for child in both:
            child.wait(PATIENCE_S)
    turns = sum(a % 2 != b % 2 for a, b in itertools.pairwise(order))
    with ckpt.sync.CheckpointManager(directory, mode="r") as mgr:
        steps = mgr.all_steps()
    if not order or steps[-1:] != [max(order)]:
        losses.append(f"the greatest step is gone: {steps} are left of {sorted(order)}")
    for step in steps:
        losses += wrong(directory, step)
    losses += _rubbish(directory, {*map(str, steps)})
    return Tally(len(order), turns, losses)


class Stopper:
    """Stops a program at the chosen one of its calls, counted anew for every round."""

    def __init__(self) -> None:
        self.calls = 0
        self.stop_at = 0

    def begin(self, stop_at: int) -> None:
        self.calls, self.stop_at = 0, stop_at

    def __call__(self, call: Call) -> int | None:
        self.calls += 1
        return signal.SIGSTOP if self.calls == self.stop_at else None


def sweeps(directory: Path, count: int, seed: int = 0) -> Tally:
    """Stop a writer in `count` saves, open managers meanwhile, let it go on; kill it now and then.

    While it is stopped it lives: nobody may take its attempt. When it was killed, the next manager
    has to. A second writer saves undisturbed all the time. Every eighth writer is killed, and the
    last one.
    """
    choice = random.Random(seed)
    tally = Tally()
    with started(command("race_saves.py", directory, "other")) as (other,):
        while tally.runs < count:
            stopper = Stopper()
            racer = command("race_saves.py", directory, "stopped")
            with watching(racer, stopper, below=directory) as (writer, _):
                if told(writer) != "ready":
                    tally.losses.append("a writer did not start")
                    break
                for number in range(min(8, count - tally.runs)):
                    last = number == 7 or tally.runs == count - 1
                    tally += _stopped_save(
                        directory, writer, other, stopper, tally.runs, choice, kill=last
                    )
            tally += _after_a_kill(directory)
    return tally


def _stopped_save(
    root: Path,
    writer: Child,
    other: Child,
    stopper: Stopper,
    number: int,
    choice: random.Random,
    *,
    kill: bool,
) -> Tally:
    step = 2 * number
    stopper.begin(choice.randint(2, 40))
    tell(writer, step)
    tally = Tally(1)
    where = f"step {step}, stopped at call {stopper.stop_at}"
    if _until_stopped(writer):
        before = attempts(root)
        # Both at once: managers that open, and a writer whose attempts come and go.
        tell(other, step + 1)
        for _ in range(choice.randint(1, 3)):
            with ckpt.sync.CheckpointManager(root) as mgr:
                mgr.all_steps()
        if told(other) != "won":
            tally.losses.append(f"{where}: another writer failed")
        tally.faults = len(before)
        if not set(before) <= set(attempts(root)):
            tally.losses.append(f"{where}: the attempt of a live writer was taken")
        if kill:
            writer.kill()
            writer.wait()
            return tally
        writer.send_signal(signal.SIGCONT)
    answer = told(writer)
    if answer != "won":
        tally.losses.append(f"{where}: the writer says {answer!r}")
        return tally
    tally.losses += wrong(root, step, "stopped")
    return tally


def _until_stopped(child: Child) -> bool:
    """Wait until a child is stopped; False where it answered instead, having met no stop."""
    assert child.stdout is not None
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        # The child is not reaped: a stop alone is asked for.
        found = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG)
        if found is not None:
            return True
        if select.select([child.stdout], [], [], 0.01)[0]:
            return False
    return False


def _after_a_kill(root: Path) -> Tally:
    """A manager opened after a kill finds no attempt that it leaves behind."""
    with ckpt.sync.CheckpointManager(root) as mgr:
        left = [name for name in os.listdir(root) if ATTEMPT in name]
        losses = [f"{name} of a dead writer is left" for name in left]
        for step in mgr.all_steps():
            losses += wrong(root, step, "other" if step % 2 else "stopped")
    return Tally(losses=losses)


def _rubbish(root: Path, wanted: set[str]) -> list[str]:
    found = set(os.listdir(root)) - {".ckpt-run"}
    return [] if found == wanted else [f"in the root: {sorted(found ^ wanted)}"]
