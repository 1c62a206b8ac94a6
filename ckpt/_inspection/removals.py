"""Steps that are deleted by their paths, and the trash: the library's own retention does it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial

from msgspec import Struct

from ckpt._inspection.places import (
    Checkpoint,
    RunRoot,
    StepPlace,
    look_at,
    names_of,
    open_as_root,
    step_place,
)
from ckpt._steps.index import StepIndex
from ckpt._steps.opened import open_step
from ckpt._steps.pins import pins, refuse_pinned
from ckpt._steps.removal.retention import Retention
from ckpt._steps.removal.trash import StepTrash
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    UnsupportedFormatError,
)
from ckpt.policies._deletion import Deletion, trash_of
from ckpt.policies._preservation import PreserveAll
from ckpt.storage._resolve import check_trash


class DeletedStep(Struct, frozen=True):
    """A step that was deleted, or would be.

    Attributes:
        path: Where it was.
        step: Its number.
        stored_bytes: Bytes of its files; None if that is not known.
        trash: The trash that it goes to; None if it is removed for good.
        done: Whether it was deleted; False if it was only looked at.
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
        deleted: When it was deleted (UTC).
        age_seconds: How long ago that was.
        path: Where it is.
    """

    step: int
    deleted: datetime
    age_seconds: float
    path: str


async def delete_steps(
    paths: Sequence[str], trash: str | None, *, dry_run: bool
) -> list[DeletedStep]:
    """Delete steps; if one of them may not be deleted, none is.

    Args:
        paths: Their paths.
        trash: The trash that they go to; None removes them.
        dry_run: Only look whether they can be deleted.

    Raises:
        InvalidArgumentError: A path is not that of a step.
        StepPinnedError: A step is pinned.
        StepNotFoundError: There is no such step.
        StorageError: The storage cannot be read or written.
    """
    deletion = Deletion(trash=trash)
    steps: dict[str, tuple[StepPlace, int | None]] = {}
    for path in paths:
        place = step_place(path)
        if place is None:
            raise await _not_a_step(path)
        steps[place.location] = place, await _deletable(place)
        if trash is not None:
            check_trash(place.root.location, trash, partial(_is_step, place.root))
    deleted = []
    for location, (place, nbytes) in steps.items():
        if not dry_run:
            retention = retention_of(place.root, deletion)
            await place.root.storage.prepare()
            await retention.prepare()
            await retention.delete(place.step)
        deleted.append(
            DeletedStep(location, place.step, nbytes, trash_of(deletion), done=not dry_run)
        )
    return deleted


def _is_step(root: RunRoot, name: str) -> bool:
    return root.names.step(name) is not None


def retention_of(root: RunRoot, deletion: Deletion) -> Retention:
    """Return what deletes steps of a root, and of its own accord none."""
    return Retention(root.storage, root.index, PreserveAll(), deletion, (), time.time_ns)


async def _deletable(place: StepPlace) -> int | None:
    """Return the bytes of a step that can be deleted; None if they are not known.

    Raises:
        CheckpointError: It cannot be deleted.
    """
    storage = place.root.storage
    try:
        opened = await open_step(storage, place.name)
    except (CorruptCheckpointError, NotACheckpointError, UnsupportedFormatError):
        opened = None
    if opened is not None and opened.manifest.step is None:
        raise _single(place.location)
    # What is not there, or not a step, gets the error that the deletion would give.
    await retention_of(place.root, Deletion()).refuse_missing(place.step)
    refuse_pinned(storage, place.step, (await pins(storage)).get(place.step, ()))
    if opened is None or opened.foreign is not None:
        return None
    return sum(each.size for each in opened.manifest.files.values())


async def _not_a_step(path: str) -> InvalidArgumentError:
    found = await look_at(path)
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


async def trashed_steps(path: str, trash: str) -> list[TrashedEntry]:
    """Return what is in the trash of a root, by step and then by time.

    Raises:
        CheckpointError: The root cannot be read.
    """
    found, now = await (await _trash_at(path, trash)).steps(), time.time()
    return [
        TrashedEntry(each.step, each.deleted, max(now - each.deleted.timestamp(), 0.0), each.path)
        for each in found
    ]


async def undelete_step(path: str, step: int, trash: str) -> str:
    """Take a step back from the trash, the save of it that was deleted last; return its path.

    Raises:
        StepNotFoundError: It is not in the trash.
        StepExistsError: The step exists.
        StorageError: The storage cannot be read or written.
    """
    found = await _trash_at(path, trash)
    saves = await found.saves_of(step)
    if not saves:
        raise await found.missing(step)
    return await found.undelete(step, saves[-1])


async def _trash_at(path: str, trash: str) -> StepTrash:
    root = await open_as_root(path)
    storage, deletion = root.storage, Deletion(trash=trash)
    check_trash(root.location, trash, partial(_is_step, root))
    entries = await storage.trashed(trash)
    listed = await storage.step_dirs()
    names = names_of([*listed, *(each.step_dir for each in entries)])
    return StepTrash(storage, StepIndex(storage, names), names, trash_of(deletion), time.time_ns)
