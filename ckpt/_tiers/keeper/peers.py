"""`PeerParts`: a keeper shows the parts of its host to the job, and fetches those of others."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.abc

from ckpt._tiers.keeper.messages import (
    FetchingPart,
    FetchPart,
    Forget,
    FromKeeper,
    Listen,
    Listening,
    PartDone,
    Refused,
)
from ckpt._tiers.peers.fetch import fetch_part
from ckpt._tiers.peers.held import remove_held, storage_of
from ckpt._tiers.peers.parts import STEPS, held_in
from ckpt._tiers.peers.remote_part import Peer
from ckpt._tiers.peers.requests import Open
from ckpt._tiers.peers.server import serving
from ckpt.errors import CheckpointError, StorageError

# A trainer that hears nothing for longer takes its keeper for stopped.
_BEAT_SECONDS = 1.0


class PeerParts:
    """What a keeper does for the peers of its trainer. Used on the keeper's loop."""

    def __init__(self, tell: Callable[[FromKeeper], None]) -> None:
        """Do nothing yet; `tell` takes what the trainer hears."""
        self._tell = tell
        self._setup: Listen | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        # The fetches that are under way: a snapshot that is not wanted any more ends them.
        self._fetches: dict[FetchPart, anyio.CancelScope] = {}

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Do what `take` is told, until cancelled: the trainer has ended."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                task_status.started()
                while True:
                    await anyio.sleep(_BEAT_SECONDS)
                    if self._fetches:
                        self._tell(FetchingPart())
        finally:
            self._tasks = None

    async def take(self, message: Listen | FetchPart | Forget) -> None:
        """Begin what the trainer wants; what is to be forgotten is gone when this returns."""
        if isinstance(message, Forget):
            await self._forget(message)
        elif self._tasks is None:
            # The trainer has ended.
            return
        elif isinstance(message, FetchPart):
            self._tasks.start_soon(self._fetch, message)
        else:
            is_first = self._setup is None
            self._setup = message
            if is_first:
                self._tasks.start_soon(self._listen, message)

    async def _forget(self, message: Forget) -> None:
        for fetch, scope in list(self._fetches.items()):
            if not fetch.is_own and message.means(fetch.part, fetch.step):
                scope.cancel()
        problem = ""
        if self._setup is not None:
            try:
                await remove_held(self._own, message.means)
            except CheckpointError as error:
                problem = error.message
        self._tell(PartDone(message.number, problem=problem))

    @property
    def _own(self) -> Path:
        assert self._setup is not None
        return Path(self._setup.folders[0][1])

    def _folders(self) -> list[tuple[int, Path]]:
        setup = self._setup
        return [] if setup is None else [(part, Path(folder)) for part, folder in setup.folders]

    async def _listen(self, setup: Listen) -> None:
        refused: set[str] = set()

        def say(problem: str) -> None:
            # Each once, and not without end.
            if problem not in refused and len(refused) < 8:
                refused.add(problem)
                self._tell(Refused(problem))

        try:
            async with serving(setup.address, setup.port, setup.key, self._folders, say) as server:
                self._tell(Listening(*server.address))
                await anyio.sleep_forever()
        except OSError as error:
            where = f"{setup.address}:{setup.port}" if setup.port else setup.address
            why = f"it cannot listen at {where}: {error.strerror or error}"
            self._tell(Listening(problem=why))

    async def _fetch(self, wanted: FetchPart) -> None:
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
        self._tell(PartDone(wanted.number, nbytes, seconds, problem))

    async def _fetch_now(self, wanted: FetchPart) -> int:
        if self._setup is None:
            raise StorageError("the keeper was not told the key of the job")
        own = self._own
        place = own / STEPS if wanted.is_own else held_in(own, wanted.part)
        if not wanted.is_own:
            # Before there is more: memory is short.
            kept = {(wanted.part, step) for step in (*wanted.keep, wanted.step)}
            await remove_held(
                own, lambda part, step: part == wanted.part and (part, step) not in kept
            )
        peer = Peer(wanted.process, wanted.host, wanted.port)
        return await fetch_part(
            peer,
            self._setup.key,
            Open(wanted.part, wanted.step, wanted.save),
            storage_of(place),
            wanted.step_dir,
        )
