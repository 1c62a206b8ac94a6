"""`save`, `load`, `metadata` and `verify`: one checkpoint at one path, without a manager."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

import anyio
from msgspec.structs import replace

from ckpt._api.background import background_saves
from ckpt._api.branches import Source, branches_call
from ckpt._api.faces.coroutines import awaited
from ckpt._api.resumption import State
from ckpt._arguments import instance_of, one_of
from ckpt._commit import Commit, CommitHooks, StepInfo
from ckpt._engine.restore.pipeline import restore_items
from ckpt._engine.save.deadline import given_up_after
from ckpt._engine.save.pipeline import save_step
from ckpt._engine.save.request import SaveCall, SaveCalls, SaveRequest
from ckpt._engine.verify.file_selection import ReadLimits, read_limits
from ckpt._engine.verify.report import VerifyReport
from ckpt._events import EventRecorder, Observer
from ckpt._plan.adapt import Adapt
from ckpt._plan.format_rules import Formats
from ckpt._redaction import redact
from ckpt._runtime.futures import settled
from ckpt._runtime.loop import run_once
from ckpt._runtime.threads import run_in_thread
from ckpt._runtime.tracebacks import outcome
from ckpt._settings import (
    ArrayMemory,
    Staging,
    StagingMode,
    Timeouts,
    VerifyMode,
    VitalSignsMode,
    as_staging,
    checks_devices,
)
from ckpt._steps.factory import job_of, make_engine, make_peers
from ckpt._steps.restores.requests import context_of, result_of, wanted_items, what_is_missing
from ckpt._steps.saves.one_shot import finished, prepared, processes_of
from ckpt._steps.saves.requests import make_request
from ckpt._steps.step_metadata import StepMetadata, describe_step
from ckpt._steps.wrong_paths import opened_checkpoint, verified
from ckpt._tree.table import size_text
from ckpt.coordination._base import Coordinator
from ckpt.errors import StepDeletedError
from ckpt.handlers._registry import HandlersLike
from ckpt.storage._manifests import has_lost_items, while_read
from ckpt.storage._resolve import PathLike, open_step_dir

logger = logging.getLogger("ckpt")

T = TypeVar("T")
# A call whose arguments are checked, to be run on an engine's loop by either face.
Call = Callable[[], Awaitable[T]]


@awaited("ckpt.save", "ckpt.sync.save")
async def save(
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
    """Save one checkpoint at `path`; durable on return.

    In a job of several processes, all of them make the call.

    Args:
        path: A directory that does not exist yet; or a URL, or a store of `ckpt.storage`.
        state: One PyTree of jax arrays, numpy arrays and Python scalars; None with `items`.
        items: Several objects by name, instead of `state`.
        metrics: Numbers by name to keep with the checkpoint, or dicts of them.
        metadata: JSON values to keep with the checkpoint.
        overwrite: Replace an existing checkpoint. The old one stays until the new is published.
        handlers: Handlers for more kinds of items; or a mapping of item names to handlers.
        staging: A `Staging`, or the name of its mode. By default only numpy arrays are copied,
            since jax arrays cannot be donated before the call returns.
        formats: How arrays are stored: `{pattern of leaf paths: ArrayFormat}`, or a function.
        vital_signs: Note what the values of every array come to; see `CheckpointManager`.
        timeouts: Time limits, in seconds.
        coordinator: The processes of the job; None uses those of `jax.distributed`.
        observers: Called with an `Event` for every timed phase, on the library's thread.
        deadline: Seconds after this call at which the save is given up; see
            `CheckpointManager.save`.

    Returns:
        What was saved.

    Raises:
        CheckpointError: As by `CheckpointManager.save` and its commit.

    Cancellation: the save is stopped and removed before the cancellation continues.

    Example:
        ```python
        info = await ckpt.save("exports/final", state, metrics={"loss": 0.5})
        ```
    """
    request = make_request(
        "", None, state, items, metrics, metadata, overwrite=overwrite, deadline=deadline
    )
    return await run_once(
        save_call(
            path, request, handlers, staging, formats, timeouts, coordinator, vital_signs, observers
        )
    )


@awaited("ckpt.save_async", "ckpt.sync.save_async")
async def save_async(
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
    """Take a snapshot for one checkpoint at `path`; writing goes on in the background.

    It returns when `CheckpointManager.save` would: you may then donate, delete or change everything
    you passed. All such saves of a process share one thread and its staging memory, and are
    written one after the other. In a job of several processes, all of them make the call.

    Args:
        path: A directory that does not exist yet; or a URL, or a store of `ckpt.storage`.
        state: One PyTree of jax arrays, numpy arrays and Python scalars; None with `items`.
        items: Several objects by name, instead of `state`.
        metrics: Numbers by name to keep with the checkpoint, or dicts of them.
        metadata: JSON values to keep with the checkpoint.
        overwrite: Replace an existing checkpoint. The old one stays until the new is published.
        handlers: Handlers for more kinds of items; or a mapping of item names to handlers.
        formats: How arrays are stored: `{pattern of leaf paths: ArrayFormat}`, or a function.
        vital_signs: Note what the values of every array come to; see `CheckpointManager`.
        timeouts: Time limits, in seconds.
        coordinator: The processes of the job; None uses those of `jax.distributed`.
        observers: Called with an `Event` for every timed phase, on the library's thread.
        deadline: Seconds after this call at which the save is given up; see
            `CheckpointManager.save`.

    Returns:
        The commit. Await it for durability and for errors. A program that ends waits for it; an
        error that was not fetched is written to standard error then, and the exit status is 120.

    Raises:
        CheckpointError: As by `CheckpointManager.save`.

    Cancellation: the save is stopped and removed before the cancellation continues.

    Example:
        ```python
        commit = await ckpt.save_async("exports/final", state)
        info = await commit
        ```
    """
    request = make_request(
        "", None, state, items, metrics, metadata, overwrite=overwrite, deadline=deadline
    )
    commit, job, staged = background_saves().start(
        path, request, handlers, formats, timeouts, coordinator, vital_signs, observers
    )
    try:
        await settled(staged)
    except anyio.get_cancelled_exc_class():
        job.cancel()
        with anyio.CancelScope(shield=True):
            await settled(job.future)
        raise
    outcome(staged)
    return commit


@awaited("ckpt.load", "ckpt.sync.load")
async def load(
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
    """Load a one-shot checkpoint, or a step from a manager's root (`runs/a/100`).

    The branches of a target can come from several checkpoints: `{"params": "runs/a/100",
    "opt_state": "runs/b/50"}` loads each from the branch of that name; `ckpt.Source` is for another
    name, and for a whole checkpoint.

    In a job of several processes, each loads what its own devices need, without waiting for others.

    Args:
        path: The directory, URL or store of the checkpoint; also one that Orbax wrote; a model
            in safetensors (a file, or a directory); and files `*.npz`, `*.npy` and `*.msgpack` of
            numpy and Flax. Or a mapping of leaf paths of branches to checkpoints; what `like` has
            elsewhere is an error, unless it is to be kept.
        like: The target: a tree whose leaves have the dtypes and shardings to return, such as a
            state. None restores everything as it was saved.
        items: Load these items only: their names, or a mapping of names to targets.
        at: Load only the branch at this leaf path, as if it were the whole tree.
        adapt: How the checkpoint may differ from the target. By default they must agree. With
            several checkpoints one for all, or a mapping of branches to them; leaf paths begin
            below the branch.
        handlers: Handlers for more kinds of items; or a mapping of item names to handlers.
        coordinator: The processes of the job; None uses those of `jax.distributed`.
        memory: Whose memory the arrays have on CPU devices; see `CheckpointManager.restore`.
        verify: With `"device"`, compare what has arrived on the devices with the vital signs of the
            checkpoint. Arrays that cannot be compared are named in a warning. By default, what is
            read is compared with its digests.

    Returns:
        The tree of a checkpoint that was saved without item names, else a dict by item name.

    Raises:
        NotACheckpointError: There is no committed checkpoint at `path`.
        CheckpointError: As by `CheckpointManager.restore`.

    Cancellation: reading stops and memory is freed before the cancellation continues.

    Example:
        ```python
        params = await ckpt.load("runs/a/100", like=params, at="params")
        both = await ckpt.load({"params": "runs/a/100", "opt_state": "runs/b/50"})
        ```
    """
    call = load_call(path, like, items, at, adapt, handlers, coordinator, memory, verify)
    return await run_once(call)


@awaited("ckpt.metadata", "ckpt.sync.metadata")
async def metadata(path: PathLike) -> StepMetadata:
    """Return the structure, shapes, dtypes and shardings of a checkpoint. Reads no array bytes.

    Raises:
        NotACheckpointError: There is no committed checkpoint at `path`.

    Example:
        ```python
        found = await ckpt.metadata("runs/a/100")
        print(found.tree["params"]["w"].shape)
        ```
    """
    return await run_once(metadata_call(path))


@awaited("ckpt.verify", "ckpt.sync.verify")
async def verify(
    path: PathLike,
    *,
    deep: bool = True,
    sample: float | None = None,
    seed: int | None = None,
    deadline: float | None = None,
) -> VerifyReport:
    """Compare a one-shot checkpoint, or a step from a manager's root, with its manifest.

    Args:
        path: The directory, URL or store of the checkpoint.
        deep: Read everything. With False, only compare names, kinds and sizes of files.
        sample: Read only this share of the files and of their bytes, chosen at random, above 0
            and up to 1. The report says what was left out.
        seed: Makes that choice repeatable.
        deadline: Seconds after this call at which no more files are begun. Files are read in random
            order then.

    Returns:
        The report, true if nothing is wrong. Damage is reported, never raised.

    Raises:
        NotACheckpointError: There is no committed checkpoint at `path`.
        StepDeletedError: It was deleted or replaced meanwhile.
        UnsupportedFormatError: It was written in a later format.
        InvalidArgumentError: `sample` or `deadline` is invalid, or given with `deep=False`.

    Cancellation: reading stops and memory is freed before the cancellation continues.

    Example:
        ```python
        report = await ckpt.verify("runs/a/100")
        assert report.ok, report
        ```
    """
    return await run_once(verify_call(path, read_limits(deep, sample, seed, deadline), deep))


def save_call(
    path: PathLike,
    request: SaveRequest,
    handlers: HandlersLike,
    staging: Staging | StagingMode | None,
    formats: Formats | None,
    timeouts: Timeouts | None,
    coordinator: Coordinator | None,
    vital_signs: VitalSignsMode,
    observers: Iterable[Observer],
) -> Call[StepInfo]:
    """Return the call behind `save`; `path` gives its `request` the step directory."""
    storage, step_dir = open_step_dir(path)
    request = replace(request, step_dir=step_dir)
    staging = as_staging(staging, "view")
    timeouts = instance_of("timeouts", timeouts, Timeouts) or Timeouts()
    engine = make_engine(staging, handlers, observers, formats, vital_signs=vital_signs)
    peers = make_peers(coordinator, timeouts, f"{storage.location}/{step_dir}", engine)

    async def call() -> StepInfo:
        processes = processes_of(peers, engine, step_dir)
        # This commit stays in here: the call itself returns or raises its outcome.
        hooks = CommitHooks(Commit(None, lambda: None))
        recorder = EventRecorder("save", None, engine.observers)
        with recorder.ending(time.perf_counter_ns()) as moved:
            async with processes.taking_part():
                async with processes.busy():
                    with given_up_after(request.deadline, hooks):
                        whole = await prepared(storage, request, processes)
                call = SaveCall(whole.items, whole.unnamed, began=hooks.watch.began)
                manifest = await save_step(
                    engine, storage, whole, hooks, SaveCalls.of(call), processes
                )
            info = finished(storage, whole, manifest, hooks)
            moved.append(info.nbytes)
        return info

    return call


def load_call(
    path: PathLike | Mapping[str, PathLike | Source],
    like: Any,
    items: Mapping[str, Any] | Iterable[str] | None,
    at: str | None,
    adapt: Adapt | Mapping[str, Adapt] | None,
    handlers: HandlersLike,
    coordinator: Coordinator | None,
    memory: ArrayMemory,
    verify: VerifyMode | None,
) -> Call[Any]:
    """Return the call behind `load`."""
    one_of("memory", memory, get_args(ArrayMemory))
    is_checked = checks_devices(verify)
    if isinstance(path, Mapping):
        return branches_call(
            path, like, items, at, adapt, handlers, coordinator, memory, is_checked
        )
    storage, step_dir = open_step_dir(path, follow=True)
    job = job_of(coordinator)
    engine = make_engine(Staging(), handlers, ())

    async def call() -> Any:
        began = time.perf_counter()
        process, count = job.process_index, job.process_count
        wanted = list(items) if isinstance(items, Iterator) else items
        loaded: dict[str, Any] | None = None
        while loaded is None:
            opened = await opened_checkpoint(path, storage, step_dir)
            manifest = opened.manifest
            try:
                async with while_read(opened.storage, opened.step_dir, manifest):
                    restore = context_of(
                        opened,
                        opened.storage,
                        engine,
                        process,
                        count,
                        memory=memory,
                        checks_devices=is_checked,
                    )
                    targets = wanted_items(manifest, like, wanted, adapt, at)
                    loaded = await restore_items(restore, targets)
            except StepDeletedError:
                # A step has only so many items to lose.
                if not await has_lost_items(opened.storage, opened.step_dir, manifest):
                    raise
        missing = what_is_missing(manifest) if like is None and wanted is None and not at else ""
        if missing:
            where = redact(opened.location)
            logger.warning("%s was loaded without some items: %s", where, missing)
        logger.info(
            "loaded %s: %s in %.2f s",
            redact(opened.location),
            size_text(sum(restore.moved)),
            time.perf_counter() - began,
        )
        return result_of(manifest, loaded, named=items is not None)

    return call


def metadata_call(path: PathLike) -> Call[StepMetadata]:
    """Return the call behind `metadata`."""
    storage, step_dir = open_step_dir(path, follow=True)

    async def call() -> StepMetadata:
        opened = await opened_checkpoint(path, storage, step_dir)
        return await run_in_thread(describe_step, opened.manifest, opened.location)

    return call


def verify_call(path: PathLike, limits: ReadLimits, deep: bool) -> Call[VerifyReport]:
    """Return the call behind `verify`."""
    storage, step_dir = open_step_dir(path, follow=True)

    async def call() -> VerifyReport:
        return await verified(path, storage, step_dir, deep, limits=limits)

    return call
