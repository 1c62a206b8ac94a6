"""`CheckpointManager`: the steps of one root, for asyncio and trio programs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import anyio

from ckpt.backlog import BacklogPolicy, check_backlog
from ckpt.commit import Commit
from ckpt.engine.exits import run_at_exit
from ckpt.engine.loop import EngineLoop
from ckpt.events import Observer
from ckpt.handlers.registry import HandlersLike
from ckpt.layout.adapt import Adapt
from ckpt.layout.formatting import Formats
from ckpt.layout.report import VerifyReport
from ckpt.policies import PreservationPolicy, PreserveAll, SavePolicy
from ckpt.redaction import redact
from ckpt.requests import make_request
from ckpt.service import RootService, make_engine
from ckpt.settings import Staging, Timeouts
from ckpt.stepinfo import StepMetadata
from ckpt.steps import check_step
from ckpt.storage.resolve import PathLike, open_root
from ckpt.waiting import settled

__all__ = ["CheckpointManager", "make_service", "raise_unseen"]

logger = logging.getLogger("ckpt")


class CheckpointManager:
    """Saves and restores the steps of one directory, while training goes on.

    Use it as `async with`; leaving the block waits for every commit and raises the error of a
    failed one, unless somebody has seen it already. Its coroutines may be awaited from any task;
    all work is done on a thread of the library's own, so a caller that blocks its event loop does
    not stall a commit, and a save does not stall the caller's loop.

    A program that never closes its manager loses nothing: at interpreter exit saves under way are
    finished, and what failed unseen is written to standard error.
    """

    def __init__(
        self,
        root: PathLike,
        *,
        save_policy: SavePolicy | None = None,
        preservation: PreservationPolicy | None = None,
        handlers: HandlersLike = (),
        staging: Staging | None = None,
        formats: Formats | None = None,
        backlog: BacklogPolicy = "wait",
        read_only: bool = False,
        timeouts: Timeouts | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        """Manage the steps below `root`. Does no input or output yet.

        Args:
            root: The directory; made at the first save if it is not there.
            save_policy: Decides which steps are saved; None saves every step asked for.
            preservation: Decides which steps are kept after a commit; None keeps all. The greatest
                step and the one just saved are always kept.
            handlers: Handlers of further kinds of items, asked in order before the built-in ones;
                or a mapping of item names to the handler of each.
            staging: How arrays get to host memory, and how much of it may be used.
            formats: How arrays are stored: `{pattern of leaf paths: ArrayFormat}`, of which the
                first that covers a leaf counts, or a function of leaf path and
                `jax.ShapeDtypeStruct` that returns an `ArrayFormat` or None. It is asked once for
                trees of the same structure. A pattern that decides about no array of a save is an
                error. PRNG keys and Python scalars have no format.
            backlog: What a save does while another one is under way. `wait` takes its snapshot
                beside it, so the call blocks for the copy only, and commits after it; while two
                are under way already it waits for the first of them. `skip` saves nothing and
                returns a falsy commit that says so. `supersede` waits like the first, but gives up
                a save that has not begun to write for the newer one: the commit of that one becomes
                falsy, with the reason in `skipped`. (With `force=True` a save is never skipped.)
            read_only: Refuse everything that writes, for evaluators.
            timeouts: How long is waited for what may never come.
            observers: Called with an `Event` for every timed phase, on the library's thread.

        Raises:
            InvalidArgumentError: An argument cannot be meant as given.
        """
        self._service = make_service(
            root,
            save_policy=save_policy,
            preservation=preservation,
            handlers=handlers,
            staging=staging,
            formats=formats,
            backlog=backlog,
            read_only=read_only,
            timeouts=timeouts,
            observers=observers,
        )
        self._loop = self._service.loop
        weakref.finalize(self, self._loop.stop).atexit = False

    @property
    def root(self) -> str:
        """The directory, as it was given."""
        return self._service.storage.location

    async def __aenter__(self) -> Self:
        try:
            await self._loop.run(self._service.open)
        except BaseException:
            # Nobody leaves a block that was not entered.
            self._loop.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Also when the block is cancelled: a snapshot that training paid for is worth the seconds
        # its commit still needs.
        with anyio.CancelScope(shield=True):
            await self._close()
        raise_unseen(self._service, error)

    async def close(self) -> None:
        """Wait for every commit, end the library's thread, and raise what nobody has seen.

        Idempotent. Cancelling the call leaves the commits to finish.

        Raises:
            CheckpointError: A save failed and its error was not fetched from its `Commit`. Several
                arrive as an `ExceptionGroup`.
        """
        await self._close()
        raise_unseen(self._service, None)

    async def _close(self) -> None:
        await anyio.to_thread.run_sync(self._loop.close, abandon_on_cancel=True)

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
            metadata: JSON values to keep with the step.
            force: Save even if the save policy says no.
            overwrite: Replace the step if it exists; the old one stays until the new one is
                published.

        Returns:
            The commit: await it for durability, or drop it and let the manager's exit tell. It is
            falsy, with the reason in `skipped`, if the save policy said no.

        Raises:
            InvalidArgumentError: An argument cannot be meant as given.
            UnsupportedLeafError: A leaf cannot be stored, or was deleted; names its path.
            StepExistsError: The step exists and `overwrite` is False.
            StorageError: The store refused before the snapshot was complete.
            HandlerError: An object with a state, or a handler of yours, raised; names the item.

        Cancellation: the save is stopped, everything of it is removed, then the cancellation goes
        on.
        """
        step = check_step(step)
        request = make_request(
            str(step), step, state, items, metrics, metadata, overwrite=overwrite
        )
        commit, job, staged = self._service.start_save(request, force=force)
        try:
            await settled(staged)
        except anyio.get_cancelled_exc_class():
            job.cancel()
            with anyio.CancelScope(shield=True):
                await settled(job.future)
            raise
        staged.result()
        return commit

    async def restore(
        self,
        step: int | None = None,
        like: Any = None,
        *,
        items: Mapping[str, Any] | Iterable[str] | None = None,
        adapt: Adapt | Mapping[str, Adapt] | None = None,
    ) -> Any:
        """Load a committed step.

        Args:
            step: The step; None is the latest.
            like: The target: a tree of the structure wanted back, whose leaves say what they come
                back as: `jax.ShapeDtypeStruct` (with its sharding and dtype), jax or numpy arrays,
                Python scalars or their types, functions, or `...` to skip a leaf or all below a
                key. None restores everything as
                it was saved. For a step of several items, a dict of item names to targets.
            items: Load these items only: their names, or a mapping of names to targets.
            adapt: What may differ between the checkpoint and the target: leaves to select, rename,
                cast, resize, stack or leave out. For several items a dict of item names may give
                each its own. By default nothing may.

        Returns:
            The tree of a step that was saved without item names, else a dict by item name.

        Raises:
            StepNotFoundError: There is no such step, or none at all.
            TargetMismatchError: `like` does not fit; lists every leaf. No array was read.
            CorruptCheckpointError: What is stored is damaged; names the leaf.
            HandlerError: An object with a state, or a handler of yours, raised; names the item.

        Cancellation: reading stops, and memory is given back before the cancellation goes on.
        """
        step = None if step is None else check_step(step)
        return await self._loop.run(self._service.restore, step, like, items, adapt)

    async def should_save(self, step: int) -> bool:
        """Tell whether the save policy wants `step`; `save` asks it itself."""
        return await self._loop.run(self._service.should_save, check_step(step))

    async def all_steps(self) -> list[int]:
        """Return every committed step, ascending; steps under way or failed are not among them."""
        return await self._loop.run(self._service.all_steps)

    async def latest_step(self) -> int | None:
        """Return the greatest committed step, or None on a fresh run."""
        return await self._loop.run(self._service.latest_step)

    async def metadata(self, step: int | None = None) -> StepMetadata:
        """Return structure, shapes, dtypes and shardings of a step; reads no array bytes.

        Args:
            step: The step; None is the latest.

        Raises:
            StepNotFoundError: There is no such step, or none at all.
        """
        step = None if step is None else check_step(step)
        return await self._loop.run(self._service.metadata, step)

    async def metrics(self, step: int | None = None) -> dict[str, float] | None:
        """Return the metrics a step was saved with, or None; `step` as in `metadata`."""
        return (await self.metadata(step)).info.metrics

    async def verify(self, step: int | None = None, *, deep: bool = True) -> VerifyReport:
        """Compare a step with its manifest, and name all damage by file, item and leaf path.

        Every byte of every file is read once, several files at a time, in a fixed amount of memory.
        Nothing is written or restored, so neither devices nor the classes of items are needed.

        Args:
            step: The step; None is the latest.
            deep: Read everything. Otherwise only the manifest is read, and names, kinds and sizes
                of files are compared with it.

        Returns:
            The report; true if nothing is wrong. Damage is never raised.

        Raises:
            StepNotFoundError: There is no such step, or none at all.
            StepDeletedError: It was deleted or replaced meanwhile.
            UnsupportedFormatError: It is of a later format.

        Cancellation: reading stops, and memory is given back before the cancellation goes on.
        """
        step = None if step is None else check_step(step)
        return await self._loop.run(self._service.verify, step, deep)

    async def delete(self, step: int) -> None:
        """Delete a committed step; it vanishes at once and whole, then its bytes are removed.

        Raises:
            StepNotFoundError: There is no such step.
            ReadOnlyError: The manager is read-only.
        """
        await self._loop.run(self._service.delete, check_step(step))

    def is_saving_in_progress(self) -> bool:
        """Tell whether a save is under way."""
        return self._service.saves.is_saving

    async def wait_until_finished(self) -> None:
        """Wait for every save that was started, and raise what nobody has seen.

        Steps that are no longer kept are deleted by then, too.

        Raises:
            CheckpointError: As `close`.
        """
        await self._loop.run(self._service.saves.idle)
        raise_unseen(self._service, None)


