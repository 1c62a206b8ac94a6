"""Checks before a save is staged: whether its entry is free, what it replaces, its metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from ckpt._arguments import shown
from ckpt._engine.save.multihost import JointSave, MultihostSave
from ckpt._engine.save.request import SaveRequest
from ckpt._format.manifest import FILE_NAME, MAX_BYTES, peek
from ckpt._steps.retention import is_ours, spare_others
from ckpt.coordination._collectives import gathered
from ckpt.errors import InvalidArgumentError, StepExistsError, StorageError
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")


async def with_plain_metrics(request: SaveRequest) -> SaveRequest:
    """Return a request whose metrics are plain numbers; waits for those that are being computed.

    Raises:
        InvalidArgumentError: One of them is not a number.
    """
    if request.metrics is None:
        return request
    metrics = await anyio.to_thread.run_sync(_plain_metrics, request.metrics)
    return replace(request, metrics=metrics)


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


async def replacing_part(storage: Storage, request: SaveRequest, joint: JointSave) -> SaveRequest:
    """Return a request that replaces a step which not all disks have, and which so is none.

    Of processes that share a root it is the request itself.

    Raises:
        InvalidArgumentError: The request is to overwrite, and every process has its own disk.
    """
    if not (isinstance(joint, MultihostSave) and joint.own_disks):
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
    if set(await gathered(joint.operation, save, "replaced")) == {save}:
        return request
    return replace(request, overwrite=True)


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
