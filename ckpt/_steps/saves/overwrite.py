"""The save of one entry: whether it may be written, what it replaces, and its metrics."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from ckpt._arguments import shown
from ckpt._commit import CommitHooks
from ckpt._engine.engine import Engine
from ckpt._engine.save.multihost import MultihostSave
from ckpt._engine.save.pipeline import save_step
from ckpt._engine.save.request import SaveCall, SaveCalls, SaveRequest
from ckpt._format.manifest import (
    FILE_NAME,
    MAX_BYTES,
    Manifest,
    peek,
    peek_files,
)
from ckpt.coordination._peers import Peers
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    StepExistsError,
    StorageError,
)
from ckpt.storage._base import Storage

__all__ = ["is_ours", "make_way", "remove_others", "replacing_part", "save_entry", "spare_others"]

logger = logging.getLogger("ckpt")

_NAMED_FILES = 5


async def save_entry(
    engine: Engine,
    storage: Storage,
    request: SaveRequest,
    hooks: CommitHooks,
    joint: MultihostSave,
    *,
    calls: SaveCalls | None = None,
    on_safe: Callable[[], None] = lambda: None,
    on_staged: Callable[[], None] = lambda: None,
    may_write: Callable[[], Awaitable[Any]] | None = None,
) -> Manifest:
    """Save one entry once its metrics are plain numbers; see `save_step`.

    Args:
        engine: The engine.
        storage: Where to.
        request: What.
        hooks: The commit to move along.
        joint: The processes of the job that save the same entry.
        calls: The items, where they come call by call; None for those of the request.
        on_safe: Called once the caller may change or donate the items of the request.
        on_staged: Called once they need no more staging memory.
        may_write: Awaited before anything but the empty attempt is written.
    """
    if request.metrics is not None:
        # They may still be computed.
        async with joint.busy():
            metrics = await anyio.to_thread.run_sync(_plain_metrics, request.metrics)
        request = replace(request, metrics=metrics)
    if calls is None:
        began = hooks.watch.began
        call = SaveCall(request.items, request.unnamed, on_safe, on_staged, began)
        calls = SaveCalls.of(call)
    return await save_step(
        engine,
        storage,
        request,
        hooks,
        calls,
        joint,
        may_write=may_write or anyio.lowlevel.checkpoint,
    )


async def make_way(storage: Storage, request: SaveRequest, others: Sequence[str] = ()) -> None:
    """Raise before anything is staged if the entry is taken; publishing checks again.

    What is going to be replaced is searched for files of others, which are moved out of it.

    Args:
        storage: The root.
        request: What is to be saved.
        others: Entries that may be the same step under other names.

    Raises:
        StepExistsError: It is, and is not to be replaced or not ours to replace.
    """
    for entry in (request.entry, *others):
        if not await storage.exists(entry):
            continue
        where = f"{storage.location}/{entry}"
        if not await is_ours(storage, entry):
            if entry != request.entry:
                # Of another name, and no step: it is not in the way.
                continue
            raise StepExistsError(
                f"{where} exists and is not a checkpoint of this library, so it is never replaced. "
                "Move it away, or choose another name",
                step=request.step,
            )
        if not request.overwrite:
            raise StepExistsError(
                f"{where} already exists; it was left as it is. Choose another step, or pass "
                "overwrite=True to replace it",
                step=request.step,
            )
        await spare_others(storage, entry)


async def is_ours(storage: Storage, entry: str) -> bool:
    """Tell whether there is a manifest in an entry, damaged or not."""
    try:
        return await storage.read(entry, FILE_NAME, MAX_BYTES) is not None
    except CorruptCheckpointError:
        return True


async def replacing_part(
    storage: Storage, peers: Peers, request: SaveRequest, joint: MultihostSave
) -> SaveRequest:
    """Return a request that replaces a step which not all disks have, and which so is none.

    Of processes that share a root it is the request itself.

    Raises:
        InvalidArgumentError: The request is to overwrite, and every process has its own disk.
    """
    if not joint.own_disks:
        return request
    if request.overwrite:
        raise InvalidArgumentError(
            "overwrite=True: where processes have disks of their own, not all can be replaced at "
            "once, and a failure in between would lose the step. Delete it first",
            step=request.step,
        )
    data = await storage.read(request.entry, FILE_NAME, MAX_BYTES)
    summary = None if data is None else await anyio.to_thread.run_sync(peek, data)
    save = None if summary is None else summary.save
    if set(await peers.gathered(joint.operation, save)) == {save}:
        return request
    return replace(request, overwrite=True)


async def spare_others(storage: Storage, entry: str) -> None:
    """Move out of an entry, which is going to be removed, what the library did not write.

    Of an entry whose manifest is damaged nobody knows what that would be. One that is replaced or
    removed by somebody else meanwhile is left to them. Nothing has to be moved where the store
    removes no more than was written.
    """
    if storage.keeps_others:
        return
    try:
        data = await storage.read(entry, FILE_NAME, MAX_BYTES)
        known = None if data is None else await anyio.to_thread.run_sync(peek_files, data)
        if known is None:
            return
        others = sorted((await storage.files(entry)).keys() - known)
        # What was listed may be the files of a step that has taken the place of this one.
        if not others or await storage.read(entry, FILE_NAME, MAX_BYTES) != data:
            return
    except CorruptCheckpointError:
        return
    except StorageError:
        if await storage.exists(entry):
            raise
        return
    folder = await storage.set_aside(entry, others)
    logger.warning(
        "%d files in %s/%s were not written by this library; they are in %s now: %s",
        len(others),
        storage.location,
        entry,
        folder,
        ", ".join(others[:_NAMED_FILES]),
    )


async def remove_others(storage: Storage, others: Sequence[str]) -> None:
    """Remove what was a step under other names, now that it is there under the one written now.

    What cannot be removed is logged: the save has succeeded, and what it wrote is what counts.
    """
    with anyio.CancelScope(shield=True):
        for entry in others:
            try:
                if await is_ours(storage, entry):
                    await storage.remove(entry)
            except StorageError as error:
                logger.warning("%s/%s was replaced and is left: %s", storage.location, entry, error)


def _plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Return metrics as JSON has them; waits for jax scalars that are still being computed."""
    plain: dict[str, float | str] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgumentError(
                f"metrics[{shown(name)}]={shown(value)}: expected a number"
            ) from error
        finite = number - number == 0
        plain[str(name)] = number if finite else repr(number)
    return plain
