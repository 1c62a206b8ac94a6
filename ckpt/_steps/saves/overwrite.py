"""Checks before a save is staged: whether its name is free, what it replaces, its metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

import anyio
from msgspec.structs import replace

from ckpt._arguments import check_step
from ckpt._engine.save.request import SaveRequest
from ckpt._format.manifest_head import FILE_NAME, MAX_BYTES, peek
from ckpt._format.metrics import plain_metrics
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import PassedOver
from ckpt._steps.pins import pins
from ckpt._steps.removal.retention import is_ours, spare_others
from ckpt._steps.unreadable import look_closely
from ckpt.errors import InvalidArgumentError, StepExistsError, StorageError
from ckpt.storage._base import Storage

if TYPE_CHECKING:
    from ckpt._engine.save.joint.multihost import JointSave

logger = logging.getLogger("ckpt")

# Why steps are saved anew. Those that they replace go to a folder of the root of that name.
_WHY = {
    "damaged": "it is damaged",
    "unhealthy": "it was passed over as not healthy",
    "abandoned": "it is of a branch that was given up",
}


async def with_plain_metrics(request: SaveRequest) -> SaveRequest:
    """Return a request whose metrics are plain numbers; waits for those that are being computed.

    Raises:
        InvalidArgumentError: One of them is not a number.
    """
    if request.metrics is None:
        return request
    metrics = await run_in_thread(plain_metrics, request.metrics)
    return replace(request, metrics=metrics)


async def make_way(
    storage: Storage,
    request: SaveRequest,
    others: Sequence[str] = (),
    passed_over: MutableMapping[int, PassedOver] | None = None,
) -> None:
    """Raise before anything is staged if the step directory is taken; publishing checks again.

    What is going to be replaced is searched for files of others, which are moved out of it. A step
    that is damaged, or was passed over, is moved aside and kept, where a storage can do that: a run
    that is started again from the step before comes to the same number every time.

    Args:
        storage: The root.
        request: What is to be saved.
        others: Step directories that may be the same step under other names.
        passed_over: Steps that look whole and were passed over; one that is moved aside goes from
            it.

    Raises:
        StepExistsError: It is, and is pinned, not to be replaced, or not ours to replace.
    """
    for step_dir in (request.step_dir, *others):
        if not await storage.exists(step_dir):
            continue
        why = await _why_passed_over(storage, request, step_dir, passed_over or {})
        if why is not None and not storage.keeps_others:
            await _refuse_pinned(storage, check_step(request.step), step_dir, why)
            await _move_aside(storage, check_step(request.step), step_dir, why)
            if passed_over is not None:
                passed_over.pop(check_step(request.step), None)
            continue
        where = f"{storage.location}/{step_dir}"
        if not await is_ours(storage, step_dir):
            if step_dir != request.step_dir:
                # It has another name and is not a step, so it is not in the way.
                continue
            raise StepExistsError(
                f"{where} exists and is not a checkpoint of this library, so it is never replaced. "
                "Delete it or move it away, or choose another name",
                step=request.step,
            )
        if not request.overwrite:
            state = "" if why is None else f" and is {why.state} ({why.reason})"
            raise StepExistsError(
                f"{where} already exists{state} and was not changed. Choose another "
                f"{'path' if request.step is None else 'step'}, or pass overwrite=True to replace "
                "it",
                step=request.step,
            )
        await spare_others(storage, step_dir)


async def _why_passed_over(
    storage: Storage, request: SaveRequest, step_dir: str, passed_over: Mapping[int, PassedOver]
) -> PassedOver | None:
    """Return what is wrong with the step that is in the way; None for a whole one, or none."""
    if request.step is None or request.overwrite:
        return None
    known = passed_over.get(request.step)
    data = None if known is None else await storage.read(step_dir, FILE_NAME, MAX_BYTES)
    summary = None if data is None else await run_in_thread(peek, data)
    if known is not None and summary is not None and summary.attempt == known.attempt:
        return known
    if known is not None and data is None and step_dir in await storage.step_dirs():
        # Of Orbax. It is only moved, so it does not matter if it has become another one.
        return known
    found = await look_closely(storage, step_dir, request.step)
    if found is None or found.kind != "damaged":
        return None
    # A link, or a file, with the name of a step is somebody's own.
    return PassedOver("", found.reason) if step_dir in await storage.step_dirs() else None


async def _refuse_pinned(storage: Storage, step: int, step_dir: str, why: PassedOver) -> None:
    """Raise if a step that is in the way is pinned: somebody looks at it where it is."""
    pinned = (await pins(storage)).get(step, ())
    if pinned:
        raise StepExistsError(
            f"{storage.location}/{step_dir} already exists and is {why.state} ({why.reason}). It "
            f"is pinned by {', '.join(map(str, pinned))}, so it is not moved out of the way. Unpin "
            "it first, or choose another step",
            step=step,
        )


async def _move_aside(storage: Storage, step: int, step_dir: str, why: PassedOver) -> None:
    kept = await storage.move(step_dir, why.state, listed=False)
    if kept is not None:
        logger.warning(
            "step %d is saved anew, because %s: %s. The old one was moved to %s",
            step,
            _WHY[why.state],
            why.reason,
            kept,
        )


async def replacing_part(
    storage: Storage, request: SaveRequest, processes: JointSave
) -> SaveRequest:
    """Return a request that replaces a step which not all disks have, and which so is none.

    Of processes that share a root it is the request itself.

    Raises:
        InvalidArgumentError: The request is to overwrite, and every process has its own disk.
    """
    # Here, since copies of steps need no jobs.
    from ckpt._engine.save.joint.multihost import MultihostSave
    from ckpt.coordination._collectives import gathered

    if not (isinstance(processes, MultihostSave) and processes.own_disks):
        return request
    if request.overwrite:
        raise InvalidArgumentError(
            "overwrite=True: where processes have disks of their own, not all can be replaced at "
            "once, and a failure in between would lose the step. Delete it first",
            step=request.step,
        )
    data = await storage.read(request.step_dir, FILE_NAME, MAX_BYTES)
    summary = None if data is None else await run_in_thread(peek, data)
    save = None if summary is None else summary.save
    if set(await gathered(processes.operation, save, "replaced")) == {save}:
        return request
    return replace(request, overwrite=True)


async def remove_others(storage: Storage, others: Sequence[str]) -> None:
    """Remove what was a step under other names, now that it is there under the one written now.

    What cannot be removed is logged: the save has succeeded, and what it wrote is what counts.
    """
    with anyio.CancelScope(shield=True):
        for step_dir in others:
            try:
                if await is_ours(storage, step_dir):
                    await storage.remove(step_dir)
            except StorageError as error:
                logger.warning(
                    "%s/%s was replaced and is left: %s", storage.location, step_dir, error
                )