def make_service(
    root: PathLike,
    *,
    save_policy: SavePolicy | None,
    preservation: PreservationPolicy | None,
    handlers: HandlersLike,
    staging: Staging | None,
    formats: Formats | None,
    backlog: BacklogPolicy,
    read_only: bool,
    timeouts: Timeouts | None,
    observers: Iterable[Observer],
) -> RootService:
    """Return the service behind a manager, asyncio or plain."""
    timeouts = timeouts or Timeouts()
    service = RootService(
        EngineLoop(),
        open_root(root, timeouts),
        make_engine(staging or Staging(), handlers, observers, formats),
        save_policy,
        preservation or PreserveAll(),
        backlog=check_backlog(backlog),
        read_only=read_only,
        timeouts=timeouts,
    )
    run_at_exit(service.finish_at_exit)
    return service


def raise_unseen(service: RootService, error: BaseException | None) -> None:
    """Raise what nobody has fetched; where `error` is on its way already, add it as notes."""
    unseen = service.saves.take_errors()
    if error is not None:
        for each in unseen:
            logger.error("a save failed: %s", each)
            where = redact(service.storage.location)
            error.add_note(f"a save to {where} failed as well: {each}")
    elif len(unseen) == 1:
        raise unseen[0]
    elif unseen:
        raise BaseExceptionGroup(f"{len(unseen)} saves failed", unseen)
