"""Campaigns of `kill -9`: at every system call that changes the disk, and at random moments."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ckpt.sync
from tests.reliability.tally import Tally
from tests.support.forked_programs import Forked, program
from tests.support.kills import at_call, run_watched
from tests.support.numbered_states import state_of
from tests.support.paths import PROGRAMS
from tests.support.trees import assert_same

__all__ = [
    "ATTEMPT",
    "EVERY",
    "KILLED",
    "MODES",
    "OLD_ACKS",
    "acknowledged",
    "at_calls",
    "at_random",
    "attempts",
    "check_root",
    "prepared",
    "saver",
    "start",
    "verdict",
]

SAVER = str(PROGRAMS / "save_until_killed.py")
ATTEMPT = ".orbax-checkpoint-tmp-"
KILLED = -signal.SIGKILL
MODES = ("append", "overwrite", "preserve")
# What was acknowledged in a prepared root, as far as no saver is told to replace or delete it.
OLD_ACKS = {"append": [0, 1], "overwrite": [0], "preserve": [1]}
# From so many kills on every call is hit; about so many calls has a save.
EVERY, TYPICAL = 200, 60


def saver(root: Path, *arguments: object) -> list[str]:
    """The script that saves to `root`, and its arguments; see `save_until_killed.py`."""
    return [SAVER, str(root), *map(str, arguments)]


def start(root: Path, *arguments: object) -> Forked:
    return program(SAVER, root, *arguments)


def acknowledged(lines: Iterable[str]) -> list[int]:
    """The numbers in whole lines `ack N`; what failed, or was cut short, is none."""
    return [int(line[4:]) for line in lines if line.startswith("ack ") and line.endswith("\n")]


def attempts(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if ATTEMPT in name]


def prepared(root: Path) -> None:
    """A root with the committed steps 0 and 1."""
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in range(2):
            mgr.save(step, state_of(step), custom_metadata=step).result()


def check_root(root: Path, mode: str, acks: list[int], *, rebooted: bool = False) -> int:
    """Check all that a crash may not touch; return how many attempts it had left behind.

    Args:
        root: The root, as the crash left it.
        mode: What the saver did: see `save_until_killed.py`.
        acks: Every number whose durability was acknowledged and that nobody has deleted.
        rebooted: Whether the machine went down, and not the program alone. Nobody knows then that
            the writer is dead, so its attempts stay until their leases have run out.
    """
    if not root.exists():
        assert not acks
        return 0
    left = len(attempts(root))
    visible = sorted(int(name) for name in os.listdir(root) if name.isdigit())
    with ckpt.sync.CheckpointManager(root, mode="r") as reader:
        assert reader.all_steps() == visible, "a half-visible step"
        assert reader.latest_step() == (visible[-1] if visible else None)
    assert len(attempts(root)) == left, "a reader touched what it must not"

    if rebooted:
        _let_time_pass(root)
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert attempts(root) == [], "dead attempts were not removed"
        assert mgr.all_steps() == visible
        numbers = {step: mgr.metadata(step).info.custom_metadata for step in visible}
        for step, number in numbers.items():
            report = mgr.verify(step)
            assert report.ok, str(report)
            assert_same(mgr.restore(step), state_of(number))
        if mode == "append":
            assert set(acks) <= set(visible), f"lost {set(acks) - set(visible)}"
            assert all(step == number for step, number in numbers.items())
        elif mode == "overwrite":
            assert not acks or numbers[0] >= acks[-1], "the old version is back"
        elif acks:
            assert acks[-1] in visible, f"lost {acks[-1]}"
            assert len(visible) >= min(2, len(acks)), "more was deleted than asked for"

        # Saving goes on where it was, and what was seen once does not go.
        following = max([*numbers.values(), -1]) + 1
        step = 0 if mode == "overwrite" else following
        save = mgr.save(step, state_of(following), custom_metadata=following, if_exists="replace")
        save.result()
        assert_same(mgr.restore(step), state_of(following))
        for step in mgr.all_steps()[:-2]:
            mgr.delete(step)
    # At the latest when its lease has run out, all that is no step is gone.
    _let_time_pass(root)
    with ckpt.sync.CheckpointManager(root) as mgr:
        wanted = {*map(str, mgr.all_steps())}
    # What an earlier manager kept is written down in the last.
    assert set(os.listdir(root)) - {".ckpt-run"} == wanted, "rubbish is left"
    return left


def _let_time_pass(root: Path) -> None:
    """Make all that is unfinished in `root` a day old."""
    then = time.time() - 86400
    for path in [*root.iterdir(), *(root / ".ckpt-pins").glob("*")]:
        if ATTEMPT in path.name or ".ckpt-" in str(path.relative_to(root)):
            os.utime(path, (then, then))


def verdict(
    root: Path, mode: str, acks: list[int], where: str, *, rebooted: bool = False
) -> list[str]:
    """What a crash took that it may not take, a line for each; see `check_root`."""
    try:
        check_root(root, mode, acks, rebooted=rebooted)
    except Exception as error:
        return [f"{where}: {type(error).__name__}: {error}"]
    return []


def _in_pairs(work: Callable[[int], Tally], count: int) -> Tally:
    with ThreadPoolExecutor(2) as two:
        return sum(two.map(work, range(count)), Tally())


def at_calls(directory: Path, count: int, seed: int = 0) -> Tally:
    """Kill a saver before each of the calls that one save makes, in every mode; or before `count`.

    Every call that changes the disk below the root counts, whichever thread makes it. A `count` of
    `EVERY` or more hits each of them once; less draws numbers, of which a few may be past the end.
    """
    template = directory / "template"
    prepared(template)

    def attack(mode: str, number: int) -> tuple[Tally, int]:
        root = directory / f"{mode}-{number}"
        shutil.copytree(template, root)
        decide = at_call(number, signal.SIGKILL) if number else None
        run = run_watched(saver(root, mode, 1), decide, below=root, forked=True)
        acks = acknowledged(run.output.splitlines(keepends=True))
        where = f"{mode}, killed at call {number}, {run.met[0] if run.met else 'not reached'}"
        losses = verdict(root, mode, [*OLD_ACKS[mode], *acks], where)
        if run.returncode != (KILLED if run.met else 0):
            losses.append(f"{where}: ended with {run.returncode}")
        shutil.rmtree(root)
        return Tally(1, len(run.met), losses), len(run.calls)

    choice = random.Random(seed)
    points = [(MODES[n % len(MODES)], choice.randint(1, TYPICAL)) for n in range(count)]
    tally = Tally()
    if count >= EVERY:
        points = []
        for mode in MODES:
            clean, calls = attack(mode, 0)
            tally += clean
            points += [(mode, number) for number in range(1, calls + 1)]
    return tally + _in_pairs(lambda index: attack(*points[index])[0], len(points))


def at_random(directory: Path, count: int, seed: int = 0) -> Tally:
    """Kill a saver at `count` random moments, several times over on each root."""
    rounds = 3

    def work(index: int) -> Tally:
        choice = random.Random(f"{seed} {index}")
        mode = MODES[index % len(MODES)]
        root = directory / str(index)
        tally = Tally()
        for _ in range(min(rounds, count - index * rounds)):
            said = _killed_after_a_while(root, mode, choice)
            tally += Tally(1, 0 if not root.exists() else bool(attempts(root)))
            tally.losses += verdict(root, mode, acknowledged(said), f"{mode}, root {index}")
        shutil.rmtree(root, ignore_errors=True)
        return tally

    return _in_pairs(work, -(-count // rounds))


def _killed_after_a_while(root: Path, mode: str, choice: random.Random) -> list[str]:
    """Kill a saver at a random moment after a random acknowledgement; return what it had said."""
    with start(root, mode) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(choice.randint(1, 3))]
        time.sleep(choice.uniform(0, 0.1))
        child.kill()
        said += child.stdout
    assert child.returncode == KILLED, f"the saver ended by itself: {said}"
    return said
