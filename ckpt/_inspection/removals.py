"""Deletion of steps by path, the trash, and the leftovers of dead writers."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import anyio
from msgspec import Struct
from msgspec.structs import replace

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
from ckpt._steps.pins import forget_expired, has_leases, pins, refuse_pinned
from ckpt._steps.removal.deletion_plan import StepTrash
from ckpt._steps.removal.recorded_policy import read_recorded_policy
from ckpt._steps.removal.retention import Retention
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    UnsupportedFormatError,
)
from ckpt.keep._deletion import Deletion, trash_of
from ckpt.keep._keep_policies import All
from ckpt.storage._base import AttemptEntry, HasDirectories, Storage
from ckpt.storage._resolve import check_trash

logger = logging.getLogger("ckpt")


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


LeftoverKind = Literal["attempt", "removal", "lease", "trash", "orbax", "other"]
# No lease shows whether Orbax is still writing a step.
_ORBAX_SECONDS = 86_400.0
# Number of looks at a store while its writers are watched.
_LOOKS = 4
_LONGEST_PAUSE_SECONDS = 30.0


class Leftover(Struct, frozen=True):
    """A leftover of a dead process, or a step in the trash.

    Attributes:
        name: Name of the step directory that it belongs to, or of the step; empty if unknown.
        kind: `attempt`: an unfinished save; `removal`: an unfinished deletion; `lease`: a lease on
            a step by a reader or a deletion; `trash`: a step in the trash; `orbax`: an unfinished
            step of Orbax; `other`: something else that a sweep has removed.
        nbytes: Its bytes; None if counting them is not cheap.
        age_seconds: Time since it was begun or deleted; None if unknown.
        owner: Host and process of its writer; empty if unknown.
        removed: True if it was removed.
    """

    name: str
    kind: LeftoverKind
    nbytes: int | None
    age_seconds: float | None
    owner: str
    removed: bool


class Collection(Struct, frozen=True):
    """The useless files of a root.

    Attributes:
        root: Path of the root.
        found: The leftovers that were removed or would be, including those that could not be
            removed.
        trashed: Number of steps that stay in the trash.
        unsure: Number of attempts whose writers may be dead, which only watching them can tell.
        done: True if the call was to remove; False for a dry run.
    """

    root: str
    found: list[Leftover]
    trashed: int
    unsure: int
    done: bool


async def collect(
    path: str,
    trash: str | None,
    *,
    older_than: float | None,
    wait: float,
    orbax: bool = False,
    dry_run: bool,
) -> Collection:
    """Remove the leftovers of dead writers in a root, and old steps of its trash.

    Args:
        path: The root.
        trash: Its trash; None for the trash of the run.
        older_than: Age in seconds from which steps in the trash are removed; None leaves the trash
            alone.
        wait: Most seconds to watch writers and readers that may be dead.
        orbax: True to remove also steps that Orbax has not finished within a day.
        dry_run: True to list only.

    Raises:
        CheckpointError: The root cannot be read or changed.
    """
    root = await open_as_root(path)
    storage = root.storage
    swept: list[str] = []
    found = await _dead(storage)
    attempts = await storage.attempts()
    expired: list[int] = []
    if not dry_run:
        swept += await storage.sweep()
        expired += await forget_expired(storage)
    if wait and await _is_unsure(storage):
        with anyio.move_on_after(wait):
            # The state changes only with time; there is no event to wait for.
            while await _is_unsure(storage):  # noqa: ASYNC110
                await anyio.sleep(min(wait / _LOOKS, _LONGEST_PAUSE_SECONDS))
        found |= await _dead(storage)
        if not dry_run:
            swept += await storage.sweep()
            expired += await forget_expired(storage)
    leftovers = [_leftover(each, swept) for each in found.values()]
    leftovers += [
        Leftover(str(step), "lease", None, None, "", removed=True) for step in sorted(set(expired))
    ]
    leftovers += [
        Leftover(name, "other", None, None, "", removed=True)
        for name in swept
        if not any(each in name for each in found)
    ]
    kept, removed = await _trashed(root, trash, older_than, dry_run=dry_run)
    for each in await _unfinished(root) if orbax else ():
        if each.age_seconds is None or each.age_seconds < _ORBAX_SECONDS:
            logger.warning("Orbax may still write %s: it is not a day old", each.name)
            continue
        is_removed = not dry_run and await storage.remove(each.name)
        leftovers.append(replace(each, removed=is_removed))
    if not (leftovers or removed or kept or attempts or root.index.unfinished):
        # There is nothing to collect, or the path is not a root at all, for which this raises.
        await root_at(path)
    unsure = sum(each.is_live is None for each in await storage.attempts())
    return Collection(storage.location, leftovers + removed, kept, unsure, done=not dry_run)


async def _unfinished(root: RunRoot) -> list[Leftover]:
    """Return the steps that Orbax began and did not finish. Damaged steps are left out."""
    # Imported only here, since most calls never need it.
    from ckpt._interop.orbax.layout import begun_ns
    from ckpt._interop.orbax.step import open_orbax

    await root.index.refresh()
    found = []
    for name in root.index.unfinished:
        try:
            if name not in root.index.begun:
                await open_orbax(root.storage, name, None)
                continue
        except NotACheckpointError:
            pass
        except CheckpointError:
            continue
        nbytes, age = _size_and_age(f"{root.location}/{name}")
        # A store does not report when an object was written; Orbax records when it began the step.
        if nbytes is None and (began := await begun_ns(root.storage, name)):
            age = max(time.time() - began / 1e9, 0.0)
        found.append(Leftover(name, "orbax", nbytes, age, "", removed=False))
    return found


async def _is_unsure(storage: Storage) -> bool:
    """Return True if some processes have to be watched, to learn whether they are dead."""
    if any(each.is_live is None for each in await storage.attempts()):
        return True
    # A disk shows the age of a lease; a store only shows whether it was renewed since the first
    # look.
    return not isinstance(storage, HasDirectories) and await has_leases(storage)


async def _dead(storage: Storage) -> dict[str, AttemptEntry]:
    return {each.id: each for each in await storage.attempts() if each.is_live is False}


def _leftover(entry: AttemptEntry, swept: Sequence[str]) -> Leftover:
    kind: LeftoverKind = "removal" if entry.is_removal else "attempt"
    removed = any(entry.id in name for name in swept)
    return Leftover(entry.step_dir, kind, entry.nbytes, entry.age_seconds, entry.owner, removed)


async def _trashed(
    root: RunRoot, given: str | None, older_than: float | None, *, dry_run: bool
) -> tuple[int, list[Leftover]]:
    """Return the number of steps that stay in the trash, and the steps that are removed."""
    trash = await trash_at(root, given)
    now = time.time()
    steps = await trash.steps()
    ages = [max(now - each.deleted.timestamp(), 0.0) for each in steps]
    going = [
        (each, age)
        for each, age in zip(steps, ages, strict=True)
        if older_than is not None and age >= older_than
    ]
    sizes = {each.path: _size_and_age(each.path)[0] for each, _ in going}
    if going and not dry_run and older_than is not None:
        await root.storage.prepare()
        await trash.empty(older_than)
    return len(steps) - len(going), [
        Leftover(os.path.basename(each.path), "trash", sizes[each.path], age, "", not dry_run)
        for each, age in going
    ]


def _size_and_age(directory: str) -> tuple[int | None, float | None]:
    """Return the bytes of the files below a directory, and the age of the newest file or directory.

    Both are None for an entry in a store.
    """
    if not os.path.isabs(directory):
        return None, None
    total, newest = 0, 0.0
    for path, _, files in os.walk(directory):
        for name in ("", *files):
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(path, name))
                total += status.st_size if name else 0
                newest = max(newest, status.st_mtime)
    return total, max(time.time() - newest, 0.0)
