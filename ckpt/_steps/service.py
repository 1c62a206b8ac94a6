"""`RootService`: the service that the asyncio manager and the plain one share.

Its coroutines run on the engine's loop. `saves` decides about saves, `root` handles committed
steps, and `reader` reads; the calls here need several of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex, get_args

from ckpt._arguments import check_step, invalid, number_of_seconds, one_of, shown
from ckpt._commit import Commit, StepInfo
from ckpt._engine.engine import Engine
from ckpt._engine.memory.arena import Arena, Buffers
from ckpt._engine.plan_cache import NO_SIDECARS, PlanCache, Sidecars
from ckpt._events import GuardedObserver, Observer
from ckpt._job.solo import SoloJob
from ckpt._plan.save_plan import Formats, compile_formats
from ckpt._runtime.jax_internals import job_size
from ckpt._runtime.loop import Job
from ckpt._settings import IfTaken, Staging, Timeouts
from ckpt._steps.index import StepIndex
from ckpt._steps.pins import Pin, pin, pins, unpin
from ckpt._steps.reader import StepReader
from ckpt._steps.removal.deletion_plan import StepTrash
from ckpt._steps.removal.retention import Retention
from ckpt._steps.root import Root, RootOptions, read_root_metadata
from ckpt._steps.saves.queue import Run, SaveQueue
from ckpt._steps.saves.save_arguments import make_request
from ckpt.errors import InvalidArgumentError
from ckpt.handlers._registry import HandlersLike, find_handlers
from ckpt.storage._base import Storage

if TYPE_CHECKING:
    from ckpt._job.solo import ProcessJob
    from ckpt._steps.run_hooks import RunHooks
    from ckpt._steps.saves.partial import OpenSave
    from ckpt.coordination._base import Coordinator
    from ckpt.extensions._interface import Extensions

logger = logging.getLogger("ckpt")


@dataclass(eq=False)
class RootService:
    """The service of one root. Its coroutines run on the engine's loop.

    Attributes:
        run: What it shares with the other places of the run.
        engine: Saves and restores.
        root: The root.
        saves: Its saves under way.
        reader: Reads its steps.
        trash: Its deleted steps.
    """

    run: Run
    engine: Engine
    root: Root
    saves: SaveQueue
    reader: StepReader
    trash: StepTrash

    @property
    def storage(self) -> Storage:
        return self.root.storage

    async def tidy(self) -> None:
        """Delete superfluous steps after a change of the steps that is not a save."""

        async def act() -> None:
            latest = await self.root.index.latest()
            if latest is not None:
                await self.root.preserve(latest.step)

        await self.root.processes.tidy(act)

    def start_partial(
        self,
        step: SupportsIndex,
        metrics: Mapping[str, Any] | None,
        metadata: Any,
        *,
        if_exists: IfTaken,
    ) -> OpenSave:
        """Return a save in parts, which begins with its first call."""
        from ckpt._steps.saves.partial import OpenSave

        one_of("if_exists", if_exists, get_args(IfTaken))
        step = check_step(step)
        name = self.root.names.name(step)
        request = make_request(name, step, {}, None, metrics, metadata, if_exists=if_exists)
        # The items come later.
        request.items.clear()
        self.root.refuse_writing()
        return OpenSave(self.saves, request, self.root.processes.save_in_parts(step))

    def reached_preemption(self, step: SupportsIndex) -> bool:
        """Return True if the run is to end at `step`; called on the caller's thread.

        The answer for a step never changes, so that a save and its caller agree.
        """
        return self.run.preemption.reached(check_step(step))

    async def open(self) -> None:
        """Create the root, and remove leftovers of dead writers; further calls do nothing."""
        await self.root.open()

    async def should_save(self, step: int) -> bool:
        """Return True if the save policy wants `step`, or if the run ends there."""
        step = check_step(step)
        root = self.root
        if root.is_read_only:
            return False
        context = self.saves.history.context(step)

        async def decide() -> bool:
            is_final = context.preempted
            if not is_final and (self.saves.is_skipping or await root.refusal(step, context)):
                return False
            return step not in self.saves.joined and not await root.has(step)

        what = f"deciding about step {step}"
        return bool(await root.processes.on_primary("should_save", step, what, decide))

    async def reload(self) -> None:
        """Forget everything that was read from the root."""
        self.root.index.forget()

    async def root_metadata(self) -> dict[str, Any]:
        """Return the metadata of the root, or if it has none yet, the configured ones."""
        return await read_root_metadata(self.storage) or dict(self.root.options.metadata or {})

    async def pin(self, step: int, name: str) -> None:
        """Protect a step from deletion until it is unpinned."""
        step = check_step(step)
        self.root.refuse_writing()

        async def is_committed() -> bool:
            return step in await self.root.index.refresh()

        act = partial(pin, self.storage, step, name, is_committed)
        await self.root.processes.on_step(f"pin-{name}", step, f"pinning step {step}", act)

    async def unpin(self, step: int, name: str) -> bool:
        """Remove a pin; return True if there was one."""
        self.root.refuse_writing()
        step = check_step(step)
        act = partial(unpin, self.storage, step, name)
        what = f"unpinning step {step}"
        return bool(await self.root.processes.everywhere(f"unpin-{name}", step, what, act))

    async def pins(self) -> dict[int, tuple[Pin, ...]]:
        return dict(await pins(self.storage))

    async def delete(self, step: int, item: str | None) -> None:
        step = check_step(step)
        root = self.root
        root.refuse_writing()

        async def act() -> None:
            # A save of the same step that is under way would be published after the deletion.
            await self.saves.idle()
            if item is None:
                await root.retention.delete(step)
            else:
                await root.retention.delete_items(await root.index.found(step), {item: None})

        what = f"the deletion of step {step}"
        await root.processes.delete(f"delete-{item}", step, what, act, self.saves.idle)

    async def undelete(self, step: int) -> None:
        step = check_step(step)
        self.root.refuse_writing()
        await self.root.processes.undelete(step, self.trash)

    async def empty_trash(self, older_than: float) -> list[int]:
        """Remove steps that were deleted at least so many seconds ago; return their numbers."""
        self.root.refuse_writing()
        seconds = number_of_seconds("older_than", older_than, zero=True)
        act = partial(self.trash.empty, seconds)
        found = await self.root.processes.everywhere("empty-trash", 0, "emptying the trash", act)
        return [int(step) for step in found] if isinstance(found, list) else []

    def start_snapshot(
        self, step: SupportsIndex, *saved: Any
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Refuse: there is no place in memory for snapshots."""
        raise InvalidArgumentError(
            "snapshot(): this manager has no tier in memory. Make it with "
            "tiers=[ckpt.tiers.SharedMemory()], or use save()",
            step=check_step(step),
        )

    async def prefetch(self, step: int | None) -> StepInfo:
        """Refuse: there is no nearer place for steps."""
        raise InvalidArgumentError(
            "prefetch(): this manager has no nearer place to copy steps to. Make it with "
            "tiers=[ckpt.tiers.Tier('/nvme/run')]; restore() reads from where the step is"
        )

    async def idle(self) -> None:
        """Wait until every save that was started has ended, and the deletions after it."""
        await self.saves.idle()

    @property
    def saving(self) -> list[int]:
        return self.saves.saving

    async def wait_until_finished(self) -> None:
        """Wait until every save has ended, and raise failures; see `SaveQueue.finished`."""
        await self.saves.finished(self.idle)

    def take_failure(self) -> BaseException | None:
        """Return failures that nobody has checked, as one error; see `OpenCommits.take`."""
        return self.saves.commits.take()

    def listen(self) -> None:
        """Handle the signals that announce the end of the run from now on."""
        self.run.preemption.open()

    def stop_listening(self) -> None:
        """Put back the handlers that were there before `listen`."""
        self.run.preemption.close()

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """Wait for the saves, and end the loop; see `SaveQueue.close`."""
        return self.saves.close(timeout)


