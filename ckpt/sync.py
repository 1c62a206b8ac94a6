"""The same calls for plain code: no `await`, no event loop needed, none in the way.

Works in scripts, in threads, inside a running event loop and in notebooks: every call hands its
work to the library's own thread and waits for it. Inside a running loop a call blocks that loop, as
any blocking call does; prefer the asyncio API there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from ckpt.backlog import BacklogPolicy
from ckpt.commit import Commit, StepInfo
from ckpt.engine.loop import EngineLoop
from ckpt.events import Observer
from ckpt.handlers.registry import HandlersLike
from ckpt.layout.adapt import Adapt
from ckpt.layout.formatting import Formats
from ckpt.layout.report import VerifyReport
from ckpt.manager import make_service, raise_unseen
from ckpt.oneshot import Call, load_call, metadata_call, save_call, verify_call
from ckpt.policies import PreservationPolicy, SavePolicy
from ckpt.requests import make_request
from ckpt.settings import Staging, Timeouts
from ckpt.stepinfo import StepMetadata
from ckpt.steps import check_step
from ckpt.storage.resolve import PathLike
from ckpt.waiting import settled_here

__all__ = ["CheckpointManager", "load", "metadata", "save", "verify"]

T = TypeVar("T")


class CheckpointManager:
    """Saves and restores the steps of one directory; see `ckpt.CheckpointManager`.

    Use it as `with`. Its methods may be called from any thread.
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
        """Manage the steps below `root`; arguments as for `ckpt.CheckpointManager`."""
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

    def __enter__(self) -> Self:
        try:
            self._loop.call(self._service.open)
        except BaseException:
            # Nobody leaves a block that was not entered.
            self._loop.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.close()
        raise_unseen(self._service, error)

    def close(self) -> None:
        """Wait for every commit and raise what nobody has seen; see the asyncio manager."""
        self._loop.close()
        raise_unseen(self._service, None)

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
        step = check_step(step)
        request = make_request(
            str(step), step, state, items, metrics, metadata, overwrite=overwrite
        )
        commit, job, staged = self._service.start_save(request, force=force)
        try:
            settled_here(staged)
        except BaseException:
            job.cancel()
            settled_here(job.future)
            raise
        staged.result()
        return commit

    def restore(
        self,
        step: int | None = None,
        like: Any = None,
        *,
        items: Mapping[str, Any] | Iterable[str] | None = None,
        adapt: Adapt | Mapping[str, Adapt] | None = None,
    ) -> Any:
        """Load a committed step; see `ckpt.CheckpointManager.restore`."""
        step = None if step is None else check_step(step)
        return self._loop.call(self._service.restore, step, like, items, adapt)

    def should_save(self, step: int) -> bool:
        """Tell whether the save policy wants `step`; `save` asks it itself."""
        return self._loop.call(self._service.should_save, check_step(step))

    def all_steps(self) -> list[int]:
        """Return every committed step, ascending."""
        return self._loop.call(self._service.all_steps)

    def latest_step(self) -> int | None:
        """Return the greatest committed step, or None on a fresh run."""
        return self._loop.call(self._service.latest_step)

    def metadata(self, step: int | None = None) -> StepMetadata:
        """Return everything about a step but its array bytes."""
        step = None if step is None else check_step(step)
        return self._loop.call(self._service.metadata, step)

    def metrics(self, step: int | None = None) -> dict[str, float] | None:
        """Return the metrics a step was saved with, or None."""
        return self.metadata(step).info.metrics

    def verify(self, step: int | None = None, *, deep: bool = True) -> VerifyReport:
        """Compare a step with its manifest; see `ckpt.CheckpointManager.verify`."""
        step = None if step is None else check_step(step)
        return self._loop.call(self._service.verify, step, deep)

    def delete(self, step: int) -> None:
        """Delete a committed step."""
        self._loop.call(self._service.delete, check_step(step))

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
) -> StepInfo:
    """Save one checkpoint at `path`; durable on return. See `ckpt.save`."""
    return _run(
        save_call(path, state, items, metrics, metadata, overwrite, handlers, staging, formats)
    )


def load(
    path: PathLike,
    like: Any = None,
    *,
    items: Mapping[str, Any] | Iterable[str] | None = None,
    adapt: Adapt | Mapping[str, Adapt] | None = None,
    handlers: HandlersLike = (),
) -> Any:
    """Load a one-shot checkpoint, or one step of a manager's root. See `ckpt.load`."""
    return _run(load_call(path, like, items, adapt, handlers))


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
