"""The synchronous API: the same calls without `await`.

It works in scripts, threads and notebooks, and inside a running event loop: every call hands its
work to the library's own thread and waits for it. Like any blocking call it blocks a running loop;
prefer the asyncio API there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, TypeVar, overload

from ckpt._api import adoption, conversion, manager, oneshot, stored_array
from ckpt._api import merge as merging
from ckpt._api import watch as watching
from ckpt._api.adoption import adopt_call
from ckpt._api.background import background_saves
from ckpt._api.base import ManagerBase
from ckpt._api.branches import Source
from ckpt._api.conversion import Conversion, FormatName, convert_call
from ckpt._api.faces.coroutines import refused
from ckpt._api.faces.plain_docs import plain_docs
from ckpt._api.merge import merge_call
from ckpt._api.oneshot import load_call, metadata_call, save_call, verify_call
from ckpt._api.partial import SyncPartialSave
from ckpt._api.resumption import Fresh, State, fresh_state, resume_target, source_target
from ckpt._api.stored_array import SyncStoredArray, find_array
from ckpt._api.trash import SyncTrash
from ckpt._api.watch import SyncWatch, watcher_of
from ckpt._arguments import true_or_false
from ckpt._commit import Commit, StepInfo
from ckpt._engine.verify.file_selection import read_limits
from ckpt._engine.verify.report import VerifyReport
from ckpt._events import Observer
from ckpt._plan.adapt import Adapt
from ckpt._plan.format_rules import Formats
from ckpt._runtime.futures import settled_here
from ckpt._runtime.loop import Job, call_once
from ckpt._runtime.tracebacks import outcome
from ckpt._settings import ArrayMemory, Staging, StagingMode, Timeouts, VerifyMode, VitalSignsMode
from ckpt._steps.pins import Pin
from ckpt._steps.saves import after_saves
from ckpt._steps.saves.requests import make_request
from ckpt._steps.step_metadata import StepMetadata
from ckpt._steps.watcher import Until, WatchOptions
from ckpt.coordination._base import Coordinator
from ckpt.exports import Safetensors, Zarr
from ckpt.handlers._registry import HandlersLike
from ckpt.policies._health import Healthy
from ckpt.policies._ranking import Metric, Mode
from ckpt.step_names import StepNames
from ckpt.storage._resolve import PathLike

__all__ = [
    "CheckpointManager",
    "adopt",
    "convert",
    "load",
    "merge",
    "metadata",
    "open_array",
    "save",
    "save_async",
    "verify",
    "watch",
]


def __dir__() -> list[str]:
    return __all__


T = TypeVar("T")


@plain_docs(manager.CheckpointManager)
class CheckpointManager(ManagerBase):
    """Saves and restores the steps of one directory while training continues.

    Use it as `with`: leaving the block waits for every commit, and raises the error of a failed one
    unless you or the next save have had it. Its methods may be called from any thread; an interrupt
    (Ctrl-C) stops the one that waits. All work is done on a thread of the library's own. Saves of a
    manager that was never closed are finished at interpreter exit, and their errors are written to
    standard error. In a job of several processes, all of them make the same calls.

    Example:
        ```python
        with ckpt.sync.CheckpointManager("runs/a", preservation=ckpt.policies.LatestN(3)) as mgr:
            start, state = mgr.resume(init_state)
            mgr.save(start, state, metrics={"loss": 0.5})
        ```
    """

    if not TYPE_CHECKING:
        __aenter__ = __aexit__ = refused(
            "use 'with ckpt.sync.CheckpointManager(...)', or with asyncio 'async with "
            "ckpt.CheckpointManager(...)'"
        )

    def __enter__(self) -> Self:
        try:
            self._service.listen()
            self._loop.call(self._service.open)
        except BaseException:
            self._give_up_entering()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(failed=error is not None)
        self._raise_unseen(error)

    def close(self) -> None:
        """Wait for every commit; see `ckpt.CheckpointManager.close`."""
        self._close()
        self._raise_unseen()

    def _close(self, *, failed: bool = False) -> None:
        try:
            self._service.close(failed=failed)
        finally:
            self._service.stop_listening()

    @overload
    def save(
        self,
        step: SupportsIndex,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        force: bool = False,
        overwrite: bool = False,
        durable: Literal[False] = False,
        deadline: float | None = None,
    ) -> Commit: ...

    @overload
    def save(
        self,
        step: SupportsIndex,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        force: bool = False,
        overwrite: bool = False,
        durable: Literal[True],
        deadline: float | None = None,
    ) -> StepInfo: ...

    def save(
        self,
        step: SupportsIndex,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        force: bool = False,
        overwrite: bool = False,
        durable: bool = False,
        deadline: float | None = None,
    ) -> Commit | StepInfo:
        """Take a snapshot and return once it is safe; see `ckpt.CheckpointManager.save`.

        An interrupt while it waits stops the save and removes it.
        """
        true_or_false("durable", durable)
        self._loop.check_caller()
        commit, job, staged = self._service.saves.start(
            step, state, items, metrics, metadata, deadline, force=force, overwrite=overwrite
        )
        return _safe(commit, job, staged, durable=durable)

    def snapshot(
        self,
        step: SupportsIndex,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
    ) -> Commit:
        """Put the state into the memory of this host; see `ckpt.CheckpointManager.snapshot`.

        An interrupt while it waits stops the snapshot and removes it.
        """
        self._loop.check_caller()
        commit, job, staged = self._service.start_snapshot(step, state, items, metrics, metadata)
        _safe(commit, job, staged, durable=False)
        return commit

    def partial(
        self,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        overwrite: bool = False,
    ) -> SyncPartialSave:
        """Save a step in several calls; see `ckpt.CheckpointManager.partial`."""
        self._loop.check_caller()
        started = self._service.start_partial(step, metrics, metadata, overwrite=overwrite)
        return SyncPartialSave(started, self)

    def restore(
        self,
        step: SupportsIndex | None = None,
        like: State | None = None,
        *,
        items: Mapping[str, Any] | Iterable[str] | None = None,
        at: str | None = None,
        adapt: Adapt | Mapping[str, Adapt] | None = None,
        broadcast_bytes: int | None = None,
        fallback: bool = False,
        healthy: bool | Healthy = False,
        memory: ArrayMemory = "jax",
        verify: VerifyMode | None = None,
    ) -> State:
        """Load a committed step; see `ckpt.CheckpointManager.restore`."""
        given = step, like, items, at, adapt, broadcast_bytes, fallback, healthy, memory, verify
        restore = partial(after_saves.restore, self._service)
        found: State = self._loop.call_served(restore, *given)
        return found

    @overload
    def resume(
        self,
        init: Callable[[], Fresh],
        *,
        like: Any = None,
        adapt: Adapt | None = None,
        fallback: bool = True,
        healthy: bool | Healthy = False,
        source: PathLike | None = None,
    ) -> tuple[int, Fresh]: ...

    @overload
    def resume(
        self,
        init: Fresh,
        *,
        like: Any = None,
        adapt: Adapt | None = None,
        fallback: bool = True,
        healthy: bool | Healthy = False,
        source: PathLike | None = None,
    ) -> tuple[int, Fresh]: ...

    @overload
    def resume(
        self,
        *,
        items: Mapping[str, Any],
        like: Mapping[str, Any] | None = None,
        adapt: Adapt | Mapping[str, Adapt] | None = None,
        fallback: bool = True,
        healthy: bool | Healthy = False,
        source: PathLike | None = None,
    ) -> tuple[int, dict[str, Any]]: ...

    def resume(
        self,
        init: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        like: Any = None,
        adapt: Adapt | Mapping[str, Adapt] | None = None,
        fallback: bool = True,
        healthy: bool | Healthy = False,
        source: PathLike | None = None,
    ) -> tuple[int, Any]:
        """Return the step to go on with, and the state to go on from.

        See `ckpt.CheckpointManager.resume`.
        """
        start = self._loop.call(after_saves.start_of_run, self._service, healthy)
        if start.is_fresh:
            if source is None:
                return 0, fresh_state(init, items)
            target = source_target(init, items, like, adapt)
            begin = self._service.reader.begin_from
            return 0, self._loop.call(begin, source, target, items is not None, adapt)
        # With a source, `adapt` is about that.
        adapt = None if source is not None else adapt
        target = resume_target(init, items, like, adapt)
        told = start, target, items is not None, adapt, fallback, healthy
        return self._loop.call_served(self._service.reader.resume, *told)

    def watch(
        self,
        *,
        timeout: float | None = None,
        min_interval: float = 0.0,
        until: Until = None,
        after: int | None = None,
        only_latest: bool = False,
        poll_interval: float = 1.0,
        pin: bool = True,
    ) -> SyncWatch:
        """Iterate over the committed steps of this root, including those saved later.

        See `ckpt.CheckpointManager.watch`.
        """
        options = WatchOptions(timeout, min_interval, until, after, only_latest, poll_interval, pin)
        return SyncWatch(self._watcher(options))

    def should_save(self, step: SupportsIndex) -> bool:
        """Return whether `save` would save `step`; only ask about the current step."""
        self._service.reached_preemption(step)
        return self._loop.call(self._service.should_save, step)

    def all_steps(self) -> list[int]:
        """Return every committed step, ascending."""
        return self._loop.call(self._service.reader.all_steps)

    def latest_step(self, *, healthy: bool | Healthy = False) -> int | None:
        """Return the latest committed step, or the latest healthy one; None without any."""
        return self._loop.call(self._service.reader.latest_step, healthy)

    def best_step(self, metric: Metric | None = None, mode: Mode | None = None) -> int | None:
        """Return the committed step with the best metric.

        See `ckpt.CheckpointManager.best_step`.
        """
        return self._loop.call(self._service.reader.best_step, metric, mode)

    def reload(self) -> None:
        """Read every manifest again. Seldom needed: changes are noticed without it, too."""
        self._loop.call(self._service.reload)

    def root_metadata(self) -> dict[str, Any]:
        """Return the metadata of the root; empty if it has none."""
        return self._loop.call(self._service.root_metadata)

    def metadata(self, step: SupportsIndex | None = None) -> StepMetadata:
        """Return the structure, shapes, dtypes and shardings of a step, or of the latest one."""
        return self._loop.call(self._service.reader.metadata, step)

    def metrics(self, step: SupportsIndex | None = None) -> dict[str, float]:
        """Return the metrics a step was saved with."""
        return self.metadata(step).info.metrics

    def verify(
        self,
        step: SupportsIndex | None = None,
        *,
        deep: bool = True,
        sample: float | None = None,
        seed: int | None = None,
        deadline: float | None = None,
    ) -> VerifyReport:
        """Compare a step with its manifest; see `ckpt.CheckpointManager.verify`."""
        return self._loop.call(self._service.reader.verify, step, deep, sample, seed, deadline)

    def prefetch(self, step: SupportsIndex | None = None) -> StepInfo:
        """Copy a step to the nearest `Tier`; see `ckpt.CheckpointManager.prefetch`."""
        return self._loop.call(self._service.prefetch, step)

    def delete(self, step: SupportsIndex, *, item: str | None = None) -> None:
        """Delete a committed step, or one item; see `ckpt.CheckpointManager.delete`."""
        self._loop.call(self._service.delete, step, item)

    def pin(self, step: SupportsIndex, name: str) -> None:
        """Protect a step from deletion until it is unpinned; see `ckpt.CheckpointManager.pin`."""
        self._loop.call(self._service.pin, step, name)

    def unpin(self, step: SupportsIndex, name: str) -> bool:
        """Remove the pin of that name; return whether there was one."""
        return self._loop.call(self._service.unpin, step, name)

    def pins(self) -> dict[int, tuple[Pin, ...]]:
        """Return the pinned steps and their pins, including those of `ckpt.sync.watch`."""
        return self._loop.call(self._service.pins)

    @property
    def trash(self) -> SyncTrash:
        """Steps that `Deletion(trash=...)` keeps after their deletion, and that can come back."""
        return SyncTrash(self._loop, self._service)

    def wait_until_finished(self) -> None:
        """Wait for every save that was started, and raise what failed of them."""
        self._loop.call(self._service.wait_until_finished)


def _safe(
    commit: Commit, job: Job[None], staged: Future[None], *, durable: bool
) -> Commit | StepInfo:
    """Return a commit once its caller may change what was passed, or once it is durable."""
    try:
        settled_here(staged)
        outcome(staged)
        return commit.result() if durable else commit
    except BaseException as error:
        if not isinstance(error, Exception):
            # Interrupted.
            job.cancel()
            settled_here(job.future)
        raise


@plain_docs(oneshot.save)
def save(
    path: PathLike,
    state: Any = None,
    *,
    items: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    metadata: Any = None,
    overwrite: bool = False,
    handlers: HandlersLike = (),
    staging: Staging | StagingMode | None = None,
    formats: Formats | None = None,
    vital_signs: VitalSignsMode = False,
    timeouts: Timeouts | None = None,
    coordinator: Coordinator | None = None,
    observers: Iterable[Observer] = (),
    deadline: float | None = None,
) -> StepInfo:
    """Save one checkpoint at `path`; durable on return. See `ckpt.save`."""
    request = make_request(
        "", None, state, items, metrics, metadata, overwrite=overwrite, deadline=deadline
    )
    return call_once(
        save_call(
            path, request, handlers, staging, formats, timeouts, coordinator, vital_signs, observers
        )
    )


@plain_docs(oneshot.save_async)
def save_async(
    path: PathLike,
    state: Any = None,
    *,
    items: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    metadata: Any = None,
    overwrite: bool = False,
    handlers: HandlersLike = (),
    formats: Formats | None = None,
    vital_signs: VitalSignsMode = False,
    timeouts: Timeouts | None = None,
    coordinator: Coordinator | None = None,
    observers: Iterable[Observer] = (),
    deadline: float | None = None,
) -> Commit:
    """Take a snapshot for one checkpoint; writing goes on in the background. See `ckpt.save_async`.

    An interrupt (Ctrl-C) while it waits stops the save and removes it.
    """
    request = make_request(
        "", None, state, items, metrics, metadata, overwrite=overwrite, deadline=deadline
    )
    saves = background_saves()
    saves.loop.check_caller()
    commit, job, staged = saves.start(
        path, request, handlers, formats, timeouts, coordinator, vital_signs, observers
    )
    try:
        settled_here(staged)
    except BaseException:
        job.cancel()
        settled_here(job.future)
        raise
    outcome(staged)
    return commit


@plain_docs(oneshot.load)
def load(
    path: PathLike | Mapping[str, PathLike | Source],
    like: State | None = None,
    *,
    items: Mapping[str, Any] | Iterable[str] | None = None,
    at: str | None = None,
    adapt: Adapt | Mapping[str, Adapt] | None = None,
    handlers: HandlersLike = (),
    coordinator: Coordinator | None = None,
    memory: ArrayMemory = "jax",
    verify: VerifyMode | None = None,
) -> State:
    """Load a one-shot checkpoint, or a step from a manager's root. See `ckpt.load`."""
    call = load_call(path, like, items, at, adapt, handlers, coordinator, memory, verify)
    found: State = call_once(call)
    return found


