"""A follower: the keeper of any other part, which brings it where the leader says.

It decides nothing. It looks which of the steps that wait is being joined, copies its files into
that attempt, and reports them. Then the step waits again, until the leader says how it has ended.
"""

from __future__ import annotations

import logging
import time

import anyio
from msgspec import Struct

from ckpt._conversion.copies.place import CopyPlace
from ckpt._conversion.copies.step_copy import Pace, StepCopier
from ckpt._tiers.drains.backlog import DrainBacklog
from ckpt._tiers.drains.drain import Drained, MovedBytes
from ckpt._tiers.drains.drainer import DrainRoute
from ckpt._tiers.joins import board as times
from ckpt._tiers.joins.board import Board, silent_error
from ckpt._tiers.joins.notes import Ended, Kind, Lead, Led, PartNote, Refusal
from ckpt._tiers.joins.stored_part import StoredPart, read_part, save_at
from ckpt.errors import (
    CorruptCheckpointError,
    StepDeletedError,
    StepNotFoundError,
    StorageError,
    UnsupportedFormatError,
    located,
)
from ckpt.storage._base import Attempt, LeavesFiles
from ckpt.storage._manifests import while_read

logger = logging.getLogger("ckpt")


class _Waiting(Struct):
    """A step that waits, as far as this keeper knows it.

    Attributes:
        save: Its save; empty if that cannot be read.
        seen: The bytes of the lead when it was last looked at; None if there was none.
        is_new: Whether it was not looked at yet.
        is_known: Whether the leader knows that it has ended here.
        doubted: The bytes of an end that the root does not bear out, and until when that is not
            taken; None if there is none.
        served: The attempts for which nothing is left to do.
        begun: Those in which this keeper has begun to write.
        nbytes: Bytes that were copied.
        seconds: How long that took.
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


class Follower:
    """Brings one of the parts of each step: the `Way` of all parts but the first."""

    def __init__(self, route: DrainRoute, pace: Pace, process: int, count: int) -> None:
        """Bring the part of a process, one of that many."""
        self._route = route
        self._pace = pace
        self._process, self._count = process, count
        self._board = Board(route.target)
        self._waiting: dict[int, _Waiting] = {}
        # What is still to be refused, and what was refused, by save.
        self._unsaid: dict[str, Refusal] = {}
        self._refused: set[str] | None = None
        self._found: Lead | None = None
        # When something of what waits was last heard, and when the root was last looked at.
        self._heard = self._looked = 0.0

    async def add(self, step: int, save: str) -> None:
        """Take notice of a step."""
        try:
            save = await save_at(self._route.source, self._route.names.name(step)) or save
        except StorageError as error:
            logger.debug("step %d cannot be read: %s", step, error)
        if not self._waiting:
            self._heard = self._looked = anyio.current_time()
        if step not in self._waiting or self._waiting[step].save != save:
            self._waiting[step] = _Waiting(save)
        self._unsaid.pop(save, None)

    async def next(self, backlog: DrainBacklog) -> int | None:
        """Wait until one of the steps is being joined, or has come to its end.

        Raises:
            StorageError: The root refuses, or the leader says nothing.
        """
        pause = times.FIRST_PAUSE_SECONDS
        while backlog.waiting:
            await self._take_back()
            await self._refuse()
            is_due = anyio.current_time() - self._looked > times.LOOK_SECONDS
            for step in backlog.order:
                found = await self._look(step, in_root=is_due)
                if found is not None and step in backlog:
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

    async def drain(self, step: int) -> Drained | None:
        """Bring the part of a step, or tell how the step has ended."""
        waiting, found = self._waiting[step], self._found
        source = self._route.place(self._route.source, step)
        if isinstance(found, Ended):
            outcome = "copied" if found.is_safe and waiting.nbytes else found.outcome
            return Drained(step, outcome, waiting.nbytes, waiting.seconds, found.reason)
        assert found is not None
        began, moved = time.perf_counter(), MovedBytes()
        try:
            with located(step=step):
                part = await read_part(source, step, self._process, self._count)
                waiting.save = part.manifest.save
                async with while_read(source.storage, source.name, part.manifest):
                    await self._serve(part, found, waiting, moved)
        except StorageError:
            if not await self._board.is_led(waiting.save, found.attempt):
                return None
            raise
        except (StepNotFoundError, StepDeletedError):
            reason = f"{source.location} was deleted before it was copied"
            return Drained(step, "deleted", reason=reason)
        except (CorruptCheckpointError, UnsupportedFormatError) as error:
            return Drained(step, "damaged", reason=error.message)
        finally:
            waiting.nbytes += moved.nbytes
            waiting.seconds += max(time.perf_counter() - began, 0.0)
        return None

    async def ended(self, drained: Drained) -> None:
        """Tell the leader that a step will not come, unless it knows that."""
        waiting = self._waiting.pop(drained.step, None)
        if waiting is not None and waiting.save and not waiting.is_known:
            self._unsaid[waiting.save] = Refusal(drained.outcome, drained.reason)
            await self._refuse()

    async def tidy(self) -> None:
        """Say what is left to be said. The leader sweeps."""
        await self._refuse()

    def _note(self, save: str, attempt: str, kind: Kind) -> PartNote:
        return PartNote(save, attempt, self._process, kind)

    async def _refuse(self) -> None:
        for save, refused in list(self._unsaid.items()):
            await self._board.put(self._note(save, "", "refused"), refused)
            self._unsaid.pop(save, None)
            if self._refused is not None:
                self._refused.add(save)

    async def _take_back(self) -> None:
        """Take back refusals of steps that wait again."""
        if self._refused is None:
            # Once: an earlier run may have refused them.
            self._refused = {
                note.save
                for note in await self._board.parts()
                if note.kind == "refused" and note.process == self._process
            }
        again = self._refused & {each.save for each in self._waiting.values()}
        await self._board.drop([self._note(save, "", "refused") for save in again])
        self._refused -= again

    async def _look(self, step: int, *, in_root: bool) -> Lead | None:
        """Return what is to be done about a step; None if there is nothing yet."""
        waiting = self._waiting.get(step)
        if waiting is None:
            # It was given up just now.
            return None
        if not waiting.save:
            # Its manifest is damaged. The leader gets to know that once it wants the step.
            waiting.save = await self._board.save_led(step) or ""
            if not waiting.save:
                return None
        found = await self._board.lead(waiting.save)
        if found.data != waiting.seen:
            waiting.seen, self._heard = found.data, anyio.current_time()
        is_new, waiting.is_new = waiting.is_new, False
        lead = found.lead
        if waiting.doubted is not None and found.data != waiting.doubted[0]:
            waiting.doubted = None
        if isinstance(lead, Ended):
            if is_new and lead.is_safe and not await self._is_in_root(step, waiting.save):
                # It was removed there since, and the leader may take it up again.
                waiting.doubted = found.data, anyio.current_time() + times.STALE_SECONDS
            if waiting.doubted is not None and anyio.current_time() < waiting.doubted[1]:
                return None
            # An end from before is that of an earlier run, perhaps: its leader may be followed by
            # one that takes the step up again, and must not wait for this part.
            waiting.is_known = not is_new
            return lead
        if isinstance(lead, Led) and lead.attempt not in waiting.served:
            return lead
        if in_root and await self._is_in_root(step, waiting.save):
            # What was noted of it was missed.
            waiting.is_known = True
            return Ended(step, "there")
        return None

    async def _is_in_root(self, step: int, save: str) -> bool:
        return await save_at(self._route.target, self._route.names.name(step)) == save

    async def _serve(
        self, part: StoredPart, led: Led, waiting: _Waiting, moved: MovedBytes
    ) -> None:
        """Copy the files of a part into an attempt, and report them, unless it ends before."""
        save, storage = waiting.save, self._route.target
        if not await self._may_begin(save, led, waiting):
            return
        waiting.begun.add(led.attempt)
        attempt = await storage.join(led.step_dir, led.attempt)
        try:
            is_whole = await self._copy(part, CopyPlace(storage, led.step_dir), attempt, led, moved)
        finally:
            with anyio.CancelScope(shield=True):
                await storage.discard(attempt)
        if is_whole:
            await self._board.put(self._note(save, led.attempt, "done"), part.report)
            waiting.served.add(led.attempt)

    async def _may_begin(self, save: str, led: Led, waiting: _Waiting) -> bool:
        """Tell whether files can be written now, once no other keeper writes them.

        Another one is that of a run that has ended, say. What it had under way when it died is in
        the attempt, and cannot be written again there on a disk.
        """
        alive, done = (self._note(save, led.attempt, kind) for kind in ("alive", "done"))
        if await self._board.begin(alive):
            return True
        while led.attempt not in waiting.begun:
            notes = await self._board.parts(save)
            if done in notes:
                waiting.served.add(led.attempt)
                return False
            if not await self._board.is_led(save, led.attempt):
                return False
            if notes.get(alive, times.STALE_SECONDS) >= times.STALE_SECONDS:
                break
            await anyio.sleep(times.LONGEST_PAUSE_SECONDS)
        if isinstance(self._route.target, LeavesFiles):
            await self._board.put(self._note(save, led.attempt, "again"), b"{}")
            waiting.served.add(led.attempt)
            return False
        return True

    async def _copy(
        self, part: StoredPart, target: CopyPlace, attempt: Attempt, led: Led, moved: MovedBytes
    ) -> bool:
        """Copy the files of a part; False if the attempt has ended before."""
        copier = StepCopier(moved, pace=self._pace, goes_on=True)
        is_whole = False
        alive = self._note(part.manifest.save, led.attempt, "alive")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._sign, alive, tasks.cancel_scope)
                await copier.copy_files(part.place, part.manifest, part.files, target, attempt)
                is_whole = True
                tasks.cancel_scope.cancel()
        finally:
            copier.close()
        return is_whole

    async def _sign(self, alive: PartNote, scope: anyio.CancelScope) -> None:
        """Show that this keeper is alive, until the attempt has ended."""
        while True:
            await anyio.sleep(times.SIGN_SECONDS)
            try:
                is_wanted = await self._board.sign(alive)
                if not is_wanted or not await self._board.is_led(alive.save, alive.attempt):
                    scope.cancel()
            except StorageError as error:
                logger.debug("a sign of life was not given: %s", error)
