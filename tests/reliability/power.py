"""A campaign of power cuts: an ext4 on a loop device, shut down without a flush."""

from __future__ import annotations

import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.reliability.kills import KILLED, OLD_ACKS, acknowledged, prepared, saver, verdict
from tests.reliability.tally import Tally
from tests.support.kills import Call, watching_forked
from tests.support.paths import PROGRAMS
from tests.support.power import Disk, power_supply

__all__ = ["cuts", "cuts_of_the_forgetful"]

FORGETFUL = str(PROGRAMS / "save_without_sync.py")
# A journal commits by itself after five seconds.
LONGEST_IDLE_S = 7.0


@dataclass(frozen=True, slots=True)
class Point:
    """When to cut: in which mode of the saver, and where in it.

    Attributes:
        mode: The mode; see `saver.py`.
        kind: `ack`: right after an acknowledgement; `idle`: some time after the last one; else
            before a call of this kind in the save after two others, or before any where it is "".
        calls: About how many such calls there are.
    """

    mode: str
    kind: str
    calls: int = 0


POINTS = (
    Point("append", "ack"),
    Point("append", "", 59),
    Point("overwrite", "", 76),
    # In a deletion.
    Point("preserve", "remove", 16),
    Point("overwrite", "ack"),
    Point("overwrite", "rename", 3),
    Point("preserve", "ack"),
    Point("append", "idle"),
    Point("append", "sync", 17),
    Point("preserve", "rename", 3),
)


def cuts(directory: Path, count: int, seed: int = 0) -> Tally:
    """Cut the power of `count` savers after, between, in and before saves and deletions."""
    choice = random.Random(seed)
    with power_supply(directory) as disk:
        attacks = [
            _attack(disk, disk.root / str(number), POINTS[number % len(POINTS)], choice)
            for number in range(count)
        ]
    return sum(attacks, Tally())


def cuts_of_the_forgetful(directory: Path, count: int, seed: int = 0) -> Tally:
    """The same on savers that sync nothing, right after acknowledgements: each should be a loss."""
    choice = random.Random(seed)
    with power_supply(directory) as disk:
        attacks = [
            _attack(disk, disk.root / str(number), Point("append", "ack"), choice, forgetful=True)
            for number in range(count)
        ]
    return sum(attacks, Tally())


def _attack(
    disk: Disk, root: Path, point: Point, choice: random.Random, *, forgetful: bool = False
) -> Tally:
    # Two steps whose acknowledgements count like all others.
    prepared(root)
    number = choice.randint(1, point.calls) if point.calls else 0
    seen, is_cut = 0, False

    def decide(call: Call) -> int | None:
        """Cut before the chosen call; who was about to make it dies with the machine."""
        nonlocal seen, is_cut
        seen += number > 0 and point.kind in ("", call.kind)
        if is_cut or (number and seen == number):
            if not is_cut:
                disk.cut()
            is_cut = True
            return signal.SIGKILL
        return None

    # Where calls are counted, one save is enough.
    saves = [1] if number else [2] if point.kind == "idle" else []
    command = saver(root, point.mode, *saves)
    if forgetful:
        command[0] = FORGETFUL
    with watching_forked(command, decide, below=root) as (child, watched):
        said = []
        if point.kind == "ack":
            # While it goes on with the next one, or deletes.
            said = [child.stdout.readline() for _ in range(choice.randint(1, 2))]
            time.sleep(choice.choice([0, 0, choice.uniform(0, 0.1)]))
            disk.cut()
            is_cut = True
            child.kill()
        said += child.stdout
        child.wait()
    if not is_cut:
        time.sleep(choice.uniform(0, LONGEST_IDLE_S) if point.kind == "idle" else 0)
        disk.cut()
    disk.restore()
    where = f"{point.mode}, cut at {point.kind or 'call'} {number}, {watched.met[:1]}"
    acks = [*OLD_ACKS[point.mode], *acknowledged(said)]
    losses = verdict(root, point.mode, acks, where, rebooted=True)
    if watched.returncode not in (0, KILLED):
        losses.append(f"{where}: ended with {watched.returncode}")
    shutil.rmtree(root, ignore_errors=True)
    return Tally(1, 1, losses)
