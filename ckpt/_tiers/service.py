"""`TieredService`: the service of a run whose steps are in several places.

It is the service of the nearest place on a storage, to which saves go, with the other places in
addition. Snapshots go to memory, and reads take a step from the nearest place that has it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, SupportsIndex

import anyio

from ckpt._arguments import check_step
from ckpt._commit import Commit, StepInfo
from ckpt._format.manifest_head import Aside, ReplacedSave
from ckpt._redaction import redact
from ckpt._runtime.loop import Job, call_once
from ckpt._steps.opened import shortened
from ckpt._steps.pins import Pin
from ckpt._steps.run_hooks import RunHooks
from ckpt._steps.service import RootService
from ckpt._tiers.agent.client import AgentClient
from ckpt._tiers.memory import MemoryTier
from ckpt._tiers.reader import TieredReader
from ckpt._tiers.tier_drains import TierDrains
from ckpt.errors import CheckpointError, InvalidArgumentError, StepNotFoundError, StorageError
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

# Time for the agent to report its end, beside the time that saves have at the end.
_LAST_WORDS_SECONDS = 15.0


class TieredService(RootService):
    """The service of a run with tiers. Its coroutines run on the engine's loop.

    Attributes:
        memory: Snapshots in memory, if there are any.
        drains: Copies steps from place to place, if there are several on a storage.
        services: The places on a storage, the nearest first, the root last.
    """

    def __init__(
        self,
        root: RootService,
        near: Sequence[RootService],
        memory: MemoryTier | None,
        drains: TierDrains | None,
        agent: AgentClient,
    ) -> None:
        """Serve a root, and the nearer places.

        Args:
            root: The last and safest place, which other programs see.
            near: Places on a storage, the nearest first.
            memory: Snapshots in memory.
            drains: Copies steps from place to place.
            agent: Client of the agent that makes these copies.
        """
        saver = near[0] if near else root
        self._nearest = TieredReader(root, self._tiers)
        # In all that is not said otherwise here, it is the service of the nearest place.
        super().__init__(
            saver.run, saver.engine, saver.root, saver.saves, self._nearest, root.trash
        )
        self.memory = memory
        self.drains = drains
        self.services: list[RootService] = [*near, root]
        self._saver, self._root = saver, root
        self._agent = agent
        self._exit_seconds = root.root.options.timeouts.exit
        self._is_open = False
        # Places that a warning has named because they could not be listed.
        self._said_untidy: list[RootService] = []
        # Set on the engine's loop.
        self._opening: anyio.Lock | None = None

    @property
    def places(self) -> list[RootService]:
        """All places, the nearest first."""
        return self.services if self.memory is None else [self.memory.service, *self.services]

    @property
    def storage(self) -> Storage:
        """Storage of the root."""
        return self._root.storage

    async def _tiers(self) -> Sequence[RootService]:
        await self.open()
        has_memory = self.memory is None or await self.memory.open()
        return self.places if has_memory else self.services

    async def open(self) -> None:
        """Open all places; further calls do nothing."""
        self._opening = self._opening or anyio.Lock()
        async with self._opening:
            if not self._is_open:
                await self._open()
                self._is_open = True

    async def _open(self) -> None:
        for each in self.services:
            await each.open()
        if self.memory is not None and await self.memory.open():
            self.memory.saved_already(await self._root.reader.latest_step())
        if self.drains is not None:
            await self.drains.open()
            # Tidy for steps that arrived after the end of the run before.
            await self._tidy(self.services)

    async def _tidy(self, places: Sequence[RootService]) -> None:
        """Delete superfluous steps at some places, after steps have arrived or gone on."""
        for each in places:
            try:
                await each.tidy()
            except StorageError as error:
                if each not in self._said_untidy:
                    self._said_untidy.append(each)
                    where = redact(each.storage.location)
                    logger.warning("%s: what is not kept there stays for now: %s", where, error)

    async def _tidy_in_time(self, places: Sequence[RootService]) -> None:
        """Do the same at the end of a run, within the time limit."""
        with anyio.move_on_after(self._exit_seconds):
            await self._tidy(places)

    def start_snapshot(
        self, step: SupportsIndex, *saved: Any
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Start a snapshot; see `MemoryTier.start`."""
        memory = self.memory
        return super().start_snapshot(step) if memory is None else memory.start(step, *saved)

    async def prefetch(self, step: int | None) -> StepInfo:
        """Bring a step to the nearest place on a storage; see the managers."""
        if self.drains is None:
            return await super().prefetch(step)
        count = self._root.root.processes.count
        if count > 1:
            raise InvalidArgumentError(
                f"prefetch(): a step is copied back whole, and in this job each of {count} "
                "processes keeps its part. restore() reads it from the root"
            )
        number, holders = await self._nearest.holders(None if step is None else check_step(step))
        places = [self.services.index(each) for each in holders if each in self.services]
        if not places:
            raise StepNotFoundError(
                "it is only a snapshot in memory, which is nearer than any tier: save() the step",
                step=number,
            )
        await self.drains.fetches.fetch(number, [place for place in places if place > 0])
        near = (await self._saver.reader.metadata(number)).info
        every = (await self.reader.metadata(number)).info
        return replace(near, tiers=every.tiers)

    async def idle(self) -> None:
        """Wait until every save and every snapshot that was started has ended."""
        for each in self.places:
            await each.idle()

    @property
    def saving(self) -> list[int]:
        return [step for each in self.places for step in each.saving]

    def listen(self) -> None:
        """Handle signals from now on, if this is the main thread."""
        super().listen()
        self._agent.tap_signals()

    def stop_listening(self) -> None:
        """Put back the signal handlers that were there before `listen`."""
        super().stop_listening()
        self._agent.untap_signals()

    async def reload(self) -> None:
        """Forget everything that was read."""
        for each in self.places:
            await each.reload()

    async def pin(self, step: int, name: str) -> None:
        """Protect a step from deletion in every place on a storage that has it."""
        holders = await self._holders(step)
        for each in holders or [self._root]:
            await each.pin(step, name)

    async def unpin(self, step: int, name: str) -> bool:
        """Remove a pin from every place; return True if there was one."""
        return any([await each.unpin(step, name) for each in self.services])

    async def pins(self) -> dict[int, tuple[Pin, ...]]:
        """Return the pinned steps, with the pins at the first place that has any for the step."""
        found: dict[int, tuple[Pin, ...]] = {}
        for each in reversed(self.services):
            found |= await each.pins()
        return dict(sorted(found.items()))

    async def delete(self, step: int, item: str | None) -> None:
        """Delete a step, or one item of it, from all places."""
        memory = self.memory
        holders = await self._holders(step)
        has_memory = memory is not None and await memory.open()
        if memory is not None and has_memory and step in await memory.service.reader.all_steps():
            holders.append(memory.service)
        for each in holders or [self._root]:
            await each.delete(step, item)
        if memory is not None and has_memory:
            await memory.deleted(step)
            # If this step was the newest, snapshots of smaller steps must be written again.
            memory.saved_already(await self._root.reader.latest_step())

    async def _holders(self, step: int) -> list[RootService]:
        number = check_step(step)
        return [each for each in self.services if number in await each.reader.all_steps()]

    async def undelete(self, step: int) -> None:
        await self._root.undelete(step)

    async def empty_trash(self, older_than: float) -> list[int]:
        """Remove steps that were deleted at least so many seconds ago; return their numbers."""
        return await self._root.empty_trash(older_than)

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """Wait for saves and snapshots, copy on the steps that wait, and release the memory.

        Args:
            timeout: Seconds to wait at most for saves; None waits without limit.
            failed: True if an exception ends the run: the last snapshot is then written to the root
                first, unless a newer step is there; otherwise, unless a newer one was saved.
        """
        done = self._saver.close(timeout)
        if self.run.loop.is_forked:
            # In a forked child, the agent and the memory belong to the parent.
            return done
        memory, ended = self.memory, False
        late: tuple[int, ...] = ()
        newest = None if memory is None else memory.left()
        flush = memory is not None and memory.flushes and (failed or newest is not None)
        if failed and flush and memory is not None and memory.is_of_job:
            # The other processes may not know yet that this one has failed.
            memory.leave()
            self._agent.leave()
        else:
            seconds = self._exit_seconds + _LAST_WORDS_SECONDS
            ended, late = self._agent.close(flush=flush, timeout=seconds)
            if memory is not None:
                memory.close(newest, failed=failed, ended=ended)
        left = [] if self.drains is None else self.drains.given_up(late)
        if left:
            logger.warning(
                "%s: steps %s were not copied there in time; they stay at %s, and the next "
                "run goes on with them",
                redact(self.storage.location),
                shortened(left),
                redact(self._saver.storage.location),
            )
        if done and ended and (flush or (self.drains is not None and self.drains.is_untidy)):
            # The loop of the run has ended. A root that some steps did not reach may be away.
            with contextlib.suppress(CheckpointError):
                call_once(
                    partial(self._tidy_in_time, self.services[:-1] if left else self.services)
                )
        return done


