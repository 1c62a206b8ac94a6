"""What dead writers left in a root, and what is in its trash: looked at, or removed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Literal

import anyio
from msgspec import Struct

from ckpt._inspection.places import RunRoot, open_as_root, root_at
from ckpt._inspection.retention.removals import trash_at
from ckpt._steps.pins import forget_expired, has_leases
from ckpt.storage._base import AttemptEntry, Storage

LeftoverKind = Literal["attempt", "removal", "lease", "trash", "other"]
# How often a store is looked at while its writers are watched.
_LOOKS = 4
_LONGEST_PAUSE_SECONDS = 30.0


class Leftover(Struct, frozen=True):
    """What a dead process left, or a step in the trash.

    Attributes:
        name: The step directory that it is of, or the step; empty if that is not known.
        kind: `attempt`: a save that was not finished; `removal`: a deletion; `lease`: what kept a
            step, or said that it is being deleted; `trash`: a step in the trash; `other`: something
            else that a sweep has removed.
        nbytes: Its bytes; None where counting them is not cheap.
        age_seconds: How long ago it was begun or deleted; None if that is not known.
        owner: Host and process of its writer; empty if that is not known.
        removed: Whether it was removed.
    """

    name: str
    kind: LeftoverKind
    nbytes: int | None
    age_seconds: float | None
    owner: str
    removed: bool


class Collection(Struct, frozen=True):
    """What of a root was of no use any more.

    Attributes:
        root: Where it is.
        found: What was removed or would be; what could not be removed is among it.
        trashed: How many steps stay in the trash.
        unsure: How many attempts may be of dead writers, which takes watching them.
        done: Whether anything was removed; False if it was only looked at.
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
    dry_run: bool,
) -> Collection:
    """Remove what dead writers left in a root, and old steps of its trash.

    Args:
        path: The root.
        trash: Its trash; None for that of the run.
        older_than: Steps go that were deleted so many seconds ago; None leaves the trash alone.
        wait: For how many seconds writers and readers are watched, where that is needed.
        dry_run: Only look.

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
            # Time itself is waited for.
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
    if not (leftovers or removed or kept or attempts):
        # There is nothing to collect, or it is no root at all.
        await root_at(path)
    unsure = sum(each.is_live is None for each in await storage.attempts())
    return Collection(storage.location, leftovers + removed, kept, unsure, done=not dry_run)


async def _is_unsure(storage: Storage) -> bool:
    """Tell whether some processes have to be watched, to learn whether they are dead."""
    if any(each.is_live is None for each in await storage.attempts()):
        return True
    # A disk says how old a lease is; a store, only whether it was renewed since the first look.
    return storage.keeps_others and await has_leases(storage)


async def _dead(storage: Storage) -> dict[str, AttemptEntry]:
    return {each.id: each for each in await storage.attempts() if each.is_live is False}


def _leftover(entry: AttemptEntry, swept: Sequence[str]) -> Leftover:
    kind: LeftoverKind = "removal" if entry.is_removal else "attempt"
    removed = any(entry.id in name for name in swept)
    return Leftover(entry.step_dir, kind, entry.nbytes, entry.age_seconds, entry.owner, removed)


async def _trashed(
    root: RunRoot, given: str | None, older_than: float | None, *, dry_run: bool
) -> tuple[int, list[Leftover]]:
    """Return how many steps stay in the trash, and those that go."""
    trash = await trash_at(root, given)
    now = time.time()
    steps = await trash.steps()
    ages = [max(now - each.deleted.timestamp(), 0.0) for each in steps]
    going = [
        (each, age)
        for each, age in zip(steps, ages, strict=True)
        if older_than is not None and age >= older_than
    ]
    sizes = {each.path: _nbytes(each.path) for each, _ in going}
    if going and not dry_run and older_than is not None:
        await root.storage.prepare()
        await trash.empty(older_than)
    return len(steps) - len(going), [
        Leftover(os.path.basename(each.path), "trash", sizes[each.path], age, "", not dry_run)
        for each, age in going
    ]


def _nbytes(directory: str) -> int | None:
    """Return the bytes of the files below a directory; None of an entry in a store."""
    if not os.path.isabs(directory):
        return None
    total = 0
    for path, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, file)).st_size
    return total
