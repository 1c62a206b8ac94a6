"""The steps of one root, read: which there are, what they are, and what they hold."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import anyio

from ckpt._arguments import check_step, shown
from ckpt._engine.engine import Engine
from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.pipeline import restore_items
from ckpt._engine.restore.shared_reads import Broadcast
from ckpt._engine.verify.pipeline import verify_entry
from ckpt._engine.verify.report import VerifyReport
from ckpt._events import EventRecorder, Observer
from ckpt._format.manifest import JsonValue, Manifest
from ckpt._plan.adapt import Adapt
from ckpt._runtime.futures import CallingThread
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt._steps.late_statistics import statistics_of
from ckpt._steps.previous_steps import saved_step
from ckpt._steps.restore_requests import check_broadcast, result_of, wanted_items
from ckpt._steps.step_metadata import StepMetadata, describe_step
from ckpt.coordination._beats import beating
from ckpt.coordination._operation import Operation
from ckpt.coordination._peers import Peers
from ckpt.errors import (
    CoordinationError,
    InvalidArgumentError,
    StepDeletedError,
    StepNotFoundError,
)
from ckpt.policies import (
    BestN,
    Metric,
    Mode,
    best_of,
)
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest, while_read

__all__ = ["StepReader"]

logger = logging.getLogger("ckpt")

# A writer that deletes the latest step this often while it is read keeps nothing that one can read.
_LATEST_TRIES = 20


class StepReader:
    """Reads the steps of one root. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        storage: Storage,
        index: StepIndex,
        engine: Engine,
        ranking: BestN | None,
        peers: Peers,
    ) -> None:
        """Read from `storage`, together with the other processes of the job.

        `ranking` says which step is the best where nobody else does.
        """
        self._storage = storage
        self._index = index
        self._engine = engine
        self._ranking = ranking
        self._peers = peers

    async def all_steps(self) -> list[int]:
        """Return every committed step, ascending."""
        return list(await self._steps())

    async def latest_step(self) -> int | None:
        """Return the greatest committed step, or None."""
        if self._peers.own_disks:
            return max(await self._steps(), default=None)
        latest = await self._index.latest()
        return None if latest is None else latest.step

    async def best_step(self, metric: Metric | None, mode: Mode | None) -> int | None:
        """Return the step with the best metric, or None; see the managers."""
        if metric is None:
            if self._ranking is None:
                raise InvalidArgumentError(
                    "best_step(): the manager's preservation has no single BestN that defines the "
                    "best step. Name a metric: best_step('loss', 'min')"
                )
            metric, mode = self._ranking.metric, mode or self._ranking.mode
        elif mode is None:
            raise InvalidArgumentError(
                f"best_step({shown(metric)}): say which values are better: mode='min' or 'max'"
            )
        steps = [saved_step(each) for each in (await self._steps()).values()]
        return await anyio.to_thread.run_sync(best_of, steps, metric, mode)

    async def _steps(self) -> dict[int, IndexedStep]:
        """Return the committed steps; of processes with disks of their own those that all have."""
        if not self._peers.own_disks:
            return await self._index.refresh()
        look = partial(self.in_common, None)
        return await self._peers.all_or_none("steps", "listing the steps", look)

    async def in_common(self, asked: int | None, operation: Operation) -> dict[int, IndexedStep]:
        """Return the steps that all processes have on disks of their own, as they are on this one.

        Args:
            asked: A step that all of them ask for, or None.
            operation: What they do it for.
        """
        async with beating(operation):
            found = await self._index.refresh()
        # What not all have published is no step, nor is what they have from different saves.
        own: JsonValue = [[each.step, each.save] for each in found.values()]
        every = await self._peers.gathered(operation, [asked, own])
        for other, _ in every:
            self._check_same(asked, other)
        common = set.intersection(*({tuple(each) for each in steps} for _, steps in every))
        return {step: found[step] for step in sorted(step for step, save in common if save)}

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
        if step is None and self._peers.own_disks:
            step = await self.latest_step()
            if step is None:
                raise self._no_step()
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
        broadcast_bytes: int | None,
        caller: CallingThread,
    ) -> Any:
        """Load a step, or the latest one: then the next one where it is deleted meanwhile.

        Several processes load the same step, and all of them fail where one does. With
        `broadcast_bytes` they share what they read, by programs that `caller` runs.
        """
        sharing = None if broadcast_bytes is None else (broadcast_bytes, caller)
        # It may be asked for more than once.
        items = list(items) if isinstance(items, Iterator) else items
        began = time.perf_counter_ns()
        with self._recorder("restore", step).failing(began):
            for _ in range(_LATEST_TRIES if step is None else 1):
                load = partial(self._found_and_loaded, step, like, items, adapt, sharing)
                try:
                    manifest, loaded = await self._peers.all_or_none(
                        "restore",
                        "the restore" if step is None else f"the restore of step {step}",
                        load,
                    )
                except StepDeletedError as error:
                    deleted = error
                    continue
                nbytes = sum(manifest.items[name].nbytes for name in loaded)
                self._recorder("restore", manifest.step).end(began, "ok", nbytes=nbytes)
                seconds = (time.perf_counter_ns() - began) / 1e9
                logger.info("restored step %s: %d bytes in %.2f s", manifest.step, nbytes, seconds)
                return result_of(manifest, loaded, named=items is not None)
            raise deleted

    async def _found_and_loaded(
        self,
        step: int | None,
        like: Any,
        items: Mapping[str, Any] | Iterable[str] | None,
        adapt: Adapt | Mapping[str, Adapt] | None,
        sharing: tuple[int, CallingThread] | None,
        operation: Operation,
    ) -> tuple[Manifest, dict[str, Any]]:
        """Find a step that all processes have, and load it, everywhere."""
        peers, broadcast = self._peers, None
        check_broadcast(None if sharing is None else sharing[0], own_disks=peers.own_disks)
        if peers.is_alone:
            entry, manifest = await self.found(step)
        elif peers.own_disks:
            entry, manifest = await self.found(await self.common(step, operation))
        else:
            nbytes = None if sharing is None else sharing[0]
            entry, manifest = await self._led(step, nbytes, operation)
            if sharing is not None:
                broadcast = Broadcast(peers, operation, *sharing)
        observers = self._engine.observers
        if not self._peers.is_alone:
            observers = (*observers, lambda event: self._peers.advance(event.nbytes))
        loaded = await self._load(entry, manifest, like, items, adapt, observers, broadcast)
        return manifest, loaded

    async def _led(
        self, step: int | None, nbytes: int | None, operation: Operation
    ) -> tuple[str, Manifest]:
        """Return entry and manifest of the step that the primary finds."""
        if self._peers.is_primary:
            entry, manifest = await self.found(step)
            about = {"step": manifest.step, "attempt": manifest.attempt, "broadcast": nbytes}
            await operation.lead(json.dumps(about).encode())
            return entry, manifest
        about = json.loads(await operation.lead(None))
        self._check_same(step, about["step"])
        if about["broadcast"] != nbytes:
            raise CoordinationError(
                f"process {self._peers.index} restores with broadcast_bytes={nbytes} while process "
                f"0 does with {about['broadcast']}; give all processes the same",
                step=about["step"],
            )
        try:
            entry, manifest = await self.found(about["step"])
        except StepNotFoundError as error:
            # It was there a moment ago.
            raise StepDeletedError(
                f"{self._storage.location}: it was deleted while it was read, or process "
                f"{self._peers.index} sees another root than process 0",
                step=about["step"],
            ) from error
        if manifest.attempt != about["attempt"]:
            raise StepDeletedError(
                f"{self._storage.location}/{entry} was replaced while it was read, or process "
                f"{self._peers.index} sees another root than process 0",
                step=manifest.step,
            )
        return entry, manifest

    async def common(self, step: int | None, operation: Operation) -> int:
        """Return the step that all processes have on their disks; None finds the greatest.

        Raises:
            StepNotFoundError: There is none; says which there are.
        """
        asked = None if step is None else check_step(step)
        steps = list(await self.in_common(asked, operation))
        if asked is None and steps:
            return steps[-1]
        if asked is not None and asked in steps:
            return asked
        listed = ", ".join(map(str, steps[-10:])) or "none"
        raise StepNotFoundError(
            "there is no such step that all processes have on disks of their own; steps that they "
            f"have in common: {listed}",
            step=asked,
        )

    def _check_same(self, step: int | None, other: int | None) -> None:
        """Raise if this process restores another step than one of the others."""
        if step != other and step is not None:
            raise CoordinationError(
                f"process {self._peers.index} restores step {step} while another one restores step "
                f"{other}. All processes must restore the same step; restore() without a step "
                "takes the latest on all of them"
            )

    async def _load(
        self,
        entry: str,
        manifest: Manifest,
        like: Any,
        items: Mapping[str, Any] | Iterable[str] | None,
        adapt: Adapt | Mapping[str, Adapt] | None,
        observers: tuple[Observer, ...],
        broadcast: Broadcast | None,
    ) -> dict[str, Any]:
        async with while_read(self._storage, entry, manifest):
            restore = RestoreContext(
                self._storage,
                entry,
                manifest,
                self._engine,
                observers,
                self._peers.index,
                self._peers.count,
                broadcast,
            )
            return await restore_items(restore, wanted_items(manifest, like, items, adapt))

    def _recorder(self, operation: str, step: int | None) -> EventRecorder:
        return EventRecorder(operation, step, self._engine.observers)

    def _no_step(self) -> StepNotFoundError:
        return StepNotFoundError(f"{self._storage.location} has no committed step; save one first")
