"""The same calls for plain code: no `await`, no event loop needed, none in the way.

Works in scripts, in threads, inside a running event loop and in notebooks: every call hands its
work to the library's own thread and waits for it. Inside a running loop a call blocks that loop, as
any blocking call does; prefer the asyncio API there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from ckpt._api.oneshot import (
    Call,
    load_call,
    metadata_call,
    save_call,
    verify_call,
)
from ckpt._api.partial import SyncPartialSave as PartialSave
from ckpt._api.watch import watch_sync as watch
from ckpt._commit import Commit, StepInfo
from ckpt._engine.verify.report import VerifyReport
from ckpt._events import Observer
from ckpt._plan.adapt import Adapt
from ckpt._plan.format_rules import Formats
from ckpt._runtime.futures import settled_here
from ckpt._runtime.loop import EngineLoop
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

__all__ = ["CheckpointManager", "load", "metadata", "save", "verify", "watch"]

T = TypeVar("T")


class CheckpointManager:
    """Saves and restores the steps of one directory; see `ckpt.CheckpointManager`.

    Use it as `with`. Its methods may be called from any thread.
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
        """Manage the steps below `root`; arguments as for `ckpt.CheckpointManager`."""
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

    def __enter__(self) -> Self:
        try:
            self._service.preemption.open()
            self._loop.call(self._service.open)
        except BaseException:
            # Nobody leaves a block that was not entered.
            self._loop.stop()
            self._service.preemption.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()
        raise_unseen(self._service, error)

    def close(self) -> None:
        """Wait for every commit and raise what nobody has seen; see the asyncio manager."""
        self._close()
        raise_unseen(self._service, None)

    def _close(self) -> None:
        try:
            self._service.close()
        finally:
            self._service.preemption.close()

    def save(
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
        """Take a snapshot and return once it is safe; see `ckpt.CheckpointManager.save`.

        An interrupt while waiting stops the save and removes everything of it.
        """
        self._loop.check_caller()
        commit, job, staged = self._service.start_save(
            step, state, items, metrics, metadata, force=force, overwrite=overwrite
        )
        try:
            settled_here(staged)
        except BaseException:
            job.cancel()
            settled_here(job.future)
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
        """Save a step in several calls; see the asyncio manager."""
        self._loop.check_caller()
        begun = self._service.start_partial(step, metrics, metadata, overwrite=overwrite)
        return PartialSave(begun, self)

    def restore(
        self,
        step: int | None = None,
        like: Any = None,
        *,
        items: Mapping[str, Any] | Iterable[str] | None = None,
        adapt: Adapt | Mapping[str, Adapt] | None = None,
        broadcast_bytes: int | None = None,
    ) -> Any:
        """Load a committed step; see `ckpt.CheckpointManager.restore`."""
        restore = self._service.reader.restore
        return self._loop.call_served(restore, step, like, items, adapt, broadcast_bytes)

    def should_save(self, step: int) -> bool:
        """Tell whether `save` would save `step`; ask about the step in hand only."""
        self._service.reached_preemption(step)
        return self._loop.call(self._service.should_save, step)

    def reached_preemption(self, step: int) -> bool:
        """Tell whether the run is to end at `step`; see the asyncio manager. Does not wait."""
        return self._service.reached_preemption(step)

    def all_steps(self) -> list[int]:
        """Return every committed step, ascending."""
        return self._loop.call(self._service.reader.all_steps)

    def latest_step(self) -> int | None:
        """Return the greatest committed step, or None on a fresh run."""
        return self._loop.call(self._service.reader.latest_step)

    def best_step(self, metric: Metric | None = None, mode: Mode | None = None) -> int | None:
        """Return the committed step with the best metric; see the asyncio manager."""
        return self._loop.call(self._service.reader.best_step, metric, mode)

    def reload(self) -> None:
        """Read every manifest anew; seldom needed."""
        self._loop.call(self._service.reload)

    def root_metadata(self) -> dict[str, Any]:
        """Return the metadata that the root was given first."""
        return self._loop.call(self._service.root_metadata)

    def metadata(self, step: int | None = None) -> StepMetadata:
        """Return everything about a step but its array bytes."""
        return self._loop.call(self._service.reader.metadata, step)

    def metrics(self, step: int | None = None) -> dict[str, float] | None:
        """Return the metrics a step was saved with, or None."""
        return self.metadata(step).info.metrics

    def verify(self, step: int | None = None, *, deep: bool = True) -> VerifyReport:
        """Compare a step with its manifest; see `ckpt.CheckpointManager.verify`."""
        return self._loop.call(self._service.reader.verify, step, deep)

    def delete(self, step: int, *, item: str | None = None) -> None:
        """Delete a committed step, or one item of it; see the asyncio manager."""
        self._loop.call(self._service.delete, step, item)

    def pin(self, step: int, name: str) -> None:
        """Keep a step from being deleted by anybody, until it is unpinned."""
        self._loop.call(self._service.pin, step, name)

    def unpin(self, step: int, name: str) -> bool:
        """Take back the pin of that name; return whether there was one."""
        return self._loop.call(self._service.unpin, step, name)

    def pins(self) -> dict[int, tuple[Pin, ...]]:
        """Return the pinned steps; those that evaluators hold are among them."""
        return self._loop.call(self._service.pins)

    def is_saving_in_progress(self) -> bool:
        """Tell whether a save is under way."""
        return self._service.saves.is_saving

    def wait_until_finished(self) -> None:
        """Wait for every save that was started, and raise what nobody has seen."""
        self._loop.call(self._service.saves.idle)
        raise_unseen(self._service, None)


def save(
    path: PathLike,
    state: Any = None,
    *,
    items: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    metadata: Any = None,
    overwrite: bool = False,
    handlers: HandlersLike = (),
    staging: Staging | None = None,
    formats: Formats | None = None,
    timeouts: Timeouts | None = None,
    coordinator: Coordinator | None = None,
) -> StepInfo:
    """Save one checkpoint at `path`; durable on return. See `ckpt.save`."""
    return _run(
        save_call(
            path,
            state,
            items,
            metrics,
            metadata,
            overwrite,
            handlers,
            staging,
            formats,
            timeouts,
            coordinator,
        )
    )


def load(
    path: PathLike,
    like: Any = None,
    *,
    items: Mapping[str, Any] | Iterable[str] | None = None,
    adapt: Adapt | Mapping[str, Adapt] | None = None,
    handlers: HandlersLike = (),
    coordinator: Coordinator | None = None,
) -> Any:
    """Load a one-shot checkpoint, or one step of a manager's root. See `ckpt.load`."""
    return _run(load_call(path, like, items, adapt, handlers, coordinator))


def metadata(path: PathLike) -> StepMetadata:
    """Return everything about a checkpoint but its array bytes. See `ckpt.metadata`."""
    return _run(metadata_call(path))


def verify(path: PathLike, *, deep: bool = True) -> VerifyReport:
    """Compare a checkpoint with its manifest. See `ckpt.verify`."""
    return _run(verify_call(path, deep))


def _run(call: Call[T]) -> T:
    loop = EngineLoop()
    try:
        return loop.call(call)
    finally:
        loop.close()
