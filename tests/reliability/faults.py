"""A fault at every file operation: the call fails by an error of ours, and nothing else happens."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ckpt
from ckpt.errors import CheckpointError, StorageError
from tests.reliability.scenarios import (
    NEXT,
    SCENARIOS,
    Entries,
    Scenario,
    age,
    contents,
    leftovers,
    manager,
    record,
    save,
    template,
)
from tests.reliability.tally import Tally
from tests.support.faults import (
    SYNCS,
    Crash,
    Effect,
    Fail,
    FaultyFiles,
    FileOperation,
    Plan,
    Predicate,
    at,
    refused_by,
)

__all__ = [
    "copied",
    "crashes",
    "every_fault",
    "is_decisive",
    "persistent_errors",
    "transient_errors",
    "watched",
]

ERRORS = [
    errno.ENOSPC,
    errno.EIO,
    errno.EDQUOT,
    errno.EROFS,
    errno.EMFILE,
    errno.EACCES,
]


@dataclass
class Case:
    """One run of a scenario with a fault.

    Attributes:
        scenario: What was done.
        root: Where.
        files: The operations.
        error: What was raised, if anything was.
        heard: How many operations there were when it was acknowledged; all, if it was not.
        losses: What should not have happened.
    """

    scenario: Scenario
    root: Path
    files: FaultyFiles
    error: BaseException | None = None
    heard: int = sys.maxsize
    losses: list[str] = field(default_factory=list)

    def hear(self) -> None:
        """Take the acknowledgement."""
        self.heard = len(self.files.operations)

    def expect(self, holds: bool, what: str) -> None:
        """Note a loss where something does not hold."""
        if not holds:
            met = "; ".join(map(str, self.files.met[:3]))
            self.losses.append(f"{self.scenario.name}, {met}: {what}")


def copied(origin: Path, root: Path) -> None:
    root.parent.mkdir(parents=True)
    if origin.exists():
        # Files are never changed in place, so copies may share them; leases are.
        shutil.copytree(origin, root, copy_function=link)


def link(source: str, target: str) -> None:
    if "/." in source:
        shutil.copy2(source, target)
    else:
        os.link(source, target)


def run(scenario: Scenario, origin: Path, root: Path, plan: Plan) -> Case:
    """Let a scenario meet a fault, and look at all that must hold whatever the fault was."""
    copied(origin, root)
    descriptors = len(os.listdir("/proc/self/fd"))
    case = Case(scenario, root, FaultyFiles(root.parent, plan, sync=False))
    options = scenario.options or {}
    with contextlib.ExitStack() as stack:
        mgr = stack.enter_context(manager(root, **options)) if scenario.opened else None
        with case.files:
            try:
                scenario.act(root, mgr, case.hear)
            except Exception as error:
                case.error = error
            if case.files.crashed and mgr is not None:
                # The process is dead: what it would still do must not reach the disk.
                stack.close()
        check_error(case)
        if mgr is not None:
            case.expect(mgr._service.engine.arena.used == 0, "staging memory was not given back")
        if mgr is not None and not case.files.crashed:
            with FaultyFiles(root.parent, sync=False):
                check_contents(case, mgr)
                save(mgr, NEXT, NEXT).result()
                case.expect(mgr.latest_step() == NEXT, "the next save is not the latest step")
    check_reopened(case)
    left = len(os.listdir("/proc/self/fd")) - descriptors
    case.expect(left <= 0, f"{left} file descriptors were left open")
    shutil.rmtree(root.parent)
    return case


def check_error(case: Case) -> None:
    """The caller hears of the fault, by the one error that it may expect."""
    error = case.error
    for each in case.files.met:
        # A cleaner that cannot sync the root leaves the bytes where they are; that is no error.
        # Of a process that has died only the first operation failed by itself.
        is_first = each is case.files.met[0] or not case.files.crashed
        is_sync = is_first and each.name in (*SYNCS, "open") and each.path == case.root.name
        if case.scenario.name == "open" and is_sync and each.error is not None:
            # Once all of it is gone, the root is only listed, and written to by others.
            done = case.files.operations[: case.files.operations.index(each)]
            is_clean = any(op.name == "unlink" and ".ckpt-lease-" in op.path for op in done)
            what = "bytes were removed that may come back"
            case.expect(is_clean or leftovers(case.root) != [], what)
            continue
        if each.name in SYNCS and each.error is not None and each.number <= case.heard:
            case.expect(error is not None, f"passed over a failed sync of {each.path}")
    if error is None:
        return
    case.expect(isinstance(error, StorageError), f"raised {type(error).__name__}: {error}")
    if not case.files.met:
        case.expect(False, f"failed without a fault: {error}")
    if isinstance(error, StorageError) and not case.files.crashed:
        numbers = {each.error.errno for each in case.files.met if each.error is not None}
        # `os.makedirs` takes any error of the look at a directory for its being something else.
        is_look = any(each.name == "stat" for each in case.files.met)
        case.expect(error.errno in numbers or is_look, f"errno {error.errno} instead of {numbers}")
    case.expect(str(case.root) in str(error), f"names no path: {error}")
    failed: set[str] = set()
    for operation in case.files.operations:
        if operation.name in ("rename", "renameat2") and operation.error is None:
            # Its sync is for this rename, such as one that takes a step back, and no second try.
            failed.discard(case.root.name)
        if operation.name in SYNCS:
            case.expect(operation.path not in failed, f"{operation.path} was synced again")
            if operation.error is not None:
                failed.add(operation.path)


def check_contents(case: Case, mgr: ckpt.sync.CheckpointManager) -> None:
    """Nothing acknowledged is lost, nothing is there by halves."""
    scenario = case.scenario
    possible: Sequence[Entries] = scenario.done if case.error is None else scenario.failed
    faults = [each for each in case.files.met if each.error is not None]
    if case.error is not None and (case.files.crashed or len(faults) > 1):
        # What was published could not be taken back, or nobody was there to do it.
        possible = scenario.possible
    try:
        found = contents(case.root, mgr)
    except (AssertionError, CheckpointError, OSError) as error:
        case.expect(False, f"{type(error).__name__}: {error}")
        return
    if found.pop(str(NEXT), None) is not None and scenario.options:
        # That save has left room for itself.
        possible = [*possible, {}]
    case.expect(found in possible, f"found {found}, error {case.error}")


def check_reopened(case: Case) -> None:
    """A new manager needs no help, and leaves no rubbish."""
    with FaultyFiles(case.root.parent, sync=False):
        age(case.root)
        with manager(case.root) as mgr:
            left = leftovers(case.root)
            case.expect(left == [], f"left after a new manager was opened: {left}")
            if NEXT not in mgr.all_steps():
                save(mgr, NEXT, NEXT).result()
            check_contents(case, mgr)
            case.expect(mgr.latest_step() == NEXT, "the next save is not the latest step")


@contextlib.contextmanager
def watched(tally: Tally) -> Iterator[None]:
    """Count as losses the errors that nobody heard of: of loops, threads and finalizers."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tally.losses.append(f"{record.name}: {record.getMessage()}")

    def unheard(arguments: Any) -> None:
        tally.losses.append(f"nobody heard of {arguments.exc_value!r}")

    handler = Handler(logging.WARNING)
    logger = logging.getLogger("asyncio")
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = threading.excepthook = unheard
    logger.addHandler(handler)
    quiet = logging.NullHandler()
    logging.getLogger("ckpt").addHandler(quiet)
    try:
        yield
        gc.collect()
    finally:
        logger.removeHandler(handler)
        logging.getLogger("ckpt").removeHandler(quiet)
        sys.unraisablehook, threading.excepthook = hooks


