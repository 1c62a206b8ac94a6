"""The leader: the keeper of part 0, which decides what is joined, and publishes it.

It begins an ordinary attempt and says so. While it copies its own files into it, the keepers of the
other parts do the same. Once all have reported, the step is an attempt like any other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
from msgspec.structs import replace

from ckpt._conversion.copies.place import CopyPlace, has_files
from ckpt._conversion.copies.step_copy import Pace, StepCopier, is_only_cut
from ckpt._conversion.copies.steps import copy_pins
from ckpt._engine.save.republication import republish
from ckpt._format.manifest import Manifest, sizes
from ckpt._format.manifest_head import FILE_NAME
from ckpt._runtime.threads import run_in_thread
from ckpt._tiers.drains.backlog import DrainBacklog
from ckpt._tiers.drains.drain import Drained, MovedBytes, Outcome
from ckpt._tiers.drains.drainer import DrainRoute
from ckpt._tiers.joins import board as times
from ckpt._tiers.joins.board import Board, silent_error
from ckpt._tiers.joins.notes import Ended, Led, PartNote, refusal_of
from ckpt._tiers.joins.stored_part import StoredPart, read_part, save_at
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotACheckpointError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UnsupportedFormatError,
    located,
)
from ckpt.storage._base import Attempt, LeavesFiles
from ckpt.storage._manifests import note_branch, read_manifest

if TYPE_CHECKING:
    from ckpt._conversion.joined.joined_step import JoinedStep

logger = logging.getLogger("ckpt")


def _joined_step(first: Manifest, reports: Sequence[bytes], attempt: Attempt) -> JoinedStep:
    """Make the step that an attempt will become, in a thread; see `joined_step`."""
    # Here, since a keeper does without jax until there is something to join.
    from ckpt._conversion.joined.joined_step import JoinPlace, joined_step

    return joined_step(first, reports, JoinPlace(attempt.step_dir, attempt.id, attempt.folder))


class _EndedError(CheckpointError):
    """The step was ended by another keeper; carries how."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended.reason or ended.outcome)
        self.ended = ended


class _OutdoneError(CheckpointError):
    """Another keeper leads the step, too, and was the last to say so: this one gives way."""


