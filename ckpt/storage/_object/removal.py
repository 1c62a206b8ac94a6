"""Removal of steps and attempts in an object store, sparing data that another writer needs.

The data of an attempt is removed after its manifest is gone, by the process that holds its lease
record; see `leases`.

The sweep of an object store, which removes the remains of dead writers. A writer is taken for dead
if this process has seen its lease record unchanged for longer than the lease lasts. The record is
sealed before anything is removed, and a writer that is alive after all loses the race for its own
record before it can put a manifest.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable

import anyio

from ckpt._format.manifest_head import FILE_NAME, peek, peek_files
from ckpt._runtime.futures import for_each
from ckpt.errors import StorageError
from ckpt.storage._base import AttemptEntry
from ckpt.storage._object import leases
from ckpt.storage._object.leases import (
    FOLDER,
    LATER,
    LeaseRecord,
    Sightings,
    record_names,
    state_of,
)
from ckpt.storage._object.listing import (
    NAMES,
    attempt_of,
    deleter_of,
    folder_of,
    gone,
    is_gone,
    is_id,
    remove_foreign,
    trash_key,
)
from ckpt.storage._object.probe import FOLDER as PROBES
from ckpt.storage._store import Store, StoredObject

logger = logging.getLogger("ckpt")

# How long a writer may take from its commit to the removal of its record: looks, and pauses.
_LOOKS, _PAUSE_SECONDS = 10, 0.05


async def remove(keys: Store, step_dir: str, attempt: str | None, seconds: float) -> bool:
    """Remove a step directory: its manifest, then its data; False if it does not exist.

    With `attempt`, it is removed only if its manifest is of that attempt.
    """
    key = f"{step_dir}/{FILE_NAME}"
    found = await keys.get(key)
    if found is None:
        return attempt is None and await remove_foreign(keys, step_dir)
    if is_gone(found.data):
        return False
    if attempt is not None and attempt_of(found.data) != attempt:
        return False
    records = await _take_over(keys, step_dir, found, seconds)
    deleter = uuid.uuid4().hex
    if records:
        deleter = records[0].attempt
    elif (record := await leases.make(keys, step_dir, deleter, seconds, "deleting")) is not None:
        records.append(record)
    # In two steps: some stores have no conditional delete, but all can replace on a condition.
    # No writer puts a new manifest there while the record of the deleter exists.
    swap = await keys.swap(key, gone(deleter), found.generation)
    if swap.generation is None:
        await for_each(lambda record: finish(keys, record), records)
        return attempt is None and await remove(keys, step_dir, attempt, seconds)
    try:
        await remove_plain_files(keys, step_dir, found)
        await for_each(lambda record: finish(keys, record), records)
    except StorageError as error:
        logger.warning("data of a deleted step at %s was left: %s", keys.location, error)
    return True


async def remove_replaced(keys: Store, step_dir: str, old: StoredObject, seconds: float) -> None:
    """Remove the data of a manifest that another one has replaced."""
    records = await _take_over(keys, step_dir, old, seconds)
    await remove_plain_files(keys, step_dir, old)
    await for_each(lambda record: finish(keys, record), records)


async def _take_over(
    keys: Store, step_dir: str, found: StoredObject, seconds: float
) -> list[LeaseRecord]:
    """Make and return lease records for removing the data that belongs to a manifest.

    An attempt that has a record already is left to the process that made it: its writer does not
    know yet that it has published, or another process deletes it.
    """
    attempt = attempt_of(found.data)
    if attempt is not None:
        ids = {attempt} if is_id(attempt) else set()
    else:
        # A damaged manifest names no attempt, so all data without a writer is removed.
        below = await keys.list(f"{step_dir}/")
        ids = {folder for path in below if (folder := folder_of(path)) is not None}
    records = []
    for each_id in sorted(ids):
        record = await _record_of(keys, step_dir, each_id, seconds)
        if record is not None:
            records.append(record)
        elif attempt is not None:
            # Left to a cleaner. `sweep` relies on the note: such an attempt was committed.
            await keys.put(leases.later_key(step_dir, each_id), b"-")
    return records


async def _record_of(
    keys: Store, step_dir: str, attempt: str, seconds: float
) -> LeaseRecord | None:
    for _ in range(_LOOKS):
        record = await leases.make(keys, step_dir, attempt, seconds, "deleting")
        if record is not None:
            return record
        # Usually its writer has just committed and is about to remove its record.
        await anyio.sleep(_PAUSE_SECONDS)
    return None


async def finish_later(keys: Store, name: str, seconds: float) -> bool:
    """Remove data whose record prevented that earlier; False if it still has the record."""
    step_dir, attempt = leases.record_names(name.removesuffix(leases.LATER)) or ("", "")
    record = await leases.make(keys, step_dir, attempt, seconds, "deleting")
    if record is None:
        return False
    await finish(keys, record)
    await keys.delete(f"{leases.FOLDER}/{name}")
    return True


async def finish_replaced(keys: Store, step_dir: str, attempt: str, seconds: float) -> None:
    """Remove the data that `attempt` has replaced, if its writer did not remove it."""
    names = await keys.list(f"{NAMES}/{step_dir}.")
    for other in names:
        if is_id(other) and other != attempt:
            record = await leases.make(keys, step_dir, other, seconds, "deleting")
            if record is not None:
                await finish(keys, record)


async def finish(keys: Store, record: LeaseRecord) -> None:
    """Remove the data of an attempt that is being deleted.

    The data stays if its manifest still exists, or is in the trash. The tombstone is removed first,
    if it is of this deletion.
    """
    step_dir, attempt = record.step_dir, record.attempt
    key = f"{step_dir}/{FILE_NAME}"
    found = await keys.get(key)
    if found is not None and deleter_of(found.data) == attempt:
        await keys.delete_if(key, found.generation)
    # The trash first: an undeleted step has its manifest before its entry is removed.
    if not await _is_in_trash(keys, step_dir, attempt):
        found = await keys.get(key)
        if found is None or attempt_of(found.data) != attempt:
            await remove_data(keys, step_dir, attempt)
    await keys.delete(record.key)


async def _is_in_trash(keys: Store, step_dir: str, attempt: str) -> bool:
    return await keys.get(trash_key(step_dir, attempt), 0, 1) is not None


async def remove_data(keys: Store, step_dir: str, attempt: str) -> None:
    """Remove everything in the folder of an attempt, and its name."""
    start = f"{step_dir}/{attempt}/"
    paths = await keys.list(start)
    await for_each(lambda path: keys.delete(start + path), paths)
    await keys.delete(f"{NAMES}/{step_dir}.{attempt}")


async def remove_plain_files(
    keys: Store, step_dir: str, old: StoredObject, kept: frozenset[str] = frozenset()
) -> None:
    """Remove the files of a step that was copied here from a disk, which has no folder.

    The files in `kept` stay; all files stay if the manifest is in the trash.
    """
    files = (peek_files(old.data) or frozenset()) - kept
    summary = peek(old.data)
    start = "" if summary is None else f"{summary.attempt}/"
    plain = [
        path
        for path in files
        if path != FILE_NAME
        and not (start and path.startswith(start))
        # Names in a manifest must not lead anywhere else, nor into a folder of an attempt.
        and folder_of(path) is None
        and not {"", ".", ".."} & set(path.split("/"))
    ]
    if plain and summary is not None and await _is_in_trash(keys, step_dir, summary.attempt):
        return
    await for_each(lambda path: keys.delete(f"{step_dir}/{path}"), plain)


async def sweep(keys: Store, sightings: Sightings, seconds: float) -> list[str]:
    """Remove the remains of writers that are certainly dead; return the names of their attempts.

    Records that are made for the removal last for `seconds`.
    """
    found = await keys.list(f"{FOLDER}/")
    put_off = {
        name for name in found if name.endswith(LATER) and record_names(name.removesuffix(LATER))
    }
    swept: list[str] = []

    async def look(name: str, record: LeaseRecord, is_dead: bool) -> None:
        if is_dead and await _end(keys, record, was_published=name + LATER in put_off):
            swept.append(name)

    await _look_at(keys, sightings, found, look)
    await for_each(lambda name: finish_later(keys, name, seconds), put_off)
    if sightings.may_see_probes:
        sightings.may_see_probes = await _remove_probes(keys, sightings, seconds)
    return sorted(swept)


async def attempts_in(keys: Store, sightings: Sightings) -> list[AttemptEntry]:
    """Return the attempts that have a record, without changing anything."""
    found: list[AttemptEntry] = []

    async def look(name: str, record: LeaseRecord, is_dead: bool) -> None:
        age, silent = _seconds_since(record.begun), _seconds_since(record.renewed)
        is_live = False if is_dead else None
        # Clocks may differ, so a silent writer is called dead only once its silence was seen here.
        if not is_dead and silent is not None and silent <= record.seconds:
            is_live = True
        found.append(
            AttemptEntry(
                record.step_dir,
                record.attempt,
                is_live,
                age,
                silent,
                owner=record.owner,
                is_removal=record.state in ("dead", "deleting"),
            )
        )

    await _look_at(keys, sightings, await keys.list(f"{FOLDER}/"), look)
    return sorted(found, key=lambda each: (each.step_dir, each.id))


async def _look_at(
    keys: Store,
    sightings: Sightings,
    listed: Iterable[str],
    then: Callable[[str, LeaseRecord, bool], Awaitable[None]],
) -> None:
    """Call `then` with the name of every record, the record, and whether its writer is dead."""
    names = [name for name in listed if record_names(name) is not None]
    sightings.keep(FOLDER, {f"{FOLDER}/{name}" for name in names})

    async def look(name: str) -> None:
        key = f"{FOLDER}/{name}"
        found = await keys.get(key)
        record = None if found is None else state_of(key, found)
        if record is not None:
            is_dead = sightings.age(key, record.generation) > record.seconds
            await then(name, record, is_dead)

    await for_each(look, names)


def _seconds_since(time_s: float | None) -> float | None:
    return None if time_s is None else max(time.time() - time_s, 0.0)


async def _end(keys: Store, record: LeaseRecord, *, was_published: bool) -> bool:
    """End an attempt whose record has expired; False if that must not be done.

    `was_published` is True if its manifest was seen, by a process that deleted or replaced it, or
    was about to.
    """
    if record.state == "committing":
        found = await keys.get(f"{record.step_dir}/{FILE_NAME}")
        is_there = found is not None and attempt_of(found.data) == record.attempt
        if not is_there and not was_published:
            # The manifest may still be written, so nothing can be removed.
            return False
        if not is_there and not await record.seize(keys):
            return False
        # The writer died before it did this.
        await finish_replaced(keys, record.step_dir, record.attempt, record.seconds)
        if is_there:
            await keys.delete(record.key)
            return True
    elif record.state == "writing" and not await record.seize(keys):
        return False
    await finish(keys, record)
    return True


async def _remove_probes(keys: Store, sightings: Sightings, seconds: float) -> bool:
    """Remove probes whose process died; return True if there were any probes."""

    async def look(name: str) -> None:
        key = f"{PROBES}/{name}"
        found = await keys.get(key, 0, 1)
        if found is not None and sightings.age(key, found.generation) > seconds:
            await keys.delete(key)

    names = await keys.list(f"{PROBES}/")
    sightings.keep(PROBES, {f"{PROBES}/{name}" for name in names})
    await for_each(look, names)
    return bool(names)
