"""The leader: the agent of part 0, which decides which steps are joined, and publishes them.

It begins an ordinary attempt and announces it. While it copies its own files into it, the agents of
the other parts do the same. Once all have reported, the step is an attempt like any other.
`transfer_of` makes a leader, or a follower, for a drainer.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
from msgspec.structs import replace

from ckpt._conversion.copies.step_copy import ByteCounter, Pace, is_only_cut
from ckpt._conversion.copies.step_location import StepLocation, has_files
from ckpt._conversion.copies.steps import copy_pins
from ckpt._engine.save.republication import republish
from ckpt._format.manifest import Manifest, sizes
from ckpt._format.manifest_head import FILE_NAME
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt._tiers.drains import join_notes as times
from ckpt._tiers.drains.drain import DrainBacklog, DrainResult
from ckpt._tiers.drains.drainer import DrainRoute, MakeStrategy, TransferStrategy, WholeStepTransfer
from ckpt._tiers.drains.follower import Follower
from ckpt._tiers.drains.join_notes import (
    JoinEndedError,
    JoinInProgress,
    JoinPart,
    PartNote,
    PartTransfer,
    decode_refusal,
    read_part,
    result_of_error,
    save_at,
    silent_error,
)
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
from ckpt.storage._base import Attempt
from ckpt.storage._manifests import note_branch, read_manifest

if TYPE_CHECKING:
    from ckpt._conversion.assembled_step import AssembledStep


def _assemble_step(first: Manifest, reports: Sequence[bytes], attempt: Attempt) -> AssembledStep:
    """Assemble the step that an attempt will become, in a thread; see `assemble_step`."""
    # Imported here, since an agent does without jax until there is something to join.
    from ckpt._conversion.assembled_step import AssemblyTarget, assemble_step

    return assemble_step(
        first, reports, AssemblyTarget(attempt.step_dir, attempt.id, attempt.folder)
    )


class _OtherLeaderError(CheckpointError):
    """Another agent leads the step, too, and was the last to announce it: this one gives way."""


class Leader(PartTransfer):
    """Leads the parts of steps into the root: the `TransferStrategy` of part 0."""

    def __init__(self, route: DrainRoute, pace: Pace, count: int) -> None:
        super().__init__(route, pace, 0, count)
        self._saves: dict[int, str] = {}
        # Results by save that are still to be written.
        self._untold: dict[str, DrainResult] = {}
        # Ids of the attempts that were begun here.
        self._attempts: set[str] = set()
        self._swept = -math.inf

    async def add(self, step: int, save: str) -> None:
        """Remember the save of a step, for its result after the step is gone."""
        self._saves[step] = save
        self._saves[step] = await self._save_of(step, save)

    async def next(self, backlog: DrainBacklog) -> int | None:
        """Return the next step of the backlog: the leader decides."""
        await self._tell()
        return next(iter(backlog.order), None)

    async def drain(self, step: int) -> DrainResult | None:
        began, moved = time.perf_counter(), ByteCounter()
        route, save = self._route, self._saves.get(step, "")
        source, target = (route.place(root, step) for root in (route.source, route.target))
        try:
            with located(step=step):
                part = await read_part(source, step, 0, self._count)
                save = self._saves[step] = part.manifest.save
                await self._wait_for_other_leader(save, step)
                ended = await self._join_unless_there(step, part, target, moved)
                # The retention of the root may have deleted the step already.
                with contextlib.suppress(StepNotFoundError):
                    await copy_pins(source.storage, step, target)
        except StorageError:
            raise
        except _OtherLeaderError:
            return None
        except CheckpointError as error:
            ended = result_of_error(error, step, source)
        seconds = max(time.perf_counter() - began, 0.0)
        return replace(ended, nbytes=moved.nbytes, seconds=seconds, save=save)

    async def ended(self, drained: DrainResult) -> None:
        """Publish the result of a step, and remove the notes of the other agents about it."""
        newest = self._saves.get(drained.step, "")
        save = drained.save or newest
        if save == newest:
            self._saves.pop(drained.step, None)
        if save:
            self._untold[save] = drained
            await self._tell()
            if anyio.current_time() - self._swept > times.KEPT_SECONDS:
                await self._sweep_notes()

    async def tidy(self) -> None:
        """Sweep the root and unneeded notes."""
        await self._tell()
        await self._route.target.sweep()
        await self._sweep_notes()

    async def _sweep_notes(self) -> None:
        await self._notes.sweep()
        self._swept = anyio.current_time()

    async def _tell(self) -> None:
        for save, ended in list(self._untold.items()):
            await self._notes.put_state(save, ended)
            self._untold.pop(save, None)
            await self._notes.drop(await self._notes.parts(save))

    async def _wait_for_other_leader(self, save: str, step: int) -> None:
        """Wait while another agent leads the step, for example that of a run that has ended.

        Raises:
            JoinEndedError: That agent has ended the join.
        """
        seen, heard = await self._notes.state(save), anyio.current_time()
        first, pause = seen, times.FIRST_PAUSE_SECONDS
        while isinstance(seen.state, JoinInProgress) and await self._may_live(seen.state):
            if anyio.current_time() - heard > times.STALE_SECONDS:
                return
            await anyio.sleep(pause)
            pause = min(2 * pause, times.LONGEST_PAUSE_SECONDS)
            before, seen = seen, await self._notes.state(save)
            if seen.data != before.data:
                heard = anyio.current_time()
        if isinstance(seen.state, DrainResult) and seen is not first:
            raise JoinEndedError(seen.state)

    async def _may_live(self, join: JoinInProgress) -> bool:
        """Return True if another agent may still write this attempt."""
        return join.attempt not in self._attempts and any(
            each.id == join.attempt and each.is_live is not False
            for each in await self._route.target.attempts()
        )

    async def _join_unless_there(
        self, step: int, part: JoinPart, target: StepLocation, moved: ByteCounter
    ) -> DrainResult:
        storage, save = target.storage, part.manifest.save
        found = await _target_state(save, target)
        if found == "there":
            return DrainResult(step, "there")
        is_left = False

        async def write(attempt: Attempt) -> Mapping[str, int]:
            nonlocal is_left
            try:
                with located(step=step):
                    return await self._write(part, target, attempt, moved)
            except (StorageError, _OtherLeaderError) as error:
                is_left = is_only_cut(error)
                raise
            except CheckpointError as error:
                # Write the result before the attempt is removed: otherwise the other agents first
                # find their files gone.
                with contextlib.suppress(StorageError):
                    await self._notes.put_state(save, result_of_error(error, step, part.place))
                raise
            except anyio.get_cancelled_exc_class():
                is_left = True
                raise

        async def give_up(attempt: Attempt) -> None:
            await storage.discard(attempt, joined=True, keep_files=is_left)

        try:
            with located(step=step):
                await republish(
                    storage, target.name, write, overwrite=found == "damaged", give_up=give_up
                )
        except StepExistsError:
            if await _target_state(save, target) != "there":
                raise
            return DrainResult(step, "there")
        return DrainResult(step, "copied")

    async def _write(
        self, part: JoinPart, target: StepLocation, attempt: Attempt, moved: ByteCounter
    ) -> Mapping[str, int]:
        """Write an attempt together with the agents of the other parts; return its files."""
        storage, manifest = target.storage, part.manifest
        assert manifest.step is not None
        join = JoinInProgress(manifest.step, target.name, attempt.id, self._count)
        async with anyio.create_task_group() as tasks:
            self._attempts.add(attempt.id)
            await self._notes.put_state(manifest.save, join)
            signs = itertools.count(1)
            tasks.start_soon(
                self._keep_signing,
                lambda: self._notes.put_state(manifest.save, replace(join, sign=next(signs))),
            )
            async with anyio.create_task_group() as both:
                both.start_soon(self._copy, part, target, attempt, moved)
                reports = await self._reports(manifest.save, join)
            step = await run_in_thread(_assemble_step, manifest, [part.report, *reports], attempt)
            await for_each(lambda path: storage.write(attempt, path, step.files[path]), step.files)
            await note_branch(storage, step.manifest.left_behind)
            await storage.write(attempt, FILE_NAME, step.encoded)
            tasks.cancel_scope.cancel()
        return sizes(step.manifest, step.encoded)

    async def _reports(self, save: str, join: JoinInProgress) -> list[bytes]:
        """Wait for the reports of all other parts.

        Raises:
            JoinEndedError: A part will not come, or the step is there by now.
            _OtherLeaderError: Another agent leads the step.
            StorageError: An agent is silent, or must begin again.
        """
        found: dict[int, bytes] = {}
        others, began = set(range(1, self._count)), anyio.current_time()
        looked, pause = began, times.FIRST_PAUSE_SECONDS
        while True:
            if not await self._notes.is_current(save, join.attempt):
                raise _OtherLeaderError("another agent leads the step")
            if anyio.current_time() - looked > times.LOOK_SECONDS:
                looked = anyio.current_time()
                if await save_at(self._route.target, join.step_dir) == save:
                    raise JoinEndedError(DrainResult(join.step, "there"))
            notes = await self._notes.parts(save)
            await self._look_for_refusals(join, notes)
            done = [note for note in notes if note.kind == "done" and note.attempt == join.attempt]
            for note in done:
                report = None
                if note.process in others - found.keys():
                    report = await self._notes.read(note)
                if report is not None:
                    found[note.process] = report
                    pause = times.FIRST_PAUSE_SECONDS
            if found.keys() == others:
                return [found[process] for process in sorted(others)]
            waited = anyio.current_time() - began
            silence = {
                note.process: age
                for note, age in notes.items()
                if note.kind == "alive" and note.attempt == join.attempt
            }
            silent = [
                process
                for process in sorted(others - found.keys())
                if silence.get(process, waited) > times.SILENT_SECONDS
            ]
            if silent:
                raise silent_error(_describe_processes(silent, self._count), self._where(join))
            await anyio.sleep(pause)
            pause = min(2 * pause, times.LONGEST_PAUSE_SECONDS)

    async def _look_for_refusals(self, join: JoinInProgress, notes: Collection[PartNote]) -> None:
        for note in notes:
            if not 0 < note.process < self._count:
                continue
            who = _describe_processes([note.process], self._count)
            if note.kind == "refused":
                refusal = decode_refusal(await self._notes.read(note))
                reason = None if refusal.reason is None else f"{who}: {refusal.reason}"
                raise JoinEndedError(replace(refusal, step=join.step, reason=reason))
            if note.kind == "again" and note.attempt == join.attempt:
                raise StorageError(f"{self._where(join)}: {who} could not go on, and begins again")

    def _where(self, join: JoinInProgress) -> str:
        return f"{self._route.target.location}/{join.step_dir}"


def _describe_processes(processes: Sequence[int], count: int) -> str:
    shown = ", ".join(map(str, processes))
    return f"process{'es' if len(processes) > 1 else ''} {shown} of {count}"


async def _target_state(save: str, target: StepLocation) -> str:
    """Return the state of a step's place: `nothing`, or the step: `there` or `damaged`.

    Raises:
        StepExistsError: The place holds something else.
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


def transfer_of(process: int, count: int) -> MakeStrategy:
    """Return the strategy for the steps of one process, for `draining`: several join their parts.

    Args:
        process: The number of the process whose disk is drained.
        count: Number of processes.

    Example:
        ```python
        async with draining(DrainRoute(disk, root), print, strategy=transfer_of(1, 4)) as drainer:
            await drainer.request(100)
            late = await drainer.finish(seconds=30)
        ```
    """

    def make(route: DrainRoute, pace: Pace) -> TransferStrategy:
        if count == 1:
            return WholeStepTransfer(route, pace)
        if process == 0:
            return Leader(route, pace, count)
        return Follower(route, pace, process, count)

    return make