def over(
    directory: Path,
    scenarios: Sequence[Scenario],
    plan_at: Callable[[int], Plan],
    count: int,
    seed: int,
) -> Tally:
    """Let scenarios meet a fault at operation 1, 2, 3, ... until one meets none.

    Where that were more than `count` runs, operations are passed over evenly; `seed` says which.
    """
    tally = Tally()
    totals: dict[str, int] = {}
    with watched(tally):
        for scenario in scenarios:
            template(scenario, directory / scenario.name / "run")
            copied(directory / scenario.name / "run", directory / "dry" / "run")
            totals[scenario.name] = len(record(scenario, directory / "dry" / "run")[0])
            shutil.rmtree(directory / "dry")
        stride = max(1, -(-sum(totals.values()) // count))
        for scenario in scenarios:
            for number in itertools.count(1 + seed % stride, stride):
                root = directory / f"{scenario.name}-{number}" / "run"
                case = run(scenario, directory / scenario.name / "run", root, plan_at(number))
                met = case.files.met
                tally += Tally(1, bool(met), case.losses)
                if not met:
                    break
    return tally


def crashes(
    directory: Path, count: int, seed: int = 0, scenarios: Sequence[Scenario] = SCENARIOS
) -> Tally:
    """Let the process die before its operation 1, 2, 3, ... of every scenario."""
    return over(directory, scenarios, lambda number: at(number, Crash()), count, seed)


def transient_errors(
    directory: Path,
    count: int,
    seed: int = 0,
    scenarios: Sequence[Scenario] = SCENARIOS,
    matching: Predicate = lambda _: True,
) -> Tally:
    """Let operation 1, 2, 3, ... that matches fail once, by all errors in turn that it may meet."""

    def plan_at(number: int) -> Plan:
        numbers = itertools.count(1)

        def plan(operation: FileOperation) -> Effect | None:
            if not matching(operation) or next(numbers) != number:
                return None
            fitting = [code for code in ERRORS if refused_by(code)(operation)]
            return Fail(fitting[(number + seed) % len(fitting)])

        return plan

    return over(directory, scenarios, plan_at, count, seed)


def is_decisive(operation: FileOperation) -> bool:
    """Tell whether a step comes, goes, or becomes durable by this operation."""
    names = ("mkdir", "rename", "renameat2", *SYNCS)
    return operation.name in names and operation.path.count("/") <= 1


def persistent_errors(
    directory: Path, count: int, seed: int = 0, scenarios: Sequence[Scenario] = SCENARIOS
) -> Tally:
    """Let operation 1, 2, 3, ... fail, and all later ones that meet the same error."""

    def plan_at(number: int) -> Plan:
        code = ERRORS[(number + seed) % len(ERRORS)]
        fitting = refused_by(code)

        def plan(operation: FileOperation) -> Effect | None:
            return Fail(code) if operation.number >= number and fitting(operation) else None

        return plan

    return over(directory, scenarios, plan_at, count, seed)


def every_fault(directory: Path, count: int, seed: int = 0) -> Tally:
    """Let every scenario meet crashes, transient and persistent errors."""
    tally = Tally()
    for number, campaign in enumerate((crashes, transient_errors, persistent_errors)):
        tally += campaign(directory / str(number), count // 3, seed)
    return tally
