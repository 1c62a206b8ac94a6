"""`MemoryTier`: the snapshots of a run in shared memory, and its agent, which outlives the run."""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, SupportsIndex

import anyio
import jax

from ckpt._arguments import check_step
from ckpt._commit import Commit, StepInfo
from ckpt._redaction import redact
from ckpt._runtime.loop import Job
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import Timeouts, host_memory_bytes
from ckpt._steps.service import RootService
from ckpt._tiers.agent.client import AgentClient
from ckpt._tiers.agent.messages import AgentMessage, FlushResult, FolderClaimed, StepInRoot, ToAgent
from ckpt._tiers.peer_replication import PeerReplication
from ckpt._tiers.peers.parts import PRIVATE, remove_replicas, snapshots_in
from ckpt._tiers.settings import SharedMemory
from ckpt._tiers.shared_folder import Found, SharedFolder
from ckpt._tree.table import format_bytes
from ckpt.errors import CheckpointError, StorageError
from ckpt.storage._base import Storage
from ckpt.storage._local.config import Local
from ckpt.storage._local.storage import LocalStorage

logger = logging.getLogger("ckpt")

# Note with the id of the run in a root; a root that is removed and created anew is another run.
_RUN_NOTE = ".ckpt-run/id"
_MOST_BYTES = 256
# Space to leave free in the file system, beside the snapshot.
_SLACK_BYTES = 4 << 20

# Numbers of snapshots with copies on peers: usually the one that all hold, and the newest; with
# slow copies, at most one more that is being copied, and one that waits.
_USUAL, _MOST_COPIED = 2, 4


class MemoryRoot(LocalStorage):
    """The root in shared memory: its folder is claimed before anything is done there."""

    def __init__(
        self, folder: SharedFolder, root: Storage, timeouts: Timeouts, process: tuple[int, int]
    ) -> None:
        """Use the folder for the snapshots of the run in `root`.

        Args:
            folder: The folder.
            root: The root of the run.
            timeouts: Source of the duration of leases.
            process: Number of this process in its job, and number of processes.
        """
        super().__init__(Local(folder.steps, permission_mode=PRIVATE), timeouts)
        self._folder = folder
        self._run_root = root
        self._process = process
        # Content of the folder when it was claimed; None before.
        self.found: Found | None = None
        # The id of the run, once it is known.
        self.run: str = ""

    async def prepare(self) -> None:
        """Claim the folder, and create the root in it."""
        if self.found is None:
            self.run = await _run_of(self._run_root)
            location = self._run_root.location
            self.found = await run_in_thread(self._folder.claim, self.run, location, *self._process)
        await super().prepare()


