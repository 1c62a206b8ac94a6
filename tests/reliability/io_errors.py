"""Writes that are short or slow, many that fail at once, and reads that fail."""

from __future__ import annotations

import errno
import itertools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
import ckpt.sync
from ckpt.errors import CheckpointError, CorruptCheckpointError, StorageError
from tests.reliability.faults import copied, watched
from tests.reliability.scenarios import SAVE, contents, manager, same, save, scenarios, template
from tests.reliability.tally import Tally
from tests.support.faults import (
    WRITES,
    Effect,
    Fail,
    FaultyFiles,
    FileOperation,
    Plan,
    Short,
    Wait,
    at,
    every,
    refused_by,
    since,
)

__all__ = ["failing_leaves", "failing_reads", "short_writes", "slow_operations"]

PATIENCE_S = 120


def is_write(operation: FileOperation) -> bool:
    return operation.name in WRITES


def short_writes(directory: Path, count: int, seed: int = 0) -> Tally:
    """Let write 1, 2, 3, ... be short, and all of them: the step is whole all the same."""
    template(SAVE, directory / "template" / "run")
    tally = Tally()
    lengths = itertools.cycle([1, 512, 4096, 4097, None])
    plans = [lambda nbytes=nbytes: every(1, Short(nbytes)) for nbytes in (None, 1 << 19, 300001)]
    for number in itertools.count(1):
        if tally.runs >= count:
            break
        length = next(lengths)
        plan = plans.pop()() if plans else at(number, Short(length), is_write)
        case, found = _save_under(directory / f"{number}" / "run", directory, plan)
        met = [each for each in case.met if each.name in WRITES]
        tally += Tally(1, bool(met), _unless_whole(found, f"short write {met[:1]}"))
        if not met:
            break
    return tally


def _save_under(root: Path, directory: Path, plan: Plan) -> tuple[FaultyFiles, Any]:
    """Save under a plan; return the operations, and what the root holds or the error."""
    copied(directory / "template" / "run", root)
    with FaultyFiles(root.parent, plan, sync=False) as files, manager(root) as mgr:
        files.operations.clear()
        found: Any
        try:
            save(mgr, 1, 1).result()
            found = contents(root, mgr)
        except (AssertionError, CheckpointError) as error:
            found = error
    shutil.rmtree(root.parent)
    return files, found


def _unless_whole(found: Any, what: str) -> list[str]:
    return [] if found in SAVE.done else [f"{what}: {found}"]


def slow_operations(directory: Path, count: int, seed: int = 0) -> Tally:
    """Hold operation 1, 2, 3, ... of a save: readers see the old steps or the new one, whole."""
    template(SAVE, directory / "template" / "run")
    tally = Tally()
    for number in itertools.count(1 + seed):
        if tally.runs >= count:
            break
        losses, met = _held(directory / f"{number}" / "run", directory, number)
        tally += Tally(1, met, losses)
        if not met:
            break
    return tally


def _held(root: Path, directory: Path, number: int) -> tuple[list[str], bool]:
    """Save with one operation held; return what went wrong, and whether it came to that."""
    copied(directory / "template" / "run", root)
    arrived, gate, ended = threading.Event(), threading.Event(), threading.Event()
    losses = []

    def plan(operation: FileOperation) -> Effect | None:
        if saver is not None and operation.number == before + number:
            arrived.set()
            return Wait(gate, seconds=PATIENCE_S)
        return None

    def act() -> None:
        try:
            save(mgr, 1, 1).result(PATIENCE_S)
        except CheckpointError as error:
            losses.append(f"operation {number}, held: {error}")
        finally:
            ended.set()
            arrived.set()

    saver: threading.Thread | None = None
    with FaultyFiles(root.parent, plan, sync=False) as files, manager(root) as mgr:
        before = len(files.operations)
        saver = threading.Thread(target=act)
        saver.start()
        arrived.wait(PATIENCE_S)
        met = bool(files.met)
        if met:
            # It may be one that comes after the acknowledgement.
            wanted = SAVE.done if ended.is_set() else SAVE.possible
            with manager(root, mode="r") as reader:
                try:
                    found = contents(root, reader)
                    losses += [] if found in wanted else [f"{files.met[0]}: {found}"]
                except (AssertionError, CheckpointError) as error:
                    losses.append(f"{files.met[0]}: {error}")
        gate.set()
        saver.join()
        losses += _unless_whole(contents(root, mgr), f"operation {number}, held")
    shutil.rmtree(root.parent)
    return losses, met