def root_service(
    run: Run,
    storage: Storage,
    engine: Engine,
    options: RootOptions,
    job: ProcessJob,
    hooks: Sequence[RunHooks] = (),
) -> RootService:
    """Return the service of the root of `storage`, for this process of `job`."""
    names, observers, now_ns = options.names, engine.observers, engine.now_ns
    hooks = (*hooks, *(made(run) for made in engine.hooks))
    index = StepIndex(storage, names, missing=options.missing, places=run.places)
    processes = job.at(index, engine.staging.backlog)
    rules = options.keep, options.deletion, engine.sidecars
    retention = Retention(storage, index, *rules, observers, now_ns, hooks, options.log_level)
    root = Root(storage, options, index, processes, retention, observers, hooks)
    saves, reader = SaveQueue(run, root, engine), StepReader(root, engine, run.origin)
    trash = StepTrash(storage, index, names, retention.trash, now_ns)
    return RootService(run, engine, root, saves, reader, trash)


# Engines take their clock from here when they are made; `ckpt.testing.clock` sets another one.
wall_clock_ns: Callable[[], int] = time.time_ns


def make_engine(
    staging: Staging,
    handlers: HandlersLike,
    observers: Iterable[Observer] = (),
    formats: Formats | None = None,
    extensions: Extensions = (),
    sidecars: Sidecars = NO_SIDECARS,
) -> Engine:
    """Return an engine with a cold arena; the given handlers come before the built-in ones."""
    arena = Arena(staging.effective_budget)
    engine = Engine(
        staging,
        find_handlers(handlers),
        checked_observers(observers),
        arena,
        Buffers(arena),
        PlanCache(compile_formats(formats)),
        sidecars,
        now_ns=wall_clock_ns,
    )
    extend(engine, extensions)
    return engine


