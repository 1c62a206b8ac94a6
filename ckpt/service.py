"""One root, as coroutines of the engine's loop: what to save, what to keep, who hears of errors.

The asyncio and the plain manager are two faces of this one object. No bytes move here.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import anyio

from ckpt.commit import Commit, CommitHooks
from ckpt.engine.arena import Arena
from ckpt.engine.loop import EngineLoop, Job
from ckpt.engine.restore import restore_items
from ckpt.engine.save import SaveEngine, SaveRequest, save_step
from ckpt.errors import (
    CheckpointError,
    CommitCancelledError,
    CorruptCheckpointError,
    InvalidArgumentError,
    ReadOnlyError,
    StepExistsError,
    StepNotFoundError,
    UnsupportedFormatError,
)
from ckpt.events import Observer, Recorder
from ckpt.handlers.base import Handler
from ckpt.handlers.pytree import PyTreeHandler
from ckpt.layout.orbax_view import root_view
from ckpt.manifest import FILE_NAME, MAX_BYTES, Manifest
from ckpt.policies import PreservationPolicy, PreserveAll, SavePolicy
from ckpt.requests import result_of, wanted_items
from ckpt.settings import Staging
from ckpt.stepinfo import StepMetadata, describe_step, step_info
from ckpt.steps import committed_steps, latest_step, read_manifest
from ckpt.storage.base import Storage

__all__ = ["RootService", "make_engine", "refuse_existing", "save_entry"]

logger = logging.getLogger("ckpt")

_ROOT_METADATA = "metadata"


def make_engine(
    staging: Staging, handlers: Sequence[Handler], observers: Iterable[Observer]
) -> SaveEngine:
    """Return an engine with a cold arena; the given handlers come before the built-in ones."""
    arena = Arena(staging.effective_budget)
    return SaveEngine(staging, (*handlers, PyTreeHandler()), tuple(observers), arena)


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
        read_only: bool,
    ) -> None:
        """Serve the root of `storage`."""
        self.loop = loop
        self.storage = storage
        self.read_only = read_only
        self._engine = engine
        self._save_policy = save_policy
        self._preservation = preservation
        self._turn: anyio.Lock | None = None
        self._opened = False
        # Saves under way, and ended ones whose error nobody has fetched yet.
        self._commits: dict[CommitHooks, Commit] = {}
        # Set when the deletions after a commit have ended; the next save does not wait for them.
        self._tidying: list[anyio.Event] = []

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return any(not commit.done() for commit in list(self._commits.values()))

    def start_save(
        self, request: SaveRequest, *, force: bool
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Start a save, from any thread.

        Returns:
            The commit, the job behind it, and a future that is done once the caller may change or
            donate what it passed, or holds the error that the call itself must raise.
        """
        if self.read_only:
            raise ReadOnlyError(f"{self.storage.location} was opened with read_only=True")
        staged: Future[None] = Future()
        jobs: list[Job[None]] = []
        commit = Commit(request.step, lambda: jobs[0].cancel(), self.loop.check_caller)
        hooks = CommitHooks(commit)
        self._forget_seen()
        self._commits[hooks] = commit
        try:
            jobs.append(self.loop.submit(self._save, request, force, hooks, staged))
        except BaseException:
            del self._commits[hooks]
            raise
        return commit, jobs[0], staged

    async def _save(
        self, request: SaveRequest, force: bool, hooks: CommitHooks, staged: Future[None]
    ) -> None:
        """Run one save to its end; every outcome goes to its commit, or to the waiting call."""
        began = time.perf_counter()
        tidied = anyio.Event()

        def on_staged() -> None:
            staged.set_result(None)

        try:
            async with self._lock():
                manifest = await self._save_in_turn(request, force, hooks, on_staged)
                where = f"{self.storage.location}/{request.entry}"
                info = None if manifest is None else step_info(manifest, where)
                self._tidying.append(tidied)
        except BaseException as error:
            self._end_badly(error, request, hooks, staged)
            if not isinstance(error, Exception):
                raise
            return
        self._commits.pop(hooks)
        try:
            if info is None:
                on_staged()
                return
            hooks.finish(info)
            seconds = time.perf_counter() - began
            logger.info("saved step %s: %d bytes in %.2f s", info.step, info.nbytes, seconds)
            await self._preserve(info.step)
        finally:
            self._tidying.remove(tidied)
            tidied.set()

    def _end_badly(
        self,
        error: BaseException,
        request: SaveRequest,
        hooks: CommitHooks,
        staged: Future[None],
    ) -> None:
        if not isinstance(error, Exception):
            error = CommitCancelledError(
                "the save was cancelled; nothing of it is left", step=request.step
            )
            hooks.fail(error, seen=True)
        else:
            if isinstance(error, CheckpointError):
                error.locate(step=request.step)
            hooks.fail(error, seen=not staged.done())
        if not staged.done():
            staged.set_exception(error)
        # A failure that is still to be told must not keep the state alive until then.
        request.items.clear()
        if hooks.is_seen:
            self._commits.pop(hooks, None)

    def _lock(self) -> anyio.Lock:
        if self._turn is None:
            self._turn = anyio.Lock()
        return self._turn

    async def _save_in_turn(
        self,
        request: SaveRequest,
        force: bool,
        hooks: CommitHooks,
        on_staged: Callable[[], None],
    ) -> Manifest | None:
        """Save unless a policy says no; None then."""
        await self.open()
        await refuse_existing(self.storage, request)
        if self._save_policy is not None and not force and request.step is not None:
            previous = await committed_steps(self.storage)
            reason = self._save_policy.refusal(request.step, previous)
            if reason is not None:
                hooks.skip(reason)
                return None
        return await save_entry(self._engine, self.storage, request, hooks, on_staged)

    async def open(self) -> None:
        """Make the root, and remove what dead writers left in it; only the first call does."""
        if self._opened or self.read_only:
            return
        await self.storage.prepare()
        removed = await self.storage.sweep()
        if removed:
            logger.debug("removed %d attempts of dead writers: %s", len(removed), removed)
        if _ROOT_METADATA not in await self.storage.entries():
            await self._write_root_metadata()
        self._opened = True

    async def _write_root_metadata(self) -> None:
        attempt = await self.storage.begin(_ROOT_METADATA)
        try:
            for path, data in root_view().items():
                await self.storage.write(attempt, path, data)
            await self.storage.publish(attempt, overwrite=False)
        except StepExistsError:
            # Another manager was first; what it wrote is as good.
            await self.storage.discard(attempt)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.storage.discard(attempt)
            raise

    async def _preserve(self, saved: int | None) -> None:
        """Delete what the policy does not keep; a failure is logged, the save is not touched.

        What was acknowledged just now stays, though older steps may be greater: after a run went
        back, its new steps are the ones it would resume from.
        """
        if isinstance(self._preservation, PreserveAll):
            return
        try:
            steps = await committed_steps(self.storage)
            kept = self._preservation.keep(steps) | set(steps[-1:]) | {saved}
            with Recorder("save", saved, self._engine.observers).phase("preserve"):
                for step in steps:
                    if step not in kept:
                        await self.storage.remove(str(step))
        except Exception:
            logger.warning("steps that are no longer kept could not be deleted", exc_info=True)

    async def should_save(self, step: int) -> bool:
        """Return whether the save policy wants `step`."""
        if self._save_policy is None:
            return True
        return self._save_policy.refusal(step, await committed_steps(self.storage)) is None

    async def all_steps(self) -> list[int]:
        """Return every committed step, ascending."""
        return await committed_steps(self.storage)

    async def latest_step(self) -> int | None:
        """Return the greatest committed step, or None."""
        return await latest_step(self.storage)

    async def manifest(self, step: int | None) -> Manifest:
        """Return the manifest of `step`, or of the latest one."""
        if step is None:
            step = await latest_step(self.storage)
            if step is None:
                raise StepNotFoundError(
                    f"{self.storage.location} has no committed step; save one first"
                )
        return await read_manifest(self.storage, str(step), step=step)

    async def metadata(self, step: int | None) -> StepMetadata:
        """Return the metadata of `step`, or of the latest one."""
        manifest = await self.manifest(step)
        path = f"{self.storage.location}/{manifest.step}"
        return await anyio.to_thread.run_sync(describe_step, manifest, path)

    async def restore(
        self,
        step: int | None,
        like: Any,
        items: Mapping[str, Any] | Iterable[str] | None,
    ) -> Any:
        """Load a step, or the latest one."""
        began = time.perf_counter()
        manifest = await self.manifest(step)
        entry = str(manifest.step)
        loaded = await restore_items(
            manifest,
            lambda item: self.storage.database_url(entry, item),
            wanted_items(manifest, like, items),
            self._engine.handlers,
            self._engine.arena,
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
        async with self._lock():
            # A damaged step is one to delete, too.
            with contextlib.suppress(CorruptCheckpointError, UnsupportedFormatError):
                await self.manifest(step)
            await self.storage.remove(str(step))

    async def wait(self) -> None:
        """Wait until every save that was started has ended, and the deletions after it."""
        async with self._lock():
            pass
        for tidied in list(self._tidying):
            await tidied.wait()

    def _forget_seen(self) -> None:
        """Drop failed saves whose error was fetched from their commit since."""
        for hooks, commit in list(self._commits.items()):
            if commit.done() and hooks.is_seen:
                self._commits.pop(hooks, None)

    def take_errors(self) -> list[BaseException]:
        """Return the errors of ended saves that nobody has fetched yet; each is given out once."""
        errors = []
        for hooks, commit in list(self._commits.items()):
            if commit.done():
                error = hooks.unseen_error()
                if error is not None:
                    errors.append(error)
        # Who waits for one now may still be cancelled before it hears: that one stays.
        self._forget_seen()
        return errors

    def finish_at_exit(self) -> None:
        """At interpreter exit: finish what is under way, and say loudly what failed unseen."""
        self.loop.close()
        self._tell_unseen()

    def __del__(self) -> None:
        # Nobody can close this root any more, so nobody else will tell. Nothing else is touched:
        # at interpreter exit the modules may be gone already.
        if self._commits:
            self._tell_unseen()

    def _tell_unseen(self) -> None:
        if self.loop.is_forked:
            return
        for error in self.take_errors():
            sys.stderr.write(
                f"ckpt: a save to {self.storage.location} failed and nobody looked: {error}\n"
            )


async def save_entry(
    engine: SaveEngine,
    storage: Storage,
    request: SaveRequest,
    hooks: CommitHooks,
    on_staged: Callable[[], None],
) -> Manifest:
    """Save one entry once its metrics are plain numbers; see `save_step`."""
    if request.metrics is not None:
        metrics = await anyio.to_thread.run_sync(_plain_metrics, request.metrics)
        request = replace(request, metrics=metrics)
    return await save_step(engine, storage, request, hooks, on_staged)


async def refuse_existing(storage: Storage, request: SaveRequest) -> None:
    """Raise before anything is staged if the entry is taken; publishing checks again.

    Raises:
        StepExistsError: It is, and is not to be replaced or not ours to replace.
    """
    if request.entry not in await storage.entries():
        return
    where = f"{storage.location}/{request.entry}"
    if await storage.read(request.entry, FILE_NAME, MAX_BYTES) is None:
        raise StepExistsError(
            f"{where} exists and is not a checkpoint of this library, so it is never replaced. "
            "Move it away, or choose another name",
            step=request.step,
        )
    if not request.overwrite:
        raise StepExistsError(
            f"{where} already exists; it was left as it is. Choose another step, or pass "
            "overwrite=True to replace it",
            step=request.step,
        )


def _plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Return metrics as JSON has them; waits for jax scalars that are still being computed."""
    plain: dict[str, float | str] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"metrics[{name!r}]={value!r:.60}: expected a number"
            ) from error
        finite = number - number == 0
        plain[str(name)] = number if finite else repr(number)
    return plain
