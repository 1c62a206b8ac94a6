"""The steps of one root, read: which there are, what they are, and what they hold."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import anyio

from ckpt.engine.restore import restore_items
from ckpt.engine.save import SaveEngine
from ckpt.engine.verification import verify_entry
from ckpt.errors import InvalidArgumentError, StepDeletedError, StepNotFoundError
from ckpt.events import Recorder
from ckpt.history import saved_step
from ckpt.index import StepIndex
from ckpt.late_statistics import statistics_of
from ckpt.layout.adapt import Adapt
from ckpt.layout.report import VerifyReport
from ckpt.manifest import Manifest
from ckpt.policies import BestN, Metric, Mode, best_of
from ckpt.requests import result_of, wanted_items
from ckpt.stepinfo import StepMetadata, describe_step
from ckpt.steps import check_step, read_manifest, while_read
from ckpt.storage.base import Storage

__all__ = ["RootReader"]

logger = logging.getLogger("ckpt")

# A writer that deletes the latest step this often while it is read keeps nothing that one can read.
_LATEST_TRIES = 20


class RootReader:
    """Reads the steps of one root. Its coroutines run on the engine's loop."""

    def __init__(
        self, storage: Storage, index: StepIndex, engine: SaveEngine, ranking: BestN | None
    ) -> None:
        """Read from `storage`; `ranking` says which step is the best where nobody else does."""
        self._storage = storage
        self._index = index
        self._engine = engine
        self._ranking = ranking

    async def all_steps(self) -> list[int]:
        """Return every committed step, ascending."""
        return list(await self._index.refresh())

    async def latest_step(self) -> int | None:
        """Return the greatest committed step, or None."""
        latest = await self._index.latest()
        return None if latest is None else latest.step

    async def best_step(self, metric: Metric | None, mode: Mode | None) -> int | None:
        """Return the step with the best metric, or None; see the managers."""
        if metric is None:
            if self._ranking is None:
                raise InvalidArgumentError(
                    "best_step(): there is no single BestN in the manager's preservation that "
                    "would say what is best. Name it: best_step('loss', 'min')"
                )
            metric, mode = self._ranking.metric, mode or self._ranking.mode
        elif mode is None:
            raise InvalidArgumentError(
                f"best_step({metric!r:.80}): say which values are better, mode='min' or mode='max'"
            )
        steps = [saved_step(each) for each in (await self._index.refresh()).values()]
        return await anyio.to_thread.run_sync(best_of, steps, metric, mode)

    async def found(self, step: int | None) -> tuple[str, Manifest]:
        """Return entry and manifest of `step`, or of the latest one.

        Raises:
            StepNotFoundError: There is no such step; says which there are.
        """
        if step is None:
            latest = await self._index.latest_manifest()
            if latest is None:
                raise self._no_step()
            return latest
        step = check_step(step)
        # The one that counts first; of several damaged ones, or foreign ones, the first tells.
        for entry in await self._index.entries_of(step):
            with contextlib.suppress(StepNotFoundError):
                return entry, await read_manifest(self._storage, entry, step=step)
        raise await self._index.not_found(step)

    async def metadata(self, step: int | None) -> StepMetadata:
        """Return the metadata of `step`, or of the latest one."""
        entry, manifest = await self.found(step)
        statistics = await statistics_of(self._storage, entry, manifest)
        path = f"{self._storage.location}/{entry}"
        return await anyio.to_thread.run_sync(describe_step, manifest, path, statistics)

    async def verify(self, step: int | None, deep: bool) -> VerifyReport:
        """Compare `step`, or the latest one, with its manifest; see `engine.verification`."""
        began = time.perf_counter_ns()
        with self._recorder("verify", step).failing(began):
            for _ in range(_LATEST_TRIES if step is None else 1):
                chosen = await self.latest_step() if step is None else check_step(step)
                if chosen is None:
                    raise self._no_step()
                entries = await self._index.entries_of(chosen)
                if not entries:
                    raise await self._index.not_found(chosen)
                try:
                    report = await verify_entry(
                        self._storage, entries[0], chosen, deep, self._engine.observers
                    )
                except StepNotFoundError as error:
                    deleted = error
                    continue
                self._recorder("verify", chosen).end(began, "ok", nbytes=report.nbytes)
                return report
            raise deleted

    async def restore(
        self,
        step: int | None,
        like: Any,
        items: Mapping[str, Any] | Iterable[str] | None,
        adapt: Adapt | Mapping[str, Adapt] | None,
    ) -> Any:
        """Load a step, or the latest one: then the next one where it is deleted meanwhile."""
        # It may be asked for more than once.
        items = list(items) if isinstance(items, Iterator) else items
        began = time.perf_counter_ns()
        with self._recorder("restore", step).failing(began):
            for _ in range(_LATEST_TRIES if step is None else 1):
                entry, manifest = await self.found(step)
                try:
                    loaded = await self._load(entry, manifest, like, items, adapt)
                except StepDeletedError as error:
                    deleted = error
                    continue
                nbytes = sum(manifest.items[name].nbytes for name in loaded)
                self._recorder("restore", manifest.step).end(began, "ok", nbytes=nbytes)
                seconds = (time.perf_counter_ns() - began) / 1e9
                logger.info("restored step %s: %d bytes in %.2f s", manifest.step, nbytes, seconds)
                return result_of(manifest, loaded, named=items is not None)
            raise deleted

    async def _load(
        self,
        entry: str,
        manifest: Manifest,
        like: Any,
        items: Mapping[str, Any] | Iterable[str] | None,
        adapt: Adapt | Mapping[str, Adapt] | None,
    ) -> dict[str, Any]:
        async with while_read(self._storage, entry, manifest):
            return await restore_items(
                manifest,
                self._storage,
                entry,
                wanted_items(manifest, like, items, adapt),
                self._engine.handlers,
                self._engine.arena,
                self._engine.buffers,
                self._engine.observers,
            )

    def _recorder(self, operation: str, step: int | None) -> Recorder:
        return Recorder(operation, step, self._engine.observers)

    def _no_step(self) -> StepNotFoundError:
        return StepNotFoundError(f"{self._storage.location} has no committed step; save one first")
