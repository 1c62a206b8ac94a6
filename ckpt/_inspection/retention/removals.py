"""Deletion of steps by path, and the trash; the library's own retention does the work."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct

from ckpt._inspection.locations import (
    Checkpoint,
    RunRoot,
    StepPath,
    locate,
    names_of,
    open_as_root,
    root_at,
    step_path_of,
)
from ckpt._steps.index import StepIndex
from ckpt._steps.opened import open_step
from ckpt._steps.pins import pins, refuse_pinned
from ckpt._steps.removal.recorded_policy import read_recorded_policy
from ckpt._steps.removal.retention import Retention
from ckpt._steps.removal.trash import StepTrash
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    UnsupportedFormatError,
)
from ckpt.keep._deletion import Deletion, trash_of
from ckpt.keep._keep_policies import All
from ckpt.storage._resolve import check_trash


class DeletedStep(Struct, frozen=True):
    """A step that was deleted, or would be.

    Attributes:
        path: Path that it had.
        step: Its number.
        stored_bytes: Bytes of its files; None if unknown.
        trash: The trash that it goes to; None if it is removed for good.
        done: True if it was deleted; False for a dry run.
    """

    path: str
    step: int
    stored_bytes: int | None
    trash: str | None
    done: bool


class TrashedEntry(Struct, frozen=True):
    """A step in the trash.

    Attributes:
        step: Its number.
        deleted: Time of its deletion (UTC).
        age_seconds: Time since the deletion.
        path: Its path in the trash.
    """

    step: int
    deleted: datetime
    age_seconds: float
    path: str


async def trash_of_run(root: RunRoot, given: str | None, *, for_good: bool = False) -> str | None:
    """Return the trash that steps of a root go to: the given one, or the trash of the run.

    Raises:
        InvalidArgumentError: The trash of the run is outside of the root, and a file in a root must
            not choose such a place; or the given path cannot be the trash of this root.
        StorageError: The root cannot be read.
    """
    if for_good:
        return None
    if given is None:
        noted = await read_recorded_policy(root.storage)
        if noted is not None and noted.deletion is None:
            raise InvalidArgumentError(
                f"{root.location}: what this run does with deleted steps cannot be read from "
                ".ckpt-run/preservation.json. Give its trash with --trash, or --for-good"
            )
        deletion = None if noted is None else noted.deletion
        given = None if deletion is None else trash_of(deletion)
        if given is not None and os.path.isabs(given):
            raise InvalidArgumentError(
                f"{root.location}: the trash of this run is {given!r:.200}. Give it with --trash, "
                "or --for-good to do without"
            )
    if given is not None:
        Deletion(trash=given)
        check_trash(root.location, given, lambda name: root.names.step(name) is not None)
    return given


async def delete_steps(
    paths: Sequence[str], trash: str | None, *, for_good: bool, dry_run: bool
) -> list[DeletedStep]:
    """Delete steps; if one of them may not be deleted, none is.

    Args:
        paths: Paths of the steps.
        trash: The trash that they go to; None for the trash of the run, if it has one.
        for_good: True to use no trash.
        dry_run: True to check only whether they can be deleted.

    Raises:
        InvalidArgumentError: A path is not the path of a step.
        StepPinnedError: A step is pinned.
        StepNotFoundError: There is no such step.
        StorageError: The storage cannot be read or written.
    """
    steps: dict[str, tuple[StepPath, int | None, str | None]] = {}
    for path in paths:
        place = step_path_of(path)
        if place is None:
            raise await _not_a_step(path)
        nbytes = await _deletable(place)
        folder = await trash_of_run(place.root, trash, for_good=for_good)
        steps[place.location] = place, nbytes, folder
    deleted = []
    for location, (place, nbytes, folder) in steps.items():
        if not dry_run:
            retention = _retention_of(place.root, Deletion(trash=folder))
            await place.root.storage.prepare()
            await retention.prepare()
            await retention.delete(place.step)
        deleted.append(DeletedStep(location, place.step, nbytes, folder, done=not dry_run))
    return deleted


def _retention_of(root: RunRoot, deletion: Deletion) -> Retention:
    """Return a retention that deletes only on request: its policy keeps all steps."""
    return Retention(root.storage, root.index, All(), deletion, (), time.time_ns)


async def _deletable(place: StepPath) -> int | None:
    """Return the bytes of a step that can be deleted; None if they are unknown.

    Raises:
        CheckpointError: The step cannot be deleted.
    """
    storage = place.root.storage
    try:
        opened = await open_step(storage, place.name)
    except (CorruptCheckpointError, NotACheckpointError, UnsupportedFormatError):
        opened = None
    if opened is not None and opened.manifest.step is None:
        raise _single(place.location)
    # A missing step is the same error here as in the deletion itself.
    await _retention_of(place.root, Deletion()).refuse_missing(place.step)
    refuse_pinned(storage, place.step, (await pins(storage)).get(place.step, ()))
    if opened is None or opened.foreign is not None:
        return None
    return sum(each.size for each in opened.manifest.files.values())


async def _not_a_step(path: str) -> InvalidArgumentError:
    found = await locate(path)
    if isinstance(found, Checkpoint):
        return _single(found.location)
    return InvalidArgumentError(
        f"{found.location} is a root of steps. Give the paths of steps in it, or say what stays "
        "with 'ckpt forget'"
    )


def _single(location: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{location} is a single checkpoint, not a step of a run: it has no pins and no trash. "
        "Remove its directory with the tools of its storage"
    )


async def trashed_steps(path: str, trash: str | None) -> list[TrashedEntry]:
    """Return the steps in the trash of a root, by step and then by time of deletion.

    Raises:
        CheckpointError: The root cannot be read.
    """
    found = await (await trash_at(await open_as_root(path), trash)).steps()
    if not found:
        # Nothing was deleted there, or the path is not a root at all, for which this raises.
        await root_at(path)
    now = time.time()
    return [
        TrashedEntry(each.step, each.deleted, max(now - each.deleted.timestamp(), 0.0), each.path)
        for each in found
    ]


async def undelete_step(path: str, step: int, trash: str | None) -> str:
    """Take a step back from the trash and return its path; takes the save that was deleted last.

    Raises:
        StepNotFoundError: The step is not in the trash.
        StepExistsError: The step exists.
        StorageError: The storage cannot be read or written.
    """
    found = await trash_at(await open_as_root(path), trash)
    saves = await found.saves_of(step)
    if not saves:
        raise await found.missing(step)
    return await found.undelete(step, saves[-1])


async def trash_at(root: RunRoot, given: str | None) -> StepTrash:
    """Return the trash of a root.

    Raises:
        CheckpointError: As in `trash_of_run`.
    """
    storage, trash = root.storage, await trash_of_run(root, given) or "trash"
    entries = await storage.trashed(trash)
    listed = await storage.step_dirs()
    names = names_of([*listed, *(each.step_dir for each in entries)])
    return StepTrash(storage, StepIndex(storage, names), names, trash, time.time_ns)