@plain_docs(oneshot.metadata)
def metadata(path: PathLike) -> StepMetadata:
    """Return the structure, shapes, dtypes and shardings of a checkpoint. See `ckpt.metadata`."""
    return call_once(metadata_call(path))


@plain_docs(oneshot.verify)
def verify(
    path: PathLike,
    *,
    deep: bool = True,
    sample: float | None = None,
    seed: int | None = None,
    deadline: float | None = None,
) -> VerifyReport:
    """Compare a checkpoint with its manifest. See `ckpt.verify`."""
    return call_once(verify_call(path, read_limits(deep, sample, seed, deadline), deep))


@plain_docs(adoption.adopt)
def adopt(
    source: PathLike,
    target: PathLike,
    *,
    step: int | None = None,
    step_names: StepNames | None = None,
    overwrite: bool = False,
) -> StepInfo:
    """Make a checkpoint of what another library wrote, without copying it. See `ckpt.adopt`."""
    return call_once(adopt_call(source, target, step, step_names, overwrite))


@plain_docs(conversion.convert)
def convert(
    source: PathLike | Mapping[Any, float],
    target: PathLike,
    *,
    format: FormatName | Safetensors | Zarr = "ckpt",
    at: str | None = None,
    formats: Formats | None = None,
    step: int | None = None,
    step_names: StepNames | None = None,
    overwrite: bool = False,
    budget_bytes: int = 256 << 20,
) -> Conversion:
    """Write a checkpoint anew, in this or another format. See `ckpt.convert`."""
    return call_once(
        convert_call(source, target, format, at, formats, step, step_names, overwrite, budget_bytes)
    )