def extend(engine: Engine, extensions: Extensions) -> None:
    """Let extensions take part in what an engine does."""
    if extensions not in ((), []):
        from ckpt.extensions._interface import join

        join(extensions, engine)


def make_job(
    coordinator: Coordinator | None, timeouts: Timeouts, location: str, engine: Engine
) -> ProcessJob:
    """Return the part that this process takes in the job that `coordinator` describes.

    Without a coordinator, it is the job of `jax.distributed`. A process that is alone imports
    nothing of jobs.
    """
    job = _several(coordinator)
    if job is None:
        return SoloJob(engine.arena.capacity)
    from ckpt._job.agreement.peers import Peers
    from ckpt._job.processes import MultihostJob

    return MultihostJob(Peers(job, timeouts.coordination, location, engine.arena.capacity))


def place_in_job(coordinator: Coordinator | None) -> tuple[int, int]:
    """Return the number of this process in its job, and the number of processes."""
    job = _several(coordinator)
    return (0, 1) if job is None else (job.process_index, job.process_count)


def _several(coordinator: Coordinator | None) -> Coordinator | None:
    """Return the job that this process shares with others; None if it is alone."""
    if coordinator is None and job_size() == 1:
        return None
    from ckpt.coordination._jobs import job_of

    job = job_of(coordinator)
    return None if job.process_count == 1 else job


def checked_observers(observers: object) -> tuple[Observer, ...]:
    """Return the observers, wrapped so that their errors do no harm.

    Raises:
        InvalidArgumentError: An element is no function.
    """
    if not isinstance(observers, Iterable) or callable(observers):
        what = "a list of functions of an Event, such as [ckpt.observers.Trace()]"
        raise invalid("observers", observers, what)
    found = tuple(observers)
    for each in found:
        if not callable(each) or isinstance(each, type):
            raise InvalidArgumentError(
                f"observers: expected functions of an Event, not {shown(each)}"
                + (f"; pass an instance, {each.__name__}(...)" if isinstance(each, type) else "")
            )
    return tuple(map(GuardedObserver, found))
