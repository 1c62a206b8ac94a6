"""The calls `save`, `load`, `metadata` and `verify` for one checkpoint at one path."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from ckpt._arguments import instance_of
from ckpt._calls.branches import Source, branches_call
from ckpt._commit import Commit, CommitHooks, StepInfo
from ckpt._engine.restore.pipeline import restore_items
from ckpt._engine.save.save_request import SaveRequest
from ckpt._engine.verify.file_selection import ReadLimits
from ckpt._engine.verify.report import VerifyReport
from ckpt._events import EventRecorder, Observer
from ckpt._plan.adapt import Adapt
from ckpt._plan.format_rules import Formats
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import ArrayMemory, Staging, StagingMode, Timeouts, as_staging
from ckpt._steps.factory import make_engine, make_job, place_in_job
from ckpt._steps.path_diagnosis import opened_checkpoint, verified
from ckpt._steps.restores.restore_arguments import (
    context_of,
    result_of,
    volume_text,
    wanted_items,
    what_is_missing,
)
from ckpt._steps.restores.restore_options import restore_options
from ckpt._steps.saves.one_shot import finished, save_one_shot
from ckpt._steps.step_metadata import StepMetadata, describe_step
from ckpt.errors import StepDeletedError
from ckpt.handlers._registry import HandlersLike
from ckpt.storage._manifests import has_lost_items
from ckpt.storage._resolve import PathLike, open_step_dir

if TYPE_CHECKING:
    from ckpt.coordination._base import Coordinator
    from ckpt.extensions import Extensions

logger = logging.getLogger("ckpt")

T = TypeVar("T")
# A call with checked arguments; either face runs it on an engine's loop.
Call = Callable[[], Awaitable[T]]


def save_call(
    path: PathLike,
    request: SaveRequest,
    staging: Staging | StagingMode | None,
    handlers: HandlersLike,
    formats: Formats | None,
    timeouts: Timeouts | None,
    coordinator: Coordinator | None,
    extensions: Extensions,
    observers: Iterable[Observer],
) -> Call[StepInfo]:
    """Return the call behind `save`; `path` gives its `request` the step directory."""
    storage, step_dir = open_step_dir(path)
    request = replace(request, step_dir=step_dir)
    staging = as_staging(staging, "view")
    timeouts = instance_of("timeouts", timeouts, Timeouts) or Timeouts()
    engine = make_engine(staging, handlers, observers, formats, extensions)
    job = make_job(coordinator, timeouts, f"{storage.location}/{step_dir}", engine)

    async def call() -> StepInfo:
        processes = job.one_shot(step_dir)
        # This commit is not handed out: the call itself returns or raises its outcome.
        hooks = CommitHooks(Commit(None, lambda: None))
        recorder = EventRecorder("save", None, engine.observers)
        with recorder.ending(time.perf_counter_ns()) as moved:
            manifest = await save_one_shot(engine, storage, request, processes, hooks)
            info = finished(storage, request, manifest, hooks)
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
    check_devices: bool,
) -> Call[Any]:
    options = restore_options(like, items, at, adapt, memory, check_devices)
    if isinstance(path, Mapping):
        return branches_call(path, options, handlers, coordinator)
    storage, step_dir = open_step_dir(path, follow=True)
    process = place_in_job(coordinator)
    engine = make_engine(Staging(), handlers, ())

    async def call() -> Any:
        began = time.perf_counter()
        while True:
            opened = await opened_checkpoint(path, storage, step_dir)
            context = context_of(opened, engine, *process, options=options)
            try:
                loaded = await restore_items(context, wanted_items(opened.manifest, options))
                break
            except StepDeletedError:
                # Try again if items were taken out: a step has a limited number of them.
                if not await has_lost_items(opened.storage, opened.step_dir, opened.manifest):
                    raise
        where = redact(opened.location)
        missing = what_is_missing(opened.manifest) if options.are_for_everything else ""
        if missing:
            logger.warning("%s was loaded without some items: %s", where, missing)
        logger.info("loaded %s: %s", where, volume_text(context, began))
        return result_of(context, options, loaded)

    return call


def metadata_call(path: PathLike) -> Call[StepMetadata]:
    storage, step_dir = open_step_dir(path, follow=True)

    async def call() -> StepMetadata:
        opened = await opened_checkpoint(path, storage, step_dir)
        return await run_in_thread(describe_step, opened.manifest, opened.location)

    return call


def verify_call(path: PathLike, limits: ReadLimits, deep: bool) -> Call[VerifyReport]:
    storage, step_dir = open_step_dir(path, follow=True)

    async def call() -> VerifyReport:
        return await verified(path, storage, step_dir, deep, limits=limits)

    return call
