"""Removal of entries and attempts in an object store, without data that another writer needs.

The data of an attempt is removed by the process that holds its lease record, after its manifest is
gone; see `leases`.
"""

from __future__ import annotations

import logging
import uuid

import anyio

from ckpt._format.manifest import FILE_NAME, peek, peek_files
from ckpt.errors import StorageError
from ckpt.storage._object import leases
from ckpt.storage._object.client import ObjectClient, StoredObject, each
from ckpt.storage._object.leases import LeaseRecord
from ckpt.storage._object.names import (
    NAMES,
    attempt_of,
    deleter_of,
    folder_of,
    gone,
    is_gone,
    is_id,
)

logger = logging.getLogger("ckpt")

# How long a writer may take from its commit to the removal of its record.
_LOOKS, _PAUSE_SECONDS = 10, 0.05


async def remove(keys: ObjectClient, entry: str, attempt: str | None, seconds: float) -> bool:
    """Remove an entry: its manifest, then its data; False if it does not exist.

    With `attempt`, only if its manifest is of that attempt.
    """
    key = f"{entry}/{FILE_NAME}"
    found = await keys.get(key)
    if found is None or is_gone(found.data):
        return False
    if attempt is not None and attempt_of(found.data) != attempt:
        return False
    records = await _take_over(keys, entry, found, seconds)
    deleter = uuid.uuid4().hex
    if records:
        deleter = records[0].attempt
    elif (record := await leases.make(keys, entry, deleter, seconds, "deleting")) is not None:
        records.append(record)
    # In two steps: some stores have no conditional delete, but all can replace on a condition.
    # Nobody writes a new manifest there while the record of the deleter exists.
    swap = await keys.swap(key, gone(deleter), found.generation)
    if swap.generation is None:
        await each(lambda record: finish(keys, record), records)
        return attempt is None and await remove(keys, entry, attempt, seconds)
    try:
        await _remove_plain_files(keys, entry, found)
        await each(lambda record: finish(keys, record), records)
    except StorageError as error:
        logger.warning("data of a deleted step at %s was left: %s", keys.location, error)
    return True


async def remove_replaced(
    keys: ObjectClient, entry: str, old: StoredObject, seconds: float
) -> None:
    """Remove the data of a manifest that another one has replaced."""
    records = await _take_over(keys, entry, old, seconds)
    await _remove_plain_files(keys, entry, old)
    await each(lambda record: finish(keys, record), records)


async def _take_over(
    keys: ObjectClient, entry: str, found: StoredObject, seconds: float
) -> list[LeaseRecord]:
    """Return lease records of the attempts whose data belongs to a manifest, to be removed.

    An attempt that has a record already is left to the process that made it: its writer does not
    know yet that it has published, or another process deletes it.
    """
    attempt = attempt_of(found.data)
    if attempt is not None:
        ids = {attempt} if is_id(attempt) else set()
    else:
        # A damaged manifest does not say, so all data of the entry that nobody writes.
        below = await keys.list(f"{entry}/")
        ids = {folder for path in below if (folder := folder_of(path)) is not None}
    records = []
    for each_id in sorted(ids):
        record = await _record_of(keys, entry, each_id, seconds)
        if record is not None:
            records.append(record)
        elif attempt is not None:
            # Left to a cleaner. `sweep` relies on it that such an attempt was committed.
            await keys.put(leases.later_key(entry, each_id), b"-")
    return records


async def _record_of(
    keys: ObjectClient, entry: str, attempt: str, seconds: float
) -> LeaseRecord | None:
    for _ in range(_LOOKS):
        record = await leases.make(keys, entry, attempt, seconds, "deleting")
        if record is not None:
            return record
        # Usually its writer has just committed and is about to remove its record.
        await anyio.sleep(_PAUSE_SECONDS)
    return None


async def finish_later(keys: ObjectClient, name: str, seconds: float) -> bool:
    """Remove data that could not be removed because it had a record; False if it still has."""
    entry, attempt = leases.record_names(name.removesuffix(leases.LATER)) or ("", "")
    record = await leases.make(keys, entry, attempt, seconds, "deleting")
    if record is None:
        return False
    await finish(keys, record)
    await keys.delete(f"{leases.FOLDER}/{name}")
    return True


async def finish_replaced(keys: ObjectClient, entry: str, attempt: str, seconds: float) -> None:
    """Remove the data that `attempt` has replaced and its writer did not remove."""
    names = await keys.list(f"{NAMES}/{entry}.")
    for other in names:
        if is_id(other) and other != attempt:
            record = await leases.make(keys, entry, other, seconds, "deleting")
            if record is not None:
                await finish(keys, record)


async def finish(keys: ObjectClient, record: LeaseRecord) -> None:
    """Remove the data of an attempt that is being deleted, unless its manifest still exists.

    The tombstone is removed first, if it is of this deletion.
    """
    entry, attempt = record.entry, record.attempt
    key = f"{entry}/{FILE_NAME}"
    found = await keys.get(key)
    if found is not None and deleter_of(found.data) == attempt:
        await keys.delete_if(key, found.generation)
    if found is None or attempt_of(found.data) != attempt:
        await remove_data(keys, entry, attempt)
    await keys.delete(record.key)


async def remove_data(keys: ObjectClient, entry: str, attempt: str) -> None:
    """Remove everything in the folder of an attempt, and its name."""
    start = f"{entry}/{attempt}/"
    paths = await keys.list(start)
    await each(lambda path: keys.delete(start + path), paths)
    await keys.delete(f"{NAMES}/{entry}.{attempt}")


async def _remove_plain_files(keys: ObjectClient, entry: str, old: StoredObject) -> None:
    """Remove the files of a step that was copied here from a disk: they are in the entry itself."""
    files = peek_files(old.data) or frozenset()
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
    await each(lambda path: keys.delete(f"{entry}/{path}"), plain)
