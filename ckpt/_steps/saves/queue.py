"""`SaveQueue`: the saves of one root that are under way.

A save goes through these states, from top to bottom:

    state        Commit.stage  slot.state  ends when
    -----------  ------------  ----------  ---------------------------------------------------
    called       waiting       no slot     no earlier save has failed unnoticed (`heed`)
    heeding      waiting       no slot     `_decide` holds `backlog.deciding`
    deciding     waiting       no slot     policy and backlog agree, and it has its slot
    queued       waiting       queued      `Backlog.admitted`: there is room to stage
    staging      staging       staging     `call.on_safe`: the call of save() returns
    held         writing       staging     `call.on_staged`: all is in host memory
    writing      writing       staged      all items are durable
    publishing   publishing    staged      the step has its name
    cleaning up  done          left        older steps are deleted

While it is staging the attempt is opened, and nothing is written until `Backlog.first` lets it: the
saves before have left then. A save that is refused or superseded ends as `skipped`, one that fails
or is cancelled as `failed`; both leave their slot, from whatever state they are in.

What keeps the state, who sets it, and who waits for it:

    what                   is set by                              is waited for by
    ---------------------  -------------------------------------  ----------------------------
    staged (Future)        `_save`: at `on_safe`, or an error     the caller of save()
    Job.future             the engine's loop, at the very end     a caller that cancels
    Commit                 `finish`, `_skip`, or `commits.fail`   all that await the commit
    cleaned_up (Event)     `finish`, after the deletions          `idle`
    slot.state             `Backlog`                              `admitted` of later slots
    slot.superseded_by     `Backlog.join` of a newer save         nothing: it cancels the save
    call.stagings          handlers' calls, and staging after     nothing: 0 calls `on_staged`
    call.returned          the pipeline, at `on_safe`             digests and encoding
    call.pressed           a wait for memory or durable items     encoding
    session.attempt_ready  the pipeline, when it may write        everything that writes
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, SupportsIndex

import anyio
from msgspec.structs import replace

from ckpt._arguments import check_step
from ckpt._commit import Commit, CommitHooks, StepInfo, step_info
from ckpt._engine.engine import Engine
from ckpt._engine.save.deadline import given_up_after
from ckpt._engine.save.joint.multihost import JointSave
from ckpt._engine.save.pipeline import save_step
from ckpt._engine.save.request import SaveCall, SaveCalls, SaveRequest
from ckpt._events import EventRecorder
from ckpt._format.manifest import Manifest
from ckpt._redaction import redact
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._settings import Timeouts
from ckpt._steps.root import Root
from ckpt._steps.saves.backlog import Backlog, BacklogPolicy, BacklogSlot
from ckpt._steps.saves.commits import OpenCommits
from ckpt._steps.saves.history import SaveHistory
from ckpt._steps.saves.overwrite import make_way, remove_others, replacing_part, with_plain_metrics
from ckpt._steps.saves.preemption import Preemption
from ckpt._steps.saves.requests import make_request
from ckpt._tree.table import size_text
from ckpt.errors import (
    CheckpointError,
    CommitCancelledError,
    CoordinationError,
    DeadlineExceededError,
    StepExistsError,
    StorageError,
)

logger = logging.getLogger("ckpt")

# A save that waits longer for those before it says so.
LONG_WAIT_SECONDS = 60.0

# Says why there is no save; of the error of one, what is said instead of raising it.
Refuse = Callable[[StorageError | None], Awaitable[str | None]]


class SaveQueue:
    """The saves of one root. Its coroutines run on the engine's loop.

    Saves under way keep it alive, and nothing above it: so it is what finishes them at interpreter
    exit, also if the manager was dropped without being closed.
    """

    def __init__(
        self,
        loop: EngineLoop,
        root: Root,
        engine: Engine,
        backlog: BacklogPolicy,
        preemption: Preemption,
        commits: OpenCommits,
        timeouts: Timeouts,
    ) -> None:
        """Save to `root`, together with the other processes of the job.

        Failures are reported through `commits`.
        """
        self.loop = loop
        self.root = root
        self.engine = engine
        self._exit_seconds = timeouts.exit
        self.restore_seconds: float = timeouts.restore
        self._policy: BacklogPolicy = backlog
        self._preemption = preemption
        # Made on the engine's loop.
        self._backlog: Backlog | None = None
        # Told of each step that was committed.
        self.on_committed: Callable[[StepInfo, Commit], None] = _nothing
        # Whether steps are copied on from here: a commit is then not in the root yet.
        self.is_drained = False
        # Done at the beginning of each save, in all processes of a job.
        self.prepare: Callable[[int], Awaitable[None]] = _ready
        # Asked before steps are deleted after a commit.
        self.may_tidy: Callable[[int], Awaitable[bool]] = _always
        self.commits = commits
        # Gives up each partial save that is open, since it would wait for its next part forever;
        # with their steps.
        self._open: dict[Callable[[str], None], int] = {}
        self._guard = threading.Lock()
        # Set when the deletions after a commit have ended; the next save does not wait for them.
        self.cleaning_up: list[anyio.Event] = []
        self.history: SaveHistory = SaveHistory(engine.now_ns, preemption)

    @property
    def saving(self) -> list[int]:
        """The steps of saves that are under way."""
        return [commit.step for commit in self._under_way if commit.step is not None]

    @property
    def joined(self) -> list[int]:
        """The steps of those of them that are not refused any more."""
        return [] if self._backlog is None else self._backlog.steps

    @property
    def is_skipping(self) -> bool:
        """Whether the backlog turns a save down that is called now."""
        return self._backlog is not None and self._backlog.refusal() is not None

    @property
    def newest(self) -> int | None:
        """The step that was committed last, as far as this process knows without looking."""
        newest = self.root.retention.newest
        return max(self.root.index.known, default=None) if newest is None else newest

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return bool(self._under_way)

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
        deadline: float | None,
        *,
        force: bool,
        overwrite: bool,
        refuse: Refuse | None = None,
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Start a save that may be refused, from any thread.

        Args:
            step: The step.
            state: As of `make_request`, like the other arguments.
            items: As there.
            metrics: As there.
            metadata: As there.
            deadline: As there.
            force: Whether policy and backlog are not asked.
            overwrite: As there.
            refuse: Asked before them, on the engine's loop, and told of a failed write.

        Returns:
            The commit, the job behind it, and a future that is done once the caller may change or
            donate what it passed, or holds the error that the call itself must raise.
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
                overwrite=overwrite,
                deadline=deadline,
            )
            self.root.refuse_writing()
        except Exception as error:
            self.root.processes.withdraw(self.loop, _kind_of(step_dir), _save_title(step), error)
            raise
        # Asked on the caller's thread, which may install signal handlers; the answer is kept.
        self._preemption.open()
        self._preemption.reached(step)
        staged: Future[None] = Future()
        jobs: list[Job[None]] = []
        commit = Commit(step, lambda: jobs[0].cancel(), self.loop.check_caller)
        hooks = CommitHooks(commit)
        self.adopt(hooks, commit)
        try:
            jobs.append(self.loop.submit(self._save, request, force, hooks, staged, refuse))
        except BaseException:
            self.commits.drop(hooks)
            raise
        return commit, jobs[0], staged

    def adopt(self, hooks: CommitHooks, commit: Commit) -> None:
        """Count a save among those under way, and report its error."""
        self.commits.adopt(hooks, commit, self.root.storage.location)

    @contextlib.contextmanager
    def opening(self, step: int, give_up: Callable[[str], None]) -> Iterator[None]:
        """Submit a partial save in the body; `give_up` ends it if it is open at `close`."""
        # Held meanwhile: `close` sees a save that can be given up, or none.
        with self._guard:
            yield
            self._open[give_up] = step

    def closed(self, give_up: Callable[[str], None]) -> None:
        """Say that a partial save is not open any more: it was finalized, or has ended."""
        with self._guard:
            self._open.pop(give_up, None)

    @property
    def in_parts(self) -> set[int]:
        """The steps of partial saves that are open."""
        with self._guard:
            return set(self._open.values())

    async def _save(
        self,
        request: SaveRequest,
        force: bool,
        hooks: CommitHooks,
        staged: Future[None],
        refuse: Refuse | None,
    ) -> None:
        """Run one save to its end; every outcome goes to its commit, or to the waiting call."""
        began_ns = time.perf_counter_ns()
        step = check_step(request.step)
        logger.debug("saving step %s of %s", step, redact(self.root.storage.location))
        request = replace(request, parent=self.history.parent)
        # Before anything is awaited, because it takes the turn of this call. Turns are counted by
        # step, so that a call more or fewer in one process harms no other step.
        processes = self.root.processes.save(_kind_of(request.step_dir), _save_title(step))
        recorder = EventRecorder("save", step, self.engine.observers)
        backlog = self._backlog = self._backlog or Backlog(self._policy)
        slot, refusal, heeded, committed = None, None, False, False
        scope = anyio.CancelScope()
        cleaned_up = anyio.Event()
        may_refuse = (
            self.root.has_policy or self._policy == "skip" or refuse is not None
        ) and not force
        try:
            # Cancelled where a newer save supersedes this one.
            with scope:
                async with processes.taking_part(may_refuse=may_refuse):
                    made_first = force or self.history.is_final(self.history.context(step))
                    await processes.heed(
                        lambda: None if made_first else self.commits.take_before(step),
                        in_doubt=not made_first and self.commits.are_in_doubt(hooks),
                    )
                    heeded = True
                    async with processes.busy():
                        await self.prepare(step)
                    with given_up_after(request.deadline, hooks):
                        slot, refusal = await self._decide(
                            request, force, scope.cancel, processes, refuse
                        )
                    if slot is not None:
                        with given_up_after(request.deadline, hooks):
                            request, others = await self._admitted(request, hooks, slot, processes)
                        recorder.report("wait", began_ns, time.perf_counter_ns())
                        call = SaveCall(
                            request.items,
                            request.unnamed,
                            on_safe=partial(staged.set_result, None),
                            on_staged=partial(backlog.staged, slot),
                            began=hooks.watch.began,
                        )
                        manifest = await save_step(
                            self.engine,
                            self.root.storage,
                            request,
                            hooks,
                            SaveCalls.of(call),
                            processes,
                            may_write=partial(self._until_first, slot, hooks),
                        )
                        await remove_others(self.root.storage, others)
                if slot is not None:
                    # Before the slot is left, so that `idle` sees the one or the other.
                    self.cleaning_up.append(cleaned_up)
                    committed = True
        except BaseException as error:
            if isinstance(error, CheckpointError):
                error.locate(step=step)
            if not heeded:
                # Not of this save. If the primary has raised it, it may be on its way here.
                told = isinstance(error, CheckpointError) and not processes.leads
                if told and not isinstance(error, CoordinationError):
                    self.commits.excuse(hooks)
            elif refuse is not None and isinstance(error, StorageError):
                refusal = await refuse(error)
                recorder.end(began_ns, "skipped", reason=refusal)
                self._skip(str(refusal), request, hooks, staged)
                return
            elif isinstance(error, StorageError) and not (processes.is_alone or staged.done()):
                # In some processes the call may have returned: all hear of it in the next one.
                staged.set_result(None)
            recorder.end_badly(began_ns, error)
            end_badly(error, request, self.commits, hooks, staged, self.newest)
            if not isinstance(error, Exception):
                raise
            return
        finally:
            if slot is not None:
                backlog.leave(slot)
                self.history.end(slot, (hooks.watch.taken.blocked or 0.0) if committed else None)
        if slot is None or scope.cancelled_caught:
            if slot is not None:
                refusal = f"superseded by step {slot.superseded_by} (backlog='supersede')"
            assert refusal is not None
            recorder.end(began_ns, "skipped", reason=refusal)
            self._skip(refusal, request, hooks, staged)
            return
        kept, cleans_up = slot.kept_seconds, processes.publishes
        await self.finish(
            cleaned_up, request, manifest, hooks, recorder, began_ns, kept, cleans_up=cleans_up
        )
        # In the pause before the next save; nothing waits for it.
        await self.engine.kernels.compile_wanted(lambda: not self.loop.closed)
        await self.engine.arena.warm(lambda: backlog.is_empty and not self.loop.closed)

    async def _decide(
        self,
        request: SaveRequest,
        force: bool,
        give_up: Callable[[], None],
        processes: JointSave,
        refuse: Refuse | None,
    ) -> tuple[BacklogSlot | None, str | None]:
        """Ask policy and backlog about a save; return its slot, or why there is no save.

        Of several processes the primary asks its own, and the others do as it says.
        """
        assert self._backlog is not None
        root, backlog, step = self.root, self._backlog, check_step(request.step)
        # Held until this save has joined, so that the next decision knows of it.
        async with backlog.deciding:
            context = self.history.context(step)
            is_final = self.history.is_final(context)

            async def ask() -> str | None:
                why = None if refuse is None else await refuse(None)
                return why or await root.refusal(step, context) or backlog.refusal()

            if refuse is not None or not (force or is_final):
                refusal = await processes.refusal(ask)
                if refusal is not None:
                    return None, refusal
            kept_seconds = await self.history.kept_by(context, root) if is_final else None
            # A slot has to be left again: so nothing may fail, or be awaited, from here on.
            slot = BacklogSlot(request.step_dir, step, give_up, kept_seconds)
            backlog.join(slot)
            self.history.begin(slot, context)
        return slot, None

    async def _admitted(
        self, request: SaveRequest, hooks: CommitHooks, slot: BacklogSlot, processes: JointSave
    ) -> tuple[SaveRequest, list[str]]:
        """Wait until there is room for a save, and make way for it in the root.

        Returns:
            The request as it is to be saved, and the step directories that it replaces under other
            names.
        """
        assert self._backlog is not None
        root, backlog = self.root, self._backlog
        others: list[str] = []
        # The other processes may wait for this one to begin, while it waits for the save before.
        async with processes.busy():
            await self._patiently(partial(backlog.admitted, slot), f"step {slot.step}")
            hooks.watch.add_wait(hooks.watch.began)
            await root.open()
            before = [other for other in backlog.under_way if other is not slot]
            if any(other.step > slot.step for other in before):
                # The run goes back behind steps that are not there yet.
                await backlog.first(slot)
            if processes.publishes:
                others = await root.other_step_dirs(slot.step)
                request = await replacing_part(self.root.storage, request, processes)
                request = await root.branched(request, self.history.restored)
                await make_way(root.storage, request, others, root.index.passed_over)
            if not request.overwrite and any(
                other.step_dir == request.step_dir for other in before
            ):
                raise StepExistsError(
                    "this step is being saved at the moment. Choose another step, or pass "
                    "overwrite=True to replace it once it is there",
                    step=request.step,
                )
            return await with_plain_metrics(request), others

    async def _until_first(self, slot: BacklogSlot, hooks: CommitHooks) -> None:
        assert self._backlog is not None
        recorder = EventRecorder("save", slot.step, self.engine.observers)
        began = time.perf_counter()
        with recorder.phase("wait"):
            await self._patiently(partial(self._backlog.first, slot), f"step {slot.step}")
        hooks.watch.add_wait(began)

    async def _patiently(self, wait: Callable[[], Awaitable[object]], who: str) -> None:
        """Wait for other saves; warn once if that takes long. `wait` may be called twice."""
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

    async def finish(
        self,
        cleaned_up: anyio.Event,
        request: SaveRequest,
        manifest: Manifest,
        hooks: CommitHooks,
        recorder: EventRecorder,
        began_ns: int,
        kept_seconds: float | None = None,
        *,
        cleans_up: bool = True,
    ) -> None:
        """Tell of a step that was published, then delete what is not kept any more.

        Args:
            cleaned_up: Is in `cleaning_up` until that has ended.
            request: What was saved.
            manifest: The manifest of the step.
            hooks: Its commit.
            recorder: Takes the end of the save.
            began_ns: When it began, by `time.perf_counter_ns`.
            kept_seconds: As of `BacklogSlot`.
            cleans_up: Whether the deletions are for this process.
        """
        try:
            self.commits.drop(hooks)
            path = f"{self.root.storage.location}/{request.step_dir}"
            info = step_info(manifest, path, hooks.watch.taken)
            # Before the commit is done: a deletion that its caller starts then must know of it.
            self.root.retention.newest = manifest.step
            self.history.committed(manifest)
            self.on_committed(info, hooks.commit)
            # Observers first: once the commit is done, the line is written and the bar is gone.
            recorder.end(began_ns, "ok", nbytes=info.nbytes)
            hooks.finish(info, in_root=not self.is_drained)
            kept = ""
            if kept_seconds is not None:
                recorder.preempted(kept_seconds)
                kept = f"; the run was preempted, and {kept_seconds:.0f} s of training are kept"
            logger.log(
                self.root.log_level,
                "saved step %s of %s: %s in %.2f s (blocked %.2f s)%s",
                info.step,
                redact(self.root.storage.location),
                size_text(info.nbytes),
                hooks.watch.elapsed,
                hooks.watch.taken.blocked or 0.0,
                kept,
            )
            if cleans_up and await self.may_tidy(check_step(request.step)):
                await self.root.preserve(check_step(request.step))
        finally:
            self.cleaning_up.remove(cleaned_up)
            cleaned_up.set()

    def _skip(
        self, reason: str, request: SaveRequest, hooks: CommitHooks, staged: Future[None]
    ) -> None:
        self.commits.drop(hooks)
        request.items.clear()
        hooks.skip(reason)
        if not staged.done():
            staged.set_result(None)

    async def idle(self) -> None:
        """Wait until every save that was started has ended, and the deletions after it."""
        if self._backlog is not None:
            await self._patiently(self._backlog.idle, "the program")
        for cleaned_up in list(self.cleaning_up):
            await cleaned_up.wait()

    async def finished(self, wait: Callable[[], Awaitable[object]]) -> None:
        """Wait for the saves of all places by `wait`, and raise what failed of them."""
        with EventRecorder("save", None, self.engine.observers).phase("wait"):
            error = await self.commits.failure_after(wait)
        if error is not None:
            raise error

    def close(self, timeout: float | None = None) -> bool:
        """End the loop once all saves have ended; partial saves that are open are discarded.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes.

        Returns:
            Whether the loop has ended.
        """
        if not self.loop.is_forked:
            self.loop.check_caller()
        # First, so that no partial save is opened after those that are open were given up.
        self.loop.stop()
        with self._guard:
            for give_up in self._open:
                give_up("the manager was closed before it was finalized")
        if timeout is None and not self.loop.close(LONG_WAIT_SECONDS):
            self._warn_of_wait("the end of the manager")
        return self.loop.close(timeout)

    def finish_at_exit(self) -> None:
        """At interpreter exit: finish what is under way; see `OpenCommits.finish_at_exit`."""
        if not self.loop.is_forked:
            self.commits.finish_at_exit(self.close, self._exit_seconds)


def _nothing(info: StepInfo, commit: Commit) -> None:
    pass


async def _ready(step: int) -> None:
    pass


async def _always(step: int) -> bool:
    return True


def end_badly(
    error: BaseException,
    request: SaveRequest,
    commits: OpenCommits,
    hooks: CommitHooks,
    staged: Future[None],
    newest: int | None = None,
) -> None:
    """Give the error of a save to the call that waits for its snapshot, or else to its commit."""
    if not isinstance(error, Exception):
        error = CommitCancelledError(
            "the save was cancelled; nothing of it is left", step=request.step
        )
    elif isinstance(error, DeadlineExceededError):
        # Its frames say nothing, and keep what was staged alive as long as the commit.
        error.__traceback__ = error.__context__ = None
    commits.fail(hooks, error, returned=staged.done(), newest=newest)
    if not staged.done():
        staged.set_exception(error)
    # A commit that waits for its error to be fetched must not keep the arrays alive.
    request.items.clear()


def _kind_of(step_dir: str) -> str:
    return f"save-{step_dir}"


def _save_title(step: int | None) -> str:
    return f"the save of step {step}"
