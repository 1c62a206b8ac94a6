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

from ckpt._inspection.json_values import age_of, time_of
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
from ckpt._interop.orbax.sidecars import OrbaxSidecars
from ckpt._steps.index import StepIndex
from ckpt._steps.opened import OpenedStep, open_step
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


class RemovedStep(Struct, frozen=True):
    """A step, with the decision whether it is deleted.

    Attributes:
        path: Its path.
        step: Its number.
        committed: Time of its commit (UTC); None if unknown.
        age_seconds: Time since the commit.
        stored_bytes: Bytes of its files; None if unknown.
        trash: The trash that it goes to; None if it stays, or is removed for good.
        goes: True if it is deleted.
        reasons: Reasons why a policy keeps it; for a step that goes, the policies that do not.
    """

    path: str
    step: int
    committed: datetime | None
    age_seconds: float | None
    stored_bytes: int | None
    trash: str | None
    goes: bool = True
    reasons: list[str] = []


class Removal(Struct, frozen=True):
    """A deletion of steps.

    Attributes:
        root: Path of the root that a policy was applied to; None if steps were given by path.
        steps: The given steps; with a policy, all steps of the root before the deletion, ascending.
        done: True if the call was to delete; False for a dry run.
    """

    root: str | None
    steps: list[RemovedStep]
    done: bool


class TrashRow(Struct, frozen=True):
    """A step in the trash.

    Attributes:
        step: Its number.
        deleted: Time of its deletion (UTC).
        age_seconds: Time since the deletion.
        path: Its path in the trash.
        stored_bytes: Bytes of its files; None in a store, where counting them is not cheap.
        goes: True if it is old enough to be removed.
        removed: True if it was removed.
    """

    step: int
    deleted: datetime
    age_seconds: float
    path: str
    stored_bytes: int | None
    goes: bool
    removed: bool


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
) -> Removal:
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
    steps: dict[str, tuple[StepPath, RemovedStep]] = {}
    for path in paths:
        place = step_path_of(path)
        if place is None:
            raise await _not_a_step(path)
        opened = await _deletable(place)
        folder = await trash_of_run(place.root, trash, for_good=for_good)
        committed = 0 if opened is None else opened.manifest.committed_ns
        steps[place.location] = (
            place,
            RemovedStep(
                place.location,
                place.step,
                time_of(committed),
                age_of(committed),
                None if opened is None else opened.stored_bytes,
                folder,
            ),
        )
    for place, planned in () if dry_run else steps.values():
        retention = _retention_of(place.root, Deletion(trash=planned.trash))
        await place.root.storage.prepare()
        await retention.prepare()
        await retention.delete(place.step)
    return Removal(None, [planned for _, planned in steps.values()], done=not dry_run)


def _retention_of(root: RunRoot, deletion: Deletion) -> Retention:
    """Return a retention that deletes only on request: its policy keeps all steps."""
    return Retention(root.storage, root.index, All(), deletion, OrbaxSidecars())


async def _deletable(place: StepPath) -> OpenedStep | None:
    """Return a step that can be deleted; None if it is damaged.

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
    return opened


async def _not_a_step(path: str) -> InvalidArgumentError:
    found = await locate(path)
    if isinstance(found, Checkpoint):
        return _single(found.location)
    return InvalidArgumentError(
        f"{found.location} is a root of steps. Give the paths of steps in it, or say what to keep, "
        "for example --keep-last 3"
    )


def _single(location: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{location} is a single checkpoint, not a step of a run: it has no pins and no trash. "
        "Remove its directory with the tools of its storage"
    )


async def trashed_steps(
    path: str, trash: str | None, *, older_than: float | None = None, dry_run: bool = False
) -> list[TrashRow]:
    """Return the steps in the trash of a root, by step and then by time of deletion.

    Args:
        path: The root.
        trash: Its trash; None for the trash of the run.
        older_than: Age in seconds from which steps are removed from the trash; None removes none.
        dry_run: True to remove nothing.

    Raises:
        CheckpointError: The root cannot be read, or its trash cannot be changed.
    """
    root = await open_as_root(path)
    found = await trash_at(root, trash)
    steps = await found.steps()
    if not steps:
        # Nothing was deleted there, or the path is not a root at all, for which this raises.
        await root_at(path)
    listed = []
    for each in steps:
        age = age_of(int(each.deleted.timestamp() * 1e9)) or 0.0
        goes = older_than is not None and age >= older_than
        nbytes, _ = _size_and_age(each.path)
        removed = goes and not dry_run
        listed.append(TrashRow(each.step, each.deleted, age, each.path, nbytes, goes, removed))
    if older_than is not None and any(each.removed for each in listed):
        await root.storage.prepare()
        await found.empty(older_than)
    return listed


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


LeftoverKind = Literal["attempt", "removal", "lease", "orbax", "other"]
# No lease shows whether Orbax is still writing a step.
_ORBAX_SECONDS = 86_400.0
# Number of looks at a store while its writers are watched.
_LOOKS = 4
_LONGEST_PAUSE_SECONDS = 30.0


class Leftover(Struct, frozen=True):
    """A leftover of a dead process.

    Attributes:
        name: Name of the step directory that it belongs to, or of the step; empty if unknown.
        kind: `attempt`: an unfinished save; `removal`: an unfinished deletion; `lease`: a lease on
            a step by a reader or a deletion; `orbax`: an unfinished step of Orbax; `other`:
            something else that a sweep has removed.
        nbytes: Its bytes; None if counting them is not cheap.
        age_seconds: Time since it was begun; None if unknown.
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
        unsure: Number of attempts whose writers may be dead, which only watching them can tell.
        done: True if the call was to remove; False for a dry run.
    """

    root: str
    found: list[Leftover]
    unsure: int
    done: bool


async def collect(path: str, *, wait: float, orbax: bool = False, dry_run: bool) -> Collection:
    """Remove the leftovers of dead writers in a root.

    Args:
        path: The root.
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
    for each in await _unfinished(root) if orbax else ():
        if each.age_seconds is None or each.age_seconds < _ORBAX_SECONDS:
            logger.warning("Orbax may still write %s: it is not a day old", each.name)
            continue
        is_removed = not dry_run and await storage.remove(each.name)
        leftovers.append(replace(each, removed=is_removed))
    if not (leftovers or attempts or root.index.unfinished):
        # There is nothing to collect, or the path is not a root at all, for which this raises.
        await root_at(path)
    unsure = sum(each.is_live is None for each in await storage.attempts())
    return Collection(storage.location, leftovers, unsure, done=not dry_run)


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
