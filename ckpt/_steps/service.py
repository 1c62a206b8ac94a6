"""`RootService`: what the asyncio manager and the plain one share.

Its coroutines run on the engine's loop. Decisions about saves are made in `saves`, what becomes of
steps in `root`, and all reading in `reader`; here are the calls that need several of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, SupportsIndex

from ckpt._arguments import check_step, number_of_seconds
from ckpt._commit import Commit, StepInfo
from ckpt._engine.engine import Engine
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._settings import Timeouts
from ckpt._steps.index import MissingRoot, StepIndex
from ckpt._steps.pins import Pin, pin, pins, unpin
from ckpt._steps.processes import OneProcess, Processes, SeparateRoots, SharedRoot
from ckpt._steps.reader import StepReader
from ckpt._steps.removal.retention import Retention
from ckpt._steps.removal.trash import StepTrash
from ckpt._steps.root import Root
from ckpt._steps.root_metadata import read_root_metadata
from ckpt._steps.saves.backlog import BacklogPolicy
from ckpt._steps.saves.commits import OpenCommits
from ckpt._steps.saves.partial import OpenSave, partial_request
from ckpt._steps.saves.preemption import Preemption
from ckpt._steps.saves.queue import SaveQueue
from ckpt.coordination._peers import Peers
from ckpt.errors import InvalidArgumentError
from ckpt.policies._by_item import Preservation
from ckpt.policies._deletion import Deletion, trash_of
from ckpt.policies._preservation import PreserveAll
from ckpt.policies._ranking import ranking_of
from ckpt.policies._save_policies import SavePolicyLike
from ckpt.step_names import StepNames
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")


class RootService:
    """The service of one root. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        loop: EngineLoop,
        storage: Storage,
        engine: Engine,
        *,
        save_policy: SavePolicyLike | None,
        preservation: Preservation | None,
        deletion: Deletion | None,
        names: StepNames,
        metadata: Mapping[str, Any] | None,
        backlog: BacklogPolicy,
        read_only: bool,
        missing: MissingRoot,
        must_exist: bool = False,
        timeouts: Timeouts,
        preemption: Preemption,
        commits: OpenCommits,
        peers: Peers | None,
        log_level: int = logging.INFO,
    ) -> None:
        """Serve the root of `storage`, together with the other processes of the job, if any."""
        self.loop = loop
        self.preemption = preemption
        self.engine = engine
        index = StepIndex(storage, names, missing=missing)
        processes: Processes
        if peers is None:
            processes = OneProcess(index, engine.arena.capacity)
        else:
            processes = (SeparateRoots if peers.own_disks else SharedRoot)(peers, index)
        retention = Retention(
            storage, index, preservation, deletion, engine.observers, engine.now_ns
        )
        retention.log_level = log_level
        trash = None if deletion is None else trash_of(deletion)
        self.trash: StepTrash = StepTrash(storage, index, names, trash, engine.now_ns)
        self.root: Root = Root(
            storage,
            names,
            index,
            processes,
            retention,
            save_policy=save_policy,
            metadata=metadata,
            read_only=read_only,
            must_exist=must_exist,
            observers=engine.observers,
            log_level=log_level,
        )
        self.saves: SaveQueue = SaveQueue(
            loop, self.root, engine, backlog, preemption, commits, timeouts
        )
        self.reader: StepReader = StepReader(
            storage,
            index,
            engine,
            ranking_of(PreserveAll() if preservation is None else preservation),
            processes,
            self.saves.history.begin_from,
            may_write=not read_only,
        )

    @property
    def storage(self) -> Storage:
        """Where the root is."""
        return self.root.storage

    @property
    def tidies_alone(self) -> bool:
        """Whether this process deletes what is not kept, without the others of a job."""
        processes = self.root.processes
        return processes.owns_root and not isinstance(processes, SeparateRoots)

    async def tidy(self) -> None:
        """Delete what is not kept, when something else than a save has changed the steps."""
        latest = await self.root.index.latest() if self.tidies_alone else None
        if latest is not None:
            await self.root.preserve(latest.step)

    def start_partial(
        self,
        step: SupportsIndex,
        metrics: Mapping[str, Any] | None,
        metadata: Any,
        *,
        overwrite: bool,
    ) -> OpenSave:
        """Return a save in parts; it begins with its first call."""
        step = check_step(step)
        request = partial_request(
            self.root.names.name(step), step, metrics, metadata, overwrite=overwrite
        )
        self.root.refuse_writing()
        if self.root.processes.count > 1:
            raise InvalidArgumentError(
                "a save in parts is made by one process, and this job has "
                f"{self.root.processes.count}: save the whole step with save()",
                step=step,
            )
        return OpenSave(self.saves, request)

    def reached_preemption(self, step: SupportsIndex) -> bool:
        """Tell whether the run is to end at `step`; called on the caller's thread.

        The answer for a step stays what it was, so that a save and its caller agree.
        """
        self.preemption.open()
        return self.preemption.reached(check_step(step))

    async def open(self) -> None:
        """Make the root, and remove what dead writers left in it; only the first call does."""
        await self.root.open()

    async def should_save(self, step: int) -> bool:
        """Return whether the save policy wants `step`, or the run ends there."""
        step = check_step(step)
        root = self.root
        if root.is_read_only:
            return False
        context = self.saves.history.context(step)
        is_final = self.saves.history.is_final(context)

        async def decide() -> bool:
            if not is_final and (self.saves.is_skipping or await root.refusal(step, context)):
                return False
            return step not in self.saves.joined and not await root.has(step)

        what = f"deciding about step {step}"
        return bool(await root.processes.on_primary("should_save", step, what, decide))

    async def reload(self) -> None:
        """Forget what was read of the root."""
        self.root.index.forget()

    async def root_metadata(self) -> dict[str, Any]:
        """Return the metadata of the root."""
        return await read_root_metadata(self.storage) or {}

    async def pin(self, step: int, name: str) -> None:
        """Keep a step from being deleted, until it is unpinned."""
        step = check_step(step)
        self.root.refuse_writing()

        async def is_committed() -> bool:
            return step in await self.root.index.refresh()

        act = partial(pin, self.storage, step, name, is_committed)
        await self.root.processes.on_step(f"pin-{name}", step, f"pinning step {step}", act)

    async def unpin(self, step: int, name: str) -> bool:
        """Take a pin back; return whether there was one."""
        self.root.refuse_writing()
        step = check_step(step)
        act = partial(unpin, self.storage, step, name)
        what = f"unpinning step {step}"
        return bool(await self.root.processes.everywhere(f"unpin-{name}", step, what, act))

    async def pins(self) -> dict[int, tuple[Pin, ...]]:
        """Return the pinned steps, and what pins them."""
        return dict(await pins(self.storage))

    async def delete(self, step: int, item: str | None) -> None:
        """Delete a step, or one item of it."""
        step = check_step(step)
        root = self.root
        root.refuse_writing()

        async def act() -> None:
            # A save of the same step that is under way would be published afterwards.
            await self.saves.idle()
            if item is None:
                await root.retention.delete(step)
            else:
                await root.retention.delete_items(await root.index.found(step), {item: None})

        if not root.processes.owns_root:
            await self.saves.idle()
        await root.processes.delete(f"delete-{item}", step, f"the deletion of step {step}", act)

    async def undelete(self, step: int) -> None:
        """Take a step back from the trash."""
        step = check_step(step)
        self.root.refuse_writing()
        await self.root.processes.undelete(step, self.trash)

    async def empty_trash(self, older_than: float) -> list[int]:
        """Remove what was deleted at least that many seconds ago; return the steps."""
        self.root.refuse_writing()
        seconds = number_of_seconds("older_than", older_than, zero=True)
        act = partial(self.trash.empty, seconds)
        found = await self.root.processes.everywhere("empty-trash", 0, "emptying the trash", act)
        return [int(step) for step in found] if isinstance(found, list) else []

    def start_snapshot(
        self,
        step: SupportsIndex,
        state: Any,
        items: Mapping[str, Any] | None,
        metrics: Mapping[str, Any] | None,
        metadata: Any,
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Refuse: without a tier in memory there is no place for snapshots."""
        raise no_memory(step)

    async def prefetch(self, step: int | None) -> StepInfo:
        """Refuse: without a tier on a storage there is no nearer place for steps."""
        raise no_tier()

    async def idle(self) -> None:
        """Wait until every save that was started has ended, and the deletions after it."""
        await self.saves.idle()

    @property
    def saving(self) -> list[int]:
        """The steps of saves that are under way."""
        return self.saves.saving

    async def wait_until_finished(self) -> None:
        """Wait until every save has ended, and raise what failed; see `SaveQueue.finished`."""
        await self.saves.finished(self.idle)

    def take_failure(self) -> BaseException | None:
        """Return failures that nobody has checked, as one error; see `OpenCommits.take`."""
        return self.saves.commits.take()

    def listen(self) -> None:
        """Handle the signals that announce the end of the run from now on."""
        self.preemption.open()

    def stop_listening(self) -> None:
        """Put back what handled them before."""
        self.preemption.close()

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """Wait for the saves, and end the loop; see `SaveQueue.close`."""
        return self.saves.close(timeout)


def no_tier() -> InvalidArgumentError:
    """Return the error of a prefetch for which the manager has no place."""
    return InvalidArgumentError(
        "prefetch(): this manager has no nearer place to copy steps to. Make it with "
        "tiers=[ckpt.tiers.Tier('/nvme/run')]; restore() reads from where the step is"
    )


def no_memory(step: SupportsIndex) -> InvalidArgumentError:
    """Return the error of a snapshot for which the manager has no place."""
    return InvalidArgumentError(
        "snapshot(): this manager has no tier in memory. Make it with "
        "tiers=[ckpt.tiers.SharedMemory()], or use save()",
        step=check_step(step),
    )
