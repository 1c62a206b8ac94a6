"""`TieredService`: the service of a run whose steps are in several places.

It offers what `RootService` does. Saves go to the nearest place on a storage, snapshots to memory,
and what is read comes from the nearest place that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, SupportsIndex

from ckpt._commit import Commit
from ckpt._engine.engine import Engine
from ckpt._format.history import Parent
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._steps.pins import Pin
from ckpt._steps.removal.trash import StepTrash
from ckpt._steps.root import Root
from ckpt._steps.saves.partial import OpenSave
from ckpt._steps.saves.preemption import Preemption
from ckpt._steps.saves.queue import SaveQueue
from ckpt._steps.service import RootService
from ckpt._tiers.memory import MemoryTier
from ckpt._tiers.reader import TieredReader, TierSteps
from ckpt.storage._base import Storage


class TieredService:
    """The service of a run with tiers. Its coroutines run on the engine's loop.

    Attributes:
        root: The last and safest place, which other programs see.
        reader: Reads the steps of all places.
    """

    def __init__(self, service: RootService, memory: MemoryTier) -> None:
        """Serve a root, and the places that are nearer."""
        self._service = service
        self._memory = memory
        self.reader: TieredReader = TieredReader(self._tiers)
        self._is_open = False
        service.saves.on_committed = memory.saved
        for each in (service, memory.service):
            each.reader.begins_from = self._begin_from

    @property
    def loop(self) -> EngineLoop:
        """The engine's loop."""
        return self._service.loop

    @property
    def engine(self) -> Engine:
        """What all saves and restores share."""
        return self._service.engine

    @property
    def storage(self) -> Storage:
        """Where the root is."""
        return self._service.storage

    @property
    def root(self) -> Root:
        """What is in the root."""
        return self._service.root

    @property
    def saves(self) -> SaveQueue:
        """The saves."""
        return self._service.saves

    @property
    def trash(self) -> StepTrash:
        """The trash of the root."""
        return self._service.trash

    @property
    def preemption(self) -> Preemption:
        """The notice that the run is to end."""
        return self._service.preemption

    def _begin_from(self, parent: Parent) -> None:
        for each in (self._service, self._memory.service):
            each.saves.history.begin_from(parent)

    async def _tiers(self) -> Sequence[TierSteps]:
        await self.open()
        root = TierSteps(self.storage.location, self._service.reader, may_fail=False)
        if not await self._memory.open():
            return [root]
        memory = self._memory.service
        return [TierSteps(memory.storage.location, memory.reader, may_fail=True), root]

    async def open(self) -> None:
        """Open all places; only the first call does."""
        if not self._is_open:
            await self._service.open()
            if await self._memory.open():
                await self._memory.saved_already(await self._service.reader.latest_step())
            self._is_open = True

    def start_snapshot(
        self,
        step: SupportsIndex,
        state: Any,
        items: Mapping[str, Any] | None,
        metrics: Mapping[str, Any] | None,
        metadata: Any,
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Start a snapshot in memory, from any thread; see `SaveQueue.start`."""
        return self._memory.start(step, state, items, metrics, metadata)

    async def idle(self) -> None:
        """Wait until every save and every snapshot that was started has ended."""
        await self._service.idle()
        await self._memory.service.idle()

    @property
    def saving(self) -> list[int]:
        """The steps of saves and snapshots that are under way."""
        return [*self._service.saving, *self._memory.service.saving]

    def take_errors(self) -> list[BaseException]:
        """Return the errors of saves and snapshots that have not been fetched."""
        return [*self._service.take_errors(), *self._memory.service.take_errors()]

    def listen(self) -> None:
        """Handle signals from now on, if this is the main thread."""
        self._service.listen()
        self._memory.keeper.tap_signals()

    def stop_listening(self) -> None:
        """Put back what handled signals before."""
        self._service.stop_listening()
        self._memory.keeper.untap_signals()

    def start_partial(
        self,
        step: SupportsIndex,
        metrics: Mapping[str, Any] | None,
        metadata: Any,
        *,
        overwrite: bool,
    ) -> OpenSave:
        """Return a save in parts; see `RootService.start_partial`."""
        return self._service.start_partial(step, metrics, metadata, overwrite=overwrite)

    def reached_preemption(self, step: SupportsIndex) -> bool:
        """Tell whether the run is to end at `step`; called on the caller's thread."""
        return self._service.reached_preemption(step)

    async def should_save(self, step: int) -> bool:
        """Return whether the save policy wants `step`, or the run ends there."""
        return await self._service.should_save(step)

    async def reload(self) -> None:
        """Forget what was read."""
        await self._service.reload()
        await self._memory.service.reload()

    async def root_metadata(self) -> dict[str, Any]:
        """Return the metadata of the root."""
        return await self._service.root_metadata()

    async def pin(self, step: int, name: str) -> None:
        """Keep a step of the root from being deleted."""
        await self._service.pin(step, name)

    async def unpin(self, step: int, name: str) -> bool:
        """Take a pin back; return whether there was one."""
        return await self._service.unpin(step, name)

    async def pins(self) -> dict[int, tuple[Pin, ...]]:
        """Return the pinned steps, and what pins them."""
        return await self._service.pins()

    async def delete(self, step: int, item: str | None) -> None:
        """Delete a step, or one item of it, wherever it is."""
        memory = self._memory.service
        if await self._memory.open() and step in await memory.reader.all_steps():
            await memory.delete(step, item)
            if step not in await self._service.reader.all_steps():
                return
        await self._service.delete(step, item)

    async def undelete(self, step: int) -> None:
        """Take a step back from the trash."""
        await self._service.undelete(step)

    async def empty_trash(self, older_than: float) -> list[int]:
        """Remove what was deleted at least that many seconds ago; return the steps."""
        return await self._service.empty_trash(older_than)

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """Wait for saves and snapshots, end the loop, and give the memory back.

        Args:
            timeout: Seconds to wait at most for saves; None waits for as long as it takes.
            failed: Whether an exception ends the run: then the last snapshot is written to the
                root first, unless a newer step is there.
        """
        done = self._service.close(timeout)
        self._memory.close(failed=failed)
        return done
