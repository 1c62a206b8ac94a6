"""One root, as coroutines of the engine's loop: what to save, what to keep, who hears of errors.

The asyncio and the plain manager are two faces of this one object. No bytes move here.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import anyio

from ckpt.backlog import BacklogPolicy
from ckpt.commit import Commit
from ckpt.engine.arena import Arena
from ckpt.engine.buffers import Buffers
from ckpt.engine.exits import fail_exit
from ckpt.engine.loop import EngineLoop, Job
from ckpt.engine.plans import PlanCache
from ckpt.engine.restore import restore_items
from ckpt.engine.save import SaveEngine, SaveRequest
from ckpt.engine.verification import verify_entry
from ckpt.errors import (
    CorruptCheckpointError,
    ReadOnlyError,
    StepDeletedError,
    StepExistsError,
    StepNotFoundError,
    UnsupportedFormatError,
)
from ckpt.events import Observer, Recorder
from ckpt.handlers.registry import HandlersLike, find_handlers
from ckpt.layout.adapt import Adapt
from ckpt.layout.formatting import Formats, compile_formats
from ckpt.layout.orbax_view import root_view
from ckpt.layout.report import VerifyReport
from ckpt.manifest import Manifest
from ckpt.policies import PreservationPolicy, PreserveAll, SavePolicy
from ckpt.redaction import redact
from ckpt.requests import result_of, wanted_items
from ckpt.saves import Saves
from ckpt.settings import Staging, Timeouts
from ckpt.stepinfo import StepMetadata, describe_step
from ckpt.steps import (
    committed_steps,
    latest_manifest,
    latest_step,
    read_manifest,
    while_read,
)
from ckpt.storage.base import Storage

__all__ = ["RootService", "make_engine"]

logger = logging.getLogger("ckpt")

_ROOT_METADATA = "metadata"
# For input and output under way to end, and what was written to be removed.
_GIVING_UP_SECONDS = 0.5
# A writer that deletes the latest step this often while it is read keeps nothing that one can read.
_LATEST_TRIES = 20


def make_engine(
    staging: Staging,
    handlers: HandlersLike,
    observers: Iterable[Observer],
    formats: Formats | None = None,
) -> SaveEngine:
    """Return an engine with a cold arena; the given handlers come before the built-in ones."""
    arena = Arena(staging.effective_budget)
    plans = PlanCache(compile_formats(formats))
    return SaveEngine(
        staging, find_handlers(handlers), tuple(observers), arena, Buffers(arena), plans
    )


class RootService:
    """Saves to and restores from one root. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        loop: EngineLoop,
        storage: Storage,
        engine: SaveEngine,
        save_policy: SavePolicy | None,
        preservation: PreservationPolicy,
        *,
        backlog: BacklogPolicy,
        read_only: bool,
        timeouts: Timeouts,
    ) -> None:
        """Serve the root of `storage`."""
        self._timeouts = timeouts
        self.loop = loop
        self.storage = storage
        self.read_only = read_only
        self._engine = engine
        self._save_policy = save_policy
        self._preservation = preservation
        self._opened = False
        self._swept = 0.0
        self.saves = Saves(loop, storage, engine, backlog)

    def start_save(
        self, request: SaveRequest, *, force: bool
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Start a save, from any thread; see `Saves.start`."""
        if self.read_only:
            raise ReadOnlyError(f"{self.storage.location} was opened with read_only=True")
        return self.saves.start(request, self, force=force)

    async def open(self) -> None:
        """Make the root, and remove what dead writers left in it; only the first call does."""
        if self._opened or self.read_only:
            return
        await self.storage.prepare()
        await self._sweep()
        if _ROOT_METADATA not in await self.storage.entries():
            await self._write_root_metadata()
        self._opened = True

    async def _sweep(self) -> None:
        """Remove what dead writers left in the root."""
        self._swept = time.monotonic()
        removed = await self.storage.sweep()
        if removed:
            logger.debug("removed %d attempts of dead writers: %s", len(removed), removed)

    async def _write_root_metadata(self) -> None:
        attempt = await self.storage.begin(_ROOT_METADATA)
        try:
            for path, data in root_view().items():
                await self.storage.write(attempt, path, data)
            await self.storage.publish(attempt, overwrite=False)
        except StepExistsError:
            # Another manager was first; what it wrote is as good.
            with anyio.CancelScope(shield=True):
                await self.storage.discard(attempt)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.storage.discard(attempt)
            raise

    async def preserve(self, saved: int | None) -> None:
        """Delete what the policy does not keep; a failure is logged, the save is not touched.

        What was acknowledged just now stays, though older steps may be greater: after a run went
        back, its new steps are the ones it would resume from. What writers on other machines left
        when they vanished is removed here, too, once their leases have run out.
        """
        try:
            if time.monotonic() - self._swept > self.storage.lease_seconds:
                await self._sweep()
            if isinstance(self._preservation, PreserveAll):
                return
            steps = await committed_steps(self.storage)
            kept = self._preservation.keep(steps) | set(steps[-1:]) | {saved}
            with Recorder("save", saved, self._engine.observers).phase("preserve"):
                for step in steps:
                    if step not in kept:
                        await self.storage.remove(str(step))
        except Exception:
            logger.warning("steps that are no longer kept could not be deleted", exc_info=True)

    async def refusal(self, step: int, pending: Sequence[int]) -> str | None:
        """Return why the save policy turns `step` down, or None; `pending` are being saved."""
        if self._save_policy is None:
            return None
        previous = sorted({*await committed_steps(self.storage), *pending})
        return self._save_policy.refusal(step, previous)

    async def should_save(self, step: int) -> bool:
        """Return whether the save policy wants `step`."""
        return await self.refusal(step, ()) is None

    async def all_steps(self) -> list[int]:
        """Return every committed step, ascending."""
        return await committed_steps(self.storage)

    async def latest_step(self) -> int | None:
        """Return the greatest committed step, or None."""
        return await latest_step(self.storage)

    async def manifest(self, step: int | None) -> Manifest:
        """Return the manifest of `step`, or of the latest one."""
        if step is not None:
            return await read_manifest(self.storage, str(step), step=step)
        manifest = await latest_manifest(self.storage)
        if manifest is None:
            raise _no_step(self.storage)
        return manifest

    async def metadata(self, step: int | None) -> StepMetadata:
        """Return the metadata of `step`, or of the latest one."""
        manifest = await self.manifest(step)
        path = f"{self.storage.location}/{manifest.step}"
        return await anyio.to_thread.run_sync(describe_step, manifest, path)

    async def verify(self, step: int | None, deep: bool) -> VerifyReport:
        """Compare `step`, or the latest one, with its manifest; see `engine.verification`."""
        for _ in range(_LATEST_TRIES if step is None else 1):
            chosen = await latest_step(self.storage) if step is None else step
            if chosen is None:
                raise _no_step(self.storage)
            try:
                return await verify_entry(
                    self.storage, str(chosen), chosen, deep, self._engine.observers
                )
            except StepNotFoundError as error:
                deleted = error
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
        for _ in range(_LATEST_TRIES if step is None else 1):
            manifest = await self.manifest(step)
            try:
                return await self._restore(manifest, like, items, adapt)
            except StepDeletedError as error:
                deleted = error
        raise deleted

    async def _restore(
        self,
        manifest: Manifest,
        like: Any,
        items: Mapping[str, Any] | Iterable[str] | None,
        adapt: Adapt | Mapping[str, Adapt] | None,
    ) -> Any:
        began = time.perf_counter()
        entry = str(manifest.step)
        async with while_read(self.storage, entry, manifest):
            loaded = await restore_items(
                manifest,
                self.storage,
                entry,
                wanted_items(manifest, like, items, adapt),
                self._engine.handlers,
                self._engine.arena,
                self._engine.buffers,
                self._engine.observers,
            )
        nbytes = sum(manifest.items[name].nbytes for name in loaded)
        seconds = time.perf_counter() - began
        logger.info("restored step %s: %d bytes in %.2f s", manifest.step, nbytes, seconds)
        return result_of(manifest, loaded, named=items is not None)

    async def delete(self, step: int) -> None:
        """Delete a step."""
        if self.read_only:
            raise ReadOnlyError(f"{self.storage.location} was opened with read_only=True")
        # A save of the same step that is under way would be published afterwards.
        await self.saves.idle()
        # A damaged step is one to delete, too.
        with contextlib.suppress(CorruptCheckpointError, UnsupportedFormatError):
            await self.manifest(step)
        if str(step) not in await self.storage.entries():
            raise StepNotFoundError(
                f"{self.storage.location}/{step} is a file or a link, not a step", step=step
            )
        await self.storage.remove(str(step))

    def finish_at_exit(self) -> None:
        """At interpreter exit: finish what is under way, and say loudly what failed unseen.

        What has not ended in time is given up. The exit status then tells, as after a failure.
        """
        given_up = []
        if not self.loop.close(self._timeouts.exit):
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


def _no_step(storage: Storage) -> StepNotFoundError:
    return StepNotFoundError(f"{storage.location} has no committed step; save one first")
