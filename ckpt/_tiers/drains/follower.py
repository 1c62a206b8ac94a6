"""A follower: the agent of any part but the first, which brings it where the leader says.

It decides nothing. It looks for waiting steps that are being joined, copies its files into their
attempts, and reports them. Then the step waits again, until the leader announces the outcome.
"""

from __future__ import annotations

import time

import anyio
from msgspec import Struct
from msgspec.structs import replace

from ckpt._conversion.copies.step_copy import ByteCounter, Pace
from ckpt._conversion.copies.step_location import StepLocation
from ckpt._tiers.drains import join_notes as times
from ckpt._tiers.drains.drain import DrainBacklog, DrainResult
from ckpt._tiers.drains.drainer import DrainRoute
from ckpt._tiers.drains.join_notes import (
    JoinInProgress,
    JoinPart,
    JoinState,
    Kind,
    PartNote,
    PartTransfer,
    read_part,
    result_of_error,
    save_at,
    silent_error,
)
from ckpt.errors import CheckpointError, StorageError, located
from ckpt.storage._base import LeavesFiles
from ckpt.storage._manifests import while_read


class _Waiting(Struct):
    """A waiting step, as far as this agent knows it.

    Attributes:
        save: Its save; empty if it cannot be read.
        seen: Bytes of the leader's note at the last look; None if there was none.
        is_new: True before the first look.
        is_known: True if the leader knows that the step has ended here.
        doubted: Bytes of a result that the root contradicts, and the time at which it is accepted
            anyway; None if there is no such result.
        served: The attempts in which nothing is left to do.
        begun: The attempts in which this agent has begun to write.
        nbytes: Copied bytes.
        seconds: Duration of the copies.
    """

    save: str
    seen: bytes | None = None
    is_new: bool = True
    is_known: bool = False
    doubted: tuple[bytes | None, float] | None = None
    served: set[str] = set()
    begun: set[str] = set()
    nbytes: int = 0
    seconds: float = 0.0