class TierHooks(RunHooks):
    """What a run with tiers does beside the saves of one of its places on a storage."""

    def __init__(self, run: Callable[[], TieredService], leg: int = 0) -> None:
        """Take part at a place; `run` returns the service of all places, `leg` is its number."""
        self._run = run
        self._leg = leg

    def protected(self) -> Collection[int]:
        drains = self._run().drains
        # A step is there before its save knows it, and the place may be tidied just then.
        joined = self._run().services[self._leg].saves.joined
        return joined if drains is None else drains.waiting(self._leg).union(joined)


class SaverHooks(TierHooks):
    """The same at the nearest place on a storage, to which saves go."""

    def committed(self, info: StepInfo, save: str, commit: Commit) -> bool:
        run = self._run()
        if run.memory is not None:
            run.memory.saved(info, in_root=run.drains is None)
        if run.drains is not None:
            run.drains.committed(info, save, commit)
        return run.drains is None

    async def before_publish(self, step: int, replaces_any: bool) -> Sequence[ReplacedSave]:
        """Return the saves of a step, at any place, that give way to the one that begins."""
        found: dict[tuple[int, int], ReplacedSave] = {}
        indices = [each.root.index for each in self._run().services]
        if len(indices) < 2:
            return ()
        bad = {each.passed_over[step] for each in indices if step in each.passed_over}
        if not replaces_any and not bad:
            return ()
        for index in indices:
            # A place that is away will report, when it is back, that another step is there.
            with contextlib.suppress(StorageError):
                for step_dir in await index.step_dirs_of(step):
                    there = await index.look(step_dir)
                    if there is None or there.is_foreign:
                        continue
                    states = (it.state for it in bad if it.attempt == there.attempt)
                    state: Aside = next(states, "")
                    if replaces_any or state:
                        times = there.created_ns, there.committed_ns
                        found.setdefault(times, ReplacedSave(*times, state=state))
        return list(found.values())

    async def before_retention(self, step: int) -> bool:
        """Let a step be copied on before its tier is tidied."""
        run = self._run()
        if run.drains is None:
            return True
        try:
            await run.open()
            await run.drains.send_on(0, step)
        except CheckpointError as error:
            where = redact(run.services[0].storage.location)
            logger.warning("step %d stays at %s for now: %s", step, where, error)
            run.drains.undecided(step, error)
            return False
        for each in run.services[1:]:
            # This comes after the commit, which does not wait for a place that is away: that place
            # gets its notes with a later step.
            with contextlib.suppress(StorageError):
                await each.root.begin()
        return True


class MemoryHooks(RunHooks):
    """What a run does beside its snapshots."""

    def __init__(self, run: Callable[[], TieredService]) -> None:
        """Take part at the memory; `run` returns the service of all places."""
        self._run = run

    async def before_save(self, step: int) -> None:
        # All processes of a job open the memory together.
        await self._run().open()
        if memory := self._run().memory:
            await memory.remove_later_snapshots(step)

    async def before_retention(self, step: int) -> bool:
        memory = self._run().memory
        return memory is None or await memory.copied(step)
