"""Saves under way on one root, and who hears of their errors."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import anyio

from ckpt._arguments import check_step
from ckpt._commit import Commit, CommitHooks, step_info
from ckpt._engine.engine import Engine
from ckpt._engine.save.multihost import MultihostSave
from ckpt._engine.save.request import SaveRequest
from ckpt._events import EventRecorder
from ckpt._format.manifest import Manifest
from ckpt._redaction import redact
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._steps.late_statistics import keep_late
from ckpt._steps.saves.backlog import Backlog, BacklogPolicy, BacklogSlot
from ckpt._steps.saves.history import Root, SaveHistory
from ckpt._steps.saves.overwrite import (
    make_way,
    remove_others,
    replacing_part,
    save_entry,
)
from ckpt._steps.saves.preemption import Preemption
from ckpt.coordination._peers import Peers
from ckpt.errors import (
    CheckpointError,
    CommitCancelledError,
    StepExistsError,
    StorageError,
)
from ckpt.storage._base import Storage

__all__ = ["SaveQueue"]

logger = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class _Decision:
    """What was decided about a save.

    Attributes:
        place: Its place in the backlog, or None if it is not to be.
        refusal: Why not.
        kept_seconds: Of a save at preemption how long ago the save before it, or the run, began.
    """

    place: BacklogSlot | None
    refusal: str | None = None
    kept_seconds: float | None = None


class SaveQueue:
    """The saves of one root. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        loop: EngineLoop,
        storage: Storage,
        engine: Engine,
        backlog: BacklogPolicy,
        preemption: Preemption,
        peers: Peers,
    ) -> None:
        """Save to `storage`, together with the other processes of the job."""
        self._loop = loop
        self._storage = storage
        self._engine = engine
        self._policy: BacklogPolicy = backlog
        self._peers = peers
        # Made on the engine's loop.
        self._backlog: Backlog | None = None
        self._joining: anyio.Lock | None = None
        # Saves under way, and ended ones whose error nobody has fetched yet.
        self._commits: dict[CommitHooks, Commit] = {}
        # Set when the deletions after a commit have ended; the next save does not wait for them.
        self.tidying: list[anyio.Event] = []
        self.moments = SaveHistory(engine.now_ns, preemption)

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

    def adopt(self, hooks: CommitHooks, commit: Commit) -> None:
        """Count a save that runs elsewhere among those under way, and tell of its error."""
        self._forget_seen()
        self._commits[hooks] = commit

    def withdraw(self, entry: str, step: int, error: Exception) -> None:
        """Tell the others that a save which they may wait for cannot begin here; does not wait."""
        if not self._peers.is_alone:
            # Of a manager that is closed they heard when it was.
            with contextlib.suppress(CheckpointError):
                self._loop.submit(self._peers.withdraw, _kind_of(entry), _what(step), error)

    async def _save(
        self,
        request: SaveRequest,
        root: Root,
        force: bool,
        hooks: CommitHooks,
        staged: Future[None],
    ) -> None:
        """Run one save to its end; every outcome goes to its commit, or to the waiting call."""
        began_ns = time.perf_counter_ns()
        # Of the step, so that a call more or fewer in one process harms no other step. Before
        # anything is awaited: the turns are those of the calls.
        kind = _kind_of(request.entry)
        turn = self._peers.turn(kind)
        recorder = EventRecorder("save", request.step, self._engine.observers)
        backlog = self._backlog = self._backlog or Backlog(self._policy)
        scope = anyio.CancelScope()
        tidied = anyio.Event()
        place, reason, committed, joint = None, None, False, None
        joining = self._joining = self._joining or anyio.Lock()
        is_asked = root.has_policy or self._policy == "skip"
        has_come = False
        try:
            with scope:
                # In turn, so that all processes save in the order of their calls.
                async with joining:
                    has_come = True
                    joint = await self._joint(request, kind, turn)
                async with joint.watched(hears=is_asked and not force):
                    decision = await self._decide(
                        request, root, force, backlog, scope.cancel, joint
                    )
                    place, reason = decision.place, decision.refusal
                    if place is not None:
                        manifest = await self._save_in_turn(
                            request, root, hooks, staged, place, joint
                        )
                if place is not None:
                    self.tidying.append(tidied)
                    committed = True
                await self._peers.ended(joint.whole)
        except BaseException as error:
            # All processes raise what the first one met.
            told = error
            if joint is not None:
                told = await joint.settle(error)
                await self._peers.failed(joint.whole)
                await self._peers.ended(joint.whole)
            elif not has_come:
                await self._peers.withdraw(kind, _what(request.step), error, turn)
            self._end_badly(told, request, hooks, staged)
            if not isinstance(error, Exception):
                recorder.end(began_ns, "cancelled")
                raise
            recorder.end(began_ns, "failed", reason=str(told))
            return
        finally:
            if place is not None:
                backlog.leave(place)
                blocked = hooks.watch.taken.blocked or 0.0
                self.moments.end(place, blocked if committed else None)
        if place is not None and scope.cancelled_caught:
            reason = f"superseded by step {place.superseded_by} (backlog='supersede')"
        if reason is not None:
            self._skip(reason, request, hooks, staged)
            recorder.end(began_ns, "skipped", reason=reason)
            return
        try:
            self.end_well(request, manifest, hooks, recorder, began_ns, decision.kept_seconds)
            if joint is not None and joint.publishes:
                await self.tidy(root, request, manifest, hooks)
        finally:
            self.tidying.remove(tidied)
            tidied.set()
        # In the pause before the next save; nobody waits for it.
        await self._engine.arena.warm(lambda: backlog.is_empty and not self._loop.closed)

    async def _joint(self, request: SaveRequest, kind: str, turn: int) -> MultihostSave:
        peers = self._peers
        operation = await peers.operation(kind, turn, _what(request.step))
        then = operation.part("end") if peers.own_disks else None
        return MultihostSave(operation, peers.team, peers.budget_bytes, peers.advance, then)

    async def _decide(
        self,
        request: SaveRequest,
        root: Root,
        force: bool,
        backlog: Backlog,
        give_up: Callable[[], None],
        joint: MultihostSave,
    ) -> _Decision:
        """Ask policy and backlog about a save, and give it its place if they agree.

        Of several processes the primary asks its own, and the others do as it says.
        """
        step = check_step(request.step)
        # So that the next decision knows of this save.
        async with backlog.deciding:
            context = self.moments.context(step)
            is_final = self.moments.is_final(context)
            if not (force or is_final):
                refusal = None
                if joint.leads:
                    async with joint.busy():
                        refusal = await root.refusal(step, context) or backlog.refusal()
                elif root.has_policy or self._policy == "skip":
                    refusal = await joint.refusal()
                if refusal is not None:
                    if joint.leads:
                        await joint.refuse(refusal)
                    return _Decision(None, refusal)
            kept_seconds = await self.moments.kept_by(context, root) if is_final else None
            # Who has a place gives it back: so nothing may fail, or be awaited, from here on.
            place = backlog.join(request.entry, step, give_up, may_be_superseded=not is_final)
            self.moments.begin(place, step, context)
        return _Decision(place, None, kept_seconds)

    async def _save_in_turn(
        self,
        request: SaveRequest,
        root: Root,
        hooks: CommitHooks,
        staged: Future[None],
        place: BacklogSlot,
        joint: MultihostSave,
    ) -> Manifest:
        """Save once there is room for it; what bears the step's name may have to be replaced."""
        assert self._backlog is not None
        backlog = self._backlog
        others: list[str] = []
        # The others may wait for this process to begin, while it waits for the save before.
        async with joint.busy():
            with EventRecorder("save", request.step, self._engine.observers).phase("wait"):
                await backlog.admitted(place)
            hooks.watch.add_wait(hooks.watch.elapsed)
            await root.open()
            before = [other for other in backlog.under_way if other is not place]
            if joint.publishes:
                others = await root.other_entries(check_step(request.step))
                request = await replacing_part(self._storage, self._peers, request, joint)
                await make_way(self._storage, request, others)
        if not request.overwrite and any(other.entry == request.entry for other in before):
            raise StepExistsError(
                "this step is being saved at the moment. Choose another step, or pass "
                "overwrite=True to replace it once it is there",
                step=request.step,
            )

        async def may_write() -> None:
            began = time.perf_counter()
            await place.may_write.wait()
            hooks.watch.add_wait(time.perf_counter() - began)

        manifest = await save_entry(
            self._engine,
            self._storage,
            request,
            hooks,
            joint,
            on_safe=lambda: staged.set_result(None),
            on_staged=lambda: backlog.staged(place),
            may_write=may_write,
        )
        await remove_others(self._storage, others)
        return manifest

    def end_well(
        self,
        request: SaveRequest,
        manifest: Manifest,
        hooks: CommitHooks,
        recorder: EventRecorder,
        began_ns: int,
        kept_seconds: float | None = None,
    ) -> None:
        """Tell of a step that was published; `kept_seconds` is that of `_Decision`."""
        self._commits.pop(hooks)
        info = step_info(manifest, f"{self._storage.location}/{request.entry}", hooks.watch.taken)
        # Before anybody is told.
        self.moments.committed(manifest)
        hooks.finish(info)
        recorder.end(began_ns, "ok", nbytes=info.nbytes)
        seconds = hooks.watch.elapsed
        kept = ""
        if kept_seconds is not None:
            recorder.preempted(kept_seconds)
            kept = f"; the run was preempted, and {kept_seconds:.0f} s of training are kept"
        logger.info("saved step %s: %d bytes in %.2f s%s", info.step, info.nbytes, seconds, kept)

    async def tidy(
        self, root: Root, request: SaveRequest, manifest: Manifest, hooks: CommitHooks
    ) -> None:
        """Delete what is not kept any more, and add to the step what is known only now."""
        seconds = await root.preserve(check_step(request.step))
        if seconds is not None:
            hooks.watch.note(deleted=seconds)
        try:
            taken = hooks.watch.taken
            await keep_late(self._storage, request.entry, manifest.attempt, taken)
        except StorageError as error:
            logger.debug("the statistics of step %s were not kept: %s", request.step, error)

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
        for tidied in list(self.tidying):
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


def _kind_of(entry: str) -> str:
    return f"save-{entry}"


def _what(step: int | None) -> str:
    return f"the save of step {step}"
