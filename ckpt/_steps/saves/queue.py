"""`SaveQueue`: the saves of one root that are under way.

A `SaveRun` is the state of one save, and drives it to its end. These objects are set and waited for
as follows:

    what                   is set by                              is waited for by
    ---------------------  -------------------------------------  ----------------------------
    run.is_staged          `Backlog.staged`                       `admitted` of later saves
    run.returned (Future)  `_save`: at the snapshot or an error   the caller of save()
    Job.future             the engine's loop, at the very end     a caller that cancels
    Commit                 `finish`, `run.skip`, or `run.fail`    all that await the commit
    run.cleaned_up (Event) `finish`, after the deletions          `idle`
    run.superseded_by      `Backlog.join` of a newer save         nothing: it cancels the save
    call.stagings          handlers' calls, and staging after     nothing: 0 calls `on_staged`
    call.caller_released   the pipeline, at `on_snapshot`         digests and encoding
    call.urgent            a wait for memory or durable items     encoding
    session.attempt_ready  the pipeline, when it may write        everything that writes
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

import anyio
from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._arguments import check_step
from ckpt._commit import Commit, step_info
from ckpt._engine.engine import Engine
from ckpt._engine.save.pipeline import save_step
from ckpt._engine.save.save_request import SaveCall, SaveCalls, SaveRequest, step_exists, time_limit
from ckpt._events import EventRecorder
from ckpt._format.manifest import Manifest
from ckpt._format.manifest_head import save_id
from ckpt._redaction import redact
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._settings import IfExists
from ckpt._steps.index import StepIndex
from ckpt._steps.restore_options import RunOrigin
from ckpt._steps.root import Root
from ckpt._steps.saves.commits import Backlog, OpenCommits, SaveRun
from ckpt._steps.saves.history import Preemption, SaveHistory
from ckpt._steps.saves.save_arguments import (
    clear_name,
    make_request,
    remove_others,
    with_plain_metrics,
)
from ckpt._tree.table import format_bytes
from ckpt.errors import SaveSkippedError, StorageError

if TYPE_CHECKING:
    from ckpt._job.solo import JobSave

logger = logging.getLogger("ckpt")

# A save or a program that waits longer for earlier saves logs a warning.
LONG_WAIT_SECONDS = 60.0

# Returns why a save is refused; given a storage error, returns a reason to skip instead of raising.
Refuse = Callable[[StorageError | None], Awaitable[str | None]]


class Run(Struct, frozen=True):
    """What the services of all places of a run share.

    Attributes:
        loop: Runs their coroutines.
        preemption: The notice that the run is to end.
        commits: The commits of all saves.
        origin: What the run goes on from.
        places: The indices of the places, if there are several.
    """

    loop: EngineLoop
    preemption: Preemption
    commits: OpenCommits
    origin: RunOrigin = field(default_factory=RunOrigin)
    places: Collection[StepIndex] = ()


class SaveQueue:
    """The saves of one root. Its coroutines run on the engine's loop.

    Saves under way keep this object alive, and nothing above it. So this object finishes them at
    interpreter exit, even if the manager was dropped without being closed.
    """

    def __init__(self, run: Run, root: Root, engine: Engine) -> None:
        """Save to `root`, together with the other processes of the job."""
        self.loop: EngineLoop = run.loop
        self.root = root
        self.engine = engine
        self._exit_seconds = root.options.timeouts.exit
        self.restore_seconds: float = root.options.timeouts.restore
        self._policy = engine.staging.backlog
        self._preemption = run.preemption
        # Set on the engine's loop.
        self._backlog: Backlog | None = None
        self.commits: OpenCommits = run.commits
        self.origin: RunOrigin = run.origin
        # A function for each open partial save that gives it up, with the step of the save: without
        # it, closing would wait for the next part forever.
        self._open: dict[Callable[[str], None], int] = {}
        self._guard = threading.Lock()
        # Events, set when the deletions after a commit have ended; the next save does not wait for
        # them.
        self._cleaning_up: list[anyio.Event] = []
        self.history: SaveHistory = SaveHistory(engine.now_ns, run.preemption)

    @property
    def saving(self) -> list[int]:
        return [commit.step for commit in self._under_way if commit.step is not None]

    @property
    def joined(self) -> list[int]:
        """The steps of saves under way that can no longer be refused."""
        return [] if self._backlog is None else self._backlog.steps

    @property
    def is_skipping(self) -> bool:
        """True if the backlog would refuse a save that is called now."""
        return self._backlog is not None and self._backlog.refusal() is not None

    @property
    def newest(self) -> int | None:
        """The newest committed step, as far as this process knows without listing."""
        newest = self.root.retention.newest
        return max(self.root.index.known, default=None) if newest is None else newest

    @property
    def _under_way(self) -> list[Commit]:
        return self.commits.under_way(self.root.storage.location)

    def start(
        self,
        step: SupportsIndex,
        state: Any,
        items: Mapping[str, Any] | None,
        metrics: Mapping[str, Any] | None,
        metadata: Any,
        timeout: float | None,
        *,
        force: bool,
        if_exists: IfExists,
        refuse: Refuse | None = None,
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Start a save that may be refused, from any thread.

        Args:
            step: The step.
            state: Passed to `make_request`, like `items`, `metrics`, `metadata`, `timeout` and
                `if_exists`.
            items: See `state`.
            metrics: See `state`.
            metadata: See `state`.
            timeout: See `state`.
            force: True to save without asking policy and backlog.
            if_exists: See `state`.
            refuse: Asked before policy and backlog, on the engine's loop, and about failed writes.

        Returns:
            The commit, the job behind it, and a future. The future is done once the caller may
            change or donate its arguments; it holds the error that the call itself must raise.
        """
        step = check_step(step)
        step_dir = self.root.names.name(step)
        try:
            request = make_request(
                step_dir,
                step,
                state,
                items,
                metrics,
                metadata,
                if_exists=if_exists,
                timeout=timeout,
            )
            self.root.refuse_writing()
        except Exception as error:
            self.root.processes.withdraw(self.loop, _kind_of(step_dir), _save_title(step), error)
            raise
        # Ask on the caller's thread, which may install signal handlers; the answer is kept.
        self._preemption.reached(step)
        run = SaveRun(request, self.loop, self.commits)
        return run.submit(self.root.storage.location, self._save, force, run, refuse)

    @contextlib.contextmanager
    def opening(self, step: int, give_up: Callable[[str], None]) -> Iterator[None]:
        """Submit a partial save in the body; `close` ends a save that is open by `give_up`."""
        # The guard is held until the end: `close` sees a save that it can give up, or no save.
        with self._guard:
            yield
            self._open[give_up] = step

    def closed(self, give_up: Callable[[str], None]) -> None:
        """Note that a partial save is no longer open: it was finalized, or has ended."""
        with self._guard:
            self._open.pop(give_up, None)

    @property
    def in_parts(self) -> set[int]:
        """The steps of partial saves that are open."""
        with self._guard:
            return set(self._open.values())

    async def _save(self, force: bool, run: SaveRun, refuse: Refuse | None) -> None:
        """Run one save to its end; its outcome goes to its commit, or to the waiting call."""
        hooks, storage = run.hooks, self.root.storage
        step = check_step(run.step)
        logger.debug("saving step %s of %s", step, redact(storage.location))
        request = replace(run.request, parent=self.origin.parent)
        # This line comes before the first await, because it takes the turn of this call. Turns are
        # counted by step, so that an extra or missing call in one process harms no other step.
        processes = self.root.processes.save(_kind_of(request.step_dir), _save_title(step))
        backlog = self._backlog = self._backlog or Backlog(self._policy)
        refusal: str | None = None
        backlog.called(run)
        scope = anyio.CancelScope()
        may_refuse = (
            self.root.options.save_when is not None or self._policy == "skip" or refuse is not None
        ) and not force

        async def why_skipped(error: BaseException) -> str | None:
            if not run.is_heeded:
                # The error belongs to an earlier save.
                if processes.was_heard(error):
                    self.commits.excuse(hooks)
            elif isinstance(error, SaveSkippedError):
                text = "step %d of %s was not saved again: %s"
                level, where = self.root.options.log_level, redact(storage.location)
                logger.log(level, text, step, where, error.message)
                return error.message
            elif refuse is not None and isinstance(error, StorageError):
                return str(await refuse(error))
            elif processes.is_raised_later(error):
                run.let_return()
            return None

        try:
            async with run.ending(self.engine.observers, lambda: self.newest, why_skipped):
                # A newer save that supersedes this one cancels the scope.
                with scope:
                    async with processes.taking_part(may_refuse=may_refuse):
                        made_first = force or self.history.context(step).preempted
                        await processes.heed(
                            lambda: None if made_first else self.commits.take_before(step),
                            in_doubt=not made_first and self.commits.are_in_doubt(hooks),
                        )
                        run.is_heeded = True
                        for one in self.root.hooks:
                            async with processes.busy():
                                await one.before_save(step)
                        with time_limit(request.timeout, hooks):
                            run.give_up = scope.cancel
                            refusal = await self._decide(force, run, processes, refuse)
                        if refusal is None:
                            with time_limit(request.timeout, hooks):
                                request, others = await self._admitted(request, run, processes)
                            run.recorder.report("wait", run.began_ns, time.perf_counter_ns())
                            call = SaveCall(
                                request.items,
                                request.unnamed,
                                run.snapshot_taken,
                                partial(backlog.staged, run),
                                hooks.watch.began,
                            )
                            manifest = await save_step(
                                self.engine,
                                storage,
                                request,
                                hooks,
                                SaveCalls(call),
                                processes,
                                may_write=partial(self._until_first, run),
                            )
                            await remove_others(storage, others)
                    if refusal is None:
                        self.published(run)
        finally:
            backlog.decided(run)
            if backlog.leave(run):
                is_there = run.cleaned_up is not None
                self.history.end(run, (hooks.watch.taken.blocked or 0.0) if is_there else None)
        if run.commit.done():
            return
        if scope.cancelled_caught:
            refusal = f"superseded by step {run.superseded_by} (backlog='supersede')"
        if refusal is not None:
            run.skip(refusal)
            return
        await self.finish(run, manifest, processes)
        # The call may wait to hear whether an equal step was there, which has gone since.
        run.let_return()
        # This work uses the pause before the next save; nothing waits for it.
        for each in self.engine.extensions:
            await each.after_save(lambda: not self.loop.closed)
        await self.engine.arena.warm(lambda: backlog.is_empty and not self.loop.closed)

    async def _decide(
        self, force: bool, run: SaveRun, processes: JobSave, refuse: Refuse | None
    ) -> str | None:
        """Let a save join the backlog, or return why policy or backlog refuse it.

        In a job the primary asks its own policy and backlog, and the others follow its answer.
        """
        assert self._backlog is not None
        root, backlog, step = self.root, self._backlog, check_step(run.step)
        # Held until this save has joined, so that the next decision takes it into account.
        async with backlog.deciding(run):
            context = self.history.context(step)

            async def ask() -> str | None:
                why = None if refuse is None else await refuse(None)
                return why or await root.refusal(step, context) or backlog.refusal()

            if refuse is not None or not (force or context.preempted):
                refusal = await processes.refusal(ask)
                if refusal is not None:
                    return refusal
            if context.preempted:
                run.kept_seconds = await self.history.kept_by(context, root)
            # The save must leave again, so nothing may fail or be awaited from here on.
            backlog.join(run)
            self.history.begin(run, context)
        return None

    async def _admitted(
        self, request: SaveRequest, run: SaveRun, processes: JobSave
    ) -> tuple[SaveRequest, list[str]]:
        """Wait until there is room for a save, and make way for it in the root.

        The call must wait for the end of the save if that decides whether the step is skipped.

        Returns:
            The request as it is to be saved, and the step directories that it replaces under other
            names.
        """
        assert self._backlog is not None
        root, backlog = self.root, self._backlog
        before, step = backlog.before(run), check_step(run.step)
        same = any(other.step_dir == request.step_dir for other in before)
        if same and request.if_exists == "skip":
            raise SaveSkippedError("it is being saved at the moment (if_exists='skip')")
        if same and request.if_exists == "error":
            raise step_exists("this step is being saved at the moment", request.step)
        # `busy`, since other processes may wait for this one to begin, while it waits for an
        # earlier save.
        async with processes.busy():
            await self._patiently(partial(backlog.admitted, run), f"step {step}")
            run.hooks.watch.add("waited", run.hooks.watch.began)
            await root.open()
            if any(check_step(other.step) > step for other in before) or (
                same and request.if_exists == "equal"
            ):
                # The run goes back behind steps that are not committed yet, or repeats one.
                await backlog.first(run)
            clear = partial(clear_name, root, self.origin)
            cleared = await processes.cleared(root.storage, request, clear)
            request, others, run.waits_for_end = cleared
            return await with_plain_metrics(request), others

    async def _until_first(self, run: SaveRun) -> None:
        assert self._backlog is not None
        began = time.perf_counter()
        # The arrays are being staged meanwhile: the call does not wait for this.
        await self.root.begin()
        with run.recorder.phase("wait"):
            await self._patiently(partial(self._backlog.first, run), f"step {run.step}")
        run.hooks.watch.add("waited", began)

    async def _patiently(self, wait: Callable[[], Awaitable[object]], who: str) -> None:
        """Wait for other saves; warn once if it takes long. `wait` may be called twice."""
        with anyio.move_on_after(LONG_WAIT_SECONDS):
            await wait()
            return
        self._warn_of_wait(who)
        await wait()

    def _warn_of_wait(self, who: str) -> None:
        saves = ", ".join(
            f"step {each.step} ({each.stage}, {each.progress.fraction:.0%} written)"
            for each in self._under_way
        )
        where = redact(self.root.storage.location)
        logger.warning(
            "%s: %s has waited %.0f s for saves that have not ended: %s",
            where,
            who,
            LONG_WAIT_SECONDS,
            saves,
        )

    def published(self, run: SaveRun) -> None:
        """Let `idle` wait for the deletions after a save, which `finish` does; called first."""
        run.cleaned_up = anyio.Event()
        self._cleaning_up.append(run.cleaned_up)

    async def finish(self, run: SaveRun, manifest: Manifest, processes: JobSave) -> None:
        """Report a published step, then delete the steps that are no longer kept.

        Args:
            run: The save.
            manifest: The manifest of the step.
            processes: The part of this process in the save; who publishes does the deletions.
        """
        assert run.cleaned_up is not None
        hooks = run.hooks
        try:
            with run.reporting(self.root.storage.location):
                path = f"{self.root.storage.location}/{run.step_dir}"
                info = step_info(manifest, path, hooks.watch.taken)
                # Set before the commit is done: a deletion that its caller starts must know it.
                self.root.retention.newest = manifest.step
                self.history.committed(manifest)
                save = save_id(manifest.save, manifest.created_ns)
                # All of them hear of it, whatever the first one answers.
                counts = [it.committed(info, save, hooks.commit) for it in self.root.hooks]
                # Observers first: once the commit is done, the line is written, the bar is gone.
                run.recorder.end(run.began_ns, "ok", nbytes=info.nbytes)
                hooks.finish(info, in_root=all(counts))
            kept = ""
            if run.kept_seconds is not None:
                run.recorder.preempted(run.kept_seconds)
                kept = f"; the run was preempted, and {run.kept_seconds:.0f} s of training are kept"
            logger.log(
                self.root.options.log_level,
                "saved step %s of %s: %s in %.2f s (blocked %.2f s)%s",
                info.step,
                redact(self.root.storage.location),
                format_bytes(info.nbytes),
                hooks.watch.elapsed,
                hooks.watch.taken.blocked or 0.0,
                kept,
            )
            await processes.if_publishing(partial(self._clean_up, check_step(run.step)))
        finally:
            self._cleaning_up.remove(run.cleaned_up)
            run.cleaned_up.set()

    async def _clean_up(self, step: int) -> None:
        for one in self.root.hooks:
            if not await one.before_retention(step):
                return
        await self.root.preserve(step)

    async def idle(self) -> None:
        """Wait until every save that was started has ended, and the deletions after it."""
        if self._backlog is not None:
            await self._patiently(self._backlog.idle, "the program")
        for cleaned_up in list(self._cleaning_up):
            await cleaned_up.wait()

    async def finished(self, wait: Callable[[], Awaitable[object]]) -> None:
        """Wait by `wait` for the saves of all places, and raise their failures."""
        with EventRecorder("save", None, self.engine.observers).phase("wait"):
            error = await self.commits.failure_after(wait)
        if error is not None:
            raise error

    def close(self, timeout: float | None = None) -> bool:
        """End the loop once all saves have ended; open partial saves are discarded.

        Args:
            timeout: Seconds to wait at most; None waits without limit.

        Returns:
            True if the loop has ended.
        """
        if not self.loop.is_forked:
            self.loop.check_caller()
        # Stop the loop first: no partial save can be opened after the open ones were given up.
        self.loop.stop()
        with self._guard:
            for give_up in self._open:
                give_up("the manager was closed before it was finalized")
        if timeout is None and not self.loop.close(LONG_WAIT_SECONDS):
            self._warn_of_wait("the end of the manager")
        return self.loop.close(timeout)

    def finish_at_exit(self) -> None:
        """Finish saves under way at interpreter exit; see `OpenCommits.finish_at_exit`."""
        if not self.loop.is_forked:
            self.commits.finish_at_exit(self.close, self._exit_seconds)


def _kind_of(step_dir: str) -> str:
    return f"save-{step_dir}"


def _save_title(step: int | None) -> str:
    return f"the save of step {step}"
