"""The arguments of a save, checked, and what becomes of a step that is there already."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import anyio
from msgspec.structs import replace

from ckpt._arguments import check_step, invalid, number_of_seconds, one_of, plain_json
from ckpt._engine.save.save_request import SaveRequest, step_exists
from ckpt._format.manifest_head import FILE_NAME, MAX_BYTES, copied_metrics, peek, plain_metrics
from ckpt._format.step_files import UNFINISHED, UNNAMED, check_item_name
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import IfExists, IfTaken
from ckpt._steps.index import PassedOver
from ckpt._steps.opened import look_closely
from ckpt._steps.pins import pins
from ckpt._steps.removal.retention import is_ours, spare_foreign_files
from ckpt._tree.table import format_bytes
from ckpt.errors import InvalidArgumentError, SaveSkippedError, StepExistsError, StorageError
from ckpt.storage._base import HasDirectories, Storage
from ckpt.storage._local.attempts import MARKS

if TYPE_CHECKING:
    from ckpt._steps.restore_options import RunOrigin
    from ckpt._steps.root import Root

logger = logging.getLogger("ckpt")

# Larger metadata gets a warning: a list of the steps reads the metadata of every step.
_LARGE_METADATA_BYTES = 1 << 20


def make_request(
    step_dir: str,
    step: int | None,
    state: Any,
    items: Mapping[str, Any] | None,
    metrics: Mapping[str, Any] | None,
    metadata: Any,
    *,
    if_exists: IfExists,
    timeout: float | None = None,
) -> SaveRequest:
    """Return the request of a save.

    Raises:
        InvalidArgumentError: Neither or both of `state` and `items` are given, the name of an item
            or `if_exists` is invalid, `metrics` or `metadata` cannot be written as JSON, or
            `timeout` is not a number of seconds above 0.
    """
    # Only loops come to the same step again, so a one-shot save has fewer choices.
    one_of("if_exists", if_exists, get_args(IfTaken if step is None else IfExists))
    if state is None and items is None:
        raise InvalidArgumentError(
            "there is nothing to save: pass a state, or items={name: object}", step=step
        )
    if state is not None and items is not None:
        raise InvalidArgumentError(
            "pass either one state or items={name: object}, and not both", step=step
        )
    given: object = items
    if items is not None and not (isinstance(given, Mapping) and given):
        raise invalid("items", items, "a mapping of one name or more to objects", step=step)
    named = {UNNAMED: state} if items is None else dict(items)
    for name in named:
        check_item_name(name)
    numbers: object = metrics
    if metrics is not None and not isinstance(numbers, Mapping):
        raise invalid("metrics", metrics, "a mapping of names to numbers", step=step)
    plain = plain_json("custom_metadata", metadata, step=step)
    size = 0 if plain is None else len(json.dumps(plain))
    if size > _LARGE_METADATA_BYTES:
        logger.warning(
            "step %s has %s of metadata, which every list of the steps reads: save it as an item "
            "instead",
            step,
            format_bytes(size),
        )
    return SaveRequest(
        step_dir=step_dir,
        step=step,
        items=named,
        unnamed=items is None,
        metrics=None if metrics is None else copied_metrics(metrics),
        metadata=plain,
        # In a drill, a program that looks for an earlier save by itself finds none.
        if_exists="replace" if step is None and "CKPT_DRILL_ROOT" in os.environ else if_exists,
        timeout=None if timeout is None else number_of_seconds("timeout", timeout),
    )


# Why steps are saved anew, by state; the old step goes to a folder of the root with that name.
_WHY = {
    "damaged": "it is damaged",
    "abandoned": "it is of a branch that was given up",
}


async def with_plain_metrics(request: SaveRequest) -> SaveRequest:
    """Return the request with plain numbers as metrics; waits for metrics being computed.

    Raises:
        InvalidArgumentError: A metric is not a number.
    """
    if request.metrics is None:
        return request
    metrics = await run_in_thread(plain_metrics, request.metrics)
    return replace(request, metrics=metrics)


async def clear_name(
    root: Root, origin: RunOrigin, request: SaveRequest
) -> tuple[SaveRequest, list[str], bool]:
    """Make way for a save in a root; called by the process that publishes the save.

    Returns:
        The request as it is to be saved; the step directories that it replaces under other names;
        and the result of `clear_target`.

    Raises:
        StepExistsError: As for `clear_target`.
        SaveSkippedError: As for `clear_target`.
    """
    others = await root.other_step_dirs(check_step(request.step))
    request = await root.branched(request, origin.restored)

    async def is_restored(step_dir: str) -> bool:
        state, there = origin.state, await root.index.look(step_dir)
        return (
            state is not None
            and there is not None
            and there.attempt == state.attempt
            and state.is_in(request.items)
        )

    passed_over = root.index.passed_over
    is_there = await clear_target(root.storage, request, others, passed_over, is_restored)
    return request, others, is_there


async def clear_target(
    storage: Storage,
    request: SaveRequest,
    others: Sequence[str] = (),
    passed_over: MutableMapping[int, PassedOver] | None = None,
    is_restored: Callable[[str], Awaitable[bool]] | None = None,
) -> bool:
    """Raise if the step directory is taken, before anything is staged; publishing checks again.

    A step to be replaced is searched for files of others, which are moved out of it. A step that is
    damaged, or was passed over, is moved aside and kept if the storage can move it: a run that is
    started again from the step before comes to the same number every time.

    Args:
        storage: The root.
        request: The save.
        others: Step directories that may be the same step under other names.
        passed_over: Steps that look whole and were passed over; a step that is moved aside is
            removed from it.
        is_restored: Returns True if the state to be saved came from this step directory, unchanged.

    Returns:
        True if a step is there with which the new one is to be compared once it is written.

    Raises:
        StepExistsError: A step is there, and it is pinned, not to be replaced, or not ours.
        SaveSkippedError: A step is there, and it is the same state, or need not be replaced.
    """
    is_there = False
    for step_dir in (request.step_dir, *others):
        if not await storage.exists(step_dir):
            continue
        why = await _why_passed_over(storage, request, step_dir, passed_over or {})
        if why is not None and isinstance(storage, HasDirectories):
            await _refuse_pinned(storage, check_step(request.step), step_dir, why)
            await _move_aside(storage, check_step(request.step), step_dir, why)
            if passed_over is not None:
                passed_over.pop(check_step(request.step), None)
            continue
        if request.step is None and await _may_go(storage, request):
            continue
        where = f"{storage.location}/{step_dir}"
        if is_restored is not None and request.if_exists == "equal" and await is_restored(step_dir):
            raise SaveSkippedError("this state was restored from it")
        if not await is_ours(storage, step_dir):
            if step_dir != request.step_dir or not await storage.exists(step_dir):
                # The directory has another name and is not a step, or is gone: it is not in the
                # way.
                continue
            raise StepExistsError(
                f"{where} exists and is not a checkpoint of this library, so it is never replaced. "
                "Delete it or move it away, or choose another name",
                step=request.step,
            )
        if request.if_exists == "skip":
            raise SaveSkippedError("it already exists (if_exists='skip')")
        if request.if_exists == "equal" and why is None and step_dir == request.step_dir:
            is_there = True
            continue
        if not request.replaces_any:
            state = "" if why is None else f" and is {why.state} ({why.reason})"
            raise step_exists(f"{where} already exists{state} and was not changed", request.step)
        await spare_foreign_files(storage, step_dir)
    return is_there


async def _may_go(storage: Storage, request: SaveRequest) -> bool:
    """Return True if the path of a one-shot save holds nothing of ours and is free to use.

    An empty directory is removed; a checkpoint of Orbax may go if it is to be replaced.
    """
    name = request.step_dir
    # Object stores have no directories, and Orbax's files there would stay beside the new ones.
    if not isinstance(storage, HasDirectories) or name not in await storage.step_dirs():
        return False
    files = await storage.files(name)
    if not files:
        await storage.remove(name)
        return True
    is_theirs = FILE_NAME not in files and not files.keys().isdisjoint(MARKS)
    return request.replaces_any and is_theirs and not any(UNFINISHED in path for path in files)


async def _why_passed_over(
    storage: Storage, request: SaveRequest, step_dir: str, passed_over: Mapping[int, PassedOver]
) -> PassedOver | None:
    """Return the fault of the step in the way; None for a whole step, or if there is none."""
    if request.step is None or request.replaces_any:
        return None
    known = passed_over.get(request.step)
    data = None if known is None else await storage.read(step_dir, FILE_NAME, MAX_BYTES)
    summary = None if data is None else await run_in_thread(peek, data)
    if known is not None and summary is not None and summary.attempt == known.attempt:
        return known
    if known is not None and data is None and step_dir in await storage.step_dirs():
        # This is a step of Orbax. It is only moved, so it does no harm if it has become another
        # step since.
        return known
    found = await look_closely(storage, step_dir, request.step)
    if found is None or found.kind != "damaged":
        return None
    # A link or a file with the name of a step belongs to somebody else.
    return PassedOver("", found.reason) if step_dir in await storage.step_dirs() else None


async def _refuse_pinned(storage: Storage, step: int, step_dir: str, why: PassedOver) -> None:
    """Raise if a step that is in the way is pinned: somebody uses it at this path."""
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
            _WHY.get(why.state, f"it was passed over as {why.state}"),
            why.reason,
            kept,
        )


async def remove_others(storage: Storage, others: Sequence[str]) -> None:
    """Remove the directories of a step under other names, now that its new name is published.

    A directory that cannot be removed is logged: the save itself has succeeded.
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
