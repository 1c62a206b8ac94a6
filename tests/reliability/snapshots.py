"""Campaigns against programs that take snapshots in memory: they, or their agents, are killed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.reliability.kills import KILLED, acknowledged, attempts
from tests.reliability.tally import Tally
from tests.support.forked_programs import Forked, fork
from tests.support.kills import at_call, watching_forked
from tests.support.snapshots import PROGRAM, children_of, shared_memory, steps_of, wait_for

__all__ = ["at_calls", "at_random", "beside_keepers", "in_compiles", "with_keepers"]

TERM = -signal.SIGTERM
# On each root and its memory; so most trainers find what a killed one has left.
ROUNDS = 5
# From so many kills on, every call of three snapshots is hit.
EVERY = 200
# About one snapshot, and the start of a trainer up to its first one.
SNAPSHOT_S, START_S = 0.03, 0.5


@dataclass
class _Host:
    """A root, the memory of a host, and the trainers that run there one after another.

    Attributes:
        root: The root.
        memory: The folder for what would be in /dev/shm.
        errors: Where the trainers log.
        acknowledged: The greatest step whose snapshot a trainer has acknowledged.
    """

    root: Path
    memory: Path
    errors: Path
    acknowledged: int = -1

    @contextlib.contextmanager
    def trainer(self, then: str, *arguments: object) -> Iterator[Forked]:
        """Start a trainer, see `take_snapshots.py`; kill it with the body."""
        argv = [PROGRAM, self.root, self.memory, then, *arguments]
        with open(self.errors, "a") as errors:
            child = fork(0, [str(each) for each in argv], errors.fileno(), dict(os.environ))
        with child:
            try:
                yield child
            finally:
                child.kill()

    def hear(self, lines: Iterable[str]) -> None:
        """Note what a trainer says, and that it goes on where the last one was."""
        for line in lines:
            if line.startswith("start ") and line.endswith("\n"):
                start = int(line.split()[1])
                assert start > self.acknowledged, f"starts at {start} after {self.acknowledged}"
            self.acknowledged = max([self.acknowledged, *acknowledged([line])])

    def hear_until(self, child: Forked, text: str) -> None:
        for line in child.stdout:
            self.hear([line])
            if line.strip() == text:
                return
        raise AssertionError(f"it has ended before {text!r}")

    def check(self) -> None:
        """What was acknowledged is in the root, and each step there is whole."""
        newest = max(steps_of(self.root), default=-1)
        assert newest >= self.acknowledged, f"{newest} is there, {self.acknowledged} is lost"

    def check_end(self) -> None:
        """A trainer goes on from there and ends well: then nothing is left of those before."""
        with self.trainer("wait", -1, 1) as child:
            self.hear([child.stdout.readline(), child.stdout.readline()])
            child.stdin.close()
            self.hear(child.stdout)
            assert child.wait() == 0, f"ended with {child.returncode}"
        assert list(self.memory.iterdir()) == [], "memory was not given back"
        steps_of(self.root)
        assert attempts(self.root) == [], "what a dead agent left is there still"

    def torn(self) -> bool:
        """Whether a snapshot was being written when the last trainer died."""
        return any(attempts(each) for each in self._folders("steps"))

    def is_writing(self) -> bool:
        """Whether an agent writes to the root, or was killed while it did."""
        return bool(self._folders("flushing-*"))

    def _folders(self, name: str) -> list[Path]:
        return list(self.memory.glob(f"ckpt-*/*/{name}"))


def _on_hosts(
    directory: Path, count: int, seed: int, attack: Callable[[_Host, random.Random], bool]
) -> Tally:
    """Attack `count` trainers, several on each host; `attack` tells whether it met something."""

    def work(index: int) -> Tally:
        choice = random.Random(f"{seed} {index}")
        place = directory / str(index)
        place.mkdir()
        tally = Tally()
        with shared_memory() as memory:
            host = _Host(place / "root", memory, place / "errors")
            try:
                for _ in range(min(ROUNDS, count - index * ROUNDS)):
                    tally += Tally(1, attack(host, choice))
                host.check_end()
            except Exception as error:
                said = host.errors.read_text()[-2000:]
                tally.lose(f"host {index}", error, said)
        shutil.rmtree(place)
        return tally

    with ThreadPoolExecutor(2) as two:
        return sum(two.map(work, range(-(-count // ROUNDS))), Tally())


def at_random(directory: Path, count: int, seed: int = 0) -> Tally:
    """Kill trainers that take snapshots without pause, each at a random moment."""

    def attack(host: _Host, choice: random.Random) -> bool:
        with host.trainer("go on") as child:
            _let_run(host, child, choice)
            child.kill()
            host.hear(child.stdout)
        assert child.returncode == KILLED, f"ended with {child.returncode}"
        host.check()
        return host.torn()

    return _on_hosts(directory, count, seed, attack)


def _let_run(host: _Host, child: Forked, choice: random.Random) -> None:
    """Wait for some snapshots, or a part of the start, and a random moment more."""
    lines = choice.randint(0, 4)
    host.hear([child.stdout.readline() for _ in range(lines)])
    time.sleep(choice.uniform(0, SNAPSHOT_S if lines else START_S))


def with_keepers(directory: Path, count: int, seed: int = 0) -> Tally:
    """Kill trainers and their agents, in any order, within milliseconds.

    Then only the memory has the last snapshot. An agent may die while it writes to the root.
    """

    def attack(host: _Host, choice: random.Random) -> bool:
        with host.trainer("go on") as child:
            _let_run(host, child, choice)
            agents = children_of(child.pid)
            kills = [[child.pid], agents]
            choice.shuffle(kills)
            for pid in kills[0]:
                _kill(pid)
            time.sleep(choice.choice((0, choice.uniform(0, 2 * SNAPSHOT_S))))
            for pid in kills[1]:
                _kill(pid)
            host.hear(child.stdout)
        assert child.returncode == KILLED, f"ended with {child.returncode}"
        steps = steps_of(host.root)
        return bool(agents) and host.acknowledged > max(steps, default=-1)

    return _on_hosts(directory, count, seed, attack)


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def beside_keepers(directory: Path, count: int, seed: int = 0) -> Tally:
    """Start trainers while the agent of a killed one still writes.

    The agent is stopped at a random moment, and goes on when the next trainer has begun to take
    snapshots, which replace what the agent was writing.
    """

    def attack(host: _Host, choice: random.Random) -> bool:
        with host.trainer("wait", -1, 2) as first:
            host.hear([first.stdout.readline() for _ in range(3)])
            _wait_for_agent(first.pid)
            [agent] = children_of(first.pid)
            first.kill()
            first.wait()
            if choice.random() < 0.5:
                _wait_until_it_writes(host, agent)
            else:
                time.sleep(choice.uniform(0, SNAPSHOT_S))
            _kill(agent, signal.SIGSTOP)
            wrote = host.is_writing()
            try:
                with host.trainer("go on") as second:
                    host.hear([second.stdout.readline() for _ in range(choice.randint(0, 4))])
                    _kill(agent, signal.SIGCONT)
                    time.sleep(choice.uniform(0, 2 * SNAPSHOT_S))
                    second.kill()
                    host.hear(second.stdout)
            finally:
                _kill(agent, signal.SIGCONT)
            host.hear(first.stdout)
        host.check()
        return wrote

    return _on_hosts(directory, count, seed, attack)


def _wait_for_agent(trainer: int) -> None:
    """Wait until the agent of a trainer watches it: it has its descriptor then."""
    [agent] = children_of(trainer)
    while not any("pidfd" in target for target in _open_files(agent)):
        time.sleep(0.005)


def _wait_until_it_writes(host: _Host, agent: int) -> None:
    """Wait until an agent writes to the root, or has ended."""
    while not host.is_writing() and not _has_ended(agent):
        time.sleep(0.0005)


def _has_ended(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _open_files(pid: int) -> list[str]:
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(each))
    return found


def in_compiles(directory: Path, count: int, seed: int = 0) -> Tally:
    """Send SIGTERM to trainers at random moments of a compile of about 20 s.

    One that has a handler, or whose manager asked for the signal, goes on compiling, and its
    snapshot has to be there meanwhile. One without is ended by the signal.
    """
    options = ("handled", "preempt", "none")

    def attack(host: _Host, choice: random.Random) -> bool:
        option = options[choice.randrange(len(options))]
        with host.trainer("compile", -1, 2, option) as child:
            host.hear_until(child, "held")
            time.sleep(choice.uniform(0, 1))
            os.kill(child.pid, signal.SIGTERM)
            wait_for(host.root, host.acknowledged)
            if option != "none":
                assert child.poll() is None, f"{option}: ended with {child.returncode}"
            child.kill()
            said = list(child.stdout)
        assert child.returncode == (TERM if option == "none" else KILLED)
        assert "released\n" not in said, f"{option}: the compile had ended"
        host.check()
        return True

    return _on_hosts(directory, count, seed, attack)


def at_calls(directory: Path, count: int, seed: int = 0) -> Tally:
    """Kill a trainer or its agent before each of its system calls that change files; or `count`.

    All that changes memory counts: three snapshots of the trainer, which kills itself after them
    unless it is dead by then, and the links of the agent, which then writes the last one. A
    `count` of `EVERY` or more hits each call once; less takes them evenly.
    """

    def attack(number: int) -> tuple[Tally, int]:
        place = directory / str(number)
        place.mkdir()
        losses = []
        with shared_memory() as memory:
            host = _Host(place / "root", memory, place / "errors")
            command = [str(PROGRAM), str(host.root), str(memory), "die", "0", "3"]
            decide = at_call(number, signal.SIGKILL) if number else None
            with (
                open(host.errors, "a") as errors,
                watching_forked(command, decide, below=memory, errors=errors) as (child, watched),
            ):
                try:
                    host.hear(child.stdout)
                    assert child.wait() == KILLED, f"ended with {child.returncode}"
                    if all(call.process == child.pid for call in watched.met):
                        host.check()
                    host.check_end()
                except Exception as error:
                    said = host.errors.read_text()[-2000:]
                    losses.append(f"killed at call {number}, {watched.met}: {error}\n{said}")
                    # The calls of an agent are watched, too, until it ends.
                    shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(place)
        return Tally(1, len(watched.met), losses), len(watched.calls)

    clean, calls = attack(0)
    count = calls if count >= EVERY else min(count, calls)
    # As many as that, evenly, however many calls there are.
    start = random.Random(seed).random()
    numbers = [1 + int((each + start) * calls / count) for each in range(count)]
    with ThreadPoolExecutor(2) as two:
        killed = two.map(lambda number: attack(number)[0], numbers)
        return sum(killed, clean)