class MemoryTier:
    """Snapshots in shared memory. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        settings: SharedMemory,
        service: RootService,
        folder: SharedFolder,
        storage: MemoryRoot,
        root_storage: Storage,
        agent: AgentClient,
        peers: PeerReplication | None,
    ) -> None:
        """Keep snapshots as the steps of `service`, in `folder`; do no input or output yet.

        Args:
            settings: The settings of the user.
            service: The service of the root in memory.
            folder: The folder of this root.
            storage: The storage of this root.
            root_storage: The root of the run.
            agent: Client of the agent, which writes the last snapshot.
            peers: The copies on other hosts, if there are to be any.
        """
        self.service = service
        self._peers = peers
        self._settings = settings
        self._folder = folder
        self._storage = storage
        self._root_storage = root_storage
        self._agent = agent
        # The greatest step that this run has saved, in the root or at a place before it.
        self._latest = -1
        # The greatest step of the root, and the speed of saves.
        self._saved = StepInRoot(-1)
        # Set on the engine's loop.
        self._opening: anyio.Lock | None = None
        self._is_open = False
        # Reason why there is no memory for snapshots; one warning gives it.
        self._problem: str | None = None
        # The last reason that a warning gave for a snapshot that was not taken.
        self._said = ""
        self._flushed: FlushResult | None = None
        # True if other processes have parts of the snapshots.
        self.is_of_job: bool = service.root.processes.count > 1

    async def open(self) -> bool:
        """Find earlier snapshots and start the agent; return True if the memory is usable.

        Further calls do no more work. Snapshots of another run are removed, with a warning.
        """
        self._opening = self._opening or anyio.Lock()
        async with self._opening:
            if not self._is_open and self._problem is None:
                try:
                    await self._open()
                    self._is_open = True
                except CheckpointError as error:
                    # The error may be that of any process of the job.
                    self._problem = error.message
                    logger.warning(
                        "%s. Training goes on without snapshots in memory", error.message
                    )
        return self._is_open

    async def _open(self) -> None:
        await self.service.open()
        # In a job, all processes have memory, or none has.
        await self.service.root.processes.everywhere("memory", 0, "opening memory", _nothing)
        if self._storage.found == "another run":
            logger.warning(
                "%s: a snapshot in memory is of an earlier run in this place, and was removed",
                redact(self._root_storage.location),
            )
        await run_in_thread(self._agent.start)
        # An agent that runs already was greeted before the folder was claimed.
        self._agent.tell(FolderClaimed(self._folder.claim_id))
        if self._peers is None:
            # Copies that are not renewed would still be found when the run has gone back behind
            # them.
            await remove_replicas(self._folder.path, lambda part, step: True)
        else:
            # If a part could not be fetched, the next start of the job may reach it: keep all.
            if await self._peers.open(self._storage.run, self._root_storage.location):
                await self._tidy()
        if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # The kernel ignores SIGTERM for this process, and later kills the whole container.
            logger.warning(
                "this is the first process of its container, for which SIGTERM does nothing: pass "
                "save_when.Preempted(), so that the last snapshot is written then"
            )

    def start(
        self,
        step: SupportsIndex,
        state: Any,
        items: Mapping[str, Any] | None,
        metrics: Mapping[str, Any] | None,
        metadata: Any,
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Start a snapshot, from any thread; see `SaveQueue.start`."""
        number = check_step(step)
        nbytes = _nbytes_of(state if items is None else dict(items))
        self._agent.tap_signals()
        return self.service.saves.start(
            number,
            state,
            items,
            metrics,
            metadata,
            None,
            force=False,
            # The processes of a job cannot all replace their parts at once.
            if_exists="error" if self.is_of_job else "replace",
            refuse=self._refusing(number, nbytes),
        )

    def _refusing(
        self, step: int, nbytes: int
    ) -> Callable[[StorageError | None], Awaitable[str | None]]:
        async def refuse(error: StorageError | None) -> str | None:
            if error is not None:
                return self._say(step, error.message)
            if not await self.open():
                return self._problem
            await run_in_thread(self._agent.start)
            why = await self._no_room(nbytes)
            return None if why is None else self._say(step, why)

        return refuse

    async def remove_later_snapshots(self, step: int) -> None:
        """Remove snapshots of greater steps: the run has gone back, and would find those first.

        In a job, remove this step, too: other processes may have lost their part of it.
        """
        root = self.service.root
        if step < self._latest:
            self._latest = step - 1
        if await self.open():
            if step < self._saved.step:
                # Greater steps in the root are no reason to leave this one unwritten, either.
                self.saved_already(step - 1)
            if self._peers is not None:
                await self._peers.forget(after=step - 1)
            for other in await root.index.refresh():
                if other > step or (other == step and self.is_of_job):
                    await root.retention.delete(other)

    async def _tidy(self) -> None:
        """Remove leftovers of a killed job from memory, but not the snapshot to go on from.

        No commit would remove a snapshot that not all processes have, and with too many snapshots
        no new one is taken.
        """
        root = self.service.root
        common = await self.service.reader.all_steps()
        for step in await root.index.refresh():
            if step not in common:
                await root.retention.delete(step)
        await root.preserve(max(common, default=0))

    async def copied(self, step: int) -> bool:
        """Have a snapshot copied to peers, and tidy the memory before and after.

        Returns:
            True if there are to be no copies, so that nothing was tidied.
        """
        if self._peers is None:
            return True
        async with self._peers.in_turn(step):
            await self.service.root.preserve(step)
            await self._peers.copy(step)
            await self.service.root.preserve(step)
        return False

    async def deleted(self, step: int) -> None:
        """Remove the copies of a snapshot that was deleted."""
        if self._peers is not None:
            await self._peers.forget(step)

    async def _no_room(self, nbytes: int) -> str | None:
        """Return the reason why there is no room for a snapshot, or None."""
        budget = self._settings.budget_bytes or host_memory_bytes() // 2
        most, beside = 2, "the one before"
        if self._peers is not None:
            # Two snapshots are held for a peer, and this one comes on top of the present ones.
            written = self.service.saves.joined
            there = len({*await self.service.root.index.refresh(), *written})
            most, beside = max(there, 1) + 3, "the one before, and two of a peer,"
            if there >= _MOST_COPIED or (there > _USUAL and most * nbytes > budget):
                return (
                    "the copies of the snapshots before are not on peers yet: take snapshots less "
                    "often, or use a faster network"
                )
        if most * nbytes > budget:
            return (
                f"a snapshot of {format_bytes(nbytes)} beside {beside} needs "
                f"{format_bytes(most * nbytes)}, and the budget is {format_bytes(budget)}: give a "
                "larger SharedMemory(budget_bytes=...)"
            )
        if await run_in_thread(self._free) < nbytes + _SLACK_BYTES:
            # The snapshot before may be under way, and the one before that about to be deleted.
            await self.service.saves.idle()
            free = await run_in_thread(self._free)
            if free < nbytes + _SLACK_BYTES:
                return (
                    f"{self._settings.directory} has {format_bytes(free)} left, and a snapshot "
                    f"needs {format_bytes(nbytes)}: give the machine or the container more (docker "
                    "run --shm-size=...), or another SharedMemory(directory=...)"
                )
        return None

    def _free(self) -> int:
        found = os.statvfs(self._folder.path)
        return found.f_bavail * found.f_frsize

    def _say(self, step: int, why: str) -> str:
        if why != self._said:
            self._said = why
            logger.warning("step %d was not kept in memory: %s", step, why)
        return why

    def saved(self, info: StepInfo, *, in_root: bool) -> None:
        """Note a step that was saved; tell the agent if it is in the root."""
        if info.step is None:
            return
        self._latest = max(self._latest, info.step)
        if in_root:
            self._saved = StepInRoot(max(info.step, self._saved.step))
            self._agent.tell(self._saved)

    def saved_already(self, step: int | None) -> None:
        """Tell the agent the greatest step of the root, even if it was greater before."""
        self._saved = StepInRoot(-1 if step is None else step)
        self._agent.tell(self._saved)

    def greeting(self) -> list[ToAgent]:
        if self._storage.found is None:
            return []
        return [FolderClaimed(self._folder.claim_id), self._saved]

    @property
    def flushes(self) -> bool:
        """True if the last snapshot is written when the run ends."""
        return self._is_open and self._settings.flush

    def leave(self) -> None:
        """Leave the last snapshot to the agent, which writes it together with other agents."""
        self._is_open = False
        logger.info(
            "the last snapshot is written to %s once all processes of the job have ended",
            redact(self._root_storage.location),
        )
        self._folder.leave()

    def left(self) -> int | None:
        """Return the newest snapshot, unless a step as great was saved, or is in the root."""
        found = snapshots_in(self._folder.steps) if self._is_open else []
        known = max(self._latest, self._saved.step)
        return found[0].step if found and found[0].step > known else None

    def close(self, left: int | None, *, failed: bool, ended: bool) -> None:
        """Release the memory, unless it has the only copy of the last snapshot.

        Args:
            left: The newest snapshot, if it is the only copy of its step.
            failed: True if an exception ends the run.
            ended: True if everything was written that was to be.
        """
        if not self._is_open:
            return
        is_only_place = failed and not self.flushes
        self._is_open = False
        has_failed = self._flushed is not None and bool(self._flushed.problem)
        if has_failed or not ended or is_only_place:
            logger.warning("the last snapshot stays in memory: %s", self._folder.path)
            self._folder.leave()
            return
        if left is not None and not self._settings.flush:
            logger.warning(
                "the snapshot of step %d is given up: it is only in memory, and flush=False. Save "
                "the last step, or leave flush on",
                left,
            )
        self._folder.remove()

    def heard(self, message: AgentMessage) -> None:
        """Handle a message of the agent; called in a thread."""
        if self._peers is not None:
            self._peers.heard(message)
        if not isinstance(message, FlushResult):
            return
        self._flushed = message
        where = redact(self._root_storage.location)
        if message.problem:
            logger.warning(
                "the last snapshot could not be written to %s: %s", where, message.problem
            )
        elif message.step >= 0:
            logger.info(
                "wrote the snapshot of step %d to %s: %s in %.2f s",
                message.step,
                where,
                format_bytes(message.nbytes),
                message.seconds,
            )
            if message.passed_over:
                logger.warning("a newer snapshot is damaged: %s", message.passed_over)


async def _nothing() -> None:
    pass


async def _run_of(storage: Storage) -> str:
    """Return the id of the run in a root, which is written once."""
    await storage.prepare()
    for _ in range(2):
        found = await storage.read("", _RUN_NOTE, _MOST_BYTES)
        if found is not None:
            return found.decode("ascii", "replace")
        new = uuid.uuid4().hex
        if await storage.put_note(_RUN_NOTE, new.encode(), replace=False):
            return new
    raise StorageError(f"{storage.location}/{_RUN_NOTE} comes and goes")


def _nbytes_of(state: Any) -> int:
    """Return the approximate bytes of all arrays of a state."""
    try:
        leaves = jax.tree.leaves(state)
    except Exception:
        # The save reports the error.
        return 0
    return sum(int(getattr(leaf, "nbytes", 0) or 0) for leaf in leaves)
