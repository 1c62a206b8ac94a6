"""Removal of steps and attempts in an object store, without data that another writer needs.

The data of an attempt is removed by the process that holds its lease record, after its manifest is
gone; see `leases`.
"""

from __future__ import annotations

import logging
import uuid

import anyio

from ckpt._format.manifest_head import FILE_NAME, peek, peek_files
from ckpt.errors import StorageError
from ckpt.storage._object import leases
from ckpt.storage._object.client import ObjectClient, StoredObject, each
from ckpt.storage._object.foreign import remove_foreign
from ckpt.storage._object.leases import LeaseRecord
from ckpt.storage._object.names import (
    NAMES,
    attempt_of,
    deleter_of,
    folder_of,
    gone,
    is_gone,
    is_id,
    trash_key,
)

logger = logging.getLogger("ckpt")

# How long a writer may take from its commit to the removal of its record.
_LOOKS, _PAUSE_SECONDS = 10, 0.05


async def remove(keys: ObjectClient, step_dir: str, attempt: str | None, seconds: float) -> bool:
    """Remove a step directory: its manifest, then its data; False if it does not exist.

    With `attempt`, only if its manifest is of that attempt.
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
        await each(lambda record: finish(keys, record), records)
        return attempt is None and await remove(keys, step_dir, attempt, seconds)
    try:
        await remove_plain_files(keys, step_dir, found)
        await each(lambda record: finish(keys, record), records)
    except StorageError as error:
        logger.warning("data of a deleted step at %s was left: %s", keys.location, error)
    return True


async def remove_replaced(
    keys: ObjectClient, step_dir: str, old: StoredObject, seconds: float
) -> None:
    """Remove the data of a manifest that another one has replaced."""
    records = await _take_over(keys, step_dir, old, seconds)
    await remove_plain_files(keys, step_dir, old)
    await each(lambda record: finish(keys, record), records)


async def _take_over(
    keys: ObjectClient, step_dir: str, found: StoredObject, seconds: float
) -> list[LeaseRecord]:
    """Return lease records of the attempts whose data belongs to a manifest, to be removed.

    An attempt that has a record already is left to the process that made it: its writer does not
    know yet that it has published, or another process deletes it.
    """
    attempt = attempt_of(found.data)
    if attempt is not None:
        ids = {attempt} if is_id(attempt) else set()
    else:
        # A damaged manifest does not say, so all data of the step directory without a writer.
        below = await keys.list(f"{step_dir}/")
        ids = {folder for path in below if (folder := folder_of(path)) is not None}
    records = []
    for each_id in sorted(ids):
        record = await _record_of(keys, step_dir, each_id, seconds)
        if record is not None:
            records.append(record)
        elif attempt is not None:
            # Left to a cleaner. `sweep` relies on it that such an attempt was committed.
            await keys.put(leases.later_key(step_dir, each_id), b"-")
    return records


async def _record_of(
    keys: ObjectClient, step_dir: str, attempt: str, seconds: float
) -> LeaseRecord | None:
    for _ in range(_LOOKS):
        record = await leases.make(keys, step_dir, attempt, seconds, "deleting")
        if record is not None:
            return record
        # Usually its writer has just committed and is about to remove its record.
        await anyio.sleep(_PAUSE_SECONDS)
    return None


async def finish_later(keys: ObjectClient, name: str, seconds: float) -> bool:
    """Remove data that could not be removed because it had a record; False if it still has."""
    step_dir, attempt = leases.record_names(name.removesuffix(leases.LATER)) or ("", "")
    record = await leases.make(keys, step_dir, attempt, seconds, "deleting")
    if record is None:
        return False
    await finish(keys, record)
    await keys.delete(f"{leases.FOLDER}/{name}")
    return True


async def finish_replaced(keys: ObjectClient, step_dir: str, attempt: str, seconds: float) -> None:
    """Remove the data that `attempt` has replaced and its writer did not remove."""
    names = await keys.list(f"{NAMES}/{step_dir}.")
    for other in names:
        if is_id(other) and other != attempt:
            record = await leases.make(keys, step_dir, other, seconds, "deleting")
            if record is not None:
                await finish(keys, record)


async def finish(keys: ObjectClient, record: LeaseRecord) -> None:
    """Remove the data of an attempt that is being deleted.

    Unless its manifest still exists, or is in the trash. The tombstone is removed first, if it is
    of this deletion.
    """
    step_dir, attempt = record.step_dir, record.attempt
    key = f"{step_dir}/{FILE_NAME}"
    found = await keys.get(key)
    if found is not None and deleter_of(found.data) == attempt:
        await keys.delete_if(key, found.generation)
    # In this order: a step that is undeleted has its manifest before its entry is removed.
    if not await _is_in_trash(keys, step_dir, attempt):
        found = await keys.get(key)
        if found is None or attempt_of(found.data) != attempt:
            await remove_data(keys, step_dir, attempt)
    await keys.delete(record.key)


async def _is_in_trash(keys: ObjectClient, step_dir: str, attempt: str) -> bool:
    return await keys.first(trash_key(step_dir, attempt)) is not None


async def remove_data(keys: ObjectClient, step_dir: str, attempt: str) -> None:
    """Remove everything in the folder of an attempt, and its name."""
    start = f"{step_dir}/{attempt}/"
    paths = await keys.list(start)
    await each(lambda path: keys.delete(start + path), paths)
    await keys.delete(f"{NAMES}/{step_dir}.{attempt}")


async def remove_plain_files(
    keys: ObjectClient, step_dir: str, old: StoredObject, kept: frozenset[str] = frozenset()
) -> None:
    """Remove the files of a step that was copied here from a disk: they are not in a folder.

    All but those that are `kept`, and none if its manifest is in the trash.
    """
    files = (peek_files(old.data) or frozenset()) - kept
    summary = peek(old.data)
    start = "" if summary is None else f"{summary.attempt}/"
    plain = [
        path
        for path in files
        if path != FILE_NAME
        and not (start and path.startswith(start))
        # Names in a manifest must not lead anywhere else.
        and folder_of(path) is None
        and not {"", ".", ".."} & set(path.split("/"))
    ]
    if plain and summary is not None and await _is_in_trash(keys, step_dir, summary.attempt):
        return
    await each(lambda path: keys.delete(f"{step_dir}/{path}"), plain)
