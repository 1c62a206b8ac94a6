"""Flush of the last snapshot to the root, as an ordinary step.

In a job, the agents of all processes join their parts. Each agent offers its snapshots, and the one
of process 0 leads the newest snapshot that all of them have.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import anyio
from msgspec import Struct

from ckpt._conversion.copies.step_location import StepLocation
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import Timeouts
from ckpt._tiers.agent.messages import FlushResult
from ckpt._tiers.drains.drain import DrainResult, drain_step
from ckpt._tiers.drains.drainer import Drainer, DrainRoute, StepNameTable, draining
from ckpt._tiers.drains.join_notes import OFFER_SIGN_SECONDS, SnapshotOffers
from ckpt._tiers.drains.leader import transfer_of
from ckpt._tiers.peers.parts import STEPS, snapshots_in
from ckpt._tiers.shared_folder import FLUSHING
from ckpt.errors import CheckpointError, StorageError
from ckpt.storage._base import Storage
from ckpt.storage._local.storage import LocalStorage

_LOOK_SECONDS = 0.5


async def flush(folder: Path, target: Storage, after: int) -> FlushResult | None:
    """Write the newest whole snapshot to the root, unless the root has a newer step.

    Args:
        folder: The folder with the snapshots.
        target: The root.
        after: The greatest step of the root.

    Returns:
        The outcome; None if there is nothing to write.

    Cancellation: nothing of the step is visible, unless it was just being published.
    """
    problem: FlushResult | None = None
    tried: set[str] = set()
    while True:
        # List again: the trainer may take another snapshot meanwhile, and remove the one before.
        found = await run_in_thread(snapshots_in, folder / STEPS)
        left = [each for each in found if each.step > after and each.step_dir not in tried]
        if not left:
            return problem
        step, step_dir = left[0].step, left[0].step_dir
        tried.add(step_dir)
        own = folder / f"{FLUSHING}{os.getpid()}"
        try:
            if not await run_in_thread(link_step, folder / STEPS / step_dir, own / step_dir):
                tried.discard(step_dir)
                continue
            source = StepLocation(LocalStorage(own, Timeouts()), step_dir)
            await target.prepare()
            done = await drain_step(step, source, StepLocation(target, step_dir))
        except CheckpointError as error:
            # The snapshot is whole; it is written once the root can be reached.
            return FlushResult(step, problem=str(error))
        finally:
            await run_in_thread(shutil.rmtree, own, True)
        why = f"step {step}: {done.problem}" if done.problem else ""
        if done.outcome in ("damaged", "deleted"):
            # An older snapshot may be whole; the fault of the newest is reported.
            problem = problem or FlushResult(step, problem=why)
            continue
        passed_over = "" if problem is None else problem.problem
        return FlushResult(step, done.seconds, done.nbytes, why, passed_over)


def link_step(source: Path, target: Path) -> bool:
    """Give a step a second name, so that it stays while it is copied; False if it is gone."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except (OSError, shutil.Error):
        if source.exists():
            raise
        return False
    return True


class JobPart(Struct, frozen=True):
    """The parts of a job's snapshots that one agent has.

    Attributes:
        folder: The folder with the parts.
        process: Number of its process.
        count: Number of processes.
    """

    folder: Path
    process: int
    count: int


async def flush_of_job(
    part: JobPart, target: Storage, after: int, seconds: float
) -> FlushResult | None:
    """Bring the newest snapshot that all processes have to the root, together with all agents.

    Args:
        part: The parts of this agent.
        target: The root.
        after: The greatest step of the root.
        seconds: Time to wait for the other agents at most.

    Returns:
        The outcome; None if the root has all snapshots of this agent.

    Raises:
        StorageError: A storage refused.

    Cancellation: nothing is left half written.
    """
    flush = _Flush(part, target, after)
    try:
        if not await flush.look():
            return None
        async with draining(
            DrainRoute(LocalStorage(flush.own, Timeouts()), target, flush.names),
            flush.note_result,
            strategy=transfer_of(part.process, part.count),
        ) as drainer:
            with anyio.move_on_after(seconds):
                await flush.run(drainer)
    finally:
        with anyio.CancelScope(shield=True):
            await flush.end()
    return flush.result(seconds)


