"""Saves that are cancelled at every file operation: absent or whole, and nothing goes on."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import ckpt
from ckpt.errors import CommitCancelledError
from tests.reliability.faults import copied, watched
from tests.reliability.scenarios import (
    HANDLERS,
    ONE,
    ONE_SHOT,
    SAVE,
    Scenario,
    contents,
    items_of,
    leftovers,
    manager,
    save,
    template,
)
from tests.reliability.tally import Tally
from tests.support.faults import SYNCS, WRITES, Effect, FaultyFiles, FileOperation, Wait

__all__ = ["cancelled_calls", "cancelled_commits"]

# Returns whether it was cancelled, how many operations there were when the caller heard, and those
# that were still under way.
Heard = tuple[bool, int, list[FileOperation]]
Act = Callable[[Path, FaultyFiles, "Trigger"], Heard]


# A write or sync that is under way when a save is cancelled takes so long after that.
MOMENT_S = 0.05


class Trigger:
    """Calls a function once, when a certain operation has come and the function is known."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._first: int | None = None
        self._cancel: Callable[[], object] | None = None
        self.fired = False

    def plan(self, operation: FileOperation) -> Effect | None:
        if self._first is not None and operation.number - self._first == self._number:
            self.fired = True
            if self._cancel is not None:
                self._cancel()
            if operation.name not in WRITES | SYNCS:
                return None
            gate = threading.Event()
            threading.Timer(MOMENT_S, gate.set).start()
            return Wait(gate)
        return None

    def begin(self, files: FaultyFiles) -> None:
        """Count operations from here."""
        self._first = len(files.operations)

    def calls(self, cancel: Callable[[], object]) -> None:
        """Take what is to be called; at once, where the operation has come already."""
        self._cancel = cancel
        if self.fired:
            cancel()


def cancelled_commits(directory: Path, count: int, seed: int = 0) -> Tally:
    """Cancel the commit of a save at its operation 1, 2, 3, ..."""

    def act(root: Path, files: FaultyFiles, trigger: Trigger) -> Heard:
        with manager(root) as mgr:
            trigger.begin(files)
            commit = save(mgr, 1, 1)
            trigger.calls(commit.cancel)
            cancelled = False
            try:
                commit.result()
            except CommitCancelledError:
                cancelled = True
            heard = len(files.operations)
            under_way = [each for each in files.operations if each.ended is None]
            # What still goes on behind the caller's back ends here, and would be counted.
            mgr.close()
            return cancelled, heard, under_way

    return _over(directory, SAVE, act, count, seed)


def cancelled_calls(directory: Path, count: int, seed: int = 0) -> Tally:
    """Cancel the task that awaits `ckpt.save` at operation 1, 2, 3, ..."""

    def act(root: Path, files: FaultyFiles, trigger: Trigger) -> Heard:
        async def main() -> Heard:
            loop = asyncio.get_running_loop()
            problems: list[object] = []
            loop.set_exception_handler(lambda _, context: problems.append(context))
            trigger.begin(files)
            call = ckpt.save(root / ONE, items=items_of(1), custom_metadata=1, handlers=HANDLERS)
            task = asyncio.ensure_future(call)
            trigger.calls(lambda: loop.call_soon_threadsafe(task.cancel))
            await asyncio.wait([task])
            heard = len(files.operations)
            under_way = [each for each in files.operations if each.ended is None]
            assert problems == []
            return task.cancelled(), heard, under_way

        return asyncio.run(main())

    return _over(directory, ONE_SHOT, act, count, seed)


def _over(directory: Path, scenario: Scenario, act: Act, count: int, seed: int) -> Tally:
    tally = Tally()
    template(scenario, directory / "template" / "run")
    with watched(tally):
        stride = 1 if count >= 200 else max(1, 100 // count)
        for number in itertools.count(1 + seed % stride, stride):
            if tally.runs >= count:
                break
            trigger, root = Trigger(number), directory / str(number) / "run"
            copied(directory / "template" / "run", root)
            with FaultyFiles(root.parent, trigger.plan, sync=False) as files:
                try:
                    cancelled, heard, under_way = act(root, files, trigger)
                except (Exception, CancelledError) as error:
                    tally.losses.append(f"cancelled at {number}: {error!r}")
                    continue
                after = [*under_way, *files.operations[heard:]]
            if not trigger.fired:
                break
            tally += Tally(1, cancelled, _look(scenario, root, cancelled, after, number))
            shutil.rmtree(root.parent)
    return tally


def _look(
    scenario: Scenario, root: Path, cancelled: bool, after: list[FileOperation], number: int
) -> list[str]:
    where = f"cancelled at operation {number}"
    losses = []
    if cancelled and after:
        losses.append(f"{where}: {len(after)} operations went on: {after[0]}")
    left = leftovers(root)
    if left:
        losses.append(f"{where}: left {left}")
    with manager(root, mode="r") as mgr:
        try:
            found = contents(root, mgr)
        except AssertionError as error:
            return [*losses, f"{where}: {error}"]
    wanted = scenario.failed if cancelled else scenario.done
    if cancelled and scenario is ONE_SHOT:
        # A task hears of the cancellation also where it came too late for the save.
        wanted = scenario.possible
    if found not in wanted:
        losses.append(f"{where}: found {found}")
    return losses