class Leader:
    """Leads the parts of steps into the root: the `Way` of part 0."""

    def __init__(self, route: DrainRoute, pace: Pace, count: int) -> None:
        """Lead that many parts."""
        self._route = route
        self._pace = pace
        self._count = count
        self._board = Board(route.target)
        self._saves: dict[int, str] = {}
        # What is still to be said of saves.
        self._untold: dict[str, Ended] = {}
        # The ids of those that were begun here.
        self._attempts: set[str] = set()
        self._swept = -math.inf

    async def add(self, step: int, save: str) -> None:
        """Remember which save a step is of, for what has to be said once it is gone."""
        route = self._route
        self._saves[step] = save
        try:
            self._saves[step] = await save_at(route.source, route.names.name(step)) or save
        except StorageError as error:
            logger.debug("step %d cannot be read: %s", step, error)

    async def next(self, backlog: DrainBacklog) -> int | None:
        """Return the step that is next in the backlog: the leader decides."""
        await self._tell()
        return next(iter(backlog.order), None)

    async def drain(self, step: int) -> Drained | None:
        """Join a step."""
        began, moved = time.perf_counter(), MovedBytes()
        route = self._route
        source, target = (route.place(root, step) for root in (route.source, route.target))
        try:
            with located(step=step):
                part = await read_part(source, step, 0, self._count)
                save = self._saves[step] = part.manifest.save
                await self._give_way(save, step)
                ended = await self._joined(step, part, target, moved)
                # The retention of the root may have deleted it already.
                with contextlib.suppress(StepNotFoundError):
                    await copy_pins(source.storage, step, target)
        except StorageError:
            raise
        except _OutdoneError:
            return None
        except CheckpointError as error:
            ended = _end_by(error, step, source)
        seconds = max(time.perf_counter() - began, 0.0)
        return Drained(step, ended.outcome, moved.nbytes, seconds, ended.reason)

    async def ended(self, drained: Drained) -> None:
        """Tell the others what has become of a step, and remove what they have said of it."""
        save = self._saves.pop(drained.step, "")
        if save:
            self._untold[save] = Ended(drained.step, drained.outcome, drained.reason)
            await self._tell()
            if anyio.current_time() - self._swept > times.KEPT_SECONDS:
                await self._sweep_notes()

    async def tidy(self) -> None:
        """Sweep the root, and notes that are needed no more."""
        await self._tell()
        await self._route.target.sweep()
        await self._sweep_notes()

    async def _sweep_notes(self) -> None:
        await self._board.sweep()
        self._swept = anyio.current_time()

    async def _tell(self) -> None:
        for save, ended in list(self._untold.items()):
            await self._board.put_lead(save, ended)
            self._untold.pop(save, None)
            await self._board.drop(await self._board.parts(save))

    async def _give_way(self, save: str, step: int) -> None:
        """Wait while another keeper leads the step: that of a run that has ended, say.

        Raises:
            _EndedError: It has brought it to its end.
        """
        seen, heard = await self._board.lead(save), anyio.current_time()
        first, pause = seen, times.FIRST_PAUSE_SECONDS
        while isinstance(seen.lead, Led) and await self._may_live(seen.lead):
            if anyio.current_time() - heard > times.STALE_SECONDS:
                return
            await anyio.sleep(pause)
            pause = min(2 * pause, times.LONGEST_PAUSE_SECONDS)
            before, seen = seen, await self._board.lead(save)
            if seen.data != before.data:
                heard = anyio.current_time()
        if isinstance(seen.lead, Ended) and seen is not first:
            raise _EndedError(seen.lead)

    async def _may_live(self, led: Led) -> bool:
        """Tell whether another keeper may still write the attempt of a lead."""
        return led.attempt not in self._attempts and any(
            each.id == led.attempt and each.is_live is not False
            for each in await self._route.target.attempts()
        )

    async def _joined(
        self, step: int, part: StoredPart, target: CopyPlace, moved: MovedBytes
    ) -> Ended:
        """Join a step, unless it is there."""
        storage, save = target.storage, part.manifest.save
        found = await _found(save, target)
        if found == "there":
            return Ended(step, "there")
        is_left = False

        async def write(attempt: Attempt) -> Mapping[str, int]:
            nonlocal is_left
            try:
                with located(step=step):
                    return await self._write(part, target, attempt, moved)
            except (StorageError, _OutdoneError) as error:
                is_left = is_only_cut(error)
                raise
            except CheckpointError as error:
                # Before the attempt is removed: otherwise the others find their files gone, first.
                with contextlib.suppress(StorageError):
                    await self._board.put_lead(save, _end_by(error, step, part.place))
                raise
            except anyio.get_cancelled_exc_class():
                is_left = True
                raise

        async def give_up(attempt: Attempt) -> None:
            if is_left and isinstance(storage, LeavesFiles):
                await storage.leave(attempt)
            else:
                await storage.discard(attempt, joined=True)

        try:
            with located(step=step):
                await republish(
                    storage, target.name, write, overwrite=found == "damaged", give_up=give_up
                )
        except StepExistsError:
            if await _found(save, target) != "there":
                raise
            return Ended(step, "there")
        return Ended(step, "copied")

    async def _write(
        self, part: StoredPart, target: CopyPlace, attempt: Attempt, moved: MovedBytes
    ) -> Mapping[str, int]:
        """Write an attempt together with the keepers of the other parts; return its files."""
        storage, manifest = target.storage, part.manifest
        assert manifest.step is not None
        led = Led(manifest.step, target.name, attempt.id, self._count)
        async with anyio.create_task_group() as tasks:
            self._attempts.add(attempt.id)
            await self._board.put_lead(manifest.save, led)
            tasks.start_soon(self._sign, manifest.save, led)
            async with anyio.create_task_group() as both:
                both.start_soon(self._copy, part, target, attempt, moved)
                reports = await self._reports(manifest.save, led)
            step = await run_in_thread(_joined_step, manifest, [part.report, *reports], attempt)
            async with anyio.create_task_group() as writes:
                for path, data in step.files.items():
                    writes.start_soon(storage.write, attempt, path, data)
            await note_branch(storage, step.manifest.left_behind)
            await storage.write(attempt, FILE_NAME, step.encoded)
            tasks.cancel_scope.cancel()
        return sizes(step.manifest, step.encoded)

    async def _copy(
        self, part: StoredPart, target: CopyPlace, attempt: Attempt, moved: MovedBytes
    ) -> None:
        copier = StepCopier(moved, pace=self._pace, goes_on=True)
        try:
            await copier.copy_files(part.place, part.manifest, part.files, target, attempt)
        finally:
            copier.close()

    async def _sign(self, save: str, led: Led) -> None:
        """Show that this keeper is alive, for ever."""
        while True:
            await anyio.sleep(times.SIGN_SECONDS)
            led = replace(led, sign=led.sign + 1)
            try:
                await self._board.put_lead(save, led)
            except StorageError as error:
                logger.debug("a sign of life was not given: %s", error)

    async def _reports(self, save: str, led: Led) -> list[bytes]:
        """Wait for the reports of all other parts.

        Raises:
            _EndedError: One of them will not come, or the step is there by now.
            _OutdoneError: Another keeper leads it.
            StorageError: A keeper says nothing, or has to begin again.
        """
        found: dict[int, bytes] = {}
        others, began = set(range(1, self._count)), anyio.current_time()
        looked, pause = began, times.FIRST_PAUSE_SECONDS
        while True:
            if not await self._board.is_led(save, led.attempt):
                raise _OutdoneError("another keeper leads the step")
            if anyio.current_time() - looked > times.LOOK_SECONDS:
                looked = anyio.current_time()
                if await save_at(self._route.target, led.step_dir) == save:
                    raise _EndedError(Ended(led.step, "there"))
            notes = await self._board.parts(save)
            await self._look_for_refusals(led, notes)
            done = [note for note in notes if note.kind == "done" and note.attempt == led.attempt]
            for note in done:
                report = None
                if note.process in others - found.keys():
                    report = await self._board.read(note)
                if report is not None:
                    found[note.process] = report
                    pause = times.FIRST_PAUSE_SECONDS
            if found.keys() == others:
                return [found[process] for process in sorted(others)]
            waited = anyio.current_time() - began
            silence = {
                note.process: age
                for note, age in notes.items()
                if note.kind == "alive" and note.attempt == led.attempt
            }
            silent = [
                process
                for process in sorted(others - found.keys())
                if silence.get(process, waited) > times.SILENT_SECONDS
            ]
            if silent:
                raise silent_error(_named(silent, self._count), self._where(led))
            await anyio.sleep(pause)
            pause = min(2 * pause, times.LONGEST_PAUSE_SECONDS)

    async def _look_for_refusals(self, led: Led, notes: Collection[PartNote]) -> None:
        for note in notes:
            if not 0 < note.process < self._count:
                continue
            who = _named([note.process], self._count)
            if note.kind == "refused":
                refusal = refusal_of(await self._board.read(note))
                reason = None if refusal.reason is None else f"{who}: {refusal.reason}"
                raise _EndedError(Ended(led.step, refusal.outcome, reason))
            if note.kind == "again" and note.attempt == led.attempt:
                raise StorageError(f"{self._where(led)}: {who} could not go on, and begins again")

    def _where(self, led: Led) -> str:
        return f"{self._route.target.location}/{led.step_dir}"


def _end_by(error: CheckpointError, step: int, source: CopyPlace) -> Ended:
    """Return how an error that is not one of a storage ends a step."""
    if isinstance(error, _EndedError):
        return error.ended
    if isinstance(error, StepNotFoundError):
        return Ended(step, "deleted", f"{source.location} was deleted before it was copied")
    outcome: Outcome = "blocked" if isinstance(error, StepExistsError) else "damaged"
    return Ended(step, outcome, error.message)


def _named(processes: Sequence[int], count: int) -> str:
    shown = ", ".join(map(str, processes))
    return f"process{'es' if len(processes) > 1 else ''} {shown} of {count}"


async def _found(save: str, target: CopyPlace) -> str:
    """Return what is where a step goes: `nothing`, or the step, `there` or `damaged`.

    Raises:
        StepExistsError: Something else is there.
    """
    try:
        found = await read_manifest(target.storage, target.name)
    except NotACheckpointError:
        return "nothing"
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        raise StepExistsError(f"{error.message}. It is never replaced: delete it") from error
    if found.save != save:
        raise StepExistsError(
            f"{target.location} is another step of that number, which is not replaced"
        )
    return "there" if await has_files(found, target) else "damaged"
