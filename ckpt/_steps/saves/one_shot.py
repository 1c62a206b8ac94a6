"""One-shot saves: those that are waited for, those in the background, and those of conversions."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import anyio.lowlevel

from ckpt._commit import CommitHooks, StepInfo, step_info
from ckpt._engine.engine import Engine
from ckpt._engine.save.pipeline import save_step
from ckpt._engine.save.save_request import SaveCall, SaveCalls, SaveRequest, time_limit
from ckpt._format.manifest import Manifest
from ckpt._redaction import redact
from ckpt._steps.saves.save_arguments import clear_target, with_plain_metrics
from ckpt._tree.table import format_bytes
from ckpt.storage._base import Storage

if TYPE_CHECKING:
    from ckpt._job.solo import JobSave

logger = logging.getLogger("ckpt")


async def save_one_shot(
    engine: Engine,
    storage: Storage,
    request: SaveRequest,
    processes: JobSave,
    hooks: CommitHooks,
    *,
    admitted: Callable[[], Awaitable[object]] = anyio.lowlevel.checkpoint,
    on_snapshot: Callable[[], None] = lambda: None,
    on_staged: Callable[[], None] = lambda: None,
    may_write: Callable[[], Awaitable[object]] = anyio.lowlevel.checkpoint,
) -> Manifest:
    """Save a checkpoint that no manager looks after; see `save_step`.

    `admitted` waits until the save may stage. Then the parent folder is made, leftovers of dead
    writers are removed, and the name is cleared.
    """
    async with processes.taking_part():
        async with processes.busy():
            with time_limit(request.timeout, hooks):
                await admitted()
                await processes.if_publishing(partial(make_way, storage, request))
                request = await with_plain_metrics(request)
        snapshot = on_snapshot, on_staged, hooks.watch.began
        calls = SaveCalls(SaveCall(request.items, request.unnamed, *snapshot))
        return await save_step(
            engine, storage, request, hooks, calls, processes, may_write=may_write
        )


async def make_way(storage: Storage, request: SaveRequest) -> None:
    """Make the root, remove leftovers of dead writers, and clear the name of a step.

    Raises:
        StepExistsError: The name is taken, and may not be replaced.
        StorageError: The store refused.
    """
    await storage.prepare()
    await storage.sweep()
    await clear_target(storage, request)


def finished(
    storage: Storage, request: SaveRequest, manifest: Manifest, hooks: CommitHooks
) -> StepInfo:
    """Log a save that was published, and return what was saved."""
    info = step_info(manifest, f"{storage.location}/{request.step_dir}", hooks.watch.taken)
    logger.info(
        "saved %s: %s in %.2f s (blocked %.2f s)",
        redact(info.path),
        format_bytes(info.nbytes),
        hooks.watch.elapsed,
        hooks.watch.taken.blocked or 0.0,
    )
    return info
