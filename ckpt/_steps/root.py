"""`Root`: one root below its saves: what it holds, what may be saved to it, what stays in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
from msgspec.structs import replace

from ckpt._arguments import check_step
from ckpt._engine.save.request import SaveRequest
from ckpt._events import EventRecorder, Observer
from ckpt._format.history import ReplacedSave
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import StepIndex
from ckpt._steps.misplaced import say_misplaced
from ckpt._steps.pins import forget_expired
from ckpt._steps.previous_steps import PreviousSteps, saved_step
from ckpt._steps.processes import Processes
from ckpt._steps.removal.retention import Retention
from ckpt._steps.root_metadata import write_root_metadata
from ckpt.errors import CheckpointError, ReadOnlyError, StorageError
from ckpt.policies._context import SaveContext
from ckpt.policies._save_policies import SavePolicyLike, refusal_of
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage
from ckpt.storage._manifests import note_branch

logger = logging.getLogger("ckpt")

# Of many steps that are left behind, the greatest are named: 20 bytes each in the list of steps.
_MOST_BEHIND = 4096


class Root:
    """One root. Its coroutines run on the engine's loop.

    Attributes:
        storage: Where it is.
        names: How the directories of its steps are called.
        index: Its committed steps.
        processes: The processes that use it.
        retention: Deletes its steps.
        is_read_only: Whether nothing may be written.
        log_level: The level of the line about each save.
    """

    def __init__(
        self,
        storage: Storage,
        names: StepNames,
        index: StepIndex,
        processes: Processes,
        retention: Retention,
        *,
        save_policy: SavePolicyLike | None,
        metadata: Mapping[str, Any] | None,
        read_only: bool,
        must_exist: bool = False,
        observers: tuple[Observer, ...],
        log_level: int = logging.INFO,
    ) -> None:
        """Take the parts of a root; does no input or output."""
        self.storage = storage
        self.names = names
        self.index = index
        self.processes = processes
        self.retention = retention
        self._save_policy = save_policy
        self._metadata = metadata
        self.is_read_only = read_only
        self._must_exist = must_exist
        self._observers = observers
        self.log_level = log_level
        # Told a step and whether it is overwritten; returns the saves that make way for it, of all
        # places to which steps are copied on from here.
        self.replaced: Callable[[int, bool], Awaitable[Sequence[ReplacedSave]]] = _nothing
        self._opened = False
        self._swept = 0.0

    @property
    def has_policy(self) -> bool:
        """Whether a policy decides about saves."""
        return self._save_policy is not None

    def refuse_writing(self) -> None:
        """Raise if nothing may be written.

        Raises:
            ReadOnlyError: The manager was opened so.
        """
        if self.is_read_only:
            raise ReadOnlyError(f"{self.storage.location} was opened with read_only=True")

    async def open(self) -> None:
        """Make the root, and remove what dead writers left in it; only the first call does."""
        if not self._opened:
            await self.processes.open(self._open)
            self._opened = True

    async def _open(self) -> None:
        if not self.is_read_only:
            await self.storage.prepare()
            await self._sweep()
            await write_root_metadata(self.storage, self._metadata)
            await self.retention.prepare()
            await self.retention.write_down()
        # Raises where there is no root, and none is to be made.
        count, latest = await self.index.overview()
        if not count and not self.index.unreadable:
            await say_misplaced(self.storage, self.index, raises=self._must_exist)
        steps = f"1 step: {latest}" if count == 1 else f"{count} steps, the latest {latest}"
        where = redact(self.storage.location)
        logger.log(self.log_level, "%s: %s", where, steps if count else "no steps yet")

    async def _sweep(self) -> None:
        """Remove what dead writers left in the root."""
        self._swept = time.monotonic()
        removed = await self.storage.sweep()
        try:
            await forget_expired(self.storage)
        except StorageError as error:
            # In a shared root these files may belong to another user.
            logger.warning("pins that have run out were left: %s", error)
        if removed:
            logger.debug("removed %d attempts of dead writers: %s", len(removed), removed)

    async def refusal(self, step: int, context: SaveContext) -> str | None:
        """Return why the save policy turns `step` down, or None."""
        if self._save_policy is None:
            return None
        previous = PreviousSteps(self.index)
        # In a thread, because a policy may be slow, or look at earlier steps. Shielded, because
        # those are read on this loop, where a cancelled scope could read nothing; and because a
        # thread cannot be interrupted anyway.
        with anyio.CancelScope(shield=True):
            found = await run_in_thread(refusal_of, self._save_policy, step, previous, context)
        return found

    async def has(self, step: int) -> bool:
        """Return whether a step is there that a save of the same number would not replace."""
        passed_over = self.index.passed_over.get(step)
        found = [await self.index.look(each) for each in await self.index.step_dirs_of(step)]
        return any(
            each is not None and (passed_over is None or each.attempt != passed_over.attempt)
            for each in found
        )

    async def newest_time(self) -> float | None:
        """Return when the save of the latest committed step began, in Unix seconds."""
        latest = await self.index.latest()
        return None if latest is None else saved_step(latest).time

    async def other_step_dirs(self, step: int) -> list[str]:
        """Return the step directories of `step` under other names than the one it is written to."""
        if isinstance(self.names, Standard):
            # It gives a step one name only, so nothing needs to be looked at.
            return []
        written = self.names.name(step)
        return [step_dir for step_dir in await self.index.step_dirs_of(step) if step_dir != written]

    async def branched(self, request: SaveRequest, restored: int | None) -> SaveRequest:
        """Return a request that names the saves that make way for it, and those it leaves behind.

        Those are of greater steps, where the run went on from a smaller one. Of a program that has
        restored nothing, or this very step, it is not known that it goes back.
        """
        step = check_step(request.step)
        request = replace(request, replaces=await self.replaced(step, request.overwrite))
        # The places are listed only where greater steps were seen before, or saved.
        places = self.index, *self.index.others
        seen = max(*(each.greatest for each in places), self.retention.newest or 0)
        if restored is None or not restored < step < seen:
            return request
        saves = {each.created_ns: each.step for each in await self.index.everywhere()}
        behind = [each for each in sorted(saves, key=lambda it: -saves[it]) if saves[each] > step]
        await note_branch(self.storage, behind)
        return replace(request, left_behind=behind[:_MOST_BEHIND])

    async def preserve(self, saved: int) -> None:
        """Delete what the policy does not keep; a failure is logged, since the save is done.

        From time to time it also removes what writers on other machines left when they vanished,
        once their leases have run out.
        """
        try:
            going = await self.processes.superfluous(saved, self.retention)
            if time.monotonic() - self._swept > self.storage.lease_seconds:
                await self._sweep()
            with EventRecorder("save", saved, self._observers).phase("preserve"):
                await self.retention.preserve(going)
        except CheckpointError as error:
            logger.warning("steps that are no longer kept could not be deleted: %s", error)
        except Exception:
            logger.warning("steps that are no longer kept could not be deleted", exc_info=True)


async def _nothing(step: int, overwrite: bool) -> Sequence[ReplacedSave]:
    return ()