class _Flush:
    """One flush, while it is under way."""

    def __init__(self, part: JobPart, target: Storage, after: int) -> None:
        self._part = part
        self._after = after
        self._offers = SnapshotOffers(target, part.process, part.count)
        # The snapshots are hard links, so that a trainer that goes on may remove its own.
        self.own: Path = part.folder / f"{FLUSHING}{os.getpid()}"
        self.names: StepNameTable = StepNameTable()
        self._steps: dict[int, str] = {}
        self._absent: list[int] = []
        self._drained: DrainResult | None = None
        self._is_over = anyio.Event()

    async def look(self) -> bool:
        """Link the present snapshots, and offer them; return True if there are any."""
        steps = self._part.folder / STEPS
        found = [each for each in await run_in_thread(snapshots_in, steps) if each.save]
        known = dict(self._steps)
        for each in found:
            if each.step <= self._after or self._steps.get(each.step) == each.save:
                continue
            source, link = steps / each.step_dir, self.own / each.step_dir
            if await run_in_thread(link_step, source, link):
                self._steps[each.step] = each.save
                self.names.add(each.step, each.step_dir)
        if self._steps != known:
            await self._offers.put({save: step for step, save in self._steps.items()})
        return bool(self._steps)

    async def run(self, drainer: Drainer) -> None:
        """Take part until a step is in the root."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._sign)
            tasks.start_soon(self._lead if self._part.process == 0 else self._follow, drainer)
            await self._is_over.wait()
            tasks.cancel_scope.cancel()

    async def _sign(self) -> None:
        while True:
            await anyio.sleep(OFFER_SIGN_SECONDS)
            await self._offers.sign()

    async def _lead(self, drainer: Drainer) -> None:
        """Lead the newest snapshot that all agents have, once all have made their offers."""
        tried: set[str] = set()
        while True:
            self._absent = await self._offers.missing()
            newest = None if self._absent else await self._offers.newest(tried)
            step = next((n for n, save in self._steps.items() if save == newest), None)
            if newest is not None and step is not None and not drainer.left:
                # An older snapshot follows only if some part of this one is damaged.
                tried.add(newest)
                await drainer.request(step, newest)
            await anyio.sleep(_LOOK_SECONDS)
            await self.look()

    async def _follow(self, drainer: Drainer) -> None:
        """Bring the parts of every snapshot that is led."""
        asked: set[tuple[int, str]] = set()
        while True:
            for step, save in list(self._steps.items()):
                if (step, save) not in asked:
                    asked.add((step, save))
                    await drainer.request(step, save)
            await anyio.sleep(_LOOK_SECONDS)
            await self.look()

    def note_result(self, drained: DrainResult) -> None:
        """Note the outcome of a step."""
        if self._drained is None or not self._drained.is_safe:
            self._drained = drained
        if drained.is_safe:
            self._is_over.set()

    async def end(self) -> None:
        """Withdraw the offer, and remove the links."""
        if not self._steps:
            return
        await run_in_thread(shutil.rmtree, self.own, True)
        try:
            await self._offers.drop()
        except StorageError:
            # The offer becomes stale soon.
            return

    def result(self, seconds: float) -> FlushResult:
        drained = self._drained
        if drained is not None:
            return FlushResult(drained.step, drained.seconds, drained.nbytes, drained.problem)
        count, newest = self._part.count, max(self._steps)
        if self._absent:
            shown = ", ".join(map(str, self._absent))
            why = f"the agents of processes {shown} of {count} offered no snapshot"
        elif self._part.process == 0:
            why = f"the {count} processes have no snapshot in common"
        else:
            why = f"process 0 of {count}, which decides what is written, has not written it"
        return FlushResult(newest, problem=f"{why} within {seconds:.0f} s")
