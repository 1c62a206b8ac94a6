"""One root, as coroutines of the engine's loop: what to save, what to keep, who hears of errors.

The asyncio and the plain manager are two faces of this one object. No bytes move here.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import anyio

from ckpt._arguments import check_step
from ckpt._commit import Commit
from ckpt._engine.engine import Engine
from ckpt._events import EventRecorder
from ckpt._redaction import redact
from ckpt._runtime.exit import fail_exit
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._settings import Timeouts
from ckpt._steps.index import StepIndex
from ckpt._steps.late_statistics import drop_orphans
from ckpt._steps.own_disks import act_if_common, delete_anywhere, superfluous_everywhere
from ckpt._steps.pins import (
    Pin,
    forget_expired,
    pin,
    pins,
    unpin,
)
from ckpt._steps.previous_steps import PreviousSteps, saved_step
from ckpt._steps.reader import StepReader
from ckpt._steps.retention import Retention
from ckpt._steps.root_metadata import read_root_metadata, write_root_metadata
from ckpt._steps.saves.backlog import BacklogPolicy
from ckpt._steps.saves.partial import OpenSave, PartialSaves, partial_request
from ckpt._steps.saves.preemption import Preemption
from ckpt._steps.saves.queue import SaveQueue
from ckpt._steps.saves.requests import make_request
from ckpt.coordination._peers import Peers
from ckpt.errors import (
    CheckpointError,
    InvalidArgumentError,
    ReadOnlyError,
    StorageError,
)
from ckpt.policies import (
    Deletion,
    PreservationPolicyLike,
    SaveContext,
    SavePolicyLike,
    ranking_of,
    refusal_of,
)
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage

__all__ = ["RootService"]

logger = logging.getLogger("ckpt")

# For input and output under way to end, and what was written to be removed.
_GIVING_UP_SECONDS = 0.5


class RootService:
    """Saves to and restores from one root. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        loop: EngineLoop,
        storage: Storage,
        engine: Engine,
        *,
        save_policy: SavePolicyLike | None,
        preservation: PreservationPolicyLike,
        deletion: Deletion,
        names: StepNames,
        metadata: Mapping[str, Any] | None,
        backlog: BacklogPolicy,
        read_only: bool,
        timeouts: Timeouts,
        preemption: Preemption,
        peers: Peers,
    ) -> None:
        """Serve the root of `storage`, together with the other processes of the job."""
        self.loop = loop
        self.storage = storage
        self._names = names
        self._peers = peers
        self.preemption = preemption
        self._timeouts = timeouts
        self._read_only = read_only
        self._engine = engine
        self._save_policy = save_policy
        self._metadata = metadata
        self._opened = False
        self._swept = 0.0
        self._index = StepIndex(storage, names)
        self.saves = SaveQueue(loop, storage, engine, backlog, preemption, peers)
        self._retention = Retention(
            storage,
            self._index,
            preservation,
            deletion,
            engine.observers,
            engine.now_ns,
            self.saves.moments,
        )
        self.reader = StepReader(storage, self._index, engine, ranking_of(preservation), peers)
        self._partials = PartialSaves(loop, storage, engine, self.saves)

    def start_save(
        self,
        step: int,
        state: Any,
        items: Mapping[str, Any] | None,
        metrics: Mapping[str, Any] | None,
        metadata: Any,
        *,
        force: bool,
        overwrite: bool,
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Start a save, from any thread; see `SaveQueue.start`."""
        step = check_step(step)
        entry = self._names.name(step)
        try:
            request = make_request(
                entry, step, state, items, metrics, metadata, overwrite=overwrite
            )
            self._refuse_writing()
        except Exception as error:
            self.saves.withdraw(entry, step, error)
            raise
        self.reached_preemption(step)
        return self.saves.start(request, self, force=force)

    def start_partial(
        self, step: int, metrics: Mapping[str, Any] | None, metadata: Any, *, overwrite: bool
    ) -> OpenSave:
        """Return a save in parts; it begins with its first call."""
        step = check_step(step)
        entry = self._names.name(step)
        request = partial_request(entry, step, metrics, metadata, overwrite=overwrite)
        self._refuse_writing()
        if not self._peers.is_alone:
            raise InvalidArgumentError(
                f"a save in parts is made by one process, and this job has {self._peers.count}: "
                "save the whole step with save()",
                step=step,
            )
        return self._partials.new(request, self)

    def reached_preemption(self, step: int) -> bool:
        """Tell whether the run is to end at `step`; called on the caller's thread.

        The answer for a step stays what it was, so that a save and its caller agree.
        """
        self.preemption.open()
        return self.preemption.reached(check_step(step))

    def _refuse_writing(self) -> None:
        if self._read_only:
            raise ReadOnlyError(f"{self.storage.location} was opened with read_only=True")

    async def open(self) -> None:
        """Make the root, and remove what dead writers left in it; only the first call does."""
        if self._opened:
            return
        if not self._peers.publishes:
            # The primary makes the root, and keeps it tidy.
            self._opened = True
            return
        try:
            await self._open()
        except BaseException as error:
            # The others would wait for this process.
            await self._peers.cannot_open(error)
            raise
        self._opened = True

    async def _open(self) -> None:
        if self._read_only:
            # Says where there is no root and none is to be made.
            await self.storage.entries()
            return
        await self.storage.prepare()
        await self._sweep()
        await write_root_metadata(self.storage, self._metadata)
        await self._retention.prepare()

    async def _sweep(self) -> None:
        """Remove what dead writers left in the root."""
        self._swept = time.monotonic()
        removed = await self.storage.sweep()
        try:
            await forget_expired(self.storage)
        except StorageError as error:
            # Of a root that is shared, what others keep there may be theirs alone.
            logger.warning("pins that have run out were left: %s", error)
        await drop_orphans(self.storage)
        if removed:
            logger.debug("removed %d attempts of dead writers: %s", len(removed), removed)

    async def preserve(self, saved: int) -> float | None:
        """Delete what the policy does not keep; a failure is logged, the save is not touched.

        What writers on other machines left when they vanished is removed here, too, once their
        leases have run out.

        Returns:
            How many seconds the deletions took; None if they failed.
        """
        began = time.perf_counter()
        try:
            going = None
            if self._peers.own_disks and not self._retention.keeps_all:
                what = f"what to delete after step {saved}"
                going = await self._peers.all_or_none(
                    f"preserve-{saved}",
                    what,
                    partial(superfluous_everywhere, self._peers, self.reader, self._retention),
                )
            if time.monotonic() - self._swept > self.storage.lease_seconds:
                await self._sweep()
            with EventRecorder("save", saved, self._engine.observers).phase("preserve"):
                await self._retention.preserve(going)
        except CheckpointError as error:
            logger.warning("steps that are no longer kept could not be deleted: %s", error)
            return None
        except Exception:
            logger.warning("steps that are no longer kept could not be deleted", exc_info=True)
            return None
        return time.perf_counter() - began

    @property
    def has_policy(self) -> bool:
        """Whether a policy decides about saves."""
        return self._save_policy is not None

    async def refusal(self, step: int, context: SaveContext) -> str | None:
        """Return why the save policy turns `step` down, or None."""
        if self._save_policy is None:
            return None
        previous = PreviousSteps(self._index)
        # In a thread: it may look at the steps before, or be slow. Shielded, since what it looks at
        # is read on this loop, which could not go on in a scope that is cancelled; and a thread
        # would be waited for all the same.
        with anyio.CancelScope(shield=True):
            found = await anyio.to_thread.run_sync(
                refusal_of, self._save_policy, step, previous, context
            )
        return found

    async def should_save(self, step: int) -> bool:
        """Return whether the save policy wants `step`, or the run ends there."""
        step = check_step(step)
        if self._read_only:
            return False
        context = self.saves.moments.context(step)
        if self.saves.moments.is_final(context) or not self.has_policy:
            return True

        async def decide() -> bool:
            return await self.refusal(step, context) is None

        what = f"deciding about step {step}"
        return bool(await self._peers.on_primary(f"should_save-{step}", what, decide))

    async def newest_time(self) -> float | None:
        """Return when the save of the greatest committed step began, in Unix seconds."""
        latest = await self._index.latest()
        return None if latest is None else saved_step(latest).time

    async def other_entries(self, step: int) -> list[str]:
        """Return the entries of `step` under other names than the one it is written to."""
        if isinstance(self._names, Standard):
            # It gives a step one name only, so nothing needs to be looked at.
            return []
        written = self._names.name(step)
        return [entry for entry in await self._index.entries_of(step) if entry != written]

    async def reload(self) -> None:
        """Forget what was read of the root."""
        self._index.forget()

    async def root_metadata(self) -> dict[str, Any]:
        """Return the metadata of the root."""
        return await read_root_metadata(self.storage) or {}

    async def pin(self, step: int, name: str) -> None:
        """Keep a step from being deleted, until it is unpinned."""
        step = check_step(step)
        self._refuse_writing()

        async def is_committed() -> bool:
            return step in await self._index.refresh()

        act = partial(pin, self.storage, step, name, is_committed)
        kind, what = f"pin-{step}-{name}", f"pinning step {step}"
        if self._peers.own_disks:
            look = partial(act_if_common, self.reader, step, act)
            await self._peers.all_or_none(kind, what, look)
        else:
            await self._peers.on_primary(kind, what, act)

    async def unpin(self, step: int, name: str) -> bool:
        """Take a pin back; return whether there was one."""
        self._refuse_writing()
        step = check_step(step)

        async def act() -> bool:
            return await unpin(self.storage, step, name)

        what = f"unpinning step {step}"
        return bool(await self._peers.act(f"unpin-{step}-{name}", what, act))

    async def pins(self) -> dict[int, tuple[Pin, ...]]:
        """Return the pinned steps, and what pins them."""
        return dict(await pins(self.storage))

    async def delete(self, step: int, item: str | None) -> None:
        """Delete a step, or one item of it."""
        step = check_step(step)
        self._refuse_writing()

        async def act() -> None:
            # A save of the same step that is under way would be published afterwards.
            await self.saves.idle()
            if item is None:
                await self._retention.delete(step)
            else:
                await self._retention.delete_item(*await self.reader.found(step), item)

        if not self._peers.publishes:
            await self.saves.idle()
        kind, what = f"delete-{step}-{item}", f"the deletion of step {step}"
        if self._peers.own_disks:
            await self._peers.all_or_none(kind, what, partial(delete_anywhere, self._peers, act))
        else:
            await self._peers.on_primary(kind, what, act)

    def close(self, timeout: float | None = None) -> bool:
        """End the loop once all saves have; saves in parts that are still open are discarded.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes.

        Returns:
            Whether the loop has ended.
        """
        if not self.loop.is_forked:
            self.loop.check_caller()
        self.loop.stop()
        self._partials.end_all()
        return self.loop.close(timeout)

    def finish_at_exit(self) -> None:
        """At interpreter exit: finish what is under way, and say loudly what failed unseen.

        What has not ended in time is given up. The exit status then tells, as after a failure.
        """
        given_up = []
        if not self.close(self._timeouts.exit):
            given_up = self.saves.cancel_all()
            self.loop.close(_GIVING_UP_SECONDS)
        for commit in given_up:
            outcome = "may be there" if commit.stage == "publishing" else "was given up"
            sys.stderr.write(
                f"ckpt: the save of step {commit.step} to {redact(self.storage.location)} had not "
                f"ended {self._timeouts.exit} s after the program had; it {outcome}\n"
            )
        if self.saves.tell_unseen() or given_up:
            fail_exit()

    def __del__(self) -> None:
        # Nobody can close this root any more, so nobody else will tell. Nothing else is touched:
        # at interpreter exit the modules may be gone already.
        saves = getattr(self, "saves", None)
        if saves is not None and saves.tell_unseen():
            fail_exit()