@plain_docs(merging.merge)
def merge(
    weights: Mapping[Any, float],
    like: State | None = None,
    *,
    items: Mapping[str, Any] | Iterable[str] | None = None,
    at: str | None = None,
    adapt: Adapt | Mapping[str, Adapt] | None = None,
    handlers: HandlersLike = (),
    coordinator: Coordinator | None = None,
) -> State:
    """Load the weighted mean of several checkpoints, onto any mesh. See `ckpt.merge`."""
    found: State = call_once(merge_call(weights, like, items, at, adapt, handlers, coordinator))
    return found


@plain_docs(stored_array.open_array)
def open_array(path: PathLike, leaf: str, *, item: str | None = None) -> SyncStoredArray:
    """Open one array of a checkpoint, to read parts of it. See `ckpt.open_array`."""
    return SyncStoredArray(call_once(partial(find_array, path, leaf, item)))


@plain_docs(watching.watch)
def watch(
    root: PathLike,
    *,
    timeout: float | None = None,
    min_interval: float = 0.0,
    until: Until = None,
    after: int | None = None,
    only_latest: bool = False,
    poll_interval: float = 1.0,
    pin: bool = True,
    step_names: StepNames | None = None,
    timeouts: Timeouts | None = None,
) -> SyncWatch:
    """Iterate over the committed steps of a root, including new ones. See `ckpt.watch`.

    The iterator has `close` in place of `aclose`. An interrupt (Ctrl-C) while it waits leaves
    nothing pinned.
    """
    options = WatchOptions(timeout, min_interval, until, after, only_latest, poll_interval, pin)
    return SyncWatch(watcher_of(root, options, step_names, timeouts))