class Follower(PartTransfer):
    """Brings one of the parts of each step: the `TransferStrategy` of all parts but the first."""

    def __init__(self, route: DrainRoute, pace: Pace, process: int, count: int) -> None:
        super().__init__(route, pace, process, count)
        self._waiting: dict[int, _Waiting] = {}
        # Refusals that are still to be written, and the saves of written ones.
        self._unsaid: dict[str, DrainResult] = {}
        self._refused: set[str] | None = None
        self._found: JoinState | None = None
        # Times of the last news about a waiting step, and of the last look at the root.
        self._heard = self._looked = 0.0

    async def add(self, step: int, save: str) -> None:
        save = await self._save_of(step, save)
        if not self._waiting:
            self._heard = self._looked = anyio.current_time()
        if step not in self._waiting or self._waiting[step].save != save:
            self._waiting[step] = _Waiting(save)
        self._unsaid.pop(save, None)

    async def next(self, backlog: DrainBacklog) -> int | None:
        """Wait until one of the steps is being joined, or has ended.

        Raises:
            StorageError: The root refuses, or the leader is silent.
        """
        pause = times.FIRST_PAUSE_SECONDS
        while backlog.waiting:
            await self._withdraw_refusals()
            await self._refuse()
            is_due = anyio.current_time() - self._looked > times.LOOK_SECONDS
            for step in backlog.order:
                waiting = self._waiting.get(step)
                found = await self._look(step, in_root=is_due)
                # It may have been saved anew meanwhile.
                is_same = self._waiting.get(step) is waiting
                if found is not None and is_same and step in backlog:
                    self._found = found
                    return step
            now = anyio.current_time()
            self._looked = now if is_due else self._looked
            if now - self._heard > times.SILENT_SECONDS:
                leader = f"process 0 of {self._count}, which decides what is copied,"
                raise silent_error(leader, self._route.target.location)
            await anyio.sleep(pause)
            pause = min(2 * pause, times.LONGEST_PAUSE_SECONDS)
        return None

    async def drain(self, step: int) -> DrainResult | None:
        """Bring the part of a step, or return the result of the step if it has ended."""
        waiting, found = self._waiting[step], self._found
        source = self._route.place(self._route.source, step)
        if isinstance(found, DrainResult):
            outcome = "copied" if found.is_safe and waiting.nbytes else found.outcome
            took = waiting.nbytes, waiting.seconds
            return DrainResult(step, outcome, *took, found.reason, waiting.save)
        assert found is not None
        began, moved = time.perf_counter(), ByteCounter()
        try:
            with located(step=step):
                part = await read_part(source, step, self._process, self._count)
                waiting.save = part.manifest.save
                async with while_read(source.storage, source.name, part.manifest):
                    await self._serve(part, found, waiting, moved)
        except StorageError:
            if not await self._notes.is_current(waiting.save, found.attempt):
                return None
            raise
        except CheckpointError as error:
            return replace(result_of_error(error, step, source), save=waiting.save)
        finally:
            waiting.nbytes += moved.nbytes
            waiting.seconds += max(time.perf_counter() - began, 0.0)
        return None

    async def ended(self, drained: DrainResult) -> None:
        """Tell the leader that a step will not come, unless it knows."""
        waiting = self._waiting.get(drained.step)
        if waiting is None:
            return
        save, is_known = waiting.save, waiting.is_known
        if drained.save and save not in ("", drained.save):
            # The step was saved anew, and waits again.
            save, is_known = drained.save, drained.is_safe
        else:
            del self._waiting[drained.step]
        if save and not is_known:
            self._unsaid[save] = drained
            await self._refuse()

    async def tidy(self) -> None:
        """Write refusals that are still to be written. The leader sweeps."""
        await self._refuse()

    def _note(self, save: str, attempt: str, kind: Kind) -> PartNote:
        return PartNote(save, attempt, self._process, kind)

    async def _refuse(self) -> None:
        for save, refused in list(self._unsaid.items()):
            await self._notes.put(self._note(save, "", "refused"), refused)
            self._unsaid.pop(save, None)
            if self._refused is not None:
                self._refused.add(save)

    async def _withdraw_refusals(self) -> None:
        """Withdraw refusals of steps that wait again."""
        if self._refused is None:
            # Read them once: an earlier run may have written them.
            self._refused = {
                note.save
                for note in await self._notes.parts()
                if note.kind == "refused" and note.process == self._process
            }
        again = self._refused & {each.save for each in self._waiting.values()}
        await self._notes.drop([self._note(save, "", "refused") for save in again])
        self._refused -= again

    async def _look(self, step: int, *, in_root: bool) -> JoinState | None:
        """Return the state to act on for a step; None if there is nothing to do yet."""
        waiting = self._waiting.get(step)
        if waiting is None:
            # The step was given up just now.
            return None
        if not waiting.save:
            # Its manifest is damaged. Ask for its save: the leader learns of the damage once it
            # wants the step.
            waiting.save = await self._notes.save_in_progress(step) or ""
            if not waiting.save:
                return None
        found = await self._notes.state(waiting.save)
        if found.data != waiting.seen:
            waiting.seen, self._heard = found.data, anyio.current_time()
        is_new, waiting.is_new = waiting.is_new, False
        state = found.state
        if waiting.doubted is not None and found.data != waiting.doubted[0]:
            waiting.doubted = None
        if isinstance(state, DrainResult):
            if is_new and state.is_safe and not await self._is_in_root(step, waiting.save):
                # The step was removed from the root since, and the leader may join it again.
                waiting.doubted = found.data, anyio.current_time() + times.STALE_SECONDS
            if waiting.doubted is not None and anyio.current_time() < waiting.doubted[1]:
                return None
            # A result from before the first look may be that of an earlier run: its leader may be
            # followed by one that joins the step again, and that must not wait for this part.
            waiting.is_known = not is_new
            return state
        if isinstance(state, JoinInProgress) and state.attempt not in waiting.served:
            return state
        if in_root and await self._is_in_root(step, waiting.save):
            # The note about the result was missed.
            waiting.is_known = True
            return DrainResult(step, "there")
        return None

    async def _is_in_root(self, step: int, save: str) -> bool:
        return await save_at(self._route.target, self._route.names.name(step)) == save

    async def _serve(
        self, part: JoinPart, join: JoinInProgress, waiting: _Waiting, moved: ByteCounter
    ) -> None:
        """Copy the files of a part into an attempt and report them, unless the attempt ends."""
        save, storage = waiting.save, self._route.target
        if not await self._may_begin(save, join, waiting):
            return
        waiting.begun.add(join.attempt)
        alive, is_whole = self._note(save, join.attempt, "alive"), False
        attempt = await storage.join(join.step_dir, join.attempt)
        try:
            async with anyio.create_task_group() as tasks:

                async def sign() -> None:
                    is_wanted = await self._notes.sign(alive)
                    if not is_wanted or not await self._notes.is_current(save, join.attempt):
                        tasks.cancel_scope.cancel()

                tasks.start_soon(self._keep_signing, sign)
                await self._copy(part, StepLocation(storage, join.step_dir), attempt, moved)
                is_whole = True
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await storage.discard(attempt)
        if is_whole:
            await self._notes.put(self._note(save, join.attempt, "done"), part.report)
            waiting.served.add(join.attempt)

    async def _may_begin(self, save: str, join: JoinInProgress, waiting: _Waiting) -> bool:
        """Return True if files can be written now, once no other agent writes them.

        Another agent may be that of a run that has ended. The files that it was writing when it
        died are in the attempt, and on a disk they cannot be written there again.
        """
        alive, done = (self._note(save, join.attempt, kind) for kind in ("alive", "done"))
        if await self._notes.begin(alive):
            return True
        while join.attempt not in waiting.begun:
            notes = await self._notes.parts(save)
            if done in notes:
                waiting.served.add(join.attempt)
                return False
            if not await self._notes.is_current(save, join.attempt):
                return False
            if notes.get(alive, times.STALE_SECONDS) >= times.STALE_SECONDS:
                break
            await anyio.sleep(times.LONGEST_PAUSE_SECONDS)
        if isinstance(self._route.target, LeavesFiles):
            await self._notes.put(self._note(save, join.attempt, "again"), b"{}")
            waiting.served.add(join.attempt)
            return False
        return True
