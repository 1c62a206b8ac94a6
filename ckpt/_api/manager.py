"""`CheckpointManager`: the steps of one root, for asyncio and trio programs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import anyio

from ckpt._api.partial import PartialSave
from ckpt._commit import Commit
from ckpt._engine.verify.report import VerifyReport
from ckpt._events import Observer
from ckpt._plan.adapt import Adapt
from ckpt._plan.format_rules import Formats
from ckpt._runtime.futures import settled
from ckpt._settings import Staging, Timeouts
from ckpt._steps.factory import make_service, raise_unseen
from ckpt._steps.pins import Pin
from ckpt._steps.saves.backlog import BacklogPolicy
from ckpt._steps.step_metadata import StepMetadata
from ckpt.coordination._base import Coordinator
from ckpt.handlers._registry import HandlersLike
from ckpt.policies import (
    Deletion,
    Metric,
    Mode,
    PreservationPolicyLike,
    SavePolicyLike,
)
from ckpt.step_names import StepNames
from ckpt.storage._resolve import PathLike

__all__ = ["CheckpointManager"]


class CheckpointManager:
    """Saves and restores the steps of one directory, while training goes on.

    Use it as `async with`; leaving the block waits for every commit and raises the error of a
    failed one, unless somebody has seen it already. Its coroutines may be awaited from any task;
    all work is done on a thread of the library's own: neither side stalls the other's loop. Saves
    of a manager that was not closed are finished at interpreter exit, and their errors written to
    standard error. In a job of several processes all of them make the same calls.
    """

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
            save_policy: Which steps are saved (`ckpt.policies`), or a function of step, previous
                steps and `SaveContext` that returns True for those to save; None saves them all.
            preservation: Which steps are kept after a commit (`ckpt.policies`), or a function that
                returns True for a step to keep; None keeps all. Pinned steps, the one just saved
                and the greatest one are always kept.
            deletion: How steps that are not kept are deleted; `Deletion(trash=...)` moves them.
            step_names: How the directories of steps are called (`ckpt.step_names`).
            metadata: JSON values to keep with the root; the first that it is given stay.
            handlers: Handlers of further kinds of items, asked in order before the built-in ones;
                or a mapping of item names to the handler of each.
            staging: How arrays get to host memory, and how much of it may be used.
            formats: How arrays are stored: `{pattern of leaf paths: ArrayFormat}`, of which the
                first that covers a leaf counts, or a function of leaf path and
                `jax.ShapeDtypeStruct` that returns an `ArrayFormat` or None. A pattern that decides
                about no array of a save is an error.
            backlog: What a save does while another one is under way. `wait` takes its snapshot
                beside it and commits after it; while two are under way it waits for the first.
                `skip` saves nothing and returns a falsy commit that says so. `supersede` gives up a
                save that has not begun to write for the newer one; its commit becomes falsy. (With
                `force=True` a save is never skipped.)
            read_only: Refuse everything that writes, for evaluators.
            create: Make the root if it is not there; otherwise opening the manager fails.
            permission_mode: Permissions of new directories, such as 0o750; files get what of them
                files can have. None lets both follow the umask.
            preemption_signals: Signals that announce the end of the run, such as
                `(signal.SIGTERM,)`. They are handled from the first use in the main thread until
                the manager closes; see `reached_preemption`.
            timeouts: How long is waited for what may never come.
            coordinator: The processes of the job (`ckpt.coordination`); None is jax.distributed's.
            observers: Called with an `Event` for every timed phase, on the library's thread.
            clock: Tells the time in Unix seconds, for tests of policies.

        Raises:
            InvalidArgumentError: An argument cannot be meant as given.
        """
        self._service = make_service(
            root,
            save_policy=save_policy,
            preservation=preservation,
            deletion=deletion,
            step_names=step_names,
            metadata=metadata,
            handlers=handlers,
            staging=staging,
            formats=formats,
            backlog=backlog,
            read_only=read_only,
            create=create,
            permission_mode=permission_mode,
            preemption_signals=preemption_signals,
            timeouts=timeouts,
            coordinator=coordinator,
            observers=observers,
            clock=clock,
        )
        self._loop = self._service.loop
        weakref.finalize(self, self._loop.stop).atexit = False

    @property
    def root(self) -> str:
        """The directory, or the URL of the place in a store."""
        return self._service.storage.location

    async def __aenter__(self) -> Self:
        try:
            self._service.preemption.open()
            await self._loop.run(self._service.open)
        except BaseException:
            # Nobody leaves a block that was not entered.
            self._loop.stop()
            self._service.preemption.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Also when cancelled: a snapshot that was paid for is worth the seconds its commit needs.
        with anyio.CancelScope(shield=True):
            await self._close()
        raise_unseen(self._service, error)

    async def close(self) -> None:
        """Wait for every commit, end the library's thread, and raise what nobody has seen.

        Idempotent. Cancelling the call leaves the commits to finish.

        Raises:
            CheckpointError: A save failed and nobody has fetched its error; several arrive as an
                `ExceptionGroup`.
        """
        await self._close()
        raise_unseen(self._service, None)

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

        From the moment this returns, the caller may donate, delete or change everything it passed.
        What happens while another save is under way is the manager's `backlog`.

        Args:
            step: The step, 0 or greater.
            state: One PyTree of jax arrays (any sharding over the local devices), numpy arrays and
                Python scalars; or None with `items`.
            items: Several objects by name instead.
            metrics: Numbers to keep with the step; jax scalars may still be being computed.
            metadata: JSON values to keep with the step; tuples come back as lists.
            force: Save even if the save policy says no.
            overwrite: Replace the step if it exists; the old one stays until the new is published.

        Returns:
            The commit: await it for durability, or let the manager's exit tell. It is falsy, with
            the reason in `skipped`, if the save policy said no.

        Raises:
            InvalidArgumentError: An argument cannot be meant as given.
            UnsupportedLeafError: A leaf cannot be stored, or was deleted; names its path.
            StepExistsError: The step exists and `overwrite` is False.
            StorageError: The store refused before the snapshot was complete.
            HandlerError: An object with a state, or a handler of yours, raised.

        Cancellation: the save is stopped, and everything of it is removed, before it goes on.
        """
        commit, job, staged = self._service.start_save(
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
        """Save a step in several calls: `async with mgr.partial(step) as part`, `part.save(...)`.

        Arguments and errors are those of `save`; the save policy is not asked.
        """
        begun = self._service.start_partial(step, metrics, metadata, overwrite=overwrite)
        return PartialSave(begun, self)

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
            step: The step; None is the latest.
            like: The target: a tree of the structure wanted back, whose leaves say what they come
                back as: `jax.ShapeDtypeStruct` (with its sharding and dtype), jax or numpy arrays,
                Python scalars or their types, functions, or `...` to skip a leaf or all below a
                key. None restores all as it was saved. For several items, a dict of targets.
            items: Load these items only: their names, or a mapping of names to targets.
            adapt: What may differ between the checkpoint and the target: leaves to select, rename,
                cast, resize, stack or leave out. For several items a dict of item names may give
                each its own. By default nothing may.
            broadcast_bytes: In a job of several processes, read what several of them need only
                once and exchange it over their devices, in as much host memory. All give the same.

        Returns:
            The tree of a step that was saved without item names, else a dict by item name.

        Raises:
            StepNotFoundError: There is no such step, or none at all.
            TargetMismatchError: `like` does not fit; lists every leaf. No array was read.
            CorruptCheckpointError: What is stored is damaged; names the leaf.
            HandlerError: An object with a state, or a handler of yours, raised; names the item.

        Cancellation: reading stops, and memory is given back before the cancellation goes on.
        """
        restore = self._service.reader.restore
        return await self._loop.run_served(restore, step, like, items, adapt, broadcast_bytes)

    async def should_save(self, step: int) -> bool:
        """Tell whether `save` would save `step`; ask about the step in hand only."""
        self._service.reached_preemption(step)
        return await self._loop.run(self._service.should_save, step)

    def reached_preemption(self, step: int) -> bool:
        """Tell whether the run is to end at `step`; does not wait.

        True once one of `preemption_signals` has come; where `jax.distributed` is initialised, at
        the step that JAX's preemption service makes all processes agree on. Ask at every step,
        after `save`: the first save that is called for such a step is made whatever policy and
        backlog say. Asked again about the same step, it gives the same answer.

        Raises:
            InvalidArgumentError: Signals cannot be handled: this is not the main thread.
        """
        return self._service.reached_preemption(step)

    async def all_steps(self) -> list[int]:
        """Return every committed step, ascending; steps under way or failed are not among them."""
        return await self._loop.run(self._service.reader.all_steps)

    async def latest_step(self) -> int | None:
        """Return the greatest committed step, or None on a fresh run."""
        return await self._loop.run(self._service.reader.latest_step)

    async def best_step(self, metric: Metric | None = None, mode: Mode | None = None) -> int | None:
        """Return the committed step with the best metric, or None if no step has it.

        Args:
            metric: Name of a metric, or a function of all metrics of a step; None is what the
                `BestN` in the manager's `preservation` ranks by.
            mode: Whether the smallest (`"min"`) or the greatest (`"max"`) value is best.
        """
        return await self._loop.run(self._service.reader.best_step, metric, mode)

    async def reload(self) -> None:
        """Read every manifest anew; what was changed is noticed without it, too."""
        await self._loop.run(self._service.reload)

    async def root_metadata(self) -> dict[str, Any]:
        """Return the metadata that the root was given first; empty if it was given none."""
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
        """Compare a step with its manifest, and name all damage by file, item and leaf path.

        Every byte is read once, in a fixed amount of memory; neither devices nor the classes of
        items are needed.

        Args:
            step: The step; None is the latest.
            deep: Read everything; otherwise compare names, kinds and sizes of files only.

        Returns:
            The report; true if nothing is wrong. Damage is never raised.

        Raises:
            StepNotFoundError: There is no such step; it may have been deleted meanwhile.
            UnsupportedFormatError: It is of a later format.

        Cancellation: reading stops, and memory is given back before the cancellation goes on.
        """
        return await self._loop.run(self._service.reader.verify, step, deep)

    async def delete(self, step: int, *, item: str | None = None) -> None:
        """Delete a committed step; it vanishes at once and whole, then its bytes are removed.

        Files in it that this library did not write are moved beside it, to `<step>.others`.

        Args:
            step: The step.
            item: Delete this one of several items only; the rest takes the step's place atomically.

        Raises:
            InvalidArgumentError: There is no such item, or no other one.
            StepNotFoundError: There is no such step.
            StepPinnedError: It is pinned.
            ReadOnlyError: The manager is read-only.
        """
        await self._loop.run(self._service.delete, step, item)

    async def pin(self, step: int, name: str) -> None:
        """Keep a step until it is unpinned, also after this run; `name` says why.

        Raises:
            StepNotFoundError: There is no such step.
        """
        await self._loop.run(self._service.pin, step, name)

    async def unpin(self, step: int, name: str) -> bool:
        """Take back the pin of that name; return whether there was one."""
        return await self._loop.run(self._service.unpin, step, name)

    async def pins(self) -> dict[int, tuple[Pin, ...]]:
        """Return the pinned steps; those that evaluators hold (`ckpt.watch`) are among them."""
        return await self._loop.run(self._service.pins)

    def is_saving_in_progress(self) -> bool:
        """Tell whether a save is under way."""
        return self._service.saves.is_saving

    async def wait_until_finished(self) -> None:
        """Wait for every save that was started, and raise what nobody has seen, as `close` does.

        Steps that are no longer kept are deleted by then, too.
        """
        await self._loop.run(self._service.saves.idle)
        raise_unseen(self._service, None)
