"""`ReplicaExchange`: serves the parts of this host to other agents, and fetches their parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.abc

from ckpt._tiers.agent.messages import (
    FromAgent,
    ListenRequest,
    ListenResult,
    PartFetchProgress,
    PartFetchRequest,
    PartRemovalRequest,
    PartResult,
    PeerRefused,
)
from ckpt._tiers.peers.fetch import fetch_part
from ckpt._tiers.peers.parts import STEPS, replica_root
from ckpt._tiers.peers.protocol import PartOpenRequest
from ckpt._tiers.peers.remote_part import Peer
from ckpt._tiers.peers.replica_parts import remove_replicas, replica_storage
from ckpt._tiers.peers.server import serving
from ckpt.errors import CheckpointError, StorageError

# Time between signs of progress: without them, the trainer takes its agent for stopped.
_BEAT_SECONDS = 1.0


class ReplicaExchange:
    """The work of an agent for the peers of its trainer. Used on the agent's loop."""

    def __init__(self, tell: Callable[[FromAgent], None]) -> None:
        """Make it without work yet; `tell` sends messages to the trainer."""
        self._tell = tell
        self._setup: ListenRequest | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        # The fetches under way; if their snapshot is no longer wanted, they are cancelled.
        self._fetches: dict[PartFetchRequest, anyio.CancelScope] = {}

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Do the work that `take` begins, until cancelled: the trainer has ended."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                task_status.started()
                while True:
                    await anyio.sleep(_BEAT_SECONDS)
                    if self._fetches:
                        self._tell(PartFetchProgress())
        finally:
            self._tasks = None

    async def take(self, message: ListenRequest | PartFetchRequest | PartRemovalRequest) -> None:
        """Begin the work of a message; parts to be removed are gone when this returns."""
        if isinstance(message, PartRemovalRequest):
            await self._forget(message)
        elif self._tasks is None:
            # The trainer has ended.
            return
        elif isinstance(message, PartFetchRequest):
            self._tasks.start_soon(self._fetch, message)
        else:
            is_first = self._setup is None
            self._setup = message
            if is_first:
                self._tasks.start_soon(self._listen, message)

    async def _forget(self, message: PartRemovalRequest) -> None:
        for fetch, scope in list(self._fetches.items()):
            if not fetch.is_own and message.means(fetch.part, fetch.step):
                scope.cancel()
        problem = ""
        if self._setup is not None:
            try:
                await remove_replicas(self._own, message.means)
            except CheckpointError as error:
                problem = error.message
        self._tell(PartResult(message.number, problem=problem))

    @property
    def _own(self) -> Path:
        assert self._setup is not None
        return Path(self._setup.folders[0][1])

    def _folders(self) -> list[tuple[int, Path]]:
        setup = self._setup
        return [] if setup is None else [(part, Path(folder)) for part, folder in setup.folders]

    async def _listen(self, setup: ListenRequest) -> None:
        refused: set[str] = set()

        def say(problem: str) -> None:
            # Report each problem once, and a limited number of them.
            if problem not in refused and len(refused) < 8:
                refused.add(problem)
                self._tell(PeerRefused(problem))

        try:
            async with serving(setup.address, setup.port, setup.key, self._folders, say) as server:
                self._tell(ListenResult(*server.address))
                await anyio.sleep_forever()
        except OSError as error:
            where = f"{setup.address}:{setup.port}" if setup.port else setup.address
            why = f"it cannot listen at {where}: {error.strerror or error}"
            self._tell(ListenResult(problem=why))

    async def _fetch(self, wanted: PartFetchRequest) -> None:
        began = time.monotonic()
        nbytes, problem = 0, "the snapshot is not wanted any more"
        with anyio.CancelScope() as scope:
            self._fetches[wanted] = scope
            try:
                nbytes = await self._fetch_now(wanted)
                problem = ""
            except CheckpointError as error:
                problem = error.message
            except OSError as error:
                problem = str(error)
            finally:
                del self._fetches[wanted]
        seconds = time.monotonic() - began
        self._tell(PartResult(wanted.number, nbytes, seconds, problem))

    async def _fetch_now(self, wanted: PartFetchRequest) -> int:
        if self._setup is None:
            raise StorageError("the agent was not told the key of the job")
        own = self._own
        place = own / STEPS if wanted.is_own else replica_root(own, wanted.part)
        if not wanted.is_own:
            # Remove first: memory is short.
            kept = {*wanted.keep, wanted.step}
            await remove_replicas(own, lambda part, step: part == wanted.part and step not in kept)
        peer = Peer(wanted.process, wanted.host, wanted.port)
        return await fetch_part(
            peer,
            self._setup.key,
            PartOpenRequest(wanted.part, wanted.step, wanted.save),
            replica_storage(place),
            wanted.step_dir,
        )
