"""Saves under way on one root, and who hears of their errors."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

import anyio

from ckpt.backlog import Backlog, BacklogPolicy, Place
from ckpt.commit import Commit, CommitHooks
from ckpt.engine.loop import EngineLoop, Job
from ckpt.engine.save import SaveEngine, SaveRequest, save_step
from ckpt.errors import (
    CheckpointError,
    CommitCancelledError,
    InvalidArgumentError,
    StepExistsError,
)
from ckpt.manifest import FILE_NAME, MAX_BYTES, Manifest
from ckpt.redaction import redact
from ckpt.stepinfo import step_info
from ckpt.storage.base import Storage

__all__ = ["Saves", "refuse_existing", "save_entry"]

logger = logging.getLogger("ckpt")


class Root(Protocol):
    """What decides about the saves of a root, on the engine's loop."""

    async def open(self) -> None:
        """Make the root ready for writing."""

    async def refusal(self, step: int, pending: Sequence[int]) -> str | None:
        """Return why `step` is not to be saved, or None; `pending` are being saved."""

    async def preserve(self, saved: int | None) -> None:
        """Delete what is not kept any more."""


class Saves:
    """The saves of one root. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        loop: EngineLoop,
        storage: Storage,
        engine: SaveEngine,
        backlog: BacklogPolicy,
    ) -> None:
        """Save to `storage`."""
        self._loop = loop
        self._storage = storage
        self._engine = engine
        self._policy: BacklogPolicy = backlog
        # Made on the engine's loop.
        self._backlog: Backlog | None = None
        # Saves under way, and ended ones whose error nobody has fetched yet.
        self._commits: dict[CommitHooks, Commit] = {}
        # Set when the deletions after a commit have ended; the next save does not wait for them.
        self._tidying: list[anyio.Event] = []

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return any(not commit.done() for commit in list(self._commits.values()))

    def start(
        self, request: SaveRequest, root: Root, *, force: bool
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Start a save that `root` may refuse, from any thread.

        Returns:
            The commit, the job behind it, and a future that is done once the caller may change or
            donate what it passed, or holds the error that the call itself must raise.
        """
        staged: Future[None] = Future()
        jobs: list[Job[None]] = []
        commit = Commit(request.step, lambda: jobs[0].cancel(), self._loop.check_caller)
        hooks = CommitHooks(commit)
        self._forget_seen()
        self._commits[hooks] = commit
        try:
            jobs.append(self._loop.submit(self._save, request, root, force, hooks, staged))
        except BaseException:
            del self._commits[hooks]
            raise
        return commit, jobs[0], staged

    async def _save(
        self,
        request: SaveRequest,
        root: Root,
        force: bool,
        hooks: CommitHooks,
        staged: Future[None],
    ) -> None:
        """Run one save to its end; every outcome goes to its commit, or to the waiting call."""
        began = time.perf_counter()
        tidied = anyio.Event()
        backlog = self._backlog = self._backlog or Backlog(self._policy)
        reason = None if force else backlog.refusal()
        if reason is not None:
            self._skip(reason, request, hooks, staged)
            return
        scope = anyio.CancelScope()
        place = backlog.join(request.entry, request.step, scope.cancel)
        manifest = None
        try:
            with scope:
                manifest = await self._save_in_turn(request, root, force, hooks, staged, place)
                self._tidying.append(tidied)
        except BaseException as error:
            self._end_badly(error, request, hooks, staged)
            if not isinstance(error, Exception):
                raise
            return
        finally:
            backlog.leave(place)
        if scope.cancelled_caught:
            reason = f"superseded by step {place.superseded_by} (backlog='supersede')"
            self._skip(reason, request, hooks, staged)
            return
        self._commits.pop(hooks)
        where = f"{self._storage.location}/{request.entry}"
        info = None if manifest is None else step_info(manifest, where)
        try:
            if info is None:
                staged.set_result(None)
                return
            hooks.finish(info)
            seconds = time.perf_counter() - began
            logger.info("saved step %s: %d bytes in %.2f s", info.step, info.nbytes, seconds)
            await root.preserve(info.step)
        finally:
            self._tidying.remove(tidied)
            tidied.set()
        # In the pause before the next save; nobody waits for it.
        await self._engine.arena.warm(lambda: backlog.is_empty and not self._loop.closed)

    async def _save_in_turn(
        self,
        request: SaveRequest,
        root: Root,
        force: bool,
        hooks: CommitHooks,
        staged: Future[None],
        place: Place,
    ) -> Manifest | None:
        """Save unless a policy says no; None then."""
        assert self._backlog is not None
        backlog = self._backlog
        await backlog.admitted(place)
        await root.open()
        before = [other for other in backlog.under_way if other is not place]
        await refuse_existing(self._storage, request)
        if not request.overwrite and any(other.entry == request.entry for other in before):
            raise StepExistsError(
                "this step is being saved at the moment. Choose another step, or pass "
                "overwrite=True to replace it once it is there",
                step=request.step,
            )
        if not force and request.step is not None:
            pending = [other.step for other in before if other.step is not None]
            reason = await root.refusal(request.step, pending)
            if reason is not None:
                hooks.skip(reason)
                return None
        return await save_entry(
            self._engine,
            self._storage,
            request,
            hooks,
            on_safe=lambda: staged.set_result(None),
            on_staged=lambda: backlog.staged(place),
            may_write=place.may_write.wait,
        )

    def _skip(
        self, reason: str, request: SaveRequest, hooks: CommitHooks, staged: Future[None]
    ) -> None:
        self._commits.pop(hooks, None)
        request.items.clear()
        hooks.skip(reason)
        if not staged.done():
            staged.set_result(None)

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

    async def idle(self) -> None:
        """Wait until every save that was started has ended, and the deletions after it."""
        if self._backlog is not None:
            await self._backlog.idle()
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

    def cancel_all(self) -> list[Commit]:
        """Ask every save under way to stop; return their commits."""
        return [commit for commit in list(self._commits.values()) if commit.cancel()]

    def tell_unseen(self) -> bool:
        """Write to standard error what failed and nobody fetched; return whether there was any."""
        if not self._commits or self._loop.is_forked:
            return False
        errors = self.take_errors()
        where = redact(self._storage.location)
        for error in errors:
            sys.stderr.write(f"ckpt: a save to {where} failed and nobody looked: {error}\n")
        return bool(errors)


async def save_entry(
    engine: SaveEngine,
    storage: Storage,
    request: SaveRequest,
    hooks: CommitHooks,
    *,
    on_safe: Callable[[], None] = lambda: None,
    on_staged: Callable[[], None] = lambda: None,
    may_write: Callable[[], Awaitable[Any]] | None = None,
) -> Manifest:
    """Save one entry once its metrics are plain numbers; see `save_step`."""
    if request.metrics is not None:
        metrics = await anyio.to_thread.run_sync(_plain_metrics, request.metrics)
        request = replace(request, metrics=metrics)
    return await save_step(
        engine,
        storage,
        request,
        hooks,
        on_safe=on_safe,
        on_staged=on_staged,
        may_write=may_write or anyio.lowlevel.checkpoint,
    )


async def refuse_existing(storage: Storage, request: SaveRequest) -> None:
    """Raise before anything is staged if the entry is taken; publishing checks again.

    Raises:
        StepExistsError: It is, and is not to be replaced or not ours to replace.
    """
    if not await storage.exists(request.entry):
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