def failing_leaves(directory: Path, count: int, seed: int = 0) -> Tally:
    """Let several large leaves fail at the same time: every error can be reached from the one."""
    state = {f"leaf_{number}": np.full(5 << 16, number, np.float32) for number in range(8)}
    tally = Tally()
    with watched(tally):
        for number in range(count):
            failing = 1 + (number + seed) % 4
            root = directory / str(number) / "run"
            root.parent.mkdir(parents=True)
            tally += _fail_at_once(root, state, failing)
            shutil.rmtree(root.parent)
    return tally


def _fail_at_once(root: Path, state: dict[str, Any], failing: int) -> Tally:
    barrier = threading.Barrier(failing)

    def is_large(operation: FileOperation) -> bool:
        return is_write(operation) and len(operation.data or b"") >= 1 << 20

    # All are under way when the first of them fails; what begins later fails as well.
    together = Wait(barrier, Fail(errno.EIO), PATIENCE_S)
    numbers = itertools.count(1)

    def plan(operation: FileOperation) -> Effect | None:
        if not is_large(operation):
            return None
        return together if next(numbers) <= failing else Fail(errno.ENOSPC)

    losses = []
    # One leaf a batch, and room for as many as there are lanes.
    staging = ckpt.Staging(budget_bytes=8 << 20)
    with manager(root, staging=staging) as mgr:
        save(mgr, 0, 0).result()
        with FaultyFiles(root.parent, plan, sync=False) as files:
            error = None
            try:
                mgr.save(1, state).result()
            except Exception as raised:
                error = raised
        raised_by_disk = [each.error for each in files.operations if each.error in _met(files)]
        if not isinstance(error, StorageError):
            losses.append(f"raised {error!r}")
        reachable = {id(each) for each in _reachable(error)}
        lost = [each for each in raised_by_disk if id(each) not in reachable]
        if lost or len(raised_by_disk) < failing:
            losses.append(f"{len(lost)} of {len(raised_by_disk)} errors cannot be reached")
        if contents(root, mgr) != {"0": 0}:
            losses.append("the failed save changed what is there")
        if mgr._service.engine.arena.used:
            losses.append("staging memory was not given back")
    return Tally(1, len(raised_by_disk), losses)


def _met(files: FaultyFiles) -> list[OSError]:
    return [each.error for each in files.met if each.error is not None]


def _reachable(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and all that it names as further ones or as causes."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, *getattr(each, "others", ())]
        waiting += getattr(each, "exceptions", ())


def failing_reads(directory: Path, count: int, seed: int = 0) -> Tally:
    """Let operation 1, 2, 3, ... of a restore fail: it is right, or says what was wrong."""
    # Another step lies in between in all memory that is used again.
    template(scenarios()["overwrite"], directory / "run")
    tally = Tally()
    with watched(tally), manager(directory / "run") as mgr:
        for code in (None, errno.EIO, errno.EMFILE, errno.EACCES):
            for lasting in (False, True):
                for number in itertools.count(1):
                    if tally.runs >= count:
                        return tally
                    effect: Effect = Short() if code is None else Fail(code)
                    place = (since if lasting else at)(number, effect, refused_by(code or 0))
                    met, losses = _read_under(directory, mgr, place, whole=code is None)
                    tally += Tally(1, met, losses)
                    if not met:
                        break
    return tally


def _read_under(
    directory: Path, mgr: ckpt.sync.CheckpointManager, plan: Plan, *, whole: bool
) -> tuple[bool, list[str]]:
    losses = []
    with FaultyFiles(directory, plan) as files:
        try:
            same(mgr.restore(0), 0)
        except (StorageError, CorruptCheckpointError) as error:
            if whole:
                losses.append(f"{files.met[:1]}: {error}")
        except Exception as error:
            losses.append(f"{files.met[:1]}: {error!r}")
    if mgr._service.engine.arena.used:
        losses.append(f"{files.met[:1]}: staging memory was not given back")
    same(mgr.restore(1), 1)
    return bool(files.met), losses
