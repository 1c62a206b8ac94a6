"""The managers' common base, and `CheckpointManager` for asyncio and trio programs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, get_args

import anyio

from ckpt._api.partial import PartialSave
from ckpt._arguments import instance_of, invalid, one_of, plain_json
from ckpt._commit import Commit
from ckpt._engine.verify.report import VerifyReport
from ckpt._events import Observer
from ckpt._plan.adapt import Adapt
from ckpt._plan.format_rules import Formats
from ckpt._redaction import redact
from ckpt._runtime.exit import run_at_exit
from ckpt._runtime.futures import settled
from ckpt._runtime.loop import EngineLoop
from ckpt._settings import Staging, Timeouts
from ckpt._steps.factory import make_engine, make_peers
from ckpt._steps.pins import Pin
from ckpt._steps.saves.backlog import BacklogPolicy
from ckpt._steps.saves.preemption import Preemption
from ckpt._steps.service import RootService
from ckpt._steps.step_metadata import StepMetadata
from ckpt.coordination._base import Coordinator
from ckpt.handlers._registry import HandlersLike
from ckpt.policies import (
    Deletion,
    Metric,
    Mode,
    PreservationPolicyLike,
    PreserveAll,
    SavePolicyLike,
    check_preservation,
    check_save_policy,
)
from ckpt.step_names import Standard, StepNames, checked
from ckpt.storage._resolve import PathLike, check_trash, open_root

logger = logging.getLogger("ckpt")


class ManagerBase:
    """What the asyncio and the synchronous manager share: their arguments, and what never waits."""

    def __init__(
        self,
        root: PathLike,
        *,
        save_policy: SavePolicyLike | None = None,
        preservation: PreservationPolicyLike | None = None,
        deletion: Deletion | None = None,
        step_names: StepNames | None = None,
        metadata: Mapping[str, Any] | None = None,
        handlers: HandlersLike = (),
        staging: Staging | None = None,
        formats: Formats | None = None,
        backlog: BacklogPolicy = "wait",
        read_only: bool = False,
        create: bool = True,
        permission_mode: int | None = None,
        preemption_signals: Iterable[int] = (),
        timeouts: Timeouts | None = None,
        coordinator: Coordinator | None = None,
        observers: Iterable[Observer] = (),
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Manage the steps below `root`. Does no input or output yet.

        Args:
            root: A directory, a URL (`s3://bucket/run`), or a store of `ckpt.storage`.
            save_policy: Which steps are saved: a policy of `ckpt.policies`, or a function of step,
                previous steps and `SaveContext` that returns True for steps to save. None saves
                every step.
            preservation: Which steps are kept after a commit: a policy of `ckpt.policies`, or a
                function that returns True for steps to keep. None keeps all. Pinned steps, the
                step just saved and the greatest one are always kept.
            deletion: How the other steps are deleted; `Deletion(trash=...)` moves them away.
            step_names: How the directories of steps are named (`ckpt.step_names`).
            metadata: JSON values to keep with the root. If it has metadata already, that stays.
            handlers: Handlers for more kinds of items, tried in order before the built-in ones;
                or a mapping of item names to the handler of each.
            staging: How snapshots are taken, and how much host memory they may use.
            formats: How arrays are stored: `{pattern of leaf paths: ArrayFormat}`, of which the
                first that matches a leaf applies, or a function of leaf path and
                `jax.ShapeDtypeStruct` that returns an `ArrayFormat` or None. A pattern that applies
                to no array of a save is an error.
            backlog: What a save does while another one is under way. `wait` takes its snapshot
                meanwhile and commits after it; with two under way it first waits for the older.
                `skip` saves nothing and returns a falsy commit that says so. `supersede` replaces
                a save that has not begun to write, whose commit becomes falsy. (A save with
                `force=True` is never skipped.)
            read_only: Refuse everything that writes; for evaluators.
            create: Create the root if it does not exist. With False, opening the manager fails.
            permission_mode: Permissions of new directories, such as 0o750; files get the same
                without the execute bits. None leaves both to the umask.
            preemption_signals: Signals that announce the end of the run, such as
                `(signal.SIGTERM,)`. They are handled from the first use in the main thread until
                the manager closes; see `reached_preemption`.
            timeouts: Time limits, in seconds.
            coordinator: The processes of the job (`ckpt.coordination`). None uses those of
                `jax.distributed`.
            observers: Called with an `Event` for every timed phase, on the library's thread.
            clock: Returns the time in Unix seconds; for tests of policies.

        Raises:
            InvalidArgumentError: An argument is invalid.
        """
        timeouts = instance_of("timeouts", timeouts, Timeouts) or Timeouts()
        instance_of("read_only", read_only, bool)
        instance_of("create", create, bool)
        storage = open_root(root, timeouts, create=create, permission_mode=permission_mode)
        if save_policy is not None:
            check_save_policy(save_policy)
        if preservation is not None:
            check_preservation(preservation)
        deletion = instance_of("deletion", deletion, Deletion) or Deletion()
        names = checked(Standard() if step_names is None else step_names)
        if deletion.trash is not None:
            check_trash(root, deletion.trash, lambda name: names.step(name) is not None)
        staging = instance_of("staging", staging, Staging) or Staging()
        engine = make_engine(staging, handlers, observers, formats, clock)
        peers = make_peers(coordinator, timeouts, storage.location, engine)
        one_of("backlog", backlog, get_args(BacklogPolicy))
        if backlog == "supersede" and peers is not None:
            what = f"'wait' or 'skip', since the {peers.count} processes of this job might differ"
            raise invalid("backlog", backlog, f"{what} in which save they give up")
        given: object = metadata
        if metadata is not None and not isinstance(given, Mapping):
            raise invalid("metadata", metadata, "a mapping of names to JSON values")
        self._loop = EngineLoop()
        self._service = RootService(
            self._loop,
            storage,
            engine,
            save_policy=save_policy,
            preservation=PreserveAll() if preservation is None else preservation,
            deletion=deletion,
            names=names,
            metadata=None if metadata is None else plain_json("metadata", dict(metadata)),
            backlog=backlog,
            read_only=read_only,
            timeouts=timeouts,
            preemption=Preemption(preemption_signals),
            peers=peers,
        )
        run_at_exit(self._service.saves.finish_at_exit)
        weakref.finalize(self, self._loop.stop).atexit = False

    @property
    def root(self) -> str:
        """The directory, or the URL of the place in a store."""
        return self._service.storage.location

    def reached_preemption(self, step: int) -> bool:
        """Return whether the run should end at `step`; does not wait.

        True once one of `preemption_signals` has arrived. With `jax.distributed` it is true from
        the step on which JAX's preemption service lets all processes agree. Ask at every step,
        after `save`: the first save for such a step is made whatever policy and backlog say. For
        one step, the answer never changes.

        Raises:
            InvalidArgumentError: Signals cannot be handled: this is not the main thread.
        """
        return self._service.reached_preemption(step)

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is under way."""
        return self._service.saves.is_saving

    def _give_up_entering(self) -> None:
        # A block that was not entered is never left.
        self._loop.stop()
        self._service.preemption.close()

    def _raise_unseen(self, error: BaseException | None = None) -> None:
        """Raise the errors that have not been fetched, or add them as notes to `error`."""
        unseen = self._service.saves.take_errors()
        if error is not None:
            for each in unseen:
                logger.error("a save failed: %s", each)
                error.add_note(f"a save to {redact(self.root)} failed as well: {each}")
        elif len(unseen) == 1:
            raise unseen[0]
        elif unseen:
            raise BaseExceptionGroup(f"{len(unseen)} saves failed", unseen)


class CheckpointManager(ManagerBase):
    """Saves and restores the steps of one directory while training continues.

    Use it as `async with`: leaving the block waits for every commit, and raises the error of a
    failed one unless you have already fetched it. Its coroutines may be awaited from any task.
    All work is done on a thread of the library's own, so that neither side stalls the other's event
    loop. Saves of a manager that was never closed are finished at interpreter exit, and their
    errors are written to standard error. In a job of several processes, all of them make the same
    calls.
    """

    async def __aenter__(self) -> Self:
        try:
            self._service.preemption.open()
            await self._loop.run(self._service.open)
        except BaseException:
            self._give_up_entering()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Even when cancelled: the snapshots are taken, and committing them takes only seconds.
        with anyio.CancelScope(shield=True):
            await self._close()
        self._raise_unseen(error)

    async def close(self) -> None:
        """Wait for every commit, end the library's thread, and raise unfetched errors of saves.

        May be called several times.

        Raises:
            CheckpointError: A save failed and its error was not fetched from its commit. Several
                such errors are raised as an `ExceptionGroup`.

        Cancellation: the commits still finish.
        """
        await self._close()
        self._raise_unseen()

    async def _close(self) -> None:
        try:
            await anyio.to_thread.run_sync(self._service.close, abandon_on_cancel=True)
        finally:
            self._service.preemption.close()

    async def save(
        self,
        step: int,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        force: bool = False,
        overwrite: bool = False,
    ) -> Commit:
        """Take a snapshot and return once it is safe; writing goes on in the background.

        Once this returns, you may donate, delete or change everything you passed. The manager's
        `backlog` decides what happens while another save is under way.

        Args:
            step: The step, 0 or greater.
            state: One PyTree of jax arrays (with any sharding over the local devices), numpy arrays
                and Python scalars; None with `items`.
            items: Several objects by name, instead of `state`.
            metrics: Numbers to keep with the step. Scalars that jax is still computing are fine.
            metadata: JSON values to keep with the step; tuples come back as lists.
            force: Save even if the save policy says no.
            overwrite: Replace the step if it exists. The old one stays until the new is published.

        Returns:
            The commit. Await it for durability, or rely on the manager's exit. It is falsy, with
            the reason in `skipped`, if the save policy said no.

        Raises:
            InvalidArgumentError: An argument is invalid. Nothing was changed.
            UnsupportedLeafError: A leaf cannot be stored, or was deleted; names its path.
            StepExistsError: The step exists and `overwrite` is False.
            StorageError: The store failed before the snapshot was complete.
            HandlerError: A handler, or an object that it saves, raised an error.

        Cancellation: the save is stopped and removed before the cancellation continues.
        """
        commit, job, staged = self._service.saves.start(
            step, state, items, metrics, metadata, force=force, overwrite=overwrite
        )
        try:
            await settled(staged)
        except anyio.get_cancelled_exc_class():
            job.cancel()
            with anyio.CancelScope(shield=True):
                await settled(job.future)
            raise
        staged.result()
        return commit

    def partial(
        self,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        overwrite: bool = False,
    ) -> PartialSave:
        """Save a step in several calls of `part.save`: `async with mgr.partial(step) as part`.

        Arguments and errors are those of `save`. The save policy is not asked.
        """
        started = self._service.start_partial(step, metrics, metadata, overwrite=overwrite)
        return PartialSave(started, self)

    async def restore(
        self,
        step: int | None = None,
        like: Any = None,
        *,
        items: Mapping[str, Any] | Iterable[str] | None = None,
        adapt: Adapt | Mapping[str, Adapt] | None = None,
        broadcast_bytes: int | None = None,
    ) -> Any:
        """Load a committed step.

        Args:
            step: The step; None for the latest.
            like: The target: a tree of the structure to return. Its leaves say what to return:
                `jax.ShapeDtypeStruct` (with sharding and dtype), jax or numpy arrays, Python
                scalars or their types, functions, or `...` to skip a leaf or a whole subtree. None
                restores everything as it was saved. For several items, a dict of targets.
            items: Load these items only: their names, or a mapping of names to targets.
            adapt: How the checkpoint may differ from the target: leaves to select, rename, cast,
                resize, stack or leave out. For several items, a dict may hold one for each. By
                default they must agree.
            broadcast_bytes: In a job of several processes, read shared data only once and exchange
                it over the devices, using this much host memory. All processes pass the same value.

        Returns:
            The tree of a step that was saved without item names, else a dict by item name.

        Raises:
            InvalidArgumentError: An argument is invalid.
            StepNotFoundError: There is no such step, or none at all.
            TargetMismatchError: `like` does not fit; lists every leaf. No array was read.
            CorruptCheckpointError: Stored data is damaged; names the leaf.
            HandlerError: A handler, or an object that it loads, raised an error; names the item.

        Cancellation: reading stops and memory is freed before the cancellation continues.
        """
        restore = self._service.reader.restore
        return await self._loop.run_served(restore, step, like, items, adapt, broadcast_bytes)

    async def should_save(self, step: int) -> bool:
        """Return whether `save` would save `step`; only ask about the current step."""
        self._service.reached_preemption(step)
        return await self._loop.run(self._service.should_save, step)

    async def all_steps(self) -> list[int]:
        """Return every committed step, ascending, without those under way or failed."""
        return await self._loop.run(self._service.reader.all_steps)

    async def latest_step(self) -> int | None:
        """Return the greatest committed step, or None on a fresh run."""
        return await self._loop.run(self._service.reader.latest_step)

    async def best_step(self, metric: Metric | None = None, mode: Mode | None = None) -> int | None:
        """Return the committed step with the best metric, or None if no step has it.

        Args:
            metric: Name of a metric, or a function of all metrics of a step. None is the metric of
                the `BestN` in the manager's `preservation`.
            mode: Whether the smallest (`"min"`) or the greatest (`"max"`) value is best.

        Raises:
            InvalidArgumentError: An argument is invalid, or missing without a `BestN`.
        """
        return await self._loop.run(self._service.reader.best_step, metric, mode)

    async def reload(self) -> None:
        """Read every manifest again. Seldom needed: changes are noticed without it, too."""
        await self._loop.run(self._service.reload)

    async def root_metadata(self) -> dict[str, Any]:
        """Return the metadata of the root; empty if it has none."""
        return await self._loop.run(self._service.root_metadata)

    async def metadata(self, step: int | None = None) -> StepMetadata:
        """Return structure, shapes, dtypes and shardings of a step, or of the latest one.

        No array bytes are read.

        Raises:
            StepNotFoundError: There is no such step, or none at all.
        """
        return await self._loop.run(self._service.reader.metadata, step)

    async def metrics(self, step: int | None = None) -> dict[str, float] | None:
        """Return the metrics a step was saved with, or None; `step` as in `metadata`."""
        return (await self.metadata(step)).info.metrics

    async def verify(self, step: int | None = None, *, deep: bool = True) -> VerifyReport:
        """Compare a step with its manifest and report all damage by file, item and leaf path.

        Every byte is read once, in a fixed amount of memory. It needs neither devices nor the
        classes of items.

        Args:
            step: The step; None for the latest.
            deep: Read everything. With False, only compare names, kinds and sizes of files.

        Returns:
            The report, true if nothing is wrong. Damage is reported, never raised.

        Raises:
            StepNotFoundError: There is no such step; it may have been deleted meanwhile.
            UnsupportedFormatError: The step was written in a later format.

        Cancellation: reading stops and memory is freed before the cancellation continues.
        """
        return await self._loop.run(self._service.reader.verify, step, deep)

    async def delete(self, step: int, *, item: str | None = None) -> None:
        """Delete a committed step. It disappears atomically, then its bytes are removed.

        Files in it that this library did not write are moved beside it, to `<step>.others`.

        Args:
            step: The step.
            item: Delete only this one of several items; the rest replaces the step atomically.

        Raises:
            InvalidArgumentError: There is no such item, or it is the only one.
            StepNotFoundError: There is no such step.
            StepPinnedError: The step is pinned.
            ReadOnlyError: The manager is read-only.
        """
        await self._loop.run(self._service.delete, step, item)

    async def pin(self, step: int, name: str) -> None:
        """Protect a step from deletion until it is unpinned, even after this run.

        Args:
            step: The step.
            name: A name for the pin, such as the reason; a step may have several pins.

        Raises:
            InvalidArgumentError: An argument is invalid.
            StepNotFoundError: There is no such step.
        """
        await self._loop.run(self._service.pin, step, name)

    async def unpin(self, step: int, name: str) -> bool:
        """Remove the pin of that name; return whether there was one."""
        return await self._loop.run(self._service.unpin, step, name)

    async def pins(self) -> dict[int, tuple[Pin, ...]]:
        """Return the pinned steps and their pins, including those of `ckpt.watch`."""
        return await self._loop.run(self._service.pins)

    async def wait_until_finished(self) -> None:
        """Wait for every save that was started, and raise unfetched errors as `close` does.

        By then, the steps that are no longer kept have been deleted, too.
        """
        await self._loop.run(self._service.saves.idle)
        self._raise_unseen()
