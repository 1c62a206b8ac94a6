"""Leftovers of dead writers in a root, and the steps in its trash: listing and removal."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Literal

import anyio
from msgspec import Struct
from msgspec.structs import replace

from ckpt._inspection.locations import RunRoot, open_as_root, root_at
from ckpt._inspection.retention.removals import trash_at
from ckpt._steps.pins import forget_expired, has_leases
from ckpt.errors import CheckpointError, NotACheckpointError
from ckpt.storage._base import AttemptEntry, HasDirectories, Storage

logger = logging.getLogger("ckpt")

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
    from ckpt._interop.orbax.listing import begun_ns
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
